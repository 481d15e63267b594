"""Measure what following the load is worth: a plan decodes under load twice, adaptive and static."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner.hardware import Hardware, Software
from planner.pressure import Agreement, PressureResult

from .control_groups import usable_cores
from .pressure_worker import Answer, Task, run, total_seconds

BUSY_FRACTION = 0.6  # of the cores that the CPU load takes
WARMUP_SECONDS = 5.0  # kernels are loaded, CUDA graphs captured, and an adaptive plan settles

Report = Callable[[str], None]


def measure_pressure(
    plan_path: Path, model_path: Path, machine: tuple[Hardware, Software], *, phase_seconds: float, report: Report
) -> PressureResult:
    """Decode under each load for `phase_seconds`, and without one half as long before, between and after.

    Each run is a child process. Raises AtsplanError.
    """
    hardware, software = machine
    n_load_processes = max(1, round(BUSY_FRACTION * usable_cores()))
    warmup_seconds = min(WARMUP_SECONDS, phase_seconds)
    task = Task(
        str(model_path), str(plan_path), hardware, True, warmup_seconds, phase_seconds / 2, phase_seconds,
        n_load_processes,
    )  # fmt: skip
    report(f"Decoding under load, adaptive: {total_seconds(task):.0f} s after loading the model ...")
    adaptive = run(task)
    report(f"Decoding under load, static: {total_seconds(task):.0f} s after loading the model ...")
    static = run(replace(task, is_adaptive=False))
    return PressureResult(adaptive.run, static.run, software, n_load_processes, agreement_of(adaptive, static))


def agreement_of(one: Answer, other: Answer) -> Agreement:
    """Compare what the runs computed after the same tokens; one may have decoded more of them."""
    n_compared = min(len(one.likeliest), len(other.likeliest))
    gaps = [max(one.gaps[i], other.gaps[i]) for i in range(n_compared) if one.likeliest[i] != other.likeliest[i]]
    return Agreement(n_compared, len(gaps), max(gaps, default=0.0))
