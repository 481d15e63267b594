"""`solve` and `show`: what people type, what they read, and one clear error for everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from planner import cache, cli, explain
from planner.errors import AtsplanError, MismatchError
from planner.measurements import Profile
from planner.memory import fixed_memory
from planner.plan import Plan
from planner.records import read_record, write_record
from planner.replay import simulate_plan
from planner.solve import solve
from planner.timeline import Event
from planner.units import MIB
from planner.workload import PRESETS, Workload
from tests.unit.planner_commands import run
from tests.unit.planner_profiles import TINY, Shapes, synthetic_profile

SHAPES = Shapes("Small", 12, 2048, 2048, 512, 8192, 16000)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile(SHAPES)


@pytest.fixture(scope="module")
def budget(profile: Profile) -> str:
    return f"{fixed_memory(profile, Workload(), budget_bytes=0).total_bytes // MIB + 200}M"


@pytest.fixture
def profile_file(profile: Profile, tmp_path: Path) -> str:
    write_record(tmp_path / "measured.json", profile)
    return str(tmp_path / "measured.json")


def test_presets_are_those_of_the_vocabulary() -> None:
    assert {preset.value for preset in cli.Preset} == set(PRESETS)


def test_solve_writes_the_plan_and_shows_it(profile_file: str, budget: str, tmp_path: Path) -> None:
    text = run("solve", profile_file, "--vram", budget, "--threads", "8")
    plan = read_record(tmp_path / "plan.json", Plan)
    assert plan.workload == Workload(n_threads=8)
    for words in ("Small in", "ffn_down", "in VRAM", "streamed", "idle", "Predicted:", "tokens/s", "plan.json"):
        assert words in text


def test_the_second_time_the_plan_comes_from_the_cache(profile_file: str, budget: str, tmp_path: Path) -> None:
    run("solve", profile_file, "--vram", budget, "--out", "a.json")
    text = run("solve", profile_file, "--vram", budget, "--out", "b.json")
    assert "from the cache" in text
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert "from the cache" not in run("solve", profile_file, "--vram", budget, "--force")


def test_without_an_argument_it_takes_the_last_profile(profile: Profile, budget: str) -> None:
    with pytest.raises(AtsplanError, match=r"No model was profiled yet\. Run: atsplan profile"):
        run("solve", "--vram", budget)
    cache.store_profile(profile)
    assert "Small in" in run("solve", "--vram", budget)


def test_a_model_is_found_by_its_fingerprint(profile: Profile, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "read_model_info", lambda path: profile.model)
    with pytest.raises(AtsplanError, match=r"Small was not profiled yet\. Run: atsplan profile model\.gguf"):
        run("solve", "model.gguf", "--vram", budget)
    cache.store_profile(profile)
    assert "Small in" in run("solve", "model.gguf", "--vram", budget)


def test_json_is_the_plan(profile_file: str, budget: str, tmp_path: Path) -> None:
    text = run("solve", profile_file, "--vram", budget, "--json", "--objective", "paper")
    assert json.loads(text) == json.loads((tmp_path / "plan.json").read_text())
    assert json.loads(text)["solver"]["objective"] == "paper"


def test_check_is_said(tmp_path: Path) -> None:
    write_record(tmp_path / "tiny.json", synthetic_profile(TINY))
    assert "CP-SAT proves" in run("solve", "tiny.json", "--vram", "600M", "--check")


def test_workload_options(profile: Profile) -> None:
    assert cli.make_workload(profile, None, 0, None, None, None) == Workload(n_context=4096)
    assert cli.make_workload(profile, 16384, 8, "summarise", None, 100) == Workload(8192, 100, 16384, n_threads=8)
    small = cli.make_workload(profile, 512, 0, None, None, None)
    assert small.n_prompt_tokens + small.n_generated_tokens == 512
    assert cli.make_workload(profile, None, 0, "chat", None, None) == Workload(n_context=4096)
    assert cli.make_workload(profile, None, 0, "summarise", None, None) == Workload(8192, 512, 8704)
    assert cli.make_workload(profile, None, 0, None, 5000, None) == Workload(5000, 256, 5376)  # 5256, rounded up
    asked = cli.make_workload(profile, 512, 0, "chat", None, None)
    assert asked.n_prompt_tokens + asked.n_generated_tokens > 512  # solve refuses it and says so


@pytest.mark.parametrize("preset", list(cli.Preset))
def test_every_workload_can_be_solved_without_naming_a_context(profile: Profile, tmp_path: Path, preset: str) -> None:
    last = profile.memory[-1]
    twice = replace(last, n_context=2 * last.n_context, context_bytes=2 * last.context_bytes)
    write_record(tmp_path / "long.json", replace(profile, memory=(*profile.memory, twice)))
    run("solve", "long.json", "--vram", "3G", "--workload", preset)
    workload = read_record(tmp_path / "plan.json", Plan).workload
    assert (workload.n_prompt_tokens, workload.n_generated_tokens) == PRESETS[preset]
    assert workload.n_context >= sum(PRESETS[preset])


def test_errors_are_clear(profile_file: str, budget: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"schema_version": 1}')
    (tmp_path / "not.gguf").write_text("hello")
    for arguments, words in (
        (["solve", profile_file, "--vram", "6Gb"], "'6Gb' is not a size"),
        (["solve", profile_file, "--vram", "100M"], "MiB are missing"),
        (["solve", "missing.json", "--vram", budget], "No such file"),
        (["solve", "not.gguf", "--vram", budget], "not.gguf"),
        (["solve", "broken.json", "--vram", budget], "broken.json"),
        (["solve", profile_file, "--vram", budget, "--out", "no/such/folder.json"], "There is no folder"),
        (["solve", profile_file, "--vram", budget, "--out", profile_file], "is read, and would be overwritten"),
        (["show", profile_file, "--html", profile_file], "is read, and would be overwritten"),
        (["show", "missing.json"], "No such file"),
        (["show", "broken.json"], "broken.json: "),
        (["show", profile_file, "--timeline"], "has no timeline"),
        (["show", profile_file, "--profile", profile_file], "needs no profile"),
    ):
        with pytest.raises(AtsplanError) as caught:
            run(*arguments)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_show(profile: Profile, profile_file: str, budget: str) -> None:
    assert "link alone" in run("show", profile_file)
    run("solve", profile_file, "--vram", budget, "--threads", "8")
    assert "Predicted:" in run("show", "plan.json")
    with pytest.raises(AtsplanError, match="--profile FILE"):
        run("show", "plan.json", "--timeline")
    text = run("show", "plan.json", "--timeline", "--profile", profile_file)
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("GPU  ", "link  ", "CPU  "))] == [
        "GPU", "link", "CPU",
    ]  # fmt: skip
    assert "░▒▓█ busy for a quarter, half, three quarters, all of a column's time" in text
    cache.store_profile(profile)
    assert "on the CPU at" in run("show", "plan.json", "--timeline")


def test_a_bound_far_from_the_prediction_is_not_shown(profile: Profile) -> None:
    plan = solve(profile, 800 * MIB, Workload(n_threads=8))
    seconds = plan.prediction.decode_seconds_per_token
    for bound_seconds, is_shown in ((seconds / 2, True), (seconds / 50, False), (1e-19, False), (0.0, False)):
        changed = replace(plan, solver=replace(plan.solver, bound_seconds=bound_seconds))
        text = " ".join(line.plain for line in explain.prediction_lines(changed))
        assert ("No placement can exceed" in text) == is_shown
        assert "static objective" not in text


def test_timeline_needs_the_right_profile(profile: Profile, budget: str) -> None:
    plan = solve(profile, 800 * MIB, Workload(n_threads=8))
    token = simulate_plan(profile, plan)
    assert token.seconds == plan.prediction.decode_seconds_per_token
    with pytest.raises(MismatchError):
        simulate_plan(synthetic_profile(replace(SHAPES, n_layers=13)), plan)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_views_fit_the_terminal(profile: Profile, width: int) -> None:
    plan = solve(profile, 800 * MIB, Workload(n_threads=8))
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(explain.plan_view(plan))
        token = simulate_plan(profile, plan)
        console.print(explain.timeline_view(token.events, [w.name for w in profile.weights], token.seconds))
        console.print(explain.profile_view(profile))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    if width >= 80:
        assert "…" not in text
    row = next(line for line in text.splitlines() if line.startswith("ffn_down"))
    marks = {"gpu": "█", "stream": "▒", "cpu": "·"}
    assert row.split()[1] == "".join(marks[p.decode] for p in plan.placements if "ffn_down" in p.name)


def test_wide_maps_are_broken_into_lines() -> None:
    plan = solve(synthetic_profile(replace(SHAPES, n_layers=130)), 1900 * MIB, Workload(n_threads=8), objective="paper")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(explain.plan_view(plan))
    maps = [line for line in console.export_text().splitlines() if line.startswith("layer")]
    assert [line.split()[1] for line in maps] == ["0", "60", "120"]


def test_roles_are_for_the_eye_only() -> None:
    assert explain.role_of("blk.12.ffn_up.weight") == (12, "ffn_up")
    assert explain.role_of("output.weight") == (None, "output")
    assert explain.role_of("strange") == (None, "strange")


def test_a_copy_that_began_in_the_token_before_is_drawn_at_the_end() -> None:
    filled = [0.0] * 10
    explain._fill(filled, -2.0, 1.0, 10.0, 1.0)
    assert filled == [1.0, 0, 0, 0, 0, 0, 0, 0, 1.0, 1.0]
    explain._fill(filled, 3.0, 4.5, 10.0, 1.0)
    assert filled[3:5] == [1.0, 0.5]
    assert Event("gpu", (0,), 0.0, 1.0).lane == "gpu"
