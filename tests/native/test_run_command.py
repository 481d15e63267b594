"""`atsplan run` and `atsplan bench` on the simulated device: text, figures, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from planner.errors import AtsplanError, DeviceError, UsageError
from planner.hardware import Hardware, Software
from planner.plan import Plan
from planner.records import write_record
from profiler.detect import detect_software
from profiler.synthetic_model import write_synthetic_model
from runtime import build
from runtime.bench import in_one_class
from runtime.bench_worker import Task, run_task
from runtime.bindings import Helper
from runtime.cli import register
from runtime.engine import Engine
from runtime.library import load
from runtime.sampling import Sampler
from runtime.session import LoadSettings
from tests.native.engine_plans import HARDWARE, plan_for, random_placements, weights_of

SOFTWARE = Software("test", "0.3.36", "", False)
PROMPT = "The capital of France is"


def detect(device: str) -> tuple[Hardware, Software]:
    if device != "sim":
        raise DeviceError(f"There is no {device} here.")
    return HARDWARE, SOFTWARE


def invoke(*arguments: str, stdin: str = "") -> Result:
    app = typer.Typer()
    register(app, detect)
    return CliRunner().invoke(app, arguments, input=stdin)


@pytest.fixture(scope="module")
def plan(native_helper: Path, smollm2: Path) -> Plan:
    weights = weights_of(smollm2, 512, 64)
    return plan_for(smollm2, random_placements(weights, 1), n_context=512, n_ubatch=64)


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> Path:
    write_record(tmp_path / "plan.json", plan)
    return tmp_path / "plan.json"


def greedy_text(model: Path, n: int) -> str:
    settings = LoadSettings(n_context=512, n_ubatch=64, n_threads=1)
    with Engine(load("sim"), model, settings) as engine, Sampler() as sampler:
        return engine.detokenize(engine.generate(engine.tokenize(PROMPT), n, sampler))


def test_prompt(plan_path: Path, smollm2: Path) -> None:
    result = invoke("run", "--plan", str(plan_path), "--model", str(smollm2), "-p", PROMPT, "-n", "6", "--stats")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{PROMPT}{greedy_text(smollm2, 6)}\n"
    for figure in ("prefill ", "decode ", "streamed ", "peak VRAM ", "(5 tokens)", "The device is simulated"):
        assert figure in result.stderr


def test_chat(plan_path: Path, smollm2: Path) -> None:
    result = invoke(
        "run",
        "--plan",
        str(plan_path),
        "--model",
        str(smollm2),
        "-n",
        "4",
        stdin="What is two plus two?\n\nAnd three?\n",
    )
    assert result.exit_code == 0, result.output
    assert len([line for line in result.stdout.splitlines() if line.strip("> ")]) >= 2
    assert "<|im_" not in result.stdout


def test_bench(plan_path: Path, smollm2: Path) -> None:
    json_path = plan_path.with_name("bench.json")
    result = invoke(
        "bench", "--plan", str(plan_path), "--model", str(smollm2), "--prompt", "16", "--generate", "4",
        "--depth", "0,32", "--repeat", "2", "--json", str(json_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "decode" in result.stdout
    written = json.loads(json_path.read_text())
    assert [depth["n_depth"] for depth in written["measured"]["depths"]] == [0, 32]
    assert len(written["measured"]["depths"][1]["decode_seconds"]["samples"]) == 2
    assert written["measured"]["statistics"]["n_graphs"] == 4
    assert written["measured"]["peak_vram_bytes"] > 0


def test_switched_off_options_and_classes_take_effect(plan: Plan, plan_path: Path, smollm2: Path) -> None:
    helper = Helper(load("sim").ats)
    task = Task(str(smollm2), "sim", str(plan_path), None, 8, 4, (0,), 1)
    as_planned = run_task(task).statistics
    assert helper.get_option("prefetch") == 1
    without_prefetch = run_task(replace(task, switched_off="prefetch")).statistics
    assert helper.get_option("prefetch") == 0
    helper.set_option("prefetch", 1)  # the helper is the process's
    write_record(plan_path, in_one_class(plan, "cpu"))
    on_cpu = run_task(task).statistics
    assert as_planned is not None
    assert without_prefetch is not None
    assert on_cpu is not None
    assert 0 < without_prefetch.n_streamed < as_planned.n_streamed  # which copies ahead for the next token
    assert on_cpu.n_streamed == 0
    assert on_cpu.n_cpu_steps > as_planned.n_cpu_steps > 0


def another_model(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    return str(write_synthetic_model(plan_path.with_name("other.gguf"), "llama-tiny")[0])


def not_a_model(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    return str(plan_path)


def absent_model(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    return str(plan_path.with_name("absent.gguf"))


def truncated_model(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    path = plan_path.with_name("truncated.gguf")
    shutil.copyfile(smollm2, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    return str(path)


def other_software(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    write_record(plan_path, replace(plan, software=replace(SOFTWARE, llama_cpp_python="0.3.1")))
    return str(smollm2)


def other_machine(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    write_record(plan_path, replace(plan, hardware=replace(HARDWARE, gpu=None)))
    return str(smollm2)


def absent_gpu(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    write_record(plan_path, replace(plan, device="cuda0"))
    return str(smollm2)


def malformed_plan(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    raw = json.loads(plan_path.read_text())
    raw["placements"][17]["decode"] = "tpu"
    plan_path.write_text(json.dumps(raw))
    return str(smollm2)


def weight_in_vram_for_one_phase(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    raw = json.loads(plan_path.read_text())
    index = next(i for i, item in enumerate(raw["placements"]) if item["decode"] == "stream")
    raw["placements"][index]["prefill"] = "gpu"
    plan_path.write_text(json.dumps(raw))
    return str(smollm2)


def forgotten_weight(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    write_record(plan_path, replace(plan, placements=plan.placements[:-2]))
    return str(smollm2)


def unknown_cache_type(plan_path: Path, plan: Plan, smollm2: Path) -> str:
    write_record(plan_path, replace(plan, workload=replace(plan.workload, type_v="q9_9")))
    return str(smollm2)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (another_model, "The plan is for Smollm2"),
        (not_a_model, "plan.json"),
        (absent_model, "absent.gguf"),
        (truncated_model, "truncated.gguf"),
        (other_software, "made with llama-cpp-python 0.3.1"),
        (other_machine, "made for another machine (no GPU instead of sim"),
        (absent_gpu, "There is no cuda0 here"),
        (malformed_plan, "placements.17.decode"),
        (weight_in_vram_for_one_phase, "decode and prefill must both be gpu or neither; they are stream, gpu"),
        (forgotten_weight, "no placement for"),
        (unknown_cache_type, "no KV cache of the type 'q9_9'"),
    ],
)
def test_bad_input_is_one_clear_error(
    plan_path: Path, plan: Plan, smollm2: Path, prepare: Callable[[Path, Plan, Path], str], message: str
) -> None:
    model = prepare(plan_path, plan, smollm2)
    result = invoke("run", "--plan", str(plan_path), "--model", model, "-p", PROMPT, "-n", "2")
    assert result.exit_code != 0
    assert isinstance(result.exception, AtsplanError), result.exception
    assert message in result.exception.message
    assert "\n" not in result.exception.message
    assert result.stdout == ""


def test_another_machine_is_a_warning_with_anyway(plan_path: Path, plan: Plan, smollm2: Path) -> None:
    model = other_machine(plan_path, plan, smollm2)
    result = invoke("run", "--plan", str(plan_path), "--model", model, "-p", PROMPT, "-n", "1", "--anyway")
    assert result.exit_code == 0
    assert "Warning: the plan is for no GPU instead of simulated GPU." in result.stderr


def test_a_prompt_longer_than_the_context(plan_path: Path, smollm2: Path) -> None:
    result = invoke("run", "--plan", str(plan_path), "--model", str(smollm2), "-p", "word " * 600)
    assert isinstance(result.exception, AtsplanError)
    assert "tokens do not fit into the context of 512" in result.exception.message


def test_an_empty_prompt(plan_path: Path, smollm2: Path) -> None:
    result = invoke("run", "--plan", str(plan_path), "--model", str(smollm2), "-p", "")
    assert isinstance(result.exception, AtsplanError)
    assert "The prompt is empty" in result.exception.message


def test_options_for_a_prompt_are_refused_in_a_chat() -> None:
    result = invoke("run", "--plan", "plan.json", "--stats", "--context-shift")
    assert isinstance(result.exception, UsageError)
    assert "leave --context-shift, --stats." in result.exception.remedy


def test_a_chat_asks_on_the_terminal() -> None:
    code = "from runtime.supervise import supervise; supervise(); from runtime.commands import _read_line; _read_line()"
    ours, its = os.openpty()
    root = Path(build.__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", code], stdin=its, stdout=its, stderr=its, cwd=root)
    os.close(its)
    try:
        assert os.read(ours, 2) == b"> "
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


def test_ctrl_c_keeps_the_text_so_far(plan: Plan, plan_path: Path, smollm2: Path) -> None:
    write_record(plan_path, replace(plan, software=detect_software()))
    arguments = ["run", "--plan", str(plan_path), "--model", str(smollm2), "-p", PROMPT, "-n", "500", "--anyway"]
    process = subprocess.Popen(
        [sys.executable, "-m", "atsplan", *arguments, "--temp", "1.5"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(build.__file__).parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    seen = process.stdout.read(len(PROMPT) + 1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert seen.startswith(PROMPT), errors
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert "Traceback" not in errors
    assert "ignored" not in errors
