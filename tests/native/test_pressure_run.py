"""A plan under real loads on the simulated device: what the processes do, when, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.errors import DeviceError, UsageError
from planner.plan import Plan
from planner.pressure import CPU_LOAD, LINK_LOAD, QUIET, Agreement, PressureResult
from planner.records import read_record, write_record
from profiler.synthetic_model import write_synthetic_model
from runtime import child, pressure_worker
from runtime.adapt import Controller, Decision
from runtime.adapt_policy import Measured
from runtime.load_aware import LoadAware
from runtime.load_processes import Load
from runtime.pressure_worker import Task, Turn, agreement_of, run_task, turn_seconds_of
from tests.native.engine_plans import HARDWARE, movable, plan_for, random_placements, weights_of
from tests.native.test_run_command import invoke

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def plan_path(native_helper: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan beside its model."""
    folder = tmp_path_factory.mktemp("pressure")
    (model,) = write_synthetic_model(folder / "model.gguf", "llama-tiny")
    weights = weights_of(model, 64)
    placements = movable(random_placements(weights, 1), weights)
    write_record(folder / "plan.json", plan_for(model, placements, n_context=64, n_ubatch=32))
    return folder / "plan.json"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_load_works_only_when_told(native_helper: Path) -> None:
    others = children_of(os.getpid())
    with Load(["cpu", "link"], "sim") as load:
        load.wait_ready()
        pids = children_of(os.getpid()) - others
        assert len(pids) == 2
        idle = [cpu_seconds(pid) for pid in pids]
        time.sleep(0.3)
        assert [cpu_seconds(pid) for pid in pids] == pytest.approx(idle, abs=0.05)
        load.go()
        time.sleep(0.5)
        load.stop()
        busy = [cpu_seconds(pid) for pid in pids]
        assert all(after - before > 0.1 for before, after in zip(idle, busy, strict=True))
        time.sleep(0.3)
        assert [cpu_seconds(pid) for pid in pids] == pytest.approx(busy, abs=0.05)
        load.go()
        load.stop()  # at once
    assert not any(is_running(pid) for pid in pids)


def test_a_load_that_cannot_start_says_why(native_helper: Path) -> None:
    with Load(["gpu"], "cuda7") as load, pytest.raises(DeviceError, match="no device cuda7"):
        load.wait_ready()
    with Load(["nonsense"], "sim") as load, pytest.raises(DeviceError, match="it gave no reason"):
        load.wait_ready()
    others = children_of(os.getpid())
    with Load(["cpu"], "sim") as load:
        load.wait_ready()
        (pid,) = children_of(os.getpid()) - others
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="has ended"):
            load.stop()


