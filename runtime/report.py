"""What a run took, beside what the plan predicted, as text."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from planner.units import format_size


@dataclass(frozen=True)
class RunFigures:
    """One prompt and its continuation. Seconds and bytes; `n_decoded` counts evaluations after the prompt."""

    n_prompt_tokens: int
    prefill_seconds: float
    n_decoded: int
    decode_seconds: float
    streamed_bytes: int
    peak_vram_bytes: int
    cpu_seconds: float
    wait_gpu_seconds: float


def describe(figures: RunFigures, plan: Plan) -> list[str]:
    """Return one line per figure: measured, then predicted and how far off the prediction is."""
    predicted = plan.prediction
    lines = [f"prefill    {_rate(figures.n_prompt_tokens, figures.prefill_seconds)} ({figures.n_prompt_tokens} tokens)"]
    if predicted.prefill_seconds > 0:
        rate = plan.workload.n_prompt_tokens / predicted.prefill_seconds
        lines[0] += f"; predicted {rate:.1f} at {plan.workload.n_prompt_tokens} tokens"
    if figures.n_decoded:
        line = f"decode     {_rate(figures.n_decoded, figures.decode_seconds)} ({figures.n_decoded} tokens)"
        if predicted.decode_seconds_per_token > 0:
            seconds = figures.decode_seconds / figures.n_decoded
            error = predicted.decode_seconds_per_token / seconds - 1
            line += f"; predicted {1 / predicted.decode_seconds_per_token:.1f} ({error:+.1%} time per token)"
        lines.append(line)
    lines.append(
        f"streamed   {format_size(figures.streamed_bytes)}; predicted "
        f"{format_size(predicted.decode_link_bytes_per_token)} per decoded token"
    )
    lines.append(
        f"peak VRAM  {format_size(figures.peak_vram_bytes)} of {format_size(plan.vram.budget_bytes)}; "
        f"predicted {format_size(predicted.peak_vram_bytes)}"
    )
    lines.append(
        f"host       {figures.cpu_seconds:.2f} s computing, {figures.wait_gpu_seconds:.2f} s waiting for the GPU"
    )
    if plan.is_simulated:
        lines.append("The device is simulated: these figures say nothing about a GPU.")
    return lines


def _rate(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tokens/s" if seconds > 0 else "-"
