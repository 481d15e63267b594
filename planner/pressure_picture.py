"""A plan under load as a PNG picture: both runs over the same time, phases shaded, with a line for each change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .picture import new_figure, save_figure
from .pressure import CPU_LOAD, LINK_LOAD, PressureResult, PressureRun, running_medians
from .trace import TokenSample
from .trace_figures import title_of
from .trace_page import EVENT_COLOUR
from .units import MIB

RUN_COLOURS = {"static": "#7f8fa6", "adaptive": "#3b7dd8"}
LOAD_COLOURS = {CPU_LOAD: "#b5489a", LINK_LOAD: "#e0a100"}

_PAUSE_SECONDS = 0.1  # between two tokens of a run: the other one's turn
_MAX_OF_ADAPTIVE = 2.0  # a plan that is held may stall for so long that nothing else could be seen


def write_pressure_png(path: Path, result: PressureResult) -> None:
    """Raises AtsplanError if matplotlib is missing or the file cannot be written."""
    figure = new_figure(11, 6.5)
    draw_pressure(figure, result)
    save_figure(figure, path, dots_per_inch=120)


def draw_pressure(figure: Any, result: PressureResult) -> None:
    """Draw into an empty figure. Zero is the beginning of the first phase."""
    figure.suptitle(title_of(result.adaptive.trace).removesuffix(", adaptive"), x=0.01, ha="left", fontsize="medium")
    panels = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1, 1]})
    values: tuple[tuple[str, Callable[[TokenSample], float]], ...] = (
        ("ms per token", lambda token: token.seconds * 1e3),
        ("ms of CPU\nper token", lambda token: token.cpu_seconds * 1e3),
        ("MiB streamed\nper token", lambda token: token.streamed_bytes / MIB),
    )
    runs = {"static": result.static, "adaptive": result.adaptive}
    starts = {name: _start(run) for name, run in runs.items()}
    tokens_of = {  # without an old file's warm-up
        name: [token for token in run.trace.tokens if token.at_seconds > starts[name]] for name, run in runs.items()
    }
    turns = {name: turns_of(tokens) for name, tokens in tokens_of.items()}
    for axes, (quantity, value) in zip(panels, values, strict=True):
        _shade(axes, result.adaptive)
        highest = dict.fromkeys(runs, 0.0)
        for name, tokens in tokens_of.items():
            raw = [value(token) for token in tokens]
            smooth = running_medians(raw)
            for number, turn in enumerate(turns[name]):
                times = [token.at_seconds - starts[name] for token in tokens[turn]]
                label = name if number == 0 else None
                axes.plot(times, raw[turn], color=RUN_COLOURS[name], linewidth=0.5, alpha=0.35)
                axes.plot(times, smooth[turn], color=RUN_COLOURS[name], linewidth=1.3, label=label)
            highest[name] = max(smooth, default=0.0)
        for change in result.adaptive.trace.changes:
            axes.axvline(change.at_seconds - starts["adaptive"], color=EVENT_COLOUR, linestyle="--", linewidth=0.8)
        axes.set_ylabel(quantity)
        limit = min(max(highest.values()), _MAX_OF_ADAPTIVE * highest["adaptive"] or math.inf)
        axes.set_ylim(0, 1.2 * limit or 1.0)  # single slow tokens may leave the picture
        if highest["static"] > limit:
            axes.text(
                0.995, 0.94, f"static: up to {highest['static']:.0f}", color=RUN_COLOURS["static"], fontsize="small",
                ha="right", va="top", transform=axes.transAxes,
            )  # fmt: skip
    panels[0].legend(loc="upper left", ncols=4, fontsize="small", frameon=False)
    if result.adaptive.phases:
        panels[-1].set_xlim(0, result.adaptive.phases[-1].end_seconds - starts["adaptive"])
    panels[-1].set_xlabel("seconds; dashed: a change of the adaptive run")


def turns_of(tokens: Sequence[TokenSample]) -> list[slice]:
    """Return which tokens followed each other without a turn of the other run."""
    bounds = [0]
    for index, (one, two) in enumerate(pairwise(tokens), 1):
        if two.at_seconds - two.seconds - one.at_seconds > _PAUSE_SECONDS:
            bounds.append(index)
    return [slice(begin, end) for begin, end in pairwise([*bounds, len(tokens)])]


def _shade(axes: Any, run: PressureRun) -> None:
    for phase in run.phases:
        if phase.load in LOAD_COLOURS:
            begin, end = (seconds - _start(run) for seconds in (phase.start_seconds, phase.end_seconds))
            axes.axvspan(begin, end, color=LOAD_COLOURS[phase.load], alpha=0.12, linewidth=0, label=phase.load)


def _start(run: PressureRun) -> float:
    return run.phases[0].start_seconds if run.phases else 0.0
