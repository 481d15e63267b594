"""Every kind of model goes through profile, solve and run with llama.cpp's own logits, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import pytest

from planner.errors import InvalidFileError
from planner.measurements import CrossingTiming, GlueTiming, KernelTiming, LinkTiming, Profile, Series
from planner.memory import fixed_memory
from planner.plan import Plan
from planner.solve import solve
from planner.units import MIB
from planner.workload import Workload
from profiler import bench, jobs, suite
from profiler.measure import Effort
from profiler.suite import Settings, profile_model
from profiler.synthetic_model import write_synthetic_model
from runtime import inspect_model as inspection
from runtime.engine import Engine, PlanEngine
from runtime.library import Library, load
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements
from tests.native.test_engine_logits import logits_of

Timing = TypeVar("Timing", KernelTiming, GlueTiming, LinkTiming, CrossingTiming)

N_CONTEXT, N_UBATCH = 256, 32
CONTINUE_NO_TEXT = {"bert-tiny": "keeps no context", "t5-tiny": "is an encoder"}
# One of each kind: dense, tied, with a sliding window, fused, experts of all sorts, MLA, recurrent, hybrid. The other
# synthetic models differ from these in norms and biases only.
GENERATIVE = (
    "llama-tiny", "phi3-tiny", "bloom-tiny", "command-r-tiny", "gemma2-tiny", "gemma3-tiny", "mixtral-tiny",
    "qwen2moe-tiny", "qwen3moe-tiny", "gpt-oss-tiny", "deepseek2-tiny", "mamba-tiny", "falcon-h1-tiny", "lfm2-tiny",
    "qwen3next-tiny", "gemma3n-tiny", "qwen2vl-tiny",
)  # fmt: skip


class WorkerHere:
    """Measures in this process: children of their own are tested elsewhere and take a second each."""

    def __init__(self, device: str) -> None:
        self.device = device

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return Series((1e-6,)) if function is bench.transfer else function(*args)  # the link is the same for all models

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Iterator[Library]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(suite, "Worker", WorkerHere)
        monkeypatch.setattr(suite, "inspect_model", inspect_here)
        monkeypatch.setattr(suite, "MAX_COLD_BYTES", 0)
        monkeypatch.setattr(suite, "MEMORY_CONTEXTS", (512,))
        for name in ("KERNELS_BUDGET_SECONDS", "CONTENTION_PHASE_SECONDS"):
            monkeypatch.setattr(jobs, name, 0.01)
        monkeypatch.setattr(jobs, "OTHER_EFFORT", Effort(1e-4))
        monkeypatch.setattr(jobs, "CROSSING_SIZES_BYTES", (4096, MIB))
        monkeypatch.setattr(jobs, "HOST_SAMPLES", 1)
        yield load("sim")


def inspect_here(
    path: Path, device: str, contexts: list[int], n_ubatch: int, type_k: str, type_v: str
) -> inspection.Inspection:
    return inspection._inspect(str(path), device, contexts, n_ubatch, type_k, type_v, True)


def profiled(path: Path) -> Profile:
    return profile_model(path, Settings("sim", (1,), N_CONTEXT, N_UBATCH), lambda *step: None)


def on_a_gpu(profile: Profile) -> Profile:
    """Return the profile as it would be with a device that is faster than the CPU, which the simulated one is not."""

    def faster(timing: Timing, factor: float) -> Timing:
        return replace(timing, seconds=Series(tuple(sample / factor for sample in timing.seconds.samples)))

    return replace(
        profile,
        kernels=tuple(faster(timing, 20 if timing.device == "gpu" else 1) for timing in profile.kernels),
        glue=tuple(faster(timing, 20) for timing in profile.glue),
        link=tuple(faster(timing, 5) for timing in profile.link),
        crossings=tuple(faster(timing, 5) for timing in profile.crossings),
    )


def solved(profile: Profile) -> Plan:
    """Return the plan with room in VRAM for a third of the weights."""
    workload = Workload(64, 32, N_CONTEXT, N_UBATCH, 1)
    n_bytes = sum(weight.size_bytes for weight in profile.weights) // 3
    return solve(profile, fixed_memory(profile, workload, budget_bytes=0).total_bytes + n_bytes, workload)


@pytest.mark.parametrize("name", GENERATIVE)
def test_profile_solve_run(library: Library, tmp_path: Path, name: str) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", name)
    profile = profiled(path)
    plan = solved(on_a_gpu(profile))
    assert {item.name for item in plan.host_placements} - {weight.name for weight in profile.weights if weight.is_input}
    expected = logits_of(Engine(library, path, LoadSettings(N_CONTEXT, N_UBATCH, 1)))
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    other = plan_for(path, random_placements(profile.weights, seed=3), n_context=N_CONTEXT, n_ubatch=N_UBATCH)
    for each in (plan, other):
        np.testing.assert_array_equal(logits_of(PlanEngine(library, path, each)), expected)


@pytest.mark.parametrize("name", CONTINUE_NO_TEXT)
def test_models_that_do_not_continue_text_are_refused(library: Library, tmp_path: Path, name: str) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", name)
    with pytest.raises(InvalidFileError, match=CONTINUE_NO_TEXT[name]) as caught:
        profiled(path)
    assert "\n" not in str(caught.value)
