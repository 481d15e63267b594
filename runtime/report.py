"""What a run took, beside what the plan predicted, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.plan import Plan
from planner.trace import Change
from planner.trace_figures import change_text
from planner.units import format_size

_N_SHOWN = 8  # changes


@dataclass(frozen=True)
class RunFigures:
    """One prompt and its continuation. Seconds and bytes; `n_decoded` counts evaluations after the prompt."""

    n_prompt_tokens: int
    prefill_seconds: float
    n_decoded: int
    decode_seconds: float
    peak_vram_bytes: int
    decode_streamed_bytes: int
    decode_cpu_seconds: float
    decode_wait_gpu_seconds: float  # of the host, for results that the CPU needs
    decode_experts: tuple[int, int, int] = (0, 0, 0)  # routed ones: found in VRAM, streamed, computed on the CPU


def describe(figures: RunFigures, plan: Plan) -> list[str]:
    """Return one line per figure: measured, then predicted."""
    predicted = plan.prediction
    line = f"prefill    {_rate(figures.n_prompt_tokens, figures.prefill_seconds)} ({figures.n_prompt_tokens} tokens)"
    if predicted.prefill_seconds > 0:
        n_tokens = plan.workload.n_prompt_tokens
        line += f"; predicted {_rate(n_tokens, predicted.prefill_seconds)} ({n_tokens} tokens)"
    lines = [line]
    if figures.n_decoded:
        line = f"decode     {_rate(figures.n_decoded, figures.decode_seconds)} ({figures.n_decoded} tokens)"
        if predicted.decode_seconds_per_token > 0:
            line += f"; predicted {_rate(1, predicted.decode_seconds_per_token)}"
        lines += [
            line,
            f"streamed   {format_size(figures.decode_streamed_bytes / figures.n_decoded)} per decoded token; "
            f"predicted {format_size(predicted.decode_link_bytes_per_token)}",
            f"host       {figures.decode_cpu_seconds / figures.n_decoded * 1e3:.2f} ms computing and "
            f"{figures.decode_wait_gpu_seconds / figures.n_decoded * 1e3:.2f} ms waiting per decoded token",
        ]
        if any(figures.decode_experts):
            lines.append(f"experts    {describe_experts(*figures.decode_experts, figures.n_decoded)}")
    lines.append(
        f"peak VRAM  {format_size(figures.peak_vram_bytes)} of {format_size(plan.vram.budget_bytes)}; "
        f"predicted {format_size(predicted.peak_vram_bytes)}"
    )
    if plan.is_simulated:
        lines.append("The device is simulated: these figures say nothing about a GPU.")
    return lines


def describe_changes(changes: Sequence[Change], *, is_adaptive: bool) -> list[str]:
    """Return what the run changed, when and why. Times count from when the model was loaded."""
    if not is_adaptive:
        return ["changes    none: the plan was static"]
    shown = [f"  at {change.at_seconds:.1f} s  {change.reason}; {change_text(change)}" for change in changes[:_N_SHOWN]]
    if len(changes) > _N_SHOWN:
        shown.append(f"  and {len(changes) - _N_SHOWN} more; --trace keeps all")
    return [f"changes    {len(changes) or 'none'}", *shown]


def describe_experts(n_resident: int, n_streamed: int, n_cpu: int, n_tokens: int) -> str:
    """Return where routed experts were computed, per token, and how often the cache in VRAM had one."""
    places = ((n_resident, "in VRAM"), (n_streamed, "streamed"), (n_cpu, "on the CPU"))
    counts = ", ".join(f"{n / n_tokens:.1f} {place}" for n, place in places)
    return f"{counts} per decoded token; hit rate {n_resident / (n_resident + n_streamed + n_cpu):.0%}"


def _rate(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tokens/s"
