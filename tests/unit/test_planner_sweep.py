"""Sweeps over VRAM, and plans for a machine that one does not have."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import cli
from planner.errors import AtsplanError, InfeasibleError
from planner.measurements import Profile
from planner.plan import Plan
from planner.records import read_record, write_record
from planner.solve import solve
from planner.sweep import parse_range, sweep, with_memory
from planner.units import GIB, MIB
from planner.workload import Workload
from tests.unit.planner_commands import run
from tests.unit.planner_profiles import TINY, synthetic_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile(TINY)


@pytest.fixture
def profile_file(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "theirs.json", profile)
    return str(tmp_path / "theirs.json")


def test_ranges() -> None:
    assert parse_range("4G..8G", 5) == [gib * GIB for gib in (4, 5, 6, 7, 8)]
    assert parse_range("1000M..1001M", 11) == [1000 * MIB, 1001 * MIB]
    assert parse_range("6G..6G", 3) == [6 * GIB]
    for text, problem in (("6G", "not a range"), ("8G..4G", "ends before"), ("4G..", "'' is not a size")):
        with pytest.raises(AtsplanError, match=problem):
            parse_range(text, 3)


def test_more_vram_is_never_slower(profile: Profile) -> None:
    budgets = parse_range("400M..700M", 7)
    points = list(sweep(budgets, lambda budget: solve(profile, budget, Workload(n_threads=8))))
    assert [point.budget_bytes for point in points] == budgets
    assert points[0].plan is None
    assert "MiB are missing" in points[0].reason
    speeds = [point.tokens_per_second for point in points]
    assert speeds[0] == 0.0 < speeds[-1]
    assert speeds == sorted(speeds)
    assert points[-1].plan is not None
    prefill_seconds = points[-1].plan.prediction.prefill_seconds
    assert points[-1].prompt_tokens_per_second == pytest.approx(512 / prefill_seconds)


def test_beyond_the_card_at_hand(profile: Profile) -> None:
    gpu = with_memory(profile, 100 * GIB).hardware.gpu
    assert gpu is not None
    assert gpu.memory_bytes == 100 * GIB
    assert with_memory(profile, 4 * GIB) is profile
    no_gpu = replace(profile, hardware=replace(profile.hardware, gpu=None))
    assert with_memory(no_gpu, GIB) is no_gpu


def test_the_command(profile_file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = run("sweep", profile_file, "--vram", "400M..700M", "--steps", "4", "--png", "sweep.png")
    rows = [line for line in text.splitlines() if "GiB" in line]
    assert len(rows) == 4
    assert "does not fit" in rows[0]
    assert rows[-1].rstrip().endswith("█" * 16)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InfeasibleError, match="MiB are missing"):
        run("sweep", profile_file, "--vram", "100M..200M")
    with pytest.raises(AtsplanError, match="There is no folder .*no/such"):
        run("sweep", profile_file, "--vram", "600M..700M", "--steps", "2", "--png", "no/such/folder.png")


def test_beyond_the_card_nothing_is_taken_by_other_programs(profile: Profile) -> None:
    assert profile.hardware.gpu is not None
    small = replace(
        profile,
        hardware=replace(profile.hardware, gpu=replace(profile.hardware.gpu, memory_bytes=500 * MIB)),
        state=replace(profile.state, gpu_memory_free_bytes=450 * MIB),
    )
    assert with_memory(small, 480 * MIB) == small
    budgets = [solve(with_memory(small, 700 * MIB), size * MIB, Workload()).vram.budget_bytes for size in (600, 700)]
    assert budgets == [600 * MIB, 700 * MIB]


def test_png_without_matplotlib(profile_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AtsplanError, match="pip install matplotlib"):
        run("sweep", profile_file, "--vram", "600M..700M", "--steps", "2", "--png", "sweep.png")


def test_solving_for_another_machine(
    profile: Profile, profile_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("solve", "--hardware", profile_file, "--vram", "600M")
    assert read_record(tmp_path / "plan.json", Plan).hardware == profile.hardware
    monkeypatch.setattr(cli, "read_model_info", lambda path: profile.model)
    run("solve", "model.gguf", "--hardware", profile_file, "--vram", "600M")


@pytest.mark.parametrize("source", ["model.gguf", "other.json"])
def test_solving_for_another_machine_with_a_profile_of_another_model(
    profile: Profile, profile_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    other = synthetic_profile(replace(TINY, name="Other", n_layers=3))
    write_record(tmp_path / "other.json", other)
    asked = []

    def describe(*question: object) -> Profile:
        asked.append(question)
        return other

    monkeypatch.setattr(cli, "read_model_info", lambda path: other.model)
    output = run("solve", source, "--hardware", profile_file, "--vram", "600M", describe=describe)
    assert "Note: Speeds are estimated: they were measured there with another model, Tiny." in " ".join(output.split())
    plan = read_record(tmp_path / "plan.json", Plan)
    assert (plan.model, plan.hardware) == (other.model, profile.hardware)
    assert asked == ([(Path(source), 4096, 512)] if source == "model.gguf" else [])
