"""Exported plans run with stock programs: the same text, the same weights streamed, settings that the helper reads."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from planner.errors import AtsplanError
from planner.plan import ExpertPolicy, Placement, Plan
from planner.records import write_record
from profiler.detect import detect_hardware, detect_software
from runtime import build, verify
from runtime.cli import register
from runtime.engine import PlanEngine
from runtime.export import settings_text
from runtime.library import load
from runtime.placement import device_options
from runtime.sampling import Sampler
from tests.native.engine_plans import plan_for, random_placements, weights_of

# Runs the exported script, then decodes one token and tells what the helper was told and what it did.
ASK_THE_HELPER = """
import ctypes, json, os, runpy, sys
from dataclasses import asdict
from runtime.bindings import Helper
llama = runpy.run_path(sys.argv[1], run_name="__main__")["llama"]
print("-----")
llama.reset()
helper = Helper(ctypes.CDLL(os.environ["GGML_BACKEND_PATH"]))
llama.eval([1, 2, 3])
llama.eval([4])
helper.statistics(reset=True)
llama.eval([5])
options = {name: helper.get_option(name) for name in json.loads(sys.argv[2])}
print(json.dumps([options, asdict(helper.statistics())]))
"""


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    register(app, lambda device: (detect_hardware(device), detect_software()))
    return CliRunner().invoke(app, ["export", *arguments])


def python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    root = str(Path(build.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def plan(native_helper: Path, smollm2: Path) -> Plan:
    weights = weights_of(smollm2)
    plan = plan_for(smollm2, random_placements(weights, 3), ring_bytes=4 << 20, prefill_min_tokens=5)
    return replace(plan, experts=ExpertPolicy(7 << 20, 3e-4, 2e-4, 1e-5))


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> Path:
    write_record(tmp_path / "my plan.json", plan)
    return tmp_path / "my plan.json"


def test_the_scripts_do_what_the_plan_says(plan: Plan, plan_path: Path, smollm2: Path) -> None:
    script = plan_path.with_name("run.py")
    exported = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "python")
    assert exported.exit_code == 0, exported.output
    script.write_text(exported.stdout)
    engine = PlanEngine(load("sim"), smollm2, plan)
    with engine, Sampler() as sampler:
        engine.evaluate([1, 2, 3])
        engine.evaluate([4])
        engine.synchronize()
        engine.statistics(reset=True)
        engine.evaluate([5])
        engine.synchronize()
        expected = engine.statistics()
        text = engine.detokenize(engine.generate(engine.tokenize("Gravity is"), 64, sampler))
    options = device_options(plan)
    text_there, answer = python("-c", ASK_THE_HELPER, str(script), json.dumps(list(options))).split("\n-----\n")
    options_there, statistics = json.loads(answer)
    assert text_there == text
    assert options_there == options
    for name in ("n_streamed", "streamed_bytes", "n_cpu_steps", "n_gpu_steps", "ring_bytes"):
        assert statistics[name] == getattr(expected, name), name
    assert statistics["n_streamed"] > 10
    script.write_text(invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "python", "--static").stdout)
    assert "ATSPLAN" not in script.read_text()
    assert python(str(script)) == text + "\n"


def test_a_stale_settings_file(plan: Plan, plan_path: Path, smollm2: Path, tmp_path: Path) -> None:
    """Programs that need it say so; atsplan's own commands do not look at it."""
    script, settings = tmp_path / "run.py", plan_path.with_suffix(".settings")
    script.write_text(invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "python").stdout)
    for text, problem in (("weight a b c\n", ":1: expected 'option NAME VALUE'"), (None, "cannot read ")):
        settings.unlink() if text is None else settings.write_text(text)
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert problem in result.stderr
        assert "ATSPLAN_SETTINGS names this file: export the plan again." in result.stderr
    asking = f"import os; os.environ['ATSPLAN_SETTINGS'] = {str(settings)!r}; from runtime.library import load; "
    assert python("-c", f"{asking}print(load('sim').device)") == "sim\n"


