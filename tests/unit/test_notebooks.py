"""Every notebook runs on a small profile, defines nothing, and shows what came out of its last run."""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from planner import Workload, library, solve
from planner.hardware import Gpu
from planner.measurements import Series
from planner.plan import Plan
from planner.records import write_record
from planner.units import GIB
from runtime.bench import Ablation, BenchResult, PlainResult
from runtime.bench_worker import DepthTimes, Measured
from runtime.session import LoadSettings
from tests.documentation import ROOT
from tests.unit.planner_profiles import TINY, synthetic_profile
from tests.unit.test_pressure import pressure_result

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells_of(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def bench_result(plan: Plan) -> BenchResult:
    """Return what `bench` would have found if the plan did as predicted, and everything else half as well."""

    def measured(factor: float) -> Measured:
        seconds = plan.prediction.decode_seconds_per_token * factor
        times = DepthTimes(0, Series((0.1,)), Series((0.2,)), Series((seconds, seconds)))
        return Measured((times,), 1.0, plan.vram.budget_bytes, None, None, 0)

    plain = PlainResult("--fit", LoadSettings(512, 64, 4), measured(2.0), measured(2.0))
    without = Ablation("without prefetch", measured(2.0))
    return BenchResult(plan, plan.hardware, plan.software, 512, 32, measured(1.0), (plain,), (without,))


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a small profile, its plan and what was measured with it where the notebooks look first."""
    monkeypatch.setenv("ATSPLAN_PLANS", str(tmp_path))
    profile = synthetic_profile(TINY)
    profile = replace(profile, hardware=replace(profile.hardware, gpu=Gpu("Test GPU", 2 * GIB, "9.0", 5, 16, "cuda")))
    profile = replace(profile, model=replace(profile.model, name="Tiny qwen3-14b"))  # which the notebooks look for
    everything = solve(profile, 2 * GIB, Workload())
    needed_bytes = everything.vram.budget_bytes - everything.vram.idle_bytes
    plan = solve(profile, needed_bytes - everything.vram.weights_bytes // 2, Workload(n_threads=4))
    assert any(placement.decode == "stream" for placement in plan.placements)
    path = library.add(plan)
    library.add(profile)
    write_record(path.with_suffix(library.BENCH_SUFFIX), bench_result(plan))
    write_record(path.with_suffix(library.PRESSURE_SUFFIX), pressure_result(plan))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("small_library")
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it writes its pictures
    matplotlib.use("agg")
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # between matplotlib and pandas
        for number, cell in enumerate(cells_of(notebook, "code")):
            exec(compile(source_of(cell), f"{notebook.name}, code cell {number}", "exec"), namespace)
    assert "profile" not in namespace or namespace["profile"].model.name == "Tiny qwen3-14b"
    namespace["plt"].close("all")
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_last_run(notebook: Path) -> None:
    cells = cells_of(notebook, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook.stat().st_size < 300_000
    assert " at 0x" not in notebook.read_text()  # an object that is not shown but named


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_nothing(notebook: Path) -> None:
    for cell in cells_of(notebook, "code"):
        for node in ast.walk(ast.parse(source_of(cell))):
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)), source_of(cell)


def test_all_notebooks_are_listed() -> None:
    assert len(NOTEBOOKS) >= 4
    page = (ROOT / "notebooks/README.md").read_text()
    for notebook in NOTEBOOKS:
        assert f"]({notebook.name})" in page
