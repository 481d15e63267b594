"""Types of the KV cache and attention without flash attention: llama.cpp's own logits, or the reason why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import AtsplanError
from profiler import suite
from profiler.suite import Settings
from profiler.synthetic_model import write_synthetic_model
from runtime import commands
from runtime.bindings import Helper
from runtime.engine import Engine, PlanEngine
from runtime.inspect_model import Inspection, inspect_model
from runtime.library import Library, load
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements
from tests.native.test_engine_logits import logits_of
from tests.native.test_run_command import SOFTWARE, detect


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_model(tmp_path_factory.mktemp("model") / "model.gguf", "llama-tiny")[0]


@pytest.fixture(scope="module")
def inspected(library: Library, model: Path) -> Inspection:
    return inspect_model(model, "sim", [256], 32)


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash_attention"),
    [
        ("q8_0", "q8_0", True),
        ("q4_0", "q4_0", True),
        ("q5_1", "f16", True),
        ("f16", "f16", False),
        ("q8_0", "f16", False),
    ],
)
def test_logits(
    library: Library, model: Path, inspected: Inspection, type_k: str, type_v: str, flash_attention: bool
) -> None:
    plan = plan_for(model, random_placements(inspected.weights_decode, 1))
    workload = replace(plan.workload, type_k=type_k, type_v=type_v, flash_attention=flash_attention)
    settings = LoadSettings(256, 32, 1, type_k, type_v, flash_attention)
    expected = logits_of(Engine(library, model, settings))
    np.testing.assert_array_equal(logits_of(PlanEngine(library, model, replace(plan, workload=workload))), expected)


def test_quantised_values_need_flash_attention(library: Library, model: Path) -> None:
    with pytest.raises(AtsplanError, match="quantized V cache requires flash_attn") as caught:
        Engine(library, model, LoadSettings(256, 32, 1, "q8_0", "q8_0", False))
    assert "\n" not in str(caught.value)


def test_attention_that_the_gpu_leaves_to_the_cpu_is_said(
    library: Library,
    model: Path,
    inspected: Inspection,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspected.unsupported_ops == ()  # of the simulated GPU

    def inspect(path: Path, device: str, contexts: list[int], ubatches: list[int], type_k: str, _: str) -> Inspection:
        return replace(inspected, unsupported_ops=("FLASH_ATTN_EXT",) if type_k == "q8_0" else ())

    monkeypatch.setattr(suite, "inspect_model", inspect)
    _, memory, notes = suite._inspect(model, "sim", Settings("sim", (1,), 256, 32), 256)
    assert len(memory) == 2  # of f16 and q4_0
    assert notes == ["The KV cache cannot be q8_0: the GPU would leave attention to the CPU."]
    monkeypatch.setattr(Helper, "unsupported_ops", lambda *_: ("FLASH_ATTN_EXT",))
    plan = plan_for(model, random_placements(inspected.weights_decode, 1), software=SOFTWARE)
    with commands.open_plan(plan, model, detect, anyway=False):
        assert "the GPU leaves to the CPU what it cannot compute: FLASH_ATTN_EXT." in capsys.readouterr().err
