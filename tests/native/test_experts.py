"""Experts computed one by one give plain llama.cpp's logits, bit for bit on the simulated device, wherever they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.experts import PREDICTION_BYTES, ExpertRates, Experts, find_blocks
from planner.measurements import WeightUse
from planner.plan import ExpertPolicy, Placement
from planner.problem import find_units
from profiler import synthetic_architectures
from profiler.synthetic_model import write_synthetic_model
from profiler.synthetic_transformer import Builder
from runtime import build
from runtime.bindings import Statistics
from runtime.engine import Engine, PlanEngine
from runtime.library import Library, load
from runtime.report import describe_experts
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements, weights_of
from tests.native.sanitized import run_program

# deepseek2: shared experts and one dense layer; gpt-oss: biases, so that only single products are recognised;
# qwen2moe: a gated shared expert; fused: gate and up are one tensor.
MODELS = ("qwen3moe", "mixtral", "gpt-oss", "deepseek2", "qwen2moe", "fused")
N_USED = {"mixtral": 2}  # of all others 4
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 1000, size=64)]
DECODED = [5, 77, 99, 42, 42, 42]  # the same token again and again is routed to the same experts
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 1, 1)
SETTINGS = LoadSettings(n_context=256, n_ubatch=64, n_threads=1)


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    written = {name: write_synthetic_model(folder / f"{name}.gguf", f"{name}-tiny")[0] for name in MODELS[:-1]}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(synthetic_architectures, "expert_ffn", _fused_expert_ffn)
        return written | {"fused": write_synthetic_model(folder / "fused.gguf", "deepseek2-tiny")[0]}


def _fused_expert_ffn(builder: Builder, block: str, n_embd: int, n_ff: int, n_experts: int) -> None:
    builder.router(f"{block}.ffn_gate_inp", n_embd, n_experts)
    builder.matrix(f"{block}.ffn_gate_up_exps", n_embd, 2 * n_ff, n_experts)
    builder.adding(f"{block}.ffn_down_exps", n_ff, n_embd, n_experts)


@pytest.fixture(scope="module")
def weights(library: Library, models: dict[str, Path]) -> dict[str, tuple[WeightUse, ...]]:
    return {name: weights_of(path, 256, 64) for name, path in models.items()}


@pytest.fixture(scope="module")
def expected(library: Library, models: dict[str, Path]) -> dict[str, NDArray[np.float32]]:
    rows = {name: logits_of(Engine(library, path, SETTINGS))[0] for name, path in models.items()}
    assert all(np.isfinite(row).all() and row.std() > 0 for row in rows.values())
    return rows


def logits_of(engine: Engine, prediction: int = 1) -> tuple[NDArray[np.float32], Statistics | None]:
    """Return the logits after a prompt, decoded tokens, and small batches; and what happened while decoding."""
    with engine:
        if isinstance(engine, PlanEngine):
            engine.helper.set_option("expert_prediction", prediction)
        engine.evaluate(PROMPT)
        rows = [engine.logits()]
        counters = None
        if isinstance(engine, PlanEngine):
            engine.statistics(reset=True)
        for token in DECODED:
            engine.evaluate([token])
            rows.append(engine.logits())
        if isinstance(engine, PlanEngine):
            counters = engine.statistics()
        for n_tokens in BATCHES:
            engine.evaluate(PROMPT[:n_tokens])
            rows.append(engine.logits())
        return np.stack(rows), counters


def experts_on_the_cpu(weights: Sequence[WeightUse]) -> list[Placement]:
    return [
        Placement(w.name, w.size_bytes, "cpu", "stream")
        if w.op == "MUL_MAT_ID"
        else Placement(w.name, w.size_bytes, *(("cpu", "cpu") if w.is_input else ("gpu", "gpu")))
        for w in weights
    ]


def expert_bytes(weights: Sequence[WeightUse]) -> tuple[int, int]:
    """Return the bytes of all experts, and of one expert's matrices."""
    tensors = [weight for weight in weights if weight.op == "MUL_MAT_ID"]
    n_layers = len({weight.name.split(".")[1] for weight in tensors})
    total = sum(weight.size_bytes for weight in tensors)
    return total, total // n_layers // tensors[0].shape[2]


