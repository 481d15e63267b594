"""Fitting llama.cpp's settings, choosing its best, and the table; measuring itself is tested on the device."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planner.errors import AtsplanError
from planner.hardware import Software
from planner.measurements import Series
from planner.plan import Placement, Plan
from planner.records import from_json, read_record, to_json
from runtime import bench, bench_worker, child
from runtime.bench_worker import DepthTimes, Measured, Task
from runtime.bindings import Statistics
from runtime.commands import parse_depths
from runtime.plain_settings import Candidate, Search, largest
from runtime.session import LoadSettings
from tests.native.engine_plans import HARDWARE, plan_for

SETTINGS = LoadSettings(1024, 128, 4)
SOFTWARE = Software("1", "0.3.36", "", False)


def measured(decode: float, prefill: float, peak_vram_bytes: int = 1 << 20) -> Measured:
    times = DepthTimes(0, Series((prefill,)), Series((prefill,)), Series((decode,)))
    return Measured((times,), 1.0, peak_vram_bytes, None, None, 1)


@pytest.fixture
def plan(smollm2: Path) -> Plan:
    plan = plan_for(smollm2, [], n_context=1024)
    prediction = replace(plan.prediction, decode_seconds_per_token=0.019)
    return replace(plan, prediction=prediction, vram=replace(plan.vram, overhead_bytes=1 << 20))


@given(st.integers(0, 200), st.integers(-1, 200))
def test_largest_that_fits(limit: int, threshold: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= threshold

    assert largest(limit, fits) == (None if threshold < 0 else min(limit, threshold))
    assert len(asked) <= 10


@pytest.mark.parametrize(("text", "expected"), [("0", (0,)), ("0,4096", (0, 4096)), ("5,5", (5,))])
def test_depths(text: str, expected: tuple[int, ...]) -> None:
    assert parse_depths(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1 2", "9" * 30])
def test_bad_depths(text: str) -> None:
    with pytest.raises(AtsplanError, match="is not a list of depths"):
        parse_depths(text)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Return the list to which everything is added that would be measured, which always takes the same time."""
    measured_tasks: list[Task] = []

    def measure(task: Task) -> Measured:
        measured_tasks.append(task)
        return measured(0.02, 0.5)

    monkeypatch.setattr(bench, "measure", measure)
    return measured_tasks


def test_a_plan_alone_is_loaded_once(tasks: list[Task], plan: Plan) -> None:
    bench.bench(
        plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
        n_prompt=512, n_generate=64, depths=(0,), n_repeat=5, against_plain=False, ablate=False,
        report=lambda _: None,
    )  # fmt: skip
    assert [task.n_repeat for task in tasks] == [5]


def test_contenders_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    tasks: list[Task] = []
    searches: list[Search] = []
    speeds = {"slow": (0.9, 0.9), "decodes": (0.1, 0.9), "prefills": (0.9, 0.1)}
    settings = {name: replace(SETTINGS, n_gpu_layers=index) for index, name in enumerate(speeds)}

    def measure(task: Task) -> Measured:
        tasks.append(task)
        if task.plan_path is not None:
            return measured(0.02, 0.5, peak_vram_bytes=len(tasks))
        if task.settings == replace(SETTINGS, n_gpu_layers=9):
            raise AtsplanError("signal 4")
        return measured(*next(speeds[name] for name in speeds if settings[name] == task.settings))

    def find_candidates(search: Search) -> tuple[Candidate, ...]:
        searches.append(search)
        broken = Candidate("broken", replace(SETTINGS, n_gpu_layers=9))
        return (broken, *(Candidate(name, settings[name]) for name in speeds))

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "find_candidates", find_candidates)
    told: list[str] = []
    result = bench.bench(
        plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
        n_prompt=512, n_generate=64, depths=(0,), n_repeat=5, against_plain=True, ablate=False, report=told.append,
    )  # fmt: skip
    names = {settings[name]: name for name in speeds} | {None: "plan"}
    assert [(names.get(task.settings, "broken"), task.n_repeat, task.n_generate) for task in tasks] == [
        ("plan", 3, 64),
        ("broken", 1, 32), ("slow", 1, 32), ("decodes", 1, 32), ("prefills", 1, 32),
        ("decodes", 5, 64), ("prefills", 5, 64), ("plan", 2, 64),
    ]  # fmt: skip
    assert [search.budget_bytes for search in searches] == [(1 << 30) - (1 << 20)]
    assert "  signal 4" in told
    assert result.measured.depths[0].decode_seconds.samples == (0.02, 0.02)
    assert result.measured.peak_vram_bytes == len(tasks)
    decode = bench.best_plain(result, 0, lambda depth: depth.decode_seconds)
    prefill = bench.best_plain(result, 0, lambda depth: depth.prefill_seconds)
    assert decode == ("decodes", Series((0.1,)))
    assert prefill == ("prefills", Series((0.1,)))
    assert from_json(to_json(result).encode(), bench.BenchResult, "result") == result

    console = Console(width=200, record=True)
    console.print(bench.table(result))
    text = console.export_text()
    (row,) = [line for line in text.splitlines() if "decode tokens/s" in line]
    for figure in ("50.0 ± 0.0%", " 10.0 ", "5.00", "52.6", "-5.0%"):
        assert figure in row
    assert "llama.cpp's best decode: decodes" in bench.remarks(result)


