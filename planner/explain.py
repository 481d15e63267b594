"""Plans and profiles for the eye: a map of layers and roles, memory, predictions, the timeline of one token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .measurements import Profile
from .plan import Placement, Plan, WeightClass
from .timeline import Event
from .units import MIB, format_count, format_size

# A letter-like shape per class, so that the map can be read without colours too.
_MARKS: dict[WeightClass, tuple[str, str]] = {"gpu": ("█", "green"), "stream": ("▒", "yellow"), "cpu": ("·", "magenta")}
HEADINGS: dict[WeightClass, str] = {"gpu": "in VRAM", "stream": "streamed", "cpu": "on the CPU"}
_LANES = {"gpu": ("GPU", "green"), "link": ("link", "yellow"), "cpu": ("CPU", "magenta")}
_SHADES = " ░▒▓█"  # of a column by its busy time
MIN_SHOWN_BYTES = MIB // 16  # smaller weights, such as norms, are counted but not drawn one by one
_LOOSEST_BOUND = 0.1  # of the predicted time: one further away tells nothing
_BLOCK = re.compile(r"^blk\.(\d{1,3})\.(.+)$")  # llama.cpp knows no model with a thousand layers


def plan_view(plan: Plan) -> RenderableType:
    """Return everything about a plan that fits on a screen."""
    parts: list[RenderableType] = [_title(plan), ""]
    parts += [_LayerMap(plan.placements), _legend(plan), "", _role_table(plan), "", _memory_table(plan), ""]
    parts += list(prediction_lines(plan))
    parts += [Text(f"Note: {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def timeline_view(events: Sequence[Event], names: Sequence[str], seconds: float) -> RenderableType:
    """Return one token's timeline: one row per lane, as wide as the terminal. `names` are those of the weights."""
    return _Gantt(events, names, seconds)


def role_of(name: str) -> tuple[int | None, str]:
    """Return (layer, role) of a tensor's name, for display only: `blk.3.ffn_up.weight` -> (3, "ffn_up")."""
    match = _BLOCK.match(name)
    layer, rest = (int(match[1]), match[2]) if match else (None, name)
    return layer, rest.removesuffix(".weight")


def layer_map(placements: Sequence[Placement]) -> dict[str, dict[int, Placement]]:
    """Return the placements of the larger weights by role and layer, in order of use."""
    rows: dict[str, dict[int, Placement]] = {}
    for placement in placements:
        layer, role = role_of(placement.name)
        if layer is not None and placement.size_bytes >= MIN_SHOWN_BYTES:
            rows.setdefault(role, {})[layer] = placement
    return rows


def _title(plan: Plan) -> Text:
    workload = plan.workload
    title = Text(plan.model.name, style="bold")
    title.append(f" in {format_size(plan.vram.budget_bytes)} of VRAM", style="bold")
    title.append(
        f"\n{plan.hardware.gpu_name}; {format_count(workload.n_threads, 'thread')}; "
        f"context {workload.n_context}, KV {workload.type_k}/{workload.type_v}; "
        f"{workload.n_prompt_tokens} prompt + {workload.n_generated_tokens} generated tokens",
        style="dim",
    )
    return title


