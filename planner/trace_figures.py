"""What is drawn of a trace, in the terminal, on a page and as a picture: the same rows of figures over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .trace import CardSample, Change, Trace
from .units import format_count, format_size


@dataclass(frozen=True)
class Row:
    """One figure over time: each value with the seconds from when to when it held. The scale is from 0 to `top`."""

    name: str
    spans: tuple[tuple[float, float], ...]
    values: tuple[float, ...]
    top: float
    text: Callable[[float], str]


def rows(trace: Trace) -> list[Row]:
    """Return the figures of the decoded tokens and of the card, those that the trace has."""
    found = []
    if trace.tokens:
        spans = tuple((max(0.0, token.at_seconds - token.seconds), token.at_seconds) for token in trace.tokens)
        seconds = tuple(token.seconds for token in trace.tokens)
        computing = tuple(_share(token.cpu_seconds, token.seconds) for token in trace.tokens)
        waiting = tuple(_share(token.wait_seconds, token.seconds) for token in trace.tokens)
        other = tuple(max(0.0, 1 - one - two) for one, two in zip(computing, waiting, strict=True))
        link = tuple(_share(token.link_seconds, token.seconds) for token in trace.tokens)
        streamed = tuple(float(token.streamed_bytes) for token in trace.tokens)
        found += [
            Row("token", spans, seconds, max(seconds), milliseconds),
            Row("CPU computing", spans, computing, 1.0, percent),
            Row("waiting for GPU", spans, waiting, 1.0, percent),
            Row("other", spans, other, 1.0, percent),
            Row("link busy", spans, link, 1.0, percent),
            Row("streamed", spans, streamed, max(streamed), format_size),
        ]
    if trace.card:
        starts = [sample.at_seconds for sample in trace.card]
        spans = tuple(zip(starts, [*starts[1:], end_of(trace)], strict=True))
        clocks = tuple(float(sample.clock_mhz) for sample in trace.card)
        found.append(Row("GPU clock", spans, clocks, max(clocks), lambda mhz: f"{mhz:.0f} MHz"))
    return found


def binned(row: Row, end_seconds: float, n_bins: int) -> list[float | None]:
    """Return the median of the values in each of `n_bins` equal parts of the time; None where there are none."""
    parts: list[list[float]] = [[] for _ in range(n_bins)]
    for (start_seconds, stop_seconds), value in zip(row.spans, row.values, strict=True):
        first, last = (bin_of(seconds, end_seconds, n_bins) for seconds in (start_seconds, stop_seconds))
        for part in parts[first : last + 1]:
            part.append(value)
    return [median(part) if part else None for part in parts]


def bin_of(at_seconds: float, end_seconds: float, n_bins: int) -> int:
    return min(n_bins - 1, int(at_seconds / end_seconds * n_bins)) if end_seconds > 0 else 0


def end_of(trace: Trace) -> float:
    """Return when the last thing in the trace happened, in seconds from its start."""
    groups: tuple[Sequence[float], ...] = (
        [token.at_seconds for token in trace.tokens], [prompt.at_seconds for prompt in trace.prompts],
        [change.at_seconds for change in trace.changes], [sample.at_seconds for sample in trace.card],
    )  # fmt: skip
    return max((max(group) for group in groups if group), default=0.0)


def title_of(trace: Trace) -> str:
    plan = trace.plan
    mode = "adaptive" if trace.is_adaptive else "static"
    return f"{plan.model.name} in {format_size(plan.vram.budget_bytes)} of VRAM, {mode}"


def subtitle_of(trace: Trace) -> str:
    """Return where it ran and how much it computed."""
    hardware = trace.hardware
    where = f"{hardware.gpu_name}, {hardware.cpu.model}"
    threads = format_count(trace.plan.workload.n_threads, "thread")
    text = f"{where}; {threads}; {format_count(len(trace.tokens), 'decoded token')}"
    if trace.prompts:
        n_tokens = sum(prompt.n_tokens for prompt in trace.prompts)
        seconds = sum(prompt.seconds for prompt in trace.prompts)
        text += f", {format_count(n_tokens, 'prompt token')} in {seconds:.1f} s"
    return f"{text}; {end_of(trace):.1f} s in all"


def change_text(change: Change) -> str:
    """Return what a change did. The speeds that led to it are in its reason."""
    before, after = change.streamed_bytes_before, change.streamed_bytes_after
    streamed = f"{format_size(before)} -> {format_size(after)}" if before != after else f"still {format_size(after)}"
    return f"streamed per token {streamed}, ring {format_size(change.ring_bytes)}"


def card_lines(samples: Sequence[CardSample]) -> Iterator[str]:
    """Yield sentences about the card; none without samples."""
    if not samples:
        return
    clocks = [sample.clock_mhz for sample in samples]
    degrees = [sample.temperature_celsius for sample in samples]
    free_bytes = min(sample.free_vram_bytes for sample in samples)
    yield (
        f"Card: {min(clocks)} to {max(clocks)} MHz, {min(degrees)} to {max(degrees)} °C, "
        f"never less than {format_size(free_bytes)} of VRAM free."
    )
    counts: dict[str, int] = {}
    for sample in samples:
        for reason in sample.throttle_reasons:
            counts[reason] = counts.get(reason, 0) + 1
    if counts:
        shares = ", ".join(f"{reason} ({n / len(samples):.0%} of the time)" for reason, n in counts.items())
        yield f"The card's clock was held down by: {shares}."
    else:
        yield "Nothing held the card's clock down."


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds < 0.01 else 1}f} ms"


def percent(fraction: float) -> str:
    return f"{fraction:.0%}"


def _share(part_seconds: float, seconds: float) -> float:
    """Return a fraction of a token's time. Estimates, and work for the next token, can exceed it."""
    return min(1.0, part_seconds / seconds) if seconds > 0 else 0.0
