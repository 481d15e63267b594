"""`atsplan run --trace`: the file is written however the run ends, and `--stats` tells what was changed."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import DeviceError, UsageError
from planner.plan import Plan
from planner.records import read_record, write_record
from planner.trace import Change, Trace
from profiler.detect import detect_software
from runtime import build, commands
from runtime.engine import PlanEngine
from runtime.report import describe_changes
from tests.native.engine_plans import HARDWARE, plan_for, random_placements, weights_of
from tests.native.test_run_command import PROMPT, invoke


@pytest.fixture(scope="module")
def plan(native_helper: Path, smollm2: Path) -> Plan:
    weights = weights_of(smollm2, 512, 64)
    return plan_for(smollm2, random_placements(weights, 1), n_context=512, n_ubatch=64)


@pytest.fixture
def run_command(plan: Plan, smollm2: Path, tmp_path: Path) -> list[str]:
    write_record(tmp_path / "plan.json", plan)
    trace = str(tmp_path / "trace.json")
    return ["run", "--plan", str(tmp_path / "plan.json"), "--model", str(smollm2), "-n", "6", "--trace", trace]


def test_a_prompt_and_its_continuation(run_command: list[str], plan: Plan, tmp_path: Path) -> None:
    result = invoke(*run_command, "-p", PROMPT, "--stats")
    assert result.exit_code == 0, result.output
    assert "changes    none" in result.stderr
    assert "The trace is in " in result.stderr
    trace = read_record(tmp_path / "trace.json", Trace)
    assert (trace.plan, trace.hardware, trace.is_adaptive) == (plan, HARDWARE, True)
    assert [prompt.n_tokens for prompt in trace.prompts] == [5]
    assert len(trace.tokens) == 5  # the first of the six follows from the prompt
    assert all(0 < token.cpu_seconds < token.seconds for token in trace.tokens)
    assert all(token.streamed_bytes > 0 for token in trace.tokens)
    times = [token.at_seconds for token in trace.tokens]
    assert times == sorted(times)
    assert trace.card == ()  # there is none


def test_static(run_command: list[str], tmp_path: Path) -> None:
    result = invoke(*run_command, "-p", PROMPT, "--stats", "--static")
    assert result.exit_code == 0, result.output
    assert "the plan was static" in result.stderr
    trace = read_record(tmp_path / "trace.json", Trace)
    assert not trace.is_adaptive
    assert len(trace.tokens) == 5
    assert trace.changes == ()


def test_a_trace_does_not_overwrite_what_is_run(plan: Plan, smollm2: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "plan.json", plan)
    (tmp_path / smollm2.name).symlink_to(smollm2)  # beside the plan, where it is found without being named
    for name in ("plan.json", smollm2.name):
        path = str(tmp_path / name)
        result = invoke("run", "--plan", str(tmp_path / "plan.json"), "-p", PROMPT, "-n", "2", "--trace", path)
        assert isinstance(result.exception, UsageError)
        assert result.exception.message == f"{path} is read, and would be overwritten."


def test_chat(run_command: list[str], tmp_path: Path) -> None:
    result = invoke(*run_command, stdin="What is two plus two?\nAnd three?\n")
    assert result.exit_code == 0, result.output
    assert len(read_record(tmp_path / "trace.json", Trace).prompts) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceError("The device failed.")])
def test_however_the_run_ends(
    run_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    evaluate = PlanEngine.evaluate

    def evaluate_some(engine: PlanEngine, tokens: list[int]) -> None:
        if engine.n_tokens == 7:
            raise error
        evaluate(engine, tokens)

    monkeypatch.setattr(PlanEngine, "evaluate", evaluate_some)
    result = invoke(*run_command, "-p", PROMPT)
    assert result.exit_code != 0
    assert len(read_record(tmp_path / "trace.json", Trace).tokens) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_ended(run_command: list[str], plan: Plan, tmp_path: Path, number: signal.Signals) -> None:
    write_record(tmp_path / "plan.json", replace(plan, software=detect_software()))
    process = subprocess.Popen(
        [sys.executable, "-m", "atsplan", *run_command, "-p", PROMPT, "-n", "500", "--temp", "1.5", "--anyway"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(build.__file__).parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    seen = process.stdout.read(len(PROMPT) + 20)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert seen.startswith(PROMPT), errors
    assert (process.returncode, rest[-1:]) == (128 + number, "\n")
    assert "Traceback" not in errors
    assert "The trace is in " in errors
    assert 0 < len(read_record(tmp_path / "trace.json", Trace).tokens) < 499


def test_a_missing_folder_is_said_before_anything_is_loaded(
    run_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "open_plan", None)
    result = invoke(*run_command[:-1], "no/such/trace.json", "-p", PROMPT)
    assert isinstance(result.exception, UsageError)
    assert "There is no folder " in result.exception.message


def test_a_trace_does_not_replace_its_plan(run_command: list[str], tmp_path: Path) -> None:
    before = (tmp_path / "plan.json").read_text()
    result = invoke(*run_command[:-1], str(tmp_path / "plan.json"), "-p", PROMPT)
    assert isinstance(result.exception, UsageError)
    assert (tmp_path / "plan.json").read_text() == before


def test_changes_in_words() -> None:
    change = Change(4.25, "the CPU is slower", 1 << 30, 3 << 29, 1 << 28, 0.5, 1.0)
    assert describe_changes([change], is_adaptive=True) == [
        "changes    1",
        "  at 4.2 s  the CPU is slower; streamed per token 1.00 GiB -> 1.50 GiB, ring 256 MiB",
    ]
    assert describe_changes([change] * 10, is_adaptive=True)[-1] == "  and 2 more; --trace keeps all"