def test_the_table_fits_the_terminal(plan: Plan) -> None:
    def times(decode: float) -> Measured:
        series = Series((0.0512, 0.0712)), Series((0.0512, 0.0712)), Series((decode, 1.4 * decode))
        return Measured((DepthTimes(4096, *series),), 1.0, 1 << 20, None, None, 1)

    plain = bench.PlainResult("best", SETTINGS, times(0.0011), times(0.0011))
    plan = replace(plan, prediction=replace(plan.prediction, decode_seconds_per_token=0.0019))
    result = bench.BenchResult(plan, HARDWARE, SOFTWARE, 512, 8, times(0.0013), (plain,), ())
    console = Console(width=80, record=True)
    console.print(bench.table(result))
    text = console.export_text()
    assert "…" not in text
    assert "8366 ± 16.3%" in text


def test_settings_that_this_cpu_cannot_execute_are_said_and_skipped(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    dies = "import os, signal, sys; print('ggml: loaded', file=sys.stderr); os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(child, "command", lambda module: [sys.executable, "-c", dies])
    repacked = replace(SETTINGS, use_repacking=True)

    def measure(task: Task) -> Measured:
        return bench_worker.measure(task) if task.settings == repacked else measured(0.02, 0.5)

    monkeypatch.setattr(bench, "measure", measure)
    candidates = (Candidate("CPU only, repacked", repacked), Candidate("CPU only", SETTINGS))
    monkeypatch.setattr(bench, "find_candidates", lambda search: candidates)
    told: list[str] = []
    result = bench.bench(
        plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
        n_prompt=512, n_generate=64, depths=(0,), n_repeat=1, against_plain=True, ablate=False, report=told.append,
    )  # fmt: skip
    tried = told.index("Trying llama.cpp with CPU only, repacked ...")
    assert told[tried + 1] == (
        "  Measuring llama.cpp failed: not usable on this CPU, which lacks an instruction (SIGILL)."
    )
    assert [item.name for item in result.plain] == ["CPU only"]


def test_ablations_change_one_thing(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    placements = (
        Placement("up", 1, "stream", "cpu"), Placement("down", 1, "cpu", "stream"), Placement("norm", 1, "gpu", "gpu"),
    )  # fmt: skip
    plan = replace(plan, placements=placements)
    seen: list[tuple[str | None, bool, list[str]]] = []

    def measure(task: Task) -> Measured:
        assert task.plan_path is not None
        if task.plan_path != "plan.json":
            variant = read_record(task.plan_path, Plan)
            seen.append((task.switched_off, task.is_adaptive, [placement.decode for placement in variant.placements]))
            assert [placement.prefill for placement in variant.placements] == ["cpu", "stream", "gpu"]
        return measured(0.02, 0.5)

    monkeypatch.setattr(bench, "measure", measure)
    result = bench.bench(
        plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
        n_prompt=512, n_generate=64, depths=(0,), n_repeat=1, against_plain=False, ablate=True, report=lambda _: None,
    )  # fmt: skip
    planned = ["stream", "cpu", "gpu"]
    assert seen == [
        ("prefetch", True, planned), ("zero_copy", True, planned), ("early_launch", True, planned),
        ("fast_products", True, planned),
        ("cuda_graphs", True, planned), (None, False, planned),
        (None, False, ["cpu", "cpu", "gpu"]), (None, False, ["stream", "stream", "gpu"]),
    ]  # fmt: skip
    assert "without zero copy: prefill 1024, decode 50.0 tokens/s" in bench.remarks(result)


def test_depths_beyond_the_context_are_refused(plan: Plan) -> None:
    with pytest.raises(AtsplanError, match=r"1000 \+ 512 \+ 64 tokens exceed the plan's context of 1024"):
        bench.bench(
            plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
            n_prompt=512, n_generate=64, depths=(0, 1000), n_repeat=1, against_plain=False, ablate=False, report=print,
        )  # fmt: skip


def test_experts_beside_their_prediction(plan: Plan) -> None:
    counters = Statistics(**(dict.fromkeys(Statistics.__dataclass_fields__, 0) | {
        "n_experts_resident": 40, "n_experts_streamed": 20, "n_experts_cpu": 20,
    }))  # fmt: skip
    prediction = replace(plan.prediction, decode_experts=(4.5, 1.5, 2.0))
    one = replace(measured(0.02, 0.5), statistics=counters, n_statistics_tokens=10)
    result = bench.BenchResult(replace(plan, prediction=prediction), HARDWARE, SOFTWARE, 16, 10, one, (), ())
    assert (
        "experts: 4.0 in VRAM, 2.0 streamed, 2.0 on the CPU per decoded token; hit rate 50%; predicted 4.5, 1.5, 2.0"
    ) in bench.remarks(result)


def test_a_static_plan_is_static_in_everything_that_is_measured(tasks: list[Task], plan: Plan) -> None:
    bench.bench(
        plan, Path("plan.json"), Path("model.gguf"), (HARDWARE, SOFTWARE),
        n_prompt=512, n_generate=64, depths=(0,), n_repeat=2, against_plain=False, ablate=True, is_adaptive=False,
        report=lambda _: None,
    )  # fmt: skip
    assert len(tasks) > 3
    assert not any(task.is_adaptive for task in tasks)
