"""A trace in the terminal: one line of marks per figure over time, then what was changed, when and why."""

from __future__ import annotations

from statistics import median

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .trace import Trace
from .trace_figures import bin_of, binned, card_lines, change_text, end_of, rows, subtitle_of, title_of

_LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "token": "bold", "CPU computing": "magenta", "waiting for GPU": "red", "link busy": "yellow", "streamed": "yellow",
    "GPU clock": "green",
}  # fmt: skip
_LABEL, _FIGURE = 16, 11  # columns
_MANY = "+"  # several changes in one column, or the tenth and later ones


def trace_view(trace: Trace) -> RenderableType:
    """Return everything about a trace that fits on a screen."""
    title = Text(title_of(trace), style="bold").append(f"\n{subtitle_of(trace)}", style="not bold dim")
    parts: list[RenderableType] = [title, "", _Rows(trace), ""]
    if trace.changes:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for number, change in enumerate(trace.changes, start=1):
            what = Text(change.reason).append(f"\n{change_text(change)}", style="dim")
            table.add_row(str(number), f"{change.at_seconds:.1f} s", what)
        parts += [Text("Changes", style="bold"), table]
    else:
        parts.append(Text("Nothing was changed." if trace.is_adaptive else "Changes were switched off."))
    parts += [Text(line) for line in card_lines(trace.card)]
    if trace.plan.is_simulated:
        parts.append(Text("The device is simulated: these figures say nothing about a GPU.", style="dim"))
    return Group(*parts)


class _Rows:
    """The figures over time, as wide as the terminal, with the median and the highest value of each."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trace, end_seconds = self._trace, end_of(self._trace)
        width = max(10, options.max_width - _LABEL - 2 * _FIGURE)
        heading = Text(" " * _LABEL + "0 s".ljust(width - 8) + f"{end_seconds:.1f} s".rjust(8), style="dim")
        yield heading.append("median".rjust(_FIGURE) + "highest".rjust(_FIGURE))
        for row in rows(trace):
            line = Text(row.name.ljust(_LABEL), no_wrap=True)
            marks = "".join(_mark(value, row.top) for value in binned(row, end_seconds, width))
            line.append(marks, style=_STYLES.get(row.name, ""))
            yield line.append(
                row.text(median(row.values)).rjust(_FIGURE) + row.text(max(row.values)).rjust(_FIGURE), style="dim"
            )
        if trace.changes:
            events = [" "] * width
            for number, change in enumerate(trace.changes, start=1):
                column = bin_of(change.at_seconds, end_seconds, width)
                events[column] = str(number) if events[column] == " " and number < 10 else _MANY
            yield Text("changes".ljust(_LABEL) + "".join(events), style="bold cyan", no_wrap=True)


def _mark(value: float | None, top: float) -> str:
    if value is None:
        return " "
    return _LEVELS[min(len(_LEVELS) - 1, int(value / top * len(_LEVELS)))] if top > 0 else _LEVELS[0]
