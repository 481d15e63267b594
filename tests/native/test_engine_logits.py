"""Under any plan the logits are those of plain llama.cpp, bit for bit, on the simulated device."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.errors import DeviceError, MismatchError
from planner.plan import Placement, WeightClass
from profiler.synthetic_model import write_synthetic_model
from runtime.engine import Engine, PlanEngine
from runtime.inspect_model import Inspection, inspect_model
from runtime.library import Library, load
from runtime.sampling import Sampler
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, random_placements, uniform_placements, weights_of

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 250, size=50)]
DECODED = [5, 77, 99, 42]
SETTINGS = LoadSettings(n_context=256, n_ubatch=32, n_threads=1)
DENSE = ("qwen3-tiny", "gemma2-tiny", "command-r-tiny")  # gemma2: sliding window; command-r: tied output matrix
MOE = ("qwen3moe-tiny", "gpt-oss-tiny", "deepseek2-tiny")
RECURRENT = ("mamba-tiny", "qwen3next-tiny")


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


@pytest.fixture(scope="module")
def inspected(library: Library, smollm2: Path) -> Inspection:
    return inspect_model(smollm2, "sim", [256], 32)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = (*DENSE, *MOE, *RECURRENT)
    return {name: write_synthetic_model(folder / f"{name}.gguf", name)[0] for name in names}


def logits_of(engine: Engine) -> NDArray[np.float32]:
    """Return the logits after the prompt, which takes two micro-batches, and after each decoded token."""
    with engine:
        engine.evaluate(PROMPT)
        rows = [engine.logits()]
        for token in DECODED:
            engine.evaluate([token])
            rows.append(engine.logits())
        return np.stack(rows)


@pytest.fixture(scope="module")
def smollm2_logits(library: Library, smollm2: Path) -> NDArray[np.float32]:
    return logits_of(Engine(library, smollm2, SETTINGS))


@pytest.mark.parametrize(
    ("decode", "prefill"), [("gpu", "gpu"), ("cpu", "cpu"), ("stream", "stream"), ("cpu", "stream"), ("stream", "cpu")]
)
def test_every_weight_in_one_class(
    library: Library,
    smollm2: Path,
    inspected: Inspection,
    smollm2_logits: NDArray[np.float32],
    decode: WeightClass,
    prefill: WeightClass,
) -> None:
    plan = plan_for(smollm2, uniform_placements(inspected.weights_decode, decode, prefill))
    np.testing.assert_array_equal(logits_of(PlanEngine(library, smollm2, plan)), smollm2_logits)


@pytest.mark.parametrize("seed", range(4))
def test_random_classes(
    library: Library, smollm2: Path, inspected: Inspection, smollm2_logits: NDArray[np.float32], seed: int
) -> None:
    ring_bytes = seed * 2 * 1024**2  # 0: as small as possible
    plan = plan_for(smollm2, random_placements(inspected.weights_decode, seed), ring_bytes=ring_bytes)
    np.testing.assert_array_equal(logits_of(PlanEngine(library, smollm2, plan)), smollm2_logits)


@pytest.mark.parametrize("name", [*DENSE, *MOE, *RECURRENT])
@pytest.mark.parametrize("flash_attention", [True, False])
def test_random_classes_of_other_architectures(
    library: Library, synthetic: dict[str, Path], name: str, flash_attention: bool
) -> None:
    path = synthetic[name]
    settings = LoadSettings(n_context=256, n_ubatch=32, n_threads=1, flash_attention=flash_attention)
    expected = logits_of(Engine(library, path, settings))
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    weights = weights_of(path, flash_attention=flash_attention)
    for seed in range(2):
        plan = plan_for(path, random_placements(weights, seed), flash_attention=flash_attention)
        np.testing.assert_array_equal(logits_of(PlanEngine(library, path, plan)), expected)


def test_shards(library: Library, synthetic: dict[str, Path], tmp_path: Path) -> None:
    whole = synthetic["qwen3moe-tiny"]
    first, *_ = write_synthetic_model(tmp_path / "model.gguf", "qwen3moe-tiny", n_shards=3)
    weights = weights_of(first)
    plan = plan_for(first, random_placements(weights, 0))
    np.testing.assert_array_equal(
        logits_of(PlanEngine(library, first, plan)), logits_of(Engine(library, whole, SETTINGS))
    )


def test_classes_decide_what_is_streamed(library: Library, smollm2: Path, inspected: Inspection) -> None:
    placements = [
        Placement(weight.name, weight.size_bytes, "stream", "cpu")
        if weight.name.endswith("ffn_up.weight")
        else Placement(weight.name, weight.size_bytes, *(("cpu", "cpu") if weight.is_input else ("gpu", "gpu")))
        for weight in inspected.weights_decode
    ]
    up_bytes = sum(placement.size_bytes for placement in placements if placement.name.endswith("ffn_up.weight"))
    with PlanEngine(library, smollm2, plan_for(smollm2, placements)) as engine:
        engine.helper.set_option("statistics", 1)
        engine.statistics(reset=True)
        engine.evaluate(PROMPT)
        engine.synchronize()
        assert engine.statistics(reset=True).n_streamed == 0
        for token in DECODED:
            engine.evaluate([token])
        engine.synchronize()
        decoded = engine.statistics()
    n_layers = 30
    rounds = math.ceil(decoded.streamed_bytes / up_bytes)  # prefetch may have begun the next token's
    assert len(DECODED) <= rounds <= len(DECODED) + 1
    assert decoded.n_graphs == len(DECODED)
    assert n_layers * len(DECODED) <= decoded.n_streamed <= n_layers * (len(DECODED) + 1)
    assert decoded.n_cpu_steps == 0


def test_memory_is_what_inspection_said(library: Library, smollm2: Path, inspected: Inspection) -> None:
    (case,) = inspected.memory
    plan = plan_for(smollm2, uniform_placements(inspected.weights_decode, "gpu", "gpu"))
    with PlanEngine(library, smollm2, plan) as engine:
        engine.evaluate(PROMPT)
        expected = inspected.device_weights_bytes + case.context_bytes + case.compute_bytes
        assert engine.accounted_vram_bytes() == expected


def test_inspection_lists_every_weight_once_and_the_tied_matrix_twice(inspected: Inspection) -> None:
    names = [weight.name for weight in inspected.weights_decode]
    assert len(names) == 2 + 30 * 9 + 1
    assert names.count("token_embd.weight") == 2
    assert len(set(names)) == len(names) - 1
    first, last = inspected.weights_decode[0], inspected.weights_decode[-1]
    assert (first.name, first.op, first.is_input) == ("token_embd.weight", "GET_ROWS", True)
    assert (last.name, last.op, last.is_input, last.shape) == ("token_embd.weight", "MUL_MAT", False, (576, 49152))
    assert last.input_bytes == 576 * 4
    assert last.output_bytes == 49152 * 4


def test_a_weight_that_the_plan_forgot(library: Library, smollm2: Path, inspected: Inspection) -> None:
    placements = uniform_placements(inspected.weights_decode, "gpu", "gpu")
    forgetful = plan_for(smollm2, [item for item in placements if item.name != "blk.7.ffn_up.weight"])
    with pytest.raises(MismatchError, match=r"no placement for blk\.7\.ffn_up\.weight"):
        PlanEngine(library, smollm2, forgetful)


def test_a_weight_that_the_model_lacks(library: Library, smollm2: Path, inspected: Inspection) -> None:
    placements = [*uniform_placements(inspected.weights_decode, "gpu", "gpu"), Placement("extra", 1, "cpu", "cpu")]
    with pytest.raises(MismatchError, match="does not use extra"):
        PlanEngine(library, smollm2, plan_for(smollm2, placements))


def test_a_ring_that_cannot_be_allocated_is_an_error(library: Library, smollm2: Path, inspected: Inspection) -> None:
    plan = plan_for(smollm2, uniform_placements(inspected.weights_decode, "stream", "stream"), ring_bytes=1 << 45)
    with PlanEngine(library, smollm2, plan) as engine:
        with pytest.raises(DeviceError, match="out of memory"):
            engine.evaluate(PROMPT)
        assert engine.n_tokens == 0


def test_greedy_text_is_the_same_and_sampling_follows_the_seed(
    library: Library, smollm2: Path, inspected: Inspection
) -> None:
    plan = plan_for(smollm2, random_placements(inspected.weights_decode, 5))
    texts = []
    for engine in (Engine(library, smollm2, SETTINGS), PlanEngine(library, smollm2, plan)):
        with engine:
            tokens = engine.tokenize("The capital of France is")
            for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2), (1.0, 1)):
                with Sampler(temperature, seed) as sampler:
                    texts.append(engine.detokenize(engine.generate(tokens, 8, sampler)))
    assert texts[:4] == texts[4:]
    assert texts[0].startswith(" Paris")
    assert texts[1] == texts[3] != texts[2]


def test_shared_prefixes_are_not_evaluated_again(library: Library, smollm2: Path) -> None:
    with Engine(library, smollm2, SETTINGS) as engine:
        assert engine.evaluate_prompt(PROMPT) == len(PROMPT)
        assert engine.evaluate_prompt(PROMPT) == 1
        expected = engine.logits()
        assert engine.evaluate_prompt([*PROMPT, 7, 8]) == 2
        assert engine.evaluate_prompt([*PROMPT[:40], 9]) == 1
        assert engine.evaluate_prompt(PROMPT) == 10
        np.testing.assert_allclose(engine.logits(), expected, atol=1e-2)  # other batches round differently


def test_recurrent_states_start_over(library: Library, synthetic: dict[str, Path]) -> None:
    with Engine(library, synthetic["mamba-tiny"], SETTINGS) as engine:
        engine.evaluate_prompt(PROMPT)
        expected = engine.logits()
        engine.evaluate_prompt([*PROMPT[:40], 9])
        assert engine.evaluate_prompt(PROMPT) == len(PROMPT)
        np.testing.assert_array_equal(engine.logits(), expected)


def test_a_full_context_ends_generation_and_refuses_prompts(library: Library, synthetic: dict[str, Path]) -> None:
    with Engine(library, synthetic["qwen3-tiny"], SETTINGS) as engine, Sampler() as sampler:
        with pytest.raises(Exception, match="300 tokens do not fit into the context of 256"):
            engine.evaluate([5] * 300)
        generated = list(engine.generate([5] * 250, 100, sampler))
        assert len(generated) <= 7
        assert engine.n_tokens <= 256


def test_characters_split_over_tokens_are_joined(library: Library, smollm2: Path) -> None:
    text = "naïve 漢字 🙂 done"
    with Engine(library, smollm2, SETTINGS) as engine:
        tokens = engine.tokenize(text, add_special=False)
        pieces = list(engine.text_pieces(tokens))
    assert "".join(pieces) == text
    assert len(pieces) < len(tokens)
    assert all("\ufffd" not in piece for piece in pieces)


def test_plain_llama_on_the_cpu_takes_no_vram(library: Library, smollm2: Path) -> None:
    with Engine(library, smollm2, SETTINGS) as engine:
        assert engine.accounted_vram_bytes() == 0
