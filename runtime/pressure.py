"""Measure what following the load is worth: a plan decodes under load, adaptive and static in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.hardware import Hardware, Software
from planner.pressure import PressureResult

from .control_groups import usable_cores
from .pressure_worker import Task, run, total_seconds

BUSY_FRACTION = 0.6  # of the cores that the CPU load takes
WARMUP_SECONDS = 5.0  # kernels are loaded, CUDA graphs captured, and an adaptive plan settles
TURN_SECONDS = 2.0  # at least: much less than what machines take to become slower or faster by themselves

Report = Callable[[str], None]


def measure_pressure(
    plan_path: Path, model_path: Path, machine: tuple[Hardware, Software], *, phase_seconds: float, report: Report
) -> PressureResult:
    """Decode under each load for `phase_seconds`, and without one half as long before, between and after; both ways.

    Works in a child process. Raises AtsplanError.
    """
    hardware, software = machine
    task = Task(
        str(model_path), str(plan_path), hardware, min(WARMUP_SECONDS, phase_seconds), phase_seconds / 2,
        phase_seconds, TURN_SECONDS, max(1, round(BUSY_FRACTION * usable_cores())),
    )  # fmt: skip
    report(
        f"Decoding under load, adaptive and static in turns: {total_seconds(task):.0f} s or more once it is loaded ..."
    )
    answer = run(task)
    return PressureResult(
        answer.adaptive, answer.static, software, task.n_load_processes, answer.agreement, answer.turn_seconds
    )