class _LayerMap:
    """One row per role, one mark per layer; broken into several maps where the terminal is too narrow."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._marks = layer_map(placements)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._marks:
            return
        n_layers = 1 + max(layer for row in self._marks.values() for layer in row)
        label = max(len(role) for role in self._marks) + 2
        per_line = max(10, (options.max_width - label) // 10 * 10)
        for first in range(0, n_layers, per_line):
            layers = range(first, min(n_layers, first + per_line))
            if first:
                yield Text()
            scale = "".join(f"{layer:<10}" if layer % 10 == 0 else "" for layer in layers)
            yield Text("layer".ljust(label) + scale[: len(layers)].rstrip(), style="dim", no_wrap=True)
            for role, row in self._marks.items():
                line = Text(role.ljust(label), no_wrap=True)
                for layer in layers:
                    mark, style = _MARKS[row[layer].decode] if layer in row else (" ", "")
                    line.append(mark, style=style)
                yield line


def _legend(plan: Plan) -> Text:
    legend = Text(style="dim")
    for cls, (mark, style) in _MARKS.items():
        legend.append(mark, style=style).append(f" {HEADINGS[cls]}   ")
    return legend.append("(while decoding)" if plan.experts is None else "(while decoding; experts: one by one)")


def _role_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_footer=True)
    totals: dict[WeightClass, int] = dict.fromkeys(_MARKS, 0)
    roles: dict[str, list[Placement]] = {}
    for placement in plan.placements:
        roles.setdefault(role_of(placement.name)[1], []).append(placement)
    large = {role: group for role, group in roles.items() if max(p.size_bytes for p in group) >= MIN_SHOWN_BYTES}
    small = [p for role, group in roles.items() if role not in large for p in group]
    rows = [(role, group) for role, group in sorted(large.items(), key=lambda item: -_size(item[1]))]
    if small:
        rows.append((f"{len(small)} small ones", small))
    for placement in plan.placements:
        totals[placement.decode] += placement.size_bytes
    table.add_column("weights", "total", no_wrap=True)
    table.add_column("size", format_size(_size(plan.placements)), justify="right", no_wrap=True)
    for cls, heading in HEADINGS.items():
        table.add_column(heading, _or_dash(totals[cls]), justify="right", no_wrap=True)
    table.add_column("prompts", justify="right", no_wrap=True)
    for role, group in rows:
        cells = []
        for cls in _MARKS:
            chosen = [placement for placement in group if placement.decode == cls]
            each = f" x {format_size(_size(chosen) / len(chosen))}" if chosen and role in large else ""
            cells.append(f"{len(chosen)}{each}" if chosen else "-")
        table.add_row(role, format_size(_size(group)), *cells, _prefill_of(group))
    return table


def _prefill_of(group: Sequence[Placement]) -> str:
    host = {placement.prefill for placement in group if not placement.is_resident}
    return "+".join(sorted(host)) if host else "-"


def memory_parts(plan: Plan) -> list[tuple[str, int]]:
    """Return where the budget goes, in words and bytes; they add up to it."""
    vram = plan.vram
    if plan.shares_ring:
        passing = [("ring, single experts", vram.ring_bytes + vram.experts_bytes)]
    else:
        passing = [("ring for streaming", vram.ring_bytes)]
        if vram.experts_bytes:
            passing.append(("single experts", vram.experts_bytes))
    return [
        ("weights", vram.weights_bytes), ("context (KV cache)", vram.context_bytes),
        ("compute buffers", vram.compute_bytes), *passing, ("driver and kernels", vram.overhead_bytes),
        ("margin", vram.margin_bytes), ("idle", vram.idle_bytes),
    ]  # fmt: skip


def _memory_table(plan: Plan) -> Table:
    vram = plan.vram
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_footer=True)
    table.add_column("VRAM", "budget", no_wrap=True)
    table.add_column("MiB", f"{vram.budget_bytes / MIB:.0f}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, size in memory_parts(plan):
        share = min(1.0, size / max(1, vram.budget_bytes))  # a stranger's figures need not add up
        table.add_row(
            name, f"{size / MIB:.0f}", Text("█" * round(share * 40), style="dim" if name == "idle" else "cyan")
        )
    return table


def prediction_lines(plan: Plan) -> Iterator[Text]:
    """Yield what the plan promises, in sentences."""
    prediction, workload = plan.prediction, plan.workload
    seconds = prediction.decode_seconds_per_token
    if seconds > 0:
        line = Text("Predicted: ", style="bold").append(_rate(1 / seconds), style="bold green")
        line.append(f" decoding ({seconds * 1e3:.2f} ms per token)")
        if prediction.prefill_seconds > 0:
            rate = _rate(workload.n_prompt_tokens / prediction.prefill_seconds)
            line.append(f", {rate} for the prompt ({prediction.prefill_seconds:.2f} s)")
        yield line
        busy = (
            ("CPU", prediction.decode_cpu_busy_seconds), ("GPU", prediction.decode_gpu_busy_seconds),
            ("link", prediction.decode_link_busy_seconds),
        )  # fmt: skip
        shares = ", ".join(f"{name} {min(1.0, value / seconds):.0%}" for name, value in busy)
        streamed = format_size(prediction.decode_link_bytes_per_token)
        yield Text(f"Busy while decoding: {shares}; {streamed} per token over the link.")
        if any(prediction.decode_experts):
            in_vram, streamed_ones, on_cpu = prediction.decode_experts
            yield Text(
                "Experts outside of VRAM are decoded one by one. Of those that a token needs, "
                f"{in_vram:.0f} are cached in VRAM, {streamed_ones:.0f} streamed and {on_cpu:.0f} computed on the CPU."
            )
    solver = plan.solver
    if solver.objective == "joint":
        is_limited = any(not placement.is_resident for placement in plan.placements if placement.costs is not None)
        if is_limited and not plan.is_simulated and solver.bound_seconds > _LOOSEST_BOUND * seconds:
            yield Text(f"No placement can exceed {_rate(1 / solver.bound_seconds)} at these measured rates.")
    else:
        yield Text("The paper's static objective, solved to the optimum.")


class _Gantt:
    def __init__(self, events: Sequence[Event], names: Sequence[str], seconds: float) -> None:
        self._events, self._names, self._seconds = events, names, seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label, busy = 6, 6
        width = max(20, options.max_width - label - busy)
        scale = self._seconds / width if self._seconds else 1.0
        for lane, (name, style) in _LANES.items():
            filled = [0.0] * width
            for event in self._events:
                if event.lane == lane:
                    _fill(filled, event.start_seconds, event.end_seconds, self._seconds, scale)
            line = Text(name.ljust(label), no_wrap=True)
            line.append("".join(_SHADES[min(4, round(share * 4))] for share in filled), style=style)
            yield line.append(f"{sum(filled) / width:>5.0%}", style="dim")
        end = f"{self._seconds * 1e3:.1f} ms"
        yield Text(" " * label + "0" + end.rjust(width - 1), style="dim", no_wrap=True)
        yield Text(f"{_SHADES[1:]} busy for a quarter, half, three quarters, all of a column's time", style="dim")
        longest = sorted((e for e in self._events if e.lane == "cpu"), key=lambda e: e.start_seconds - e.end_seconds)
        for event in longest[:3]:
            steps = " + ".join(self._names[use] for use in event.uses)
            yield Text(
                f"  {(event.end_seconds - event.start_seconds) * 1e3:.2f} ms on the CPU at "
                f"{event.start_seconds * 1e3:.1f} ms: {steps}",
                style="dim",
            )


def _fill(filled: list[float], start: float, end: float, period: float, scale: float) -> None:
    """Add an event to the shares of busy time per cell. What began before the round belongs to its end."""
    shift = period if start < 0 else 0.0
    for low, high in ((start + shift, min(end + shift, period)), (0.0, end + shift - period)):
        if high <= low:
            continue
        first, last = int(low / scale), min(len(filled) - 1, int(high / scale))
        for cell in range(first, last + 1):
            inside = min(high, (cell + 1) * scale) - max(low, cell * scale)
            filled[cell] = min(1.0, filled[cell] + max(0.0, inside) / scale)


def profile_view(profile: Profile) -> RenderableType:
    """Return a profile's facts: what was measured, where, and the rates that decide."""
    title = Text(profile.model.name, style="bold").append(
        f"\n{profile.hardware.cpu.model}, {profile.hardware.cpu.physical_cores} cores; "
        f"{profile.hardware.gpu_name}\n"
        f"{len(profile.sizes)} weights, {format_size(sum(profile.sizes.values()))}; "
        f"context {profile.n_context}, micro-batch {profile.n_ubatch}; "
        f"llama-cpp-python {profile.software.llama_cpp_python}",
        style="dim",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("threads", "CPU alone", "CPU, link busy", "link alone", "link, CPU busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in profile.contention:
        rates = (c.cpu_alone, c.cpu_while_link_busy, c.link_alone, c.link_while_cpu_busy)
        table.add_row(str(c.n_threads), *(f"{rate / 1e9:.1f} GB/s" for rate in rates))
    notes = [Text(f"Note: {note}", style="dim") for note in profile.notes]
    return Group(title, "", table, *notes)


def _size(placements: Sequence[Placement]) -> int:
    return sum(placement.size_bytes for placement in placements)


def _rate(tokens_per_second: float) -> str:
    n_digits = 0 if tokens_per_second >= 100 else 1 if tokens_per_second >= 10 else 2
    return f"{tokens_per_second:.{n_digits}f} tokens/s"


def _or_dash(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"