def test_loads_end_with_whoever_started_them() -> None:
    program = (
        "import os, time\n"
        "from runtime.load_processes import Load\n"
        "load = Load(['cpu', 'cpu'], 'sim')\n"
        "load.wait_ready()\n"
        "load.go()\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], env=child.environment(), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    pids = children_of(parent.pid)
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_both_runs_go_on_through_all_phases(plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptive one decides to stream nothing; the static one stays as planned."""
    monkeypatch.setattr(pressure_worker, "_N_PROMPT", 33)  # the last token alone
    monkeypatch.setattr(pressure_worker, "_N_BEHIND", 8)
    monkeypatch.setattr(pressure_worker, "_N_TURN", 1)
    events: list[tuple[float, str]] = []
    for name in ("go", "stop"):
        usual = getattr(Load, name)

        def noted(load: Load, name: str = name, usual: Callable[[Load], None] = usual) -> None:
            usual(load)
            events.append((time.perf_counter() - started, name))

        monkeypatch.setattr(Load, name, noted)

    def stream_nothing(controller: Controller, _: Measured) -> Decision:
        before, controller.streamed = controller.streamed, ()
        return Decision(before, (), "nothing", 1.0, 1.0)

    monkeypatch.setattr(Controller, "add", stream_nothing)
    build = LoadAware.__init__

    def noted_build(self: LoadAware, *arguments: Any, **options: Any) -> None:
        nonlocal started
        build(self, *arguments, **options)
        started = self._started  # zero of the trace's time

    started = 0.0
    monkeypatch.setattr(LoadAware, "__init__", noted_build)
    seeds: list[int] = []
    change_over = pressure_worker._Decoder.change_over

    def noted_change_over(self: Any, is_adaptive: bool, *, seed: int) -> None:
        seeds.append(seed)
        change_over(self, is_adaptive, seed=seed)

    monkeypatch.setattr(pressure_worker._Decoder, "change_over", noted_change_over)
    task = Task(str(plan_path.with_name("model.gguf")), str(plan_path), HARDWARE, 0.2, 0.4, 0.6, 0.2, 1)
    answer = run_task(task)
    for run, is_adaptive in ((answer.adaptive, True), (answer.static, False)):
        phases, tokens = run.phases, run.trace.tokens
        assert run.trace.is_adaptive == is_adaptive
        assert [phase.load for phase in phases] == [QUIET, CPU_LOAD, QUIET, LINK_LOAD, QUIET]
        assert sum(phase.n_tokens for phase in phases) == len(tokens)
        for phase, other in zip(phases, answer.static.phases, strict=True):
            part = tokens[phase.first_token : phase.first_token + phase.n_tokens]
            wanted = task.quiet_seconds if phase.load == QUIET else task.load_seconds
            assert sum(token.seconds for token in part) <= phase.end_seconds - phase.start_seconds - wanted
            assert phase.start_seconds <= part[0].at_seconds <= part[-1].at_seconds <= phase.end_seconds
            assert (phase.start_seconds, phase.end_seconds) == (other.start_seconds, other.end_seconds)
        assert all(one.end_seconds <= two.start_seconds for one, two in pairwise(phases))
    adaptive, static = ([token.at_seconds for token in run.trace.tokens] for run in (answer.adaptive, answer.static))
    assert adaptive[0] < static[0] and adaptive[-1] < static[-1] and not set(adaptive) & set(static)
    order = [who for _, who in sorted([(at, 0) for at in adaptive] + [(at, 1) for at in static])]
    n_turns = 1 + sum(one != two for one, two in pairwise(order))
    assert n_turns == 2 * (2 + 3 + 2 + 3 + 2)
    assert seeds == [index // 2 for index in range(n_turns)]  # no two pairs decode the same tokens
    assert answer.turn_seconds == pytest.approx(0.2)

    assert [name for _, name in events] == ["go", "stop", "go", "stop"]
    for (at, _), phase in zip(events, answer.adaptive.phases[1:], strict=True):
        assert at == pytest.approx(phase.start_seconds, abs=0.03)  # a phase begins when its load does

    plan = answer.static.trace.plan
    planned = sum(item.size_bytes for item in plan.placements if item.decode == "stream" and not item.is_resident)
    fixed = sum(item.size_bytes for item in plan.placements if item.decode == "stream" and item.costs is None)
    assert {token.streamed_bytes for token in answer.static.trace.tokens} == {planned}
    assert {token.streamed_bytes for token in answer.adaptive.trace.tokens} == {fixed} != {planned}
    assert answer.adaptive.trace.changes and not answer.static.trace.changes
    assert answer.agreement.n_compared > 100
    assert answer.agreement.n_different == 0  # the simulated device computes as the CPU does
    assert [prompt.n_tokens for prompt in answer.adaptive.trace.prompts] == [32]  # the context was cut back only


def test_turns_are_long_enough_to_try_a_pattern() -> None:
    """A phase has one turn of each run at least."""
    task = Task("", "", HARDWARE, 5.0, 10.0, 20.0, 2.0, 1)
    assert [turn_seconds_of(task, n) for n in (500, 25)] == [2.0, 3.0]  # of tokens of 0.01 and 0.2 s
    assert [pressure_worker._n_turns(20.0, seconds) for seconds in (2.0, 3.0, 6.0, 30.0)] == [10, 6, 3, 1]


class RecordingEngine:
    """Keeps the context before and with every token. A recurrent one cannot cut it."""

    n_context, n_vocab = 2048, 100_000

    def __init__(self, *, is_recurrent: bool = False) -> None:
        self.context: list[int] = []
        self.decoded: list[tuple[int, ...]] = []
        self.load = SimpleNamespace(follow=lambda: None, hold=lambda: None)
        self._is_recurrent = is_recurrent

    @property
    def n_tokens(self) -> int:
        return len(self.context)

    def evaluate(self, tokens: Sequence[int]) -> None:
        self.context += tokens
        if len(tokens) == 1:
            self.decoded.append(tuple(self.context))

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        del self.context[0 if self._is_recurrent else len(tokens) - 1 :]
        return len(self.context)

    def logits(self) -> NDArray[np.float32]:
        return np.array([0, 3, 1, 2], np.float32)


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_the_turns_of_a_pair_decode_the_same_tokens_and_no_others_do(is_recurrent: bool) -> None:
    """So that a measurement compares as many tokens as it counts, and another one the same."""
    measurements = []
    for _ in range(2):
        engine = RecordingEngine(is_recurrent=is_recurrent)
        decoder = pressure_worker._Decoder(engine)  # type: ignore[arg-type]
        decoder.decode(0.01)
        turns = []
        for index in range(4):
            engine.decoded.clear()
            decoder.change_over(index % 2 == 0, seed=index // 2)
            assert len(engine.decoded) == 5
            assert [decoder._next() for _ in range(300)] == 300 * [(1, 1.0)]  # the context is cut back meanwhile
            turns.append(list(engine.decoded))
        measurements.append(turns)
    assert measurements[0] == measurements[1]
    assert turns[0] == turns[1] and turns[2] == turns[3]
    assert not set(turns[0]) & set(turns[2])
    assert len(set(turns[0])) == len(turns[0])
    assert {len(context) for context in turns[0]} == set(range(513, 769))


def test_agreement() -> None:
    def turn(likeliest: tuple[int, ...], gaps: tuple[float, ...]) -> Turn:
        return Turn(0, True, 0, len(likeliest), likeliest, gaps)

    one, other = turn((1, 2, 3, 4), (9.0, 0.1, 0.2, 9.0)), turn((1, 5, 6), (9.0, 0.3, 0.1))
    assert agreement_of([one, other]) == Agreement(3, 2, 0.3)
    assert agreement_of([one, other, one, one]) == Agreement(7, 2, 0.3)
    assert agreement_of([one, one]) == Agreement(4, 0, 0.0)


def test_the_command(plan_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke(
        "bench", "--plan", str(plan_path), "--pressure", "--phase-seconds", "0.4",
        "--json", str(tmp_path / "p.json"), "--png", str(tmp_path / "p.png"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "GPU and link load" in result.stdout
    assert "likeliest next tokens: 0 of " in result.stdout
    assert "The device is simulated" in result.stdout
    record = read_record(tmp_path / "p.json", PressureResult)
    assert record.adaptive.trace.plan == record.static.trace.plan == read_record(plan_path, Plan)
    assert (record.adaptive.trace.is_adaptive, record.static.trace.is_adaptive) == (True, False)
    assert record.agreement.n_compared > 10
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pressure", "--static"], "--pressure measures the plan alone"),
        (["--pressure", "--against", "llama.cpp"], "--pressure measures the plan alone"),
        (["--pressure", "--repeat", "5", "--depth", "0"], "Leave --depth, --repeat."),  # though these are the defaults
        (["--png", "p.png"], "--png: that is for a measurement under load. Add --pressure."),
        (["--phase-seconds", "20"], "--phase-seconds: that is for a measurement under load. Add --pressure."),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    result = invoke("bench", "--plan", "plan.json", *options)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
