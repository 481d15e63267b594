"""`atsplan run` where llama.cpp gives up, and interrupted at any moment: one clear line, the text so far."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import atsplan
from planner.errors import DeviceError
from planner.gguf_model import read_gguf
from planner.records import write_record
from profiler import bench
from profiler.detect import detect_software
from profiler.measure import Effort
from profiler.synthetic_architectures import synthetic_model
from profiler.synthetic_model import write_synthetic_model
from profiler.worker import Worker
from runtime import commands
from runtime.bindings import Helper
from runtime.inspect_model import inspect_model
from tests.native.engine_plans import plan_for, random_placements, weights_of
from tests.native.test_run_command import SOFTWARE, detect

PROMPT = "the th the"


def write_broken_model(folder: Path, key: str, value: object) -> Path:
    """Write a model that llama.cpp loads and cannot compute."""
    sound = synthetic_model("gemma2-tiny")
    return write_synthetic_model(folder / "model.gguf", replace(sound, metadata={**sound.metadata, key: value}))[0]


def write_plan(model: Path, n_context: int = 256) -> Path:
    weights = inspect_model(model, "sim", [n_context], 32).weights_decode
    plan = plan_for(model, random_placements(weights, 1), n_context=n_context, software=detect_software())
    write_record(model.with_name("plan.json"), plan)
    return model.with_name("plan.json")


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(atsplan.__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-m", "atsplan", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.layer_norm_rms_epsilon", -1.0, r"SIGABRT\): GGML_ASSERT\(eps >= 0.0f\) failed"),
        ("rope.dimension_count", 7, r"SIGABRT\): GGML_ASSERT\(n_dims % 2 == 0\) failed"),
        ("rope.dimension_count", 2**31 + 2**29, r"SIGSEGV\): it gave no reason"),
    ],
)
def test_what_llama_cpp_gives_up_on(native_helper: Path, tmp_path: Path, key: str, value: object, reason: str) -> None:
    model = write_broken_model(tmp_path, key, value)
    plan = write_plan(model)
    before = set(tmp_path.iterdir())
    process = start("run", "--plan", str(plan), "--model", str(model), "-p", PROMPT, "--anyway", folder=tmp_path)
    output, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if not line.startswith("Warning: ")]  # of another machine
    assert process.returncode == 1
    assert output == ""
    assert re.fullmatch(rf"Error: llama\.cpp gave up \({reason}", lines[0])
    assert lines[1:] == ["The model file may be damaged, or use something that this llama.cpp cannot compute."]
    assert set(tmp_path.iterdir()) == before  # no core dump, nothing half-written


def test_a_measurement_that_llama_cpp_gives_up_on(native_helper: Path, tmp_path: Path) -> None:
    model = write_broken_model(tmp_path, "attention.layer_norm_rms_epsilon", -1.0)
    with (
        pytest.raises(DeviceError, match=r"ended abruptly: GGML_ASSERT\(eps >= 0.0f\) failed"),
        Worker("sim") as worker,
    ):
        worker.call(bench.glue, "sim", model, 256, 32, 1, Effort(0.01))


def test_inspection_of_what_llama_cpp_gives_up_on(native_helper: Path, tmp_path: Path) -> None:
    model = write_broken_model(tmp_path, "block_count", 0)
    with pytest.raises(Exception, match=r"llama\.cpp cannot use .*GGML_ASSERT\(hparams.n_layer_all > 0") as caught:
        inspect_model(model, "sim", [256], 32)
    assert "\n" not in str(caught.value)


def test_an_interrupt_at_any_moment_keeps_the_text_so_far(native_helper: Path, smollm2: Path, tmp_path: Path) -> None:
    weights = weights_of(smollm2, 512)
    plan = plan_for(smollm2, random_placements(weights, 1), n_context=512, software=detect_software())
    write_record(tmp_path / "plan.json", plan)
    prompt = "Once upon a time " * 40  # takes a while to evaluate
    arguments = ("run", "--plan", "plan.json", "--model", str(smollm2), "-p", prompt, "-n", "400", "--anyway")
    started = time.monotonic()
    process = start(*arguments, "--temp", "1.5", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.read(len(prompt))  # now the first token is due
    seconds = time.monotonic() - started
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest[-1:]) == (130, "\n")
    assert "Traceback" not in errors
    for share in (0.4, 0.65, 0.9):  # while importing, loading, evaluating the prompt
        process = start(*arguments, folder=tmp_path)
        time.sleep(share * seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert output in ("", "\n") or output.startswith(prompt)
        assert all(line.startswith("Warning: ") for line in errors.splitlines()), errors


def test_memory_that_others_took_since_the_plan_was_made(
    native_helper: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(smollm2, [], software=SOFTWARE)
    plan = replace(plan, vram=replace(plan.vram, weights_bytes=64 << 20))
    monkeypatch.setattr(Helper, "device_memory", lambda self: (10 << 20, 1 << 30))
    monkeypatch.delattr(commands, "PlanEngine")  # nothing is loaded
    with (
        pytest.raises(DeviceError, match=r"needs 64 MiB of VRAM, 54 MiB more than is free\. Close"),
        commands.open_plan(plan, smollm2, detect, anyway=False),
    ):
        pass


def test_a_truncated_file_is_refused_before_it_is_loaded(native_helper: Path, tmp_path: Path) -> None:
    (model,) = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")
    plan = write_plan(model)
    os.truncate(model, max(tensor.offset_bytes for tensor in read_gguf(model).tensors))
    process = start("run", "--plan", str(plan), "--model", str(model), "-p", PROMPT, "--anyway", folder=tmp_path)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert re.fullmatch(r"Error: \S*model\.gguf is truncated: \d+ bytes are missing\.\nDownload .*\n", errors)
