"""Every type of weights that llama.cpp computes with, on the CPU and on the (simulated) GPU, resident and streamed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.gguf_model import GGML_TYPES, read_gguf
from planner.plan import WeightClass
from profiler import synthetic_model
from profiler.synthetic_model import write_synthetic_model
from profiler.synthetic_transformer import SyntheticModel, SyntheticTensor
from profiler.synthetic_weights import MATRIX_TYPES
from runtime.bindings import Ggml, Helper, MatmulSpec
from runtime.engine import Engine, PlanEngine
from runtime.library import Library, load
from tests.native.engine_plans import MATMULS, plan_for, uniform_placements, weights_of
from tests.native.test_engine_logits import SETTINGS, logits_of

# Not of weights: types of activations that only products read, and whole numbers.
NOT_OF_WEIGHTS = {"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"}
TYPES = [name for name in MATRIX_TYPES if name != "f32"]  # f32 has its norms and biases in every model


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


def write_in_turn(path: Path, name: str, roles: tuple[str, ...], first: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the model `name` whose matrices in `roles` take one type after the other, from TYPES[first] on."""
    n_written = 0

    def tensor_type(model: SyntheticModel, tensor: SyntheticTensor) -> str:
        nonlocal n_written
        if not tensor.is_matrix:
            return "f32"
        if not any(role in tensor.name for role in roles):
            return "f16"
        n_written += 1
        return TYPES[(first + n_written - 1) % len(TYPES)]

    monkeypatch.setattr(synthetic_model, "tensor_type", tensor_type)
    return write_synthetic_model(path, name)[0]


def test_all_types_are_known() -> None:
    assert set(MATRIX_TYPES) | NOT_OF_WEIGHTS == {name for name, _, _ in GGML_TYPES.values()}


@pytest.mark.parametrize(
    ("name", "roles", "first"),
    [("llama-tiny", ("attn", "ffn"), 0)] + [("mixtral-tiny", ("_exps",), first) for first in (0, 12, 24)],
)
def test_logits(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, roles: tuple[str, ...], first: int
) -> None:
    path = write_in_turn(tmp_path / "model.gguf", name, roles, first, monkeypatch)
    weights = weights_of(path)
    found = [weight.type for weight in weights if weight.op in MATMULS and any(role in weight.name for role in roles)]
    assert len(set(found)) == min(len(found), len(TYPES))
    expected = logits_of(Engine(library, path, SETTINGS))
    assert np.isfinite(expected).all()
    classes: tuple[WeightClass, ...] = ("gpu", "stream", "cpu")
    for each in classes:
        plan = plan_for(path, uniform_placements(weights, each, each))
        np.testing.assert_array_equal(logits_of(PlanEngine(library, path, plan)), expected)


def test_products_are_measured(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_in_turn(tmp_path / "model.gguf", "llama-tiny", ("attn", "ffn"), 0, monkeypatch)
    ggml, helper = Ggml(library.ggml), Helper(library.ats)
    tensors = {tensor.type_name: tensor for tensor in read_gguf(path).tensors if len(tensor.shape) == 2}
    assert set(tensors) == set(TYPES)
    data = path.read_bytes()
    for name, tensor in tensors.items():
        weights = data[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        spec = MatmulSpec(ggml.type_number(name), tensor.shape, 0, 1, weights, 0)
        for device in ("cpu", "sim"):
            (seconds,) = helper.bench_matmul(device, 1, spec, n_warmup=0, n_samples=1)
            assert 0 < seconds < 1
