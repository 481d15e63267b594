"""A plan or a profile as a PNG picture: the map, the memory, the densities, the timeline."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .densities import Density
from .errors import AtsplanError
from .explain import layer_map, memory_parts
from .plan import Placement, Plan, WeightClass
from .timeline import Timeline
from .units import GIB, MIB

COLOURS: dict[WeightClass, str] = {"gpu": "#2a9d4a", "stream": "#e0a100", "cpu": "#b5489a"}
LANES = (("gpu", "GPU", COLOURS["gpu"]), ("link", "link", COLOURS["stream"]), ("cpu", "CPU", COLOURS["cpu"]))
MEMORY_COLOURS = {
    "weights": "#2a9d4a",
    "context (KV cache)": "#3b7dd8",
    "compute buffers": "#7fb2f0",
    "ring for streaming": "#e0a100",
    "single experts": "#b5489a",
    "ring, single experts": "#e0a100",
    "driver and kernels": "#7f8fa6",
    "margin": "#b0b9c6",
    "idle": "#dfe3ea",
}


def write_png(path: Path, title: str, plan: Plan | None, items: Sequence[Density], token: Timeline | None) -> None:
    """Draw what there is. Raises AtsplanError if matplotlib is missing or the file cannot be written."""
    rows = layer_map(plan.placements) if plan else {}
    parts: list[tuple[float, Any]] = []  # (height in inches, what draws it)
    if plan and rows:
        parts.append((0.6 + 0.25 * len(rows), lambda axes: _draw_map(axes, rows)))
    if plan:
        parts.append((1.2, lambda axes: _draw_memory(axes, plan)))
    if items:
        parts.append((0.8 + 0.25 * len(items), lambda axes: _draw_densities(axes, items)))
    if token:
        parts.append((1.8, lambda axes: _draw_timeline(axes, token)))
    heights = [height for height, _ in parts]
    figure = new_figure(12, sum(heights) + 0.5)
    figure.suptitle(title, x=0.01, ha="left")
    panels = figure.subplots(len(parts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (_, draw), row in zip(parts, panels, strict=True):
        draw(row[0])
    save_figure(figure, path, dots_per_inch=120)


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty figure that belongs to no window. Raises AtsplanError without matplotlib, which is optional."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise AtsplanError("A PNG needs matplotlib.", "Install it with: pip install matplotlib") from error
    return figures.Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Any, path: Path, *, dots_per_inch: int) -> None:
    """Write the figure as PNG. Raises AtsplanError."""
    try:
        figure.savefig(path, format="png", dpi=dots_per_inch)
    except OSError as error:
        raise AtsplanError(f"Cannot write {path}: {error.strerror}.", "Choose another file or make room.") from error


def _draw_map(axes: Any, rows: dict[str, dict[int, Placement]]) -> None:
    for row, by_layer in enumerate(rows.values()):
        for layer, placement in by_layer.items():
            axes.broken_barh([(layer - 0.45, 0.9)], (row - 0.4, 0.8), facecolors=COLOURS[placement.decode])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("layer (green: in VRAM, yellow: streamed, purple: on the CPU, while decoding)")
    axes.set_xlim(-0.7, max(layer for by_layer in rows.values() for layer in by_layer) + 0.7)


def _draw_memory(axes: Any, plan: Plan) -> None:
    start = 0.0
    for name, size in memory_parts(plan):
        if size:
            axes.barh([0], [size / GIB], left=[start], color=MEMORY_COLOURS[name], label=f"{name} {size / MIB:.0f} MiB")
            start += size / GIB
    axes.set_yticks([])
    axes.set_xlabel("GiB of VRAM")
    axes.set_xlim(0, max(start, 1e-9))
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)


def _draw_densities(axes: Any, items: Sequence[Density]) -> None:
    places = range(len(items))
    axes.barh([p - 0.2 for p in places], [i.cpu_seconds_per_mib * 1e6 for i in items], 0.4, color=COLOURS["cpu"])
    axes.barh([p + 0.2 for p in places], [(i.gpu_seconds_per_mib or 0) * 1e6 for i in items], 0.4, color=COLOURS["gpu"])
    axes.set_yticks(places, [f"{item.role} {item.type}" for item in items])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per MiB and token (purple: CPU, green: GPU)")


def _draw_timeline(axes: Any, token: Timeline) -> None:
    for row, (lane, _, colour) in enumerate(LANES):
        spans = [
            (event.start_seconds * 1e3, (event.end_seconds - event.start_seconds) * 1e3)
            for event in token.events
            if event.lane == lane
        ]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(LANES)), [name for _, name, _ in LANES])
    axes.invert_yaxis()
    axes.set_xlabel("ms of one token")