def forced(n_used: int, k: int, cache_bytes: int = 0) -> ExpertPolicy:
    """Return times with which streaming `k` of `n_used` missing experts is best by far."""
    return ExpertPolicy(
        cache_bytes, cpu_seconds=max(k, 1e-9), link_seconds=max(n_used - k, 1e-9), link_latency_seconds=0.0
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cached", ["nothing", "a few", "everything"])
def test_any_number_streamed_any_cache(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
    name: str,
    cached: str,
) -> None:
    total, one = expert_bytes(weights[name])
    cache_bytes = {"nothing": 0, "a few": 12 * one, "everything": total}[cached]
    n_used = N_USED.get(name, 4)
    for k in range(n_used + 1):
        plan = plan_for(
            models[name], experts_on_the_cpu(weights[name]), n_ubatch=64, experts=forced(n_used, k, cache_bytes)
        )
        rows, counters = logits_of(PlanEngine(library, models[name], plan))
        np.testing.assert_array_equal(rows, expected[name], err_msg=f"k = {k}")
        assert counters is not None
        if name != "gpt-oss":  # whose products are blocks of their own
            n_layers = total // one // next(w.shape[2] for w in weights[name] if w.op == "MUL_MAT_ID")
            n_routed = n_layers * n_used * len(DECODED)
            counts = (counters.n_experts_resident, counters.n_experts_streamed, counters.n_experts_cpu)
            assert sum(counts) == n_routed
            assert (counts[1] > 0) == (k > 0)
            assert (counts[0] > 0) == (cache_bytes > 0 and k > 0)
            if k == n_used:
                assert counts[2] == 0
                assert cached != "everything" or counts[0] > n_routed / 4  # half of the decoded tokens are the same


@pytest.mark.parametrize("name", MODELS)
def test_experts_copied_ahead(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
    name: str,
) -> None:
    _, one = expert_bytes(weights[name])
    n_used = N_USED.get(name, 4)
    for k in range(n_used + 1):
        policy = forced(n_used, k, cache_bytes=k % 3 * 6 * one)
        plan = plan_for(models[name], experts_on_the_cpu(weights[name]), n_ubatch=64, experts=policy)
        rows, counters = logits_of(PlanEngine(library, models[name], plan), prediction=2)
        np.testing.assert_array_equal(rows, expected[name], err_msg=f"k = {k}")
        assert counters is not None
        assert counters.n_experts_predicted > 0
        assert 0 < counters.n_experts_predicted_used <= counters.n_experts_predicted
        without, counters = logits_of(PlanEngine(library, models[name], plan), prediction=0)
        np.testing.assert_array_equal(without, expected[name], err_msg=f"k = {k}")
        assert counters is not None
        assert counters.n_experts_predicted == 0


def test_an_expert_now_and_then_fills_the_cache(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
) -> None:
    total, _ = expert_bytes(weights["qwen3moe"])
    # Far less than anything takes: so that both sides are found to take longer at the same pace.
    policy = ExpertPolicy(total, cpu_seconds=1e-7, link_seconds=7.6e-7, link_latency_seconds=0.0)
    plan = plan_for(models["qwen3moe"], experts_on_the_cpu(weights["qwen3moe"]), n_ubatch=64, experts=policy)
    rows, counters = logits_of(PlanEngine(library, models["qwen3moe"], plan), prediction=0)
    np.testing.assert_array_equal(rows, expected["qwen3moe"])
    assert counters is not None
    assert 0 < counters.n_experts_streamed < counters.n_experts_cpu / 4


@pytest.mark.parametrize("name", MODELS)
def test_several_tokens_at_once(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
    name: str,
) -> None:
    _, one = expert_bytes(weights[name])
    n_used = N_USED.get(name, 4)
    n_columns = n_used * sum(n for n in BATCHES if n > 1)
    streamed = []
    for k in range(n_used + 1):
        policy = forced(n_used, k, cache_bytes=k * 8 * one)
        plan = plan_for(
            models[name], experts_on_the_cpu(weights[name]), n_ubatch=64, experts=policy, prefill_min_tokens=65
        )
        with PlanEngine(library, models[name], plan) as engine:
            engine.evaluate(PROMPT)
            rows = [engine.logits()]
            for token in DECODED:
                engine.evaluate([token])
                rows.append(engine.logits())
            engine.statistics(reset=True)
            for n_tokens in BATCHES:
                engine.evaluate(PROMPT[:n_tokens])
                rows.append(engine.logits())
            counters = engine.statistics()
        np.testing.assert_array_equal(np.stack(rows), expected[name], err_msg=f"k = {k}")
        assert counters.n_streamed == 0  # whole tensors
        if k == 0:
            assert counters.n_experts_cpu > n_columns
            assert counters.streamed_bytes == 0
        streamed.append(counters.streamed_bytes)
    assert streamed[0] < streamed[1] < streamed[-1]


def test_kernels_that_depend_on_the_number_of_columns(library: Library, tmp_path: Path) -> None:
    """From 8 columns on, llama.cpp computes an expert of K-quants with a kernel that adds up in another order."""
    spec = replace(synthetic_architectures.synthetic_model("qwen3moe-small"), quantisation="Q4_K_M")
    (path,) = write_synthetic_model(tmp_path / "model.gguf", spec)
    weights = weights_of(path, 256, 64)
    assert {weight.type for weight in weights if weight.op == "MUL_MAT_ID"} == {"q4_K", "q6_K"}  # two kinds of slots
    _, one = expert_bytes(weights)

    def rows_of(engine: Engine) -> NDArray[np.float32]:
        with engine:
            rows = []
            for n_tokens in (64, 8, 16, 24, 32, 48):
                engine.evaluate(PROMPT[:n_tokens])
                rows.append(engine.logits())
            return np.stack(rows)

    expected = rows_of(Engine(library, path, SETTINGS))
    for k in range(5):
        policy = forced(4, k, cache_bytes=40 * one)  # of either kind more slots than a layer has experts
        plan = plan_for(path, experts_on_the_cpu(weights), n_ubatch=64, experts=policy, prefill_min_tokens=65)
        np.testing.assert_array_equal(rows_of(PlanEngine(library, path, plan)), expected, err_msg=f"k = {k}")


@pytest.mark.parametrize("name", MODELS)
def test_any_classes_of_the_other_weights(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
    name: str,
) -> None:
    _, one = expert_bytes(weights[name])
    for seed in range(3):
        plan = plan_for(
            models[name], random_placements(weights[name], seed), n_ubatch=64, ring_bytes=seed * 2 * 1024**2,
            experts=forced(4, 2, cache_bytes=seed * 8 * one),
        )  # fmt: skip
        rows, _ = logits_of(PlanEngine(library, models[name], plan), prediction=2)
        np.testing.assert_array_equal(rows, expected[name], err_msg=f"seed {seed}")


@pytest.mark.parametrize("name", MODELS)
def test_classes_that_change_between_tokens(
    library: Library,
    models: dict[str, Path],
    weights: dict[str, tuple[WeightUse, ...]],
    expected: dict[str, NDArray[np.float32]],
    name: str,
) -> None:
    """A layer's experts are one block, then some of its matrices on their own, then one block again."""
    placements, generator = experts_on_the_cpu(weights[name]), random.Random(0)
    plan = plan_for(
        models[name], placements, n_ubatch=64, ring_bytes=8 * 1024**2, experts=forced(4, 2, cache_bytes=1024**2)
    )
    host_names = [p.name for p in placements if p.decode == "cpu"]
    with PlanEngine(library, models[name], plan) as engine:
        engine.evaluate(PROMPT)
        rows = [engine.logits()]
        for token in DECODED:
            engine.helper.set_classes((n, generator.choice(("cpu", "stream")), "stream") for n in host_names)
            engine.evaluate([token])
            rows.append(engine.logits())
    np.testing.assert_array_equal(np.stack(rows), expected[name][: len(rows)])


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_experts_take_turns_in_the_ring(
    library: Library, models: dict[str, Path], weights: dict[str, tuple[WeightUse, ...]], name: str
) -> None:
    """Nothing of the other is read there, also after the ring has changed its size or decoding has streamed."""

    def rows_of(engine: Engine) -> list[NDArray[np.float32]]:
        rows = []
        with engine:
            for turn in range(6):
                if isinstance(engine, PlanEngine):
                    if turn == 3:
                        engine.helper.set_option("ring_bytes", ring_bytes // 2)
                    if turn == 4:
                        engine.helper.set_classes((name, "stream", "stream") for name in host_names)
                    if turn == 5:
                        engine.helper.set_classes((name, "cpu", "stream") for name in host_names)
                for tokens in (PROMPT[turn : turn + 20], [5], [77], PROMPT[turn : turn + 3], [77]):
                    engine.evaluate(tokens)
                    rows.append(engine.logits())
                if isinstance(engine, PlanEngine) and turn < 3:
                    counters = engine.statistics()
                    assert counters.ring_bytes == ring_bytes
                    assert counters.expert_bytes <= PREDICTION_BYTES
                    assert counters.n_experts_streamed > 0
        return rows

    total, one = expert_bytes(weights[name])
    ring_bytes = 2 * total
    placements = experts_on_the_cpu(weights[name])
    host_names = [placement.name for placement in placements if placement.decode == "cpu"]
    expected = rows_of(Engine(library, models[name], SETTINGS))
    for cache_bytes in (0, 12 * one):
        plan = plan_for(
            models[name], placements, n_ubatch=64, ring_bytes=ring_bytes, experts=forced(4, 2, cache_bytes)
        )  # fmt: skip
        np.testing.assert_array_equal(rows_of(PlanEngine(library, models[name], plan)), expected)


@pytest.mark.parametrize("name", MODELS)
def test_vram_is_what_the_planner_accounts_for(
    library: Library, models: dict[str, Path], weights: dict[str, tuple[WeightUse, ...]], name: str
) -> None:
    blocks = find_blocks(weights[name], find_units(weights[name]))
    assert len(blocks) == {"deepseek2": 3, "fused": 3, "gpt-oss": 8}.get(name, 4)
    rates = ExpertRates((0.0,), 1.0, 1.0, 1.0, 1.0)
    experts = Experts(blocks, (rates,) * len(blocks), (None,) * len(blocks))
    total, one = expert_bytes(weights[name])
    for cache_bytes in (0, 10 * one + 17, total // 2, 2 * total):
        policy = forced(4, 2, cache_bytes)
        plan = plan_for(models[name], experts_on_the_cpu(weights[name]), n_ubatch=64, experts=policy)
        with PlanEngine(library, models[name], plan) as engine:
            engine.evaluate([1])
            engine.synchronize()
            allocated = engine.statistics().expert_bytes
        accounted = experts.vram_bytes(range(len(blocks)), cache_bytes)
        assert allocated <= accounted <= allocated + 256 * 1024


def test_the_counts_in_words() -> None:
    text = describe_experts(300, 200, 500, 10)
    assert text == "30.0 in VRAM, 20.0 streamed, 50.0 on the CPU per decoded token; hit rate 30%"


def test_the_policy_of_the_cache(tmp_path: Path, llama_headers: Path) -> None:
    names = ("expert_cache.cpp", "expert_division.cpp", "prediction_trial.cpp")
    sources = [build.SOURCE_FOLDER / name for name in names]
    result = run_program("expert_cache_test", sources, tmp_path, llama_headers)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
