"""A trace as a PNG picture: panels over the same time, with a line for each change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .picture import new_figure, save_figure
from .trace import Trace
from .trace_figures import end_of, subtitle_of, title_of
from .trace_page import COLOURS, EVENT_COLOUR
from .units import MIB


def write_trace_png(path: Path, trace: Trace) -> None:
    """Draw what the trace has. Raises AtsplanError if matplotlib is missing or the file cannot be written."""
    draw = [draw_token_seconds, draw_shares, draw_streamed] if trace.tokens else []
    draw += [draw_card] if trace.card else []
    n_panels = max(1, len(draw))
    figure = new_figure(11, 1.9 * n_panels + 0.8)
    figure.suptitle(f"{title_of(trace)}\n{subtitle_of(trace)}", x=0.01, ha="left", fontsize="medium")
    panels = figure.subplots(n_panels, 1, squeeze=False, sharex=True)[:, 0]
    for axes, draw_panel in zip(panels, draw, strict=False):
        draw_panel(axes, trace)
        mark_changes(axes, trace)
    panels[-1].set_xlim(0, end_of(trace) or 1.0)
    panels[-1].set_xlabel("seconds")
    save_figure(figure, path, dots_per_inch=120)


def draw_token_seconds(axes: Any, trace: Trace, **style: Any) -> None:
    style = {"color": COLOURS["token"], "linewidth": 1, **style}
    axes.plot(_times(trace), [token.seconds * 1e3 for token in trace.tokens], **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms per token")


def draw_shares(axes: Any, trace: Trace) -> None:
    """Stack what the host thread does while a token is made; the link works beside it."""
    computing = [token.cpu_seconds * 1e3 for token in trace.tokens]
    waiting = [token.wait_seconds * 1e3 for token in trace.tokens]
    rest = [
        max(0.0, token.seconds * 1e3 - one - two)
        for token, one, two in zip(trace.tokens, computing, waiting, strict=True)
    ]
    names = ("CPU computing", "waiting for GPU", "other")
    colours = [COLOURS[name] for name in names]
    axes.stackplot(_times(trace), computing, waiting, rest, labels=names, colors=colours, alpha=0.75)
    link = [token.link_seconds * 1e3 for token in trace.tokens]
    axes.plot(_times(trace), link, color=COLOURS["link busy"], linewidth=1, label="link busy")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms per token")
    axes.legend(loc="upper left", ncols=4, fontsize="small", frameon=False)


def draw_streamed(axes: Any, trace: Trace) -> None:
    streamed = [token.streamed_bytes / MIB for token in trace.tokens]
    axes.step(_times(trace), streamed, color=COLOURS["streamed"], linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB streamed\nper token")


def draw_card(axes: Any, trace: Trace) -> None:
    times = [sample.at_seconds for sample in trace.card]
    axes.step(times, [sample.clock_mhz for sample in trace.card], where="post", color=COLOURS["GPU clock"])
    held = [sample for sample in trace.card if sample.throttle_reasons]
    if held:
        places = [sample.at_seconds for sample in held]
        label = "held down by " + ", ".join(sorted({reason for sample in held for reason in sample.throttle_reasons}))
        axes.plot(places, [sample.clock_mhz for sample in held], "v", color=COLOURS["waiting for GPU"], label=label)
        axes.legend(loc="lower left", fontsize="small", frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GPU clock, MHz")
    beside = axes.twinx()
    beside.plot(times, [sample.temperature_celsius for sample in trace.card], color=COLOURS["other"], linewidth=1)
    beside.set_ylabel("°C")


def mark_changes(axes: Any, trace: Trace) -> None:
    for change in trace.changes:
        axes.axvline(change.at_seconds, color=EVENT_COLOUR, linestyle="--", linewidth=1)


def _times(trace: Trace) -> Sequence[float]:
    return [token.at_seconds for token in trace.tokens]
