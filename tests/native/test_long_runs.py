"""Long texts: a full context is shifted as llama.cpp does it, and memory stays flat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.workload import KV_TYPES
from profiler.synthetic_model import write_synthetic_model
from runtime.engine import Engine, PlanEngine
from runtime.library import Library, load
from runtime.sampling import Sampler
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements, weights_of
from tests.native.process_memory import anonymous_bytes

SETTINGS = LoadSettings(n_context=256, n_ubatch=32, n_threads=1)


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


def decode(engine: Engine, n_tokens: int, seed: int = 0) -> NDArray[np.float32]:
    """Decode random tokens, forgetting when the context is full, and return the logits of every 25th."""
    rows = []
    for index, token in enumerate(np.random.default_rng(seed).integers(10, 1000, size=n_tokens)):
        if engine.n_tokens == engine.n_context:
            engine.forget_half()
        engine.evaluate([int(token)])
        if index % 25 == 24:
            rows.append(engine.logits())
    return np.stack(rows)


# Positions that move, in a sliding window too; recurrent states, alone and beside attention; positions in three
# dimensions.
@pytest.mark.parametrize(
    "name", ["llama-tiny", "gemma2-tiny", "deepseek2-tiny", "mamba-tiny", "falcon-h1-tiny", "qwen2vl-tiny"]
)
def test_a_shifted_context_is_llama_cpps_own(library: Library, tmp_path: Path, name: str) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", name)
    weights = weights_of(path)
    with Engine(library, path, SETTINGS) as engine:
        expected = decode(engine, 300)
        assert engine.n_context == 256
        assert engine.n_tokens == 300 - 128
    with PlanEngine(library, path, plan_for(path, random_placements(weights, 1))) as engine:
        np.testing.assert_array_equal(decode(engine, 300), expected)


@pytest.mark.parametrize("type_k", KV_TYPES)
def test_keys_of_any_type_can_be_shifted(library: Library, tmp_path: Path, type_k: str) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")
    with Engine(library, path, replace(SETTINGS, type_k=type_k, type_v=type_k)) as engine:
        decode(engine, 260)
        assert engine.n_tokens == 260 - 128
        assert np.isfinite(engine.logits()).all()


def test_4096_tokens_in_flat_memory(library: Library, tmp_path: Path) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")
    weights = weights_of(path)
    with PlanEngine(library, path, plan_for(path, random_placements(weights, 1))) as engine:
        decode(engine, 600)
        before = anonymous_bytes()
        decode(engine, 4096)
        grown = anonymous_bytes() - before
        assert engine.n_evaluated == 600 + 4096
    assert grown < 1 << 20


def test_text_goes_on_after_the_context_is_full(library: Library, tmp_path: Path) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")
    with Engine(library, path, SETTINGS) as engine, Sampler() as sampler:
        assert len(list(engine.generate([5] * 250, 20, sampler))) <= 7
        assert engine.n_tokens <= 256
        assert len(list(engine.continue_text(10, sampler, forgets=True))) == 10
        assert engine.n_tokens == 256 - 128 + 9
