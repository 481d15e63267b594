"""A trace as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from .page import colour_key, drawing, html_page
from .trace import Trace
from .trace_figures import Row, binned, card_lines, change_text, end_of, milliseconds, rows, subtitle_of, title_of
from .units import format_size

COLOURS = {
    "token": "#3b7dd8", "CPU computing": "#b5489a", "waiting for GPU": "#d1495b", "other": "#7f8fa6",
    "link busy": "#e0a100", "streamed": "#c77d00", "GPU clock": "#2a9d4a",
}  # fmt: skip
EVENT_COLOUR = "#0f9bb3"
_LABEL, _WIDTH, _FIGURES, _HEIGHT = 110, 720, 150, 64  # pixels
_N_BINS = 360
_DIGIT = 7  # pixels, at least


def trace_page(trace: Trace) -> str:
    """Return the page: the figures over time with a mark for each change, then the changes and the card in words."""
    parts = [_tiles(trace), "<h2>Over time</h2>", _chart(trace), "<h2>Changes</h2>", _changes(trace)]
    parts += [f"<p>{escape(line)}</p>" for line in card_lines(trace.card)]
    if trace.plan.is_simulated:
        parts.append('<p class="soft">The device is simulated: these figures say nothing about a GPU.</p>')
    software = trace.plan.software
    footer = (
        f"Trace of a plan of atsplan {software.atsplan} for llama-cpp-python {software.llama_cpp_python}; model "
        f"{trace.plan.model.file_name} ({trace.plan.model.fingerprint}), hardware {trace.hardware.fingerprint}."
    )
    return html_page(title_of(trace), subtitle_of(trace), parts, footer)


def _tiles(trace: Trace) -> str:
    tiles = [("changes", str(len(trace.changes)))]
    if trace.tokens:
        tiles = [
            ("median of a token", milliseconds(median(token.seconds for token in trace.tokens))),
            ("slowest token", milliseconds(max(token.seconds for token in trace.tokens))),
            ("streamed per token", format_size(median(token.streamed_bytes for token in trace.tokens))),
            *tiles,
        ]
    inner = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in tiles)
    return f'<div class="tiles">{inner}</div>'


def _chart(trace: Trace) -> str:
    """Draw a strip per figure, one below the other over the same time."""
    strips, end_seconds = rows(trace), end_of(trace)
    height = _HEIGHT * len(strips) + 20
    shapes = [shape for index, row in enumerate(strips) for shape in _strip(row, index, end_seconds)]
    free_from = 0.0  # the number of a change that is close to others would cover theirs: it is left to the tip
    for number, change in enumerate(trace.changes, start=1):
        x = _LABEL + _WIDTH * change.at_seconds / end_seconds if end_seconds else _LABEL
        label = f'<text x="{x + 3:.1f}" y="10">{number}</text>' if x >= free_from else ""
        if label:
            free_from = x + 3 + _DIGIT * len(str(number))
        tip = f"{number}: at {change.at_seconds:.1f} s: {change.reason}"
        shapes.append(
            f'<g><title>{escape(tip)}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 16}" '
            f'stroke="{EVENT_COLOUR}" stroke-width="1.5" stroke-dasharray="4 3"/>{label}</g>'
        )
    shapes.append(f'<text x="{_LABEL}" y="{height - 4}">0 s</text>')
    shapes.append(f'<text x="{_LABEL + _WIDTH}" y="{height - 4}" text-anchor="end">{end_seconds:.1f} s</text>')
    keys = "".join(f"<span>{colour_key(COLOURS[row.name])}{escape(row.name)}</span>" for row in strips)
    note = "Each strip begins at 0; medians per pixel. Shares are of a token's time."
    return (
        f"{drawing('Figures over time', _LABEL + _WIDTH + _FIGURES, height, shapes)}"
        f'<p class="keys soft">{keys}</p><p class="soft">{note}</p>'
    )


def _strip(row: Row, index: int, end_seconds: float) -> Iterator[str]:
    bottom = (index + 1) * _HEIGHT - 4
    usable, colour = _HEIGHT - 12, COLOURS[row.name]
    yield f'<text x="0" y="{bottom - usable / 2:.0f}">{escape(row.name)}</text>'
    yield f'<line x1="{_LABEL}" x2="{_LABEL + _WIDTH}" y1="{bottom}" y2="{bottom}" stroke="{colour}" opacity=".4"/>'
    for points in _runs(binned(row, end_seconds, _N_BINS)):
        xs = [_LABEL + place * _WIDTH / _N_BINS for place, _ in points]
        ys = [bottom - (usable * value / row.top if row.top else 0.0) for _, value in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        area = f"{xs[0]:.1f},{bottom} {line} {xs[-1]:.1f},{bottom}"
        yield f'<polygon points="{area}" fill="{colour}" opacity=".2"/>'
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    x = _LABEL + _WIDTH + 8
    middle, highest = row.text(median(row.values)), row.text(max(row.values))
    yield f'<text x="{x}" y="{bottom - usable / 2 - 6:.0f}">median {escape(middle)}</text>'
    yield f'<text x="{x}" y="{bottom - usable / 2 + 8:.0f}">highest {escape(highest)}</text>'


def _runs(values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """Yield the points of each stretch without a gap, as steps: two per value, at its bin's ends."""
    points: list[tuple[float, float]] = []
    for place, value in enumerate(values):
        if value is not None:
            points += [(place, value), (place + 1, value)]
        elif points:
            yield points
            points = []
    if points:
        yield points


def _changes(trace: Trace) -> str:
    if not trace.changes:
        return f"<p>{'Nothing was changed.' if trace.is_adaptive else 'Changes were switched off.'}</p>"
    lines = "".join(
        f"<tr><td>{number}</td><td>{change.at_seconds:.1f} s</td>"
        f'<td style="text-align:left;white-space:normal">{escape(change.reason)}<br/>'
        f"<span class=soft>{escape(change_text(change))}</span></td></tr>"
        for number, change in enumerate(trace.changes, start=1)
    )
    return f'<div class="scroll"><table>{lines}</table></div>'
