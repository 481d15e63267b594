"""Every shipped plan, profile and bench result can be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import library
from planner.library_check import check_file
from planner.plan import Plan
from planner.records import read_record
from runtime.bench import BenchResult

SHIPPED = Path(library.__file__).parents[1] / "plans"


def test_the_shipped_library_is_found() -> None:
    assert library.folders()[-1] == SHIPPED
    assert {path.suffix for path in SHIPPED.rglob("*") if path.is_file()} <= {".json", ".md"}
    assert {path.parent.parent.parent for path in SHIPPED.rglob("*.json")} <= {SHIPPED}


@pytest.mark.parametrize("path", library.files(SHIPPED), ids=lambda path: str(path.relative_to(SHIPPED)))
def test_a_shipped_file(path: Path) -> None:
    assert check_file(path, is_shared=True) == []
    if path.name.endswith(library.BENCH_SUFFIX):
        result = read_record(path, BenchResult)
        plan = read_record(path.with_name(path.name.removesuffix(library.BENCH_SUFFIX) + ".json"), Plan)
        assert result.plan == plan
        assert result.hardware == plan.hardware
        assert result.software == plan.software
        assert 0 < result.measured.peak_vram_bytes <= plan.vram.budget_bytes
