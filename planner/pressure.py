"""A plan under load: the same tokens decoded adaptively and statically, in turns, while other programs come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .hardware import Software
from .trace import TokenSample, Trace
from .trace_figures import milliseconds, title_of

# History: 1 = first version.
PRESSURE_SCHEMA_VERSION = 1

QUIET, CPU_LOAD, LINK_LOAD = "quiet", "CPU load", "GPU and link load"

_N_SKIPPED = 10  # tokens at the beginning of a phase that may still adapt
_N_WINDOW = 5  # tokens of the running median that tells when a phase has settled
_SETTLED = 0.05  # of the settled median: how near it has to be
_MIN_RISE = 0.02  # of the quiet time: a smaller rise is noise, and has no cut


@dataclass(frozen=True)
class Phase:
    """A part of a run under one load. Its tokens are `first_token` and the next ones of the trace."""

    load: str  # "quiet" | "CPU load" | "GPU and link load"
    start_seconds: float  # in the trace's time
    end_seconds: float
    first_token: int
    n_tokens: int


@dataclass(frozen=True)
class PressureRun:
    """The trace of one run: of its own turns, without their first tokens, in which the engine changes over.

    What it tells of prompts and of the card is of both runs.
    """

    trace: Trace
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Agreement:
    """Whether both runs computed the same: the likeliest next token after the same tokens, turn by turn."""

    n_compared: int  # before 0.4.6, of the same few tokens in every turn
    n_different: int
    largest_gap: float  # between the two likeliest logits, where the likeliest token differs


@dataclass(frozen=True)
class PressureResult:
    adaptive: PressureRun
    static: PressureRun
    software: Software
    n_load_processes: int  # of the CPU load
    agreement: Agreement
    turn_seconds: float = 0.0  # after which the other run went on, under load; 0: one after the other, before 0.4.5
    schema_version: int = PRESSURE_SCHEMA_VERSION


@dataclass(frozen=True)
class PhaseFigures:
    """One phase of one run.

    The rise of a phase of load is a fraction of what a token takes in the quiet ones just before and after it, that of
    a quiet phase of what it takes in the first one: a machine's own speed changes from minute to minute.
    """

    settled_seconds: float  # mean of a token, without the first ones: stalls are rare and long, and a median hides them
    rise: float
    n_until_settled: int | None  # tokens; None if it never settles


def phase_figures(run: PressureRun) -> list[PhaseFigures | None]:
    """Return the figures of each phase; None for one without tokens."""
    parts = [_seconds(run, phase) for phase in run.phases]
    means = [fmean(_without_first(part)) if part else None for part in parts]
    quiet = {
        index: mean
        for index, (phase, mean) in enumerate(zip(run.phases, means, strict=True))
        if phase.load == QUIET and mean is not None
    }
    found: list[PhaseFigures | None] = []
    for index, (phase, part, mean) in enumerate(zip(run.phases, parts, means, strict=True)):
        if mean is None:
            found.append(None)
            continue
        compared = [min(quiet)] if phase.load == QUIET else [i for i in (index - 1, index + 1) if i in quiet]
        rise = mean / fmean(quiet[i] for i in compared) - 1 if compared else 0.0
        found.append(PhaseFigures(mean, rise, n_until_settled(part)))
    return found


def quiet_seconds(run: PressureRun) -> float | None:
    """Return the mean of a token of all quiet phases together, without the first ones of each; None if there is none.

    Machines drift by some percent from minute to minute: one phase alone says less.
    """
    parts = [_without_first(_seconds(run, phase)) for phase in run.phases if phase.load == QUIET]
    seconds = [one for part in parts for one in part]
    return fmean(seconds) if seconds else None


def n_until_settled(seconds: Sequence[float]) -> int | None:
    """Return the number of tokens until the running median comes within 5 % of the settled ones' median."""
    usual = median(_without_first(seconds))
    near = (abs(middle - usual) <= _SETTLED * usual for middle in running_medians(seconds))
    return next((index for index, is_near in enumerate(near) if is_near), None)


def running_medians(values: Sequence[float]) -> list[float]:
    """Return for each value the median of the five around it; at both ends, of those that there are."""
    half = _N_WINDOW // 2
    return [median(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def cut_of_rise(adaptive: PhaseFigures | None, static: PhaseFigures | None) -> float | None:
    """Return the part of the static plan's rise that adapting avoids; None if there is no rise to speak of."""
    if adaptive is None or static is None or static.rise < _MIN_RISE:
        return None
    return 1 - adaptive.rise / static.rise


def pressure_view(result: PressureResult) -> RenderableType:
    """Return the table of phases and what to make of it, for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("phase", "adaptive", "rise", "after", "static", "rise", "cut"):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    adaptive, static = phase_figures(result.adaptive), phase_figures(result.static)
    for phase, one, other in zip(result.adaptive.phases, adaptive, static, strict=False):
        cut = cut_of_rise(one, other) if phase.load != QUIET else None
        table.add_row(phase.load, *_cells(one), *_cells(other)[:2], "" if cut is None else f"{cut:.0%}")
    title = Text(title_of(result.adaptive.trace).removesuffix(", adaptive"), style="bold")
    title.append(
        f"\nmean of a token without a phase's first {_N_SKIPPED}; its rise over the quiet phases beside it, of "
        "quiet ones over the first; after how many tokens a median of five comes within 5 %; cut: the part of static's "
        "rise that adapting avoids; "
        f"load processes on the CPU: {result.n_load_processes}; "
        + (f"turns of {result.turn_seconds:.3g} s" if result.turn_seconds else "one run after the other"),
        "not bold dim",
    )
    return Group(title, "", table, "", *(Text(line) for line in remarks(result)))


def remarks(result: PressureResult) -> list[str]:
    """Return the lines below the table."""
    lines = []
    pairs = [("adaptive", phase_figures(result.adaptive)), ("static", phase_figures(result.static))]
    adaptive, static = quiet_seconds(result.adaptive), quiet_seconds(result.static)
    if adaptive and static:
        lines.append(f"all quiet phases: {adaptive / static - 1:+.1%} time per token, adaptive against static")
    lasts = [f"{name} {figures[-1].rise:+.1%}" for name, figures in pairs if figures and figures[-1]]
    if lasts:
        lines.append(f"last phase against the first: {', '.join(lasts)}")
    lines.append(f"changes: {len(result.adaptive.trace.changes)}")
    agreement = result.agreement
    line = f"likeliest next tokens: {agreement.n_different} of {agreement.n_compared} differ"
    if agreement.n_different:
        line += f"; there, the two likeliest logits are at most {agreement.largest_gap:.3g} apart"
    lines.append(line)
    if result.adaptive.trace.plan.is_simulated:
        lines.append("The device is simulated: these figures say nothing about a GPU.")
    return lines


def _cells(figures: PhaseFigures | None) -> tuple[str, str, str]:
    if figures is None:
        return "-", "-", "-"
    settled = "never" if figures.n_until_settled is None else str(figures.n_until_settled)
    return milliseconds(figures.settled_seconds), f"{figures.rise:+.0%}", settled


def _seconds(run: PressureRun, phase: Phase) -> list[float]:
    tokens: Sequence[TokenSample] = run.trace.tokens[phase.first_token : phase.first_token + phase.n_tokens]
    return [token.seconds for token in tokens]


def _without_first(seconds: Sequence[float]) -> Sequence[float]:
    """Leave out what may still adapt, of a short phase at most half."""
    return seconds[min(_N_SKIPPED, len(seconds) // 2) :]
