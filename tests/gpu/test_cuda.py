"""On a real GPU, any plan's logits are those of plain llama.cpp on that GPU, but for float noise.

Noise: the CPU's kernels round activations to 8 bits in blocks of 256, CUDA's in blocks of 32, and sums run in another
order. What a plan gets wrong (a stale copy, a missing wait, a wrong column) is far above it. Where two experts are
nearly equally wanted, noise decides between them: a few rows may then differ, also if llama.cpp itself computes on the
CPU.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.plan import ExpertPolicy
from profiler.synthetic_model import synthetic_model, write_synthetic_model
from runtime.engine import Engine, PlanEngine
from runtime.inspect_model import inspect_model
from runtime.library import load
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements

pytestmark = pytest.mark.gpu

DEVICE = "cuda0"
MAX_NOISE = 0.1  # of the logits' standard deviation
MAX_FLIPPED = 0.2  # of the rows: there, noise chose another expert
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 250, size=100)]
# CUDA graphs replay from the third token on.
DECODED = [int(token) for token in np.random.default_rng(1).integers(0, 250, size=24)]
# Of several tokens; launches are early from the fourth of a size on. 100 have more columns than a GPU has room for.
BATCHES = (2, 3, 7, 7, 7, 7, 7, 100, 100, 100, 100, 100, 1, 1)
SETTINGS = LoadSettings(n_context=1024, n_ubatch=128, n_threads=2)
ANY_EXPERTS = ExpertPolicy(cache_bytes=1 << 20, cpu_seconds=2e-5, link_seconds=2e-5, link_latency_seconds=0.0)


def logits(
    device: str,
    model: Path,
    seed: int | None,
    experts: ExpertPolicy | None = None,
    prediction: int = 1,
    max_pinned_bytes: int | None = None,
) -> NDArray[np.float32]:
    """Run in a process of its own, because one process keeps one device. Without a seed: plain llama.cpp."""
    library = load(device)
    if seed is None:
        devices = (device.upper(),) if device != "sim" else ()
        engine = Engine(library, model, replace(SETTINGS, devices=devices))
    else:
        weights = inspect_model(model, device, [SETTINGS.n_context], SETTINGS.n_ubatch).weights_decode
        min_tokens = 129 if seed == 2 else 8  # the prompt as decoded tokens are, or not
        placements = random_placements(weights, seed)
        plan = plan_for(
            model, placements, n_context=SETTINGS.n_context, n_ubatch=SETTINGS.n_ubatch, ring_bytes=4 << 20,
            experts=experts, prefill_min_tokens=min_tokens,
        )  # fmt: skip
        engine = PlanEngine(library, model, replace(plan, device=device), max_pinned_bytes=max_pinned_bytes)
        engine.helper.set_option("expert_prediction", prediction)
    rows = []
    with engine:
        engine.evaluate(PROMPT)
        rows.append(engine.logits())
        for token in DECODED:
            engine.evaluate([token])
            rows.append(engine.logits())
        for n_tokens in BATCHES:
            engine.evaluate(PROMPT[:n_tokens])
            rows.append(engine.logits())
    return np.stack(rows)


def compare(
    model: Path, experts: ExpertPolicy | None = None, prediction: int = 1, max_pinned_bytes: int | None = None
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as plain, ProcessPoolExecutor(1, mp_context=context) as planned:
        expected = plain.submit(logits, DEVICE, model, None).result()
        for seed in range(3):
            found = planned.submit(logits, DEVICE, model, seed, experts, prediction, max_pinned_bytes).result()
            differs = np.abs(found - expected).max(axis=1) > MAX_NOISE * expected.std()
            assert differs.mean() <= (MAX_FLIPPED if experts else 0.0)
            assert np.abs(found - expected).max() < expected.std()


def test_dense(native_helper: Path, tmp_path: Path) -> None:
    compare(write_synthetic_model(tmp_path / "model.gguf", synthetic_model("llama-small", "q4_K"))[0])


def test_weights_in_pageable_memory(native_helper: Path, tmp_path: Path) -> None:
    compare(
        write_synthetic_model(tmp_path / "model.gguf", synthetic_model("llama-small", "q4_K"))[0], max_pinned_bytes=1
    )


@pytest.mark.parametrize("prediction", [0, 2])
@pytest.mark.parametrize("name", ["qwen3moe-small", "gpt-oss-small", "deepseek2-small"])
def test_experts(native_helper: Path, tmp_path: Path, name: str, prediction: int) -> None:
    model = write_synthetic_model(tmp_path / "model.gguf", synthetic_model(name, "q8_0"))[0]
    compare(model, ANY_EXPERTS, prediction)
