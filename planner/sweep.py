"""What more or less VRAM would change: a plan for every budget in a range, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from .errors import InfeasibleError, UsageError
from .measurements import Profile
from .picture import COLOURS, new_figure, save_figure
from .plan import Plan
from .units import GIB, MIB, format_size, parse_size

_BAR_WIDTH = 16


@dataclass(frozen=True)
class Point:
    """A budget and its plan; without one, `reason` says why."""

    budget_bytes: int
    plan: Plan | None
    reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.plan.prediction.decode_seconds_per_token if self.plan else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        if self.plan is None or not self.plan.prediction.prefill_seconds:
            return 0.0
        return self.plan.workload.n_prompt_tokens / self.plan.prediction.prefill_seconds


def parse_range(text: str, n_steps: int) -> list[int]:
    """Return `n_steps` budgets from "4G..24G", whole MiB at even distances. Raises UsageError."""
    low_text, separator, high_text = text.partition("..")
    if not separator:
        raise UsageError(f"'{text}' is not a range of VRAM.", "Write it like 4G..24G.")
    low, high = parse_size(low_text), parse_size(high_text)
    if low > high:
        raise UsageError(f"'{text}' ends before it begins.", "Write it like 4G..24G.")
    steps = max(1, n_steps - 1)
    budgets = [round((low + (high - low) * step / steps) / MIB) * MIB for step in range(steps + 1)]
    return sorted(set(budgets))


def with_memory(profile: Profile, memory_bytes: int) -> Profile:
    """Return the profile as of a card with at least so much memory: what-if questions go beyond the card at hand."""
    gpu = profile.hardware.gpu
    if gpu is None or gpu.memory_bytes >= memory_bytes:
        return profile
    return replace(
        profile,
        hardware=replace(profile.hardware, gpu=replace(gpu, memory_bytes=memory_bytes)),
        state=replace(profile.state, gpu_memory_free_bytes=0),  # of another card
    )


def sweep(budgets: Sequence[int], make_plan: Callable[[int], Plan]) -> Iterator[Point]:
    """Yield a point per budget. What does not fit has no plan; other errors are raised."""
    for budget_bytes in budgets:
        try:
            yield Point(budget_bytes, make_plan(budget_bytes))
        except InfeasibleError as error:
            yield Point(budget_bytes, None, error.message)


def sweep_table(points: Sequence[Point]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("VRAM", "tokens/s", "prompt t/s", "in VRAM", "streamed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    best = max((point.tokens_per_second for point in points), default=0.0)
    for point in points:
        budget = f"{point.budget_bytes / GIB:.2f} GiB"
        if point.plan is None:
            table.add_row(budget, "-", "-", "-", "-", Text("does not fit", style="dim"))
            continue
        bar = "█" * max(1, round(_BAR_WIDTH * point.tokens_per_second / best))
        table.add_row(
            budget, f"{point.tokens_per_second:.1f}", f"{point.prompt_tokens_per_second:.0f}",
            format_size(point.plan.vram.weights_bytes),
            format_size(point.plan.prediction.decode_link_bytes_per_token), Text(bar, style="green"),
        )  # fmt: skip
    return table


def write_sweep_png(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw tokens/s against VRAM. Raises AtsplanError if matplotlib is missing or the file cannot be written."""
    solved = [point for point in points if point.plan]
    budgets = [point.budget_bytes / GIB for point in solved]
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    decode = axes.plot(
        budgets, [point.tokens_per_second for point in solved], "o-", color=COLOURS["gpu"], label="decode"
    )
    axes.set_xlabel("VRAM budget in GiB")
    axes.set_ylabel("tokens/s while decoding")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    prompts = axes.twinx()
    prefill = prompts.plot(
        budgets, [point.prompt_tokens_per_second for point in solved], "s--", color="#7f8fa6", label="prompt"
    )
    prompts.set_ylabel("tokens/s of the prompt")
    prompts.set_ylim(bottom=0)
    axes.legend(handles=[*decode, *prefill], loc="upper left")
    axes.set_title(title, loc="left")
    save_figure(figure, path, dots_per_inch=150)