def test_nothing_stands_in_for_a_device_that_is_hidden(
    plan: Plan, plan_path: Path, smollm2: Path, tmp_path: Path
) -> None:
    write_record(plan_path, replace(plan, device="cuda0"))
    (tmp_path / "run.py").write_text(invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "python").stdout)
    result = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "llama.cpp finds no device CUDA0, which ATSPLAN_DEVICE names." in result.stderr


def test_command_lines(plan: Plan, plan_path: Path, smollm2: Path, native_helper: Path) -> None:
    for target, separator in (("llama-server", ","), ("llama-bench", ";")):
        result = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", target)
        words = shlex.split(result.stdout.replace("\\\n", ""))
        program = words.index(target)
        environment = dict(word.split("=", 1) for word in words[:program])
        assert environment == {
            "GGML_BACKEND_PATH": str(native_helper),
            "ATSPLAN_DEVICE": "sim",
            "ATSPLAN_SETTINGS": str(plan_path.with_suffix(".settings")),
        }
        assert Path(environment["ATSPLAN_SETTINGS"]).read_text() == settings_text(plan)
        overrides = words[words.index("-ot") + 1].split(separator)
        assert all(item.startswith("^") and item.endswith("$=ATS_Host") for item in overrides)
        options = dict(zip(words[program + 1 :: 2], words[program + 2 :: 2], strict=True))
        assert options["-dev"] == "ATS0"
        assert (options["-m"], options["-ub"], options["-t"], options["-lm"]) == (str(smollm2), "32", "1", "none")
        assert f"{target} must be of the same llama.cpp" in result.stderr
        if target == "llama-server":
            assert (options["-c"], options["-np"], options["--fit"]) == ("256", "1", "off")
        else:
            assert (options["-p"], options["-n"]) == ("16", "8")
            assert "6.0 MiB more VRAM than planned" in result.stderr  # 32 tokens x 49,152 logits x 4 bytes


def test_static_command_lines(plan: Plan, plan_path: Path, smollm2: Path) -> None:
    write_record(plan_path, replace(plan, device="cuda0"))
    result = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "llama-server", "--static")
    words = shlex.split(result.stdout.replace("\\\n", ""))
    assert words[0] == "llama-server"
    assert words[words.index("-dev") + 1] == "CUDA0"
    assert all(item.endswith("=CPU") for item in words[words.index("-ot") + 1].split(","))
    assert not plan_path.with_suffix(".settings").exists()
    assert "Any llama-server that knows these options" in result.stderr
    assert "must be" not in result.stderr
    assert "Any llama-server that knows these options" in result.stderr
    assert "must be" not in result.stderr


def test_llama_bench_runs_it(plan: Plan, plan_path: Path, smollm2: Path) -> None:
    """The command as exported, with the program of the same llama.cpp if there is one here."""
    if shutil.which("llama-bench") is None:
        pytest.skip("no llama-bench on the PATH")
    command = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "llama-bench").stdout.strip()
    libraries = f"{build.find_llama().library_folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            f"{command} -r 1 -o jsonl", shell=True, env=environment, capture_output=True, text=True, check=False
        )

    result = run()
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(16, 0), (0, 8)]
    assert {row["devices"] for row in rows} == {"ATS0"}
    assert all(row["avg_ts"] > 0 for row in rows)
    plan_path.with_suffix(".settings").write_text("weight a b c\n")
    assert ".settings:1: expected 'option NAME VALUE'" in run().stderr


def test_what_cannot_be_exported(plan: Plan, plan_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "find_model", lambda *_: smollm2)  # it would miss the weights that are made up here

    def export(name: str, target: str) -> str:
        placements = (*plan.placements, Placement(name, 1, "cpu", "cpu"))
        write_record(plan_path, replace(plan, placements=placements))
        result = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", target)
        assert isinstance(result.exception, AtsplanError)
        return result.exception.message

    assert "has a space in its name" in export("a name", "python")
    assert "holds a separator" in export("a,b", "llama-server")
    long = tuple(Placement(f"{n}.{'x' * 40}", 1, "cpu", "cpu") for n in range(3000))
    write_record(plan_path, replace(plan, placements=(*plan.placements, *long)))
    result = invoke("--plan", str(plan_path), "--model", str(smollm2), "--to", "llama-bench")
    assert "too long for a command line" in str(result.exception)
