"""Every shipped plan, profile and bench result can be trusted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner import library
from planner.library_check import check_file
from planner.page import plan_page
from planner.picture import write_png
from planner.plan import Plan
from planner.pressure import PressureResult, phase_figures
from planner.records import read_record
from runtime.bench import BenchResult

SHIPPED = Path(library.__file__).parents[1] / "plans"
FILES = library.files(SHIPPED)
BENCH_RESULTS = [path for path in FILES if path.name.endswith(library.BENCH_SUFFIX)]
PRESSURE_RESULTS = [path for path in FILES if path.name.endswith(library.PRESSURE_SUFFIX)]


def name(path: Path) -> str:
    return str(path.relative_to(SHIPPED))


def test_the_shipped_library_is_found() -> None:
    assert library.folders()[-1] == SHIPPED
    assert set(SHIPPED.glob("*/**/*.json")) == set(FILES)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_shipped_file(path: Path) -> None:
    assert check_file(path, is_shared=True) == []
    assert re.findall(r'"/\w.*', path.read_text()) == []  # no paths of the machine where it was made


@pytest.mark.parametrize("path", BENCH_RESULTS, ids=name)
def test_a_shipped_bench_result(path: Path) -> None:
    """It is named after the plan that it measured, on the machine that the plan is for, within the budget."""
    result = read_record(path, BenchResult)
    assert result.plan in plans_named_like(path)
    assert result.hardware.fingerprint == result.plan.hardware.fingerprint
    assert result.software.llama_cpp_python == result.plan.software.llama_cpp_python
    assert 0 < result.measured.peak_vram_bytes <= result.plan.vram.budget_bytes


@pytest.mark.parametrize("path", PRESSURE_RESULTS, ids=name)
def test_a_shipped_measurement_under_load(path: Path) -> None:
    """It is named after the plan that it measured, on the machine that the plan is for; both runs lived through all."""
    result = read_record(path, PressureResult)
    for run, is_adaptive in ((result.adaptive, True), (result.static, False)):
        trace = run.trace
        assert trace.plan in plans_named_like(path)
        assert trace.hardware.fingerprint == trace.plan.hardware.fingerprint
        assert trace.is_adaptive == is_adaptive
        assert None not in phase_figures(run)


def plans_named_like(path: Path) -> list[Plan]:
    return [
        read_record(other, Plan)
        for other in path.parent.glob("*.json")
        if library.kind_of(other) is Plan and path.name.startswith(other.stem)
    ]


@pytest.mark.parametrize("path", [path for path in FILES if library.kind_of(path) is Plan], ids=name)
def test_a_shipped_plan_can_be_drawn(path: Path, tmp_path: Path) -> None:
    plan = read_record(path, Plan)
    assert plan.model.name in plan_page(plan, [], None, [])
    write_png(tmp_path / "plan.png", plan.model.name, plan, [], None)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
