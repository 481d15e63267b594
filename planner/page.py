"""A plan or a profile as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .densities import Density, microseconds
from .explain import HEADINGS, MIN_SHOWN_BYTES, layer_map, memory_parts, prediction_lines, role_of
from .measurements import Profile
from .picture import COLOURS, LANES, MEMORY_COLOURS
from .plan import Placement, Plan, WeightClass
from .timeline import Timeline
from .units import MIB, format_count, format_size

_CELL, _ROW, _LABEL = 14, 20, 130  # pixels of the map
_TIMELINE_WIDTH, _LANE_HEIGHT = 960, 26
_MIN_WIDTH = 700  # of a drawing; narrower windows scroll
_STYLE = """
:root { color-scheme: light dark; --fore: #1c2430; --back: #ffffff; --soft: #5b6675; --line: #d8dde5; --card: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --fore: #e4e8ee; --back: #14181f; --soft: #9aa5b4; --line: #333b47; --card: #1d232c; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--back); color: var(--fore);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }
.tile b { display: block; font-size: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.bar { display: flex; height: 1.6rem; border-radius: .3rem; overflow: hidden; margin: .5rem 0; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin: 0 .35rem 0 0; }
.keys span { margin-right: 1.2rem; white-space: nowrap; }
.meter { display: block; height: .45rem; border-radius: .2rem; margin: .1rem 0; min-width: 1px; }
.wide { width: 40%; min-width: 10rem; }
svg text { fill: var(--soft); font-size: 11px; }
"""


def plan_page(plan: Plan, items: Sequence[Density], token: Timeline | None, names: Sequence[str]) -> str:
    """Return the page. Without the plan's profile there are no densities and no timeline; `names` are its weights'."""
    workload = plan.workload
    subtitle = (
        f"{plan.hardware.gpu_name}, {plan.hardware.cpu.model}; {format_count(workload.n_threads, 'thread')}; "
        f"context {workload.n_context}, KV {workload.type_k}/{workload.type_v}; "
        f"{workload.n_prompt_tokens} prompt + {workload.n_generated_tokens} generated tokens"
    )
    parts = [
        _tiles(plan),
        *(f"<p>{escape(line.plain)}</p>" for line in prediction_lines(plan)),
        *(f'<p class="soft">Note: {escape(note)}</p>' for note in plan.notes),
        "<h2>Where the weights are</h2>", _map(plan.placements), _outside(plan.placements),
        "<h2>VRAM</h2>", _memory(plan),
    ]  # fmt: skip
    parts += _measured_parts(items, workload.n_threads, token, names)
    if token is None:
        parts.append('<p class="soft">Densities and timeline need the profile that the plan was made from.</p>')
    title = f"{plan.model.name} in {format_size(plan.vram.budget_bytes)} of VRAM"
    footer = (
        f"Plan of atsplan {plan.software.atsplan} for llama-cpp-python {plan.software.llama_cpp_python}; model "
        f"{plan.model.file_name} ({plan.model.fingerprint}), hardware {plan.hardware.fingerprint}."
    )
    return html_page(title, subtitle, parts, footer)


def profile_page(profile: Profile, items: Sequence[Density], n_threads: int) -> str:
    """Return the page; `items` are densities with `n_threads` CPU threads."""
    subtitle = (
        f"{profile.hardware.cpu.model}, {profile.hardware.cpu.physical_cores} cores; {profile.hardware.gpu_name}; "
        f"{len(profile.sizes)} weights, "
        f"{format_size(sum(profile.sizes.values()))}"
    )
    rates = "".join(
        f"<tr><td>{c.n_threads}</td>"
        + "".join(
            f"<td>{rate / 1e9:.1f}</td>"
            for rate in (c.cpu_alone, c.cpu_while_link_busy, c.link_alone, c.link_while_cpu_busy)
        )
        + "</tr>"
        for c in profile.contention
    )
    parts = [f'<p class="soft">Note: {escape(note)}</p>' for note in profile.notes]
    if rates:
        parts.append(
            "<h2>Rates in GB/s</h2><table><tr><th>threads</th><th>CPU alone</th><th>CPU, link busy</th>"
            f"<th>link alone</th><th>link, CPU busy</th></tr>{rates}</table>"
        )
    footer = (
        f"Profile of atsplan {profile.software.atsplan} with llama-cpp-python {profile.software.llama_cpp_python}; "
        f"hardware {profile.hardware.fingerprint}, measured {profile.state.taken_at}."
    )
    return html_page(profile.model.name, subtitle, [*parts, *_measured_parts(items, n_threads, None, ())], footer)


def html_page(title: str, subtitle: str, parts: Sequence[str], footer: str) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n{body}\n'
        f'<p class="soft" style="margin-top:2rem">{escape(footer)}</p>\n</body></html>\n'
    )


def _tiles(plan: Plan) -> str:
    prediction = plan.prediction
    seconds, prompt_seconds = prediction.decode_seconds_per_token, prediction.prefill_seconds
    tiles = [
        ("decoding, predicted", f"{1 / seconds:.1f} tokens/s" if seconds else "-"),
        (
            "prompt, predicted",
            f"{plan.workload.n_prompt_tokens / prompt_seconds:.0f} tokens/s" if prompt_seconds else "-",
        ),
        ("peak VRAM", format_size(prediction.peak_vram_bytes)),
        ("streamed per token", format_size(prediction.decode_link_bytes_per_token)),
    ]
    inner = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in tiles)
    return f'<div class="tiles">{inner}</div>'


def _map(placements: Sequence[Placement]) -> str:
    """Draw a cell per layer and role; its lower third is what the weight does while a prompt is processed."""
    rows = layer_map(placements)
    if not rows:
        return ""
    n_layers = 1 + max(layer for by_layer in rows.values() for layer in by_layer)
    width, height = _LABEL + n_layers * _CELL, _ROW * (len(rows) + 1)
    shapes = [f'<text x="{_LABEL + layer * _CELL}" y="12">{layer}</text>' for layer in range(0, n_layers, 10)]
    for row, (role, by_layer) in enumerate(rows.items(), start=1):
        y = row * _ROW
        shapes.append(f'<text x="0" y="{y + 12}">{escape(role)}</text>')
        for layer, item in by_layer.items():
            x, cell = _LABEL + layer * _CELL, _CELL - 2
            shapes.append(
                f"<g><title>{escape(_describe(item))}</title>"
                f'<rect x="{x}" y="{y}" width="{cell}" height="11" fill="{COLOURS[item.decode]}"/>'
                f'<rect x="{x}" y="{y + 11}" width="{cell}" height="5" fill="{COLOURS[item.prefill]}"/></g>'
            )
    keys = "".join(f"<span>{colour_key(COLOURS[cls])}{escape(name)}</span>" for cls, name in HEADINGS.items())
    return (
        f"{drawing('Placement by layer and role', width, height, shapes)}"
        f'<p class="keys soft">{keys}</p><p class="soft">Upper part: while decoding. Lower part: for prompts.</p>'
    )


def _outside(placements: Sequence[Placement]) -> str:
    """List the larger weights that belong to no layer."""
    items = [item for item in placements if role_of(item.name)[0] is None and item.size_bytes >= MIN_SHOWN_BYTES]
    return "".join(f"<p>{colour_key(COLOURS[item.decode])}{escape(_describe(item))}</p>" for item in items)


def _describe(item: Placement) -> str:
    where = HEADINGS[item.decode]
    if item.prefill != item.decode:
        where += f", for prompts {HEADINGS[item.prefill]}"
    return f"{item.name}, {format_size(item.size_bytes)}: {where}"


def _memory(plan: Plan) -> str:
    budget = max(1, plan.vram.budget_bytes)
    parts = memory_parts(plan)
    bar = "".join(
        f'<div style="width:{100 * size / budget:.3f}%;background:{MEMORY_COLOURS[name]}" title="{escape(name)}"></div>'
        for name, size in parts
    )
    rows = "".join(
        f"<tr><td>{colour_key(MEMORY_COLOURS[name])}{escape(name)}</td><td>{size / MIB:.0f} MiB</td>"
        f"<td>{size / budget:.1%}</td></tr>"
        for name, size in parts
    )
    total = f"<tr><th>budget</th><th>{budget / MIB:.0f} MiB</th><th></th></tr>"
    return f'<div class="bar">{bar}</div><table>{rows}{total}</table>'


def _measured_parts(
    items: Sequence[Density], n_threads: int, token: Timeline | None, names: Sequence[str]
) -> Iterator[str]:
    if items:
        yield f"<h2>What a MiB costs per token, in microseconds ({format_count(n_threads, 'CPU thread')})</h2>"
        yield _densities(items)
    if token:
        yield f"<h2>One token: {token.seconds * 1e3:.2f} ms</h2>"
        yield _timeline(token, names)


def _densities(items: Sequence[Density]) -> str:
    highest = max((item.cpu_seconds_per_mib for item in items), default=0.0) or 1.0

    def meter(seconds: float | None, cls: WeightClass) -> str:
        share = 100 * (seconds or 0.0) / highest
        return f'<span class="meter" style="width:{share:.2f}%;background:{COLOURS[cls]}"></span>'

    rows = "".join(
        f"<tr><td>{escape(item.role)} <span class=soft>{escape(item.type)} &times; {item.n_weights}</span></td>"
        f"<td>{escape(format_size(item.size_bytes))}</td><td>{microseconds(item.cpu_seconds_per_mib)}</td>"
        f"<td>{microseconds(item.gpu_seconds_per_mib)}</td><td>{microseconds(item.gain_seconds_per_mib)}</td>"
        f'<td class="wide">{meter(item.cpu_seconds_per_mib, "cpu")}{meter(item.gpu_seconds_per_mib, "gpu")}</td></tr>'
        for item in items
    )
    spans = f"<span>{colour_key(COLOURS['cpu'])}CPU</span><span>{colour_key(COLOURS['gpu'])}GPU</span>"
    keys = f'<p class="keys soft">{spans}</p>'
    heading = "<tr><th>weights</th><th>size</th><th>CPU</th><th>GPU</th><th>gain</th><th></th></tr>"
    return f'<div class="scroll"><table style="width:100%">{heading}{rows}</table></div>{keys}'


def _timeline(token: Timeline, names: Sequence[str]) -> str:
    first = min((event.start_seconds for event in token.events), default=0.0)  # a copy may start before the token
    scale = _TIMELINE_WIDTH / (token.seconds - min(0.0, first)) if token.seconds else 0.0
    zero = 40 - min(0.0, first) * scale
    height = _LANE_HEIGHT * len(LANES) + 18
    shapes = []
    for row, (lane, label, colour) in enumerate(LANES):
        y = row * _LANE_HEIGHT
        shapes.append(f'<text x="0" y="{y + 15}">{label}</text>')
        for event in token.events:
            if event.lane != lane:
                continue
            start, length = event.start_seconds, event.end_seconds - event.start_seconds
            what = " + ".join(names[use] for use in event.uses) or "no weights"
            tip = f"{what}: {length * 1e3:.3f} ms at {start * 1e3:.2f} ms"
            shapes.append(
                f'<rect x="{zero + start * scale:.2f}" y="{y + 2}" width="{max(0.3, length * scale):.2f}" '
                f'height="{_LANE_HEIGHT - 6}" fill="{colour}"><title>{escape(tip)}</title></rect>'
            )
    shapes.append(f'<text x="{zero:.2f}" y="{height - 4}">0</text>')
    end = 40 + _TIMELINE_WIDTH
    shapes.append(f'<text x="{end}" y="{height - 4}" text-anchor="end">{token.seconds * 1e3:.2f} ms</text>')
    return drawing("Timeline of one token", end, height, shapes)


def drawing(label: str, width: int, height: int, shapes: Sequence[str]) -> str:
    """Return a drawing that shrinks with the window, down to where it would be unreadable."""
    return (
        f'<div class="scroll"><svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;min-width:{min(width, _MIN_WIDTH)}px">{"".join(shapes)}</svg></div>'
    )


def colour_key(colour: str) -> str:
    return f'<i class="key" style="background:{colour}"></i>'
