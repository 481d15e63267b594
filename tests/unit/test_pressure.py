"""A plan under load: the figures of phases, their table and picture, and how the loads and the runs are driven."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from planner.hardware import Software
from planner.plan import Plan
from planner.pressure import (
    CPU_LOAD,
    LINK_LOAD,
    QUIET,
    Agreement,
    Phase,
    PressureResult,
    PressureRun,
    cut_of_rise,
    n_until_settled,
    phase_figures,
    pressure_view,
    quiet_seconds,
    remarks,
)
from planner.pressure_picture import turns_of, write_pressure_png
from planner.records import from_json, to_json
from planner.solve import solve
from planner.trace import Change, TokenSample, Trace
from planner.units import MIB
from planner.workload import Workload
from tests.unit.planner_profiles import TINY, synthetic_profile

LOADS = (QUIET, CPU_LOAD, QUIET, LINK_LOAD, QUIET)


def run_of(plan: Plan, *phases: list[float], is_adaptive: bool) -> PressureRun:
    """Return a run with these seconds per token in each phase, after a warm-up of one token of 1 s."""
    tokens, found, now = [TokenSample(1.0, 1.0, 0.0, 0.0, 0.0, 0)], [], 1.0
    for load, seconds in zip(LOADS, phases, strict=True):
        start, first = now, len(tokens)
        for one in seconds:
            now += one
            tokens.append(TokenSample(now, one, one / 2, 0.0, one, 10 * MIB))
        found.append(Phase(load, start, now, first, len(seconds)))
    changes = (Change(2.0, "the CPU is slower", 10 * MIB, 12 * MIB, MIB, 0.5, 1.0),) if is_adaptive else ()
    return PressureRun(Trace(plan, plan.hardware, is_adaptive, tuple(tokens), (), changes, ()), tuple(found))


def pressure_result(plan: Plan) -> PressureResult:
    """Return a measurement in which adapting avoids 70 % and 50 % of the rises under the two loads."""
    quiet = [0.1] * 40
    adaptive = run_of(
        plan, quiet, [0.2] * 12 + [0.13] * 30, quiet, [0.2] * 3 + [0.14] * 30, [0.102] * 40, is_adaptive=True
    )
    static = run_of(plan, quiet, [0.2] * 30, [0.1] * 4, [0.18] * 30, [0.1] * 4, is_adaptive=False)
    return PressureResult(adaptive, static, Software("1", "2", "", True), 10, Agreement(99, 2, 0.25))


@pytest.fixture(scope="module")
def result() -> PressureResult:
    return pressure_result(solve(synthetic_profile(TINY), 700 * MIB, Workload(n_threads=8)))


def test_figures_of_phases(result: PressureResult) -> None:
    adaptive = phase_figures(result.adaptive)
    settled = [0.1, (2 * 0.2 + 30 * 0.13) / 32, 0.1, 0.14, 0.102]  # without the first ten tokens
    assert [f and f.settled_seconds for f in adaptive] == pytest.approx(settled)
    assert [f and round(f.rise, 3) for f in adaptive] == [0.0, 0.344, 0.0, 0.386, 0.02]
    assert [f and f.n_until_settled for f in adaptive] == [0, 12, 0, 3, 0]
    static = phase_figures(result.static)
    cuts = [cut_of_rise(one, other) for one, other in zip(adaptive, static, strict=True)]
    assert cuts == [None, pytest.approx(0.65625), None, pytest.approx(1 - (0.14 / 0.101 - 1) / 0.8), None]


def test_quiet_phases_count_by_their_tokens(result: PressureResult) -> None:
    quiet = (60 * 0.1 + 30 * 0.102) / 90  # without the first ten of each phase
    assert quiet_seconds(result.adaptive) == pytest.approx(quiet)
    assert quiet_seconds(result.static) == pytest.approx(0.1)
    assert quiet_seconds(replace(result.static, phases=())) is None


def test_how_soon_a_phase_settles() -> None:
    assert n_until_settled([0.2] + [0.1] * 20) == 0
    assert n_until_settled([0.2] * 9 + [0.1] * 20) == 9
    assert n_until_settled([0.1] * 15 + [0.2] * 14 + [0.3] * 15) is not None
    assert n_until_settled([0.1] * 14 + [0.2] * 4) == 0


def test_the_table(result: PressureResult) -> None:
    console = Console(width=80, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(pressure_view(result))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line.split("  ") for line in text.splitlines() if "load" in line and "ms" in line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        [CPU_LOAD, "134.4 ms", "+34%", "12", "200.0 ms", "+100%", "66%"],
        [LINK_LOAD, "140.0 ms", "+39%", "3", "180.0 ms", "+80%", "52%"],
    ]
    lines = remarks(result)
    assert lines[0] == "all quiet phases: +0.7% time per token, adaptive against static"
    assert lines[1] == "last phase against the first: adaptive +2.0%, static +0.0%"
    assert "2 of 99 differ; there, the two likeliest logits are at most 0.25 apart" in lines[3]


def test_lines_end_where_the_other_run_has_its_turn() -> None:
    times = [1.0, 1.1, 1.2, 3.2, 3.3, 5.0]  # ends of tokens of 0.1 s; the last one took 1.7 s
    tokens = [TokenSample(at, 1.7 if at == 5.0 else 0.1, 0.0, 0.0, 0.0, 0) for at in times]
    assert turns_of(tokens) == [slice(0, 3), slice(3, 6)]
    assert turns_of(tokens[:1]) == [slice(0, 1)]


def test_a_run_without_quiet_phases_has_no_rise(result: PressureResult) -> None:
    first, load, *_ = result.static.phases
    rises = [figures and figures.rise for figures in phase_figures(replace(result.static, phases=(load,)))]
    assert rises == [0.0]
    rises = [figures and figures.rise for figures in phase_figures(replace(result.static, phases=(first, load)))]
    assert rises == pytest.approx([0.0, 1.0])


def test_a_result_of_a_version_without_turns(result: PressureResult) -> None:
    """Both runs came one after the other."""
    old = json.loads(to_json(replace(result, turn_seconds=2.0)))
    assert old.pop("turn_seconds") == 2.0
    read = from_json(json.dumps(old).encode(), PressureResult, "result")
    assert read == replace(result, turn_seconds=0.0)
    with Console(width=80, record=True, file=io.StringIO()) as console:
        console.print(pressure_view(read))
    assert "one run after the other" in " ".join(console.export_text().split())


def test_the_record_and_the_picture(result: PressureResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert from_json(to_json(result).encode(), PressureResult, "result") == result
    write_pressure_png(tmp_path / "pressure.png", result)
    assert (tmp_path / "pressure.png").read_bytes().startswith(b"\x89PNG")
    without = replace(result.static.phases[4], n_tokens=0)
    assert phase_figures(replace(result.static, phases=(*result.static.phases[:4], without)))[4] is None
    empty = replace(result.adaptive, phases=(), trace=replace(result.adaptive.trace, tokens=(), changes=()))
    write_pressure_png(tmp_path / "empty.png", replace(result, adaptive=empty, static=empty))
    assert remarks(replace(result, adaptive=empty, static=empty))[0] == "changes: 0"
