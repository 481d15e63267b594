"""The micro-benchmarks time real work: more of it takes longer, and so do cold weights. Bad requests are errors."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import DeviceError
from planner.units import KIB, MIB
from profiler.synthetic_model import write_synthetic_model
from profiler.worker import Worker
from runtime.bindings import Ggml, Helper, MatmulSpec
from runtime.library import HYBRID_DEVICE, load
from runtime.session import LoadSettings, open_context, open_model
from tests.native.process_memory import anonymous_bytes

F32, Q4_K = 0, 12
Q4_K_BYTES = 144  # per block of 256 elements


@pytest.fixture(scope="module")
def helper(native_helper: Path) -> Helper:
    return Helper(load("sim").ats)


def product(
    shape: tuple[int, ...], *, kind: int = Q4_K, n_experts_used: int = 0, n_tokens: int = 1, cold_bytes: int = 0
) -> MatmulSpec:
    random = np.random.default_rng(0)
    if kind == F32:  # not any bytes: denormal numbers are slow
        row = random.standard_normal(shape[0], np.float32).tobytes()
    else:
        row = random.bytes(shape[0] * Q4_K_BYTES // 256)
    return MatmulSpec(kind, shape, n_experts_used, n_tokens, row * 4, cold_bytes)


def ratio(helper: Helper, slow: MatmulSpec, fast: MatmulSpec, device: str = "cpu") -> float:
    """Return how many times longer `slow` takes when no other program interferes: the best of alternating rounds."""
    seconds = {"slow": 1e9, "fast": 1e9}
    for _ in range(20):
        for name, spec in (("slow", slow), ("fast", fast)):
            seconds[name] = min(seconds[name], *helper.bench_matmul(device, 1, spec, n_warmup=0, n_samples=8))
        time.sleep(0.03)  # what disturbs one round is over before the last
    return seconds["slow"] / seconds["fast"]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_twice_the_rows_take_about_twice_as_long(helper: Helper, device: str) -> None:
    assert 1.4 < ratio(helper, product((1024, 4096)), product((1024, 2048)), device) < 3


def test_a_batch_takes_longer_than_a_token(helper: Helper) -> None:
    assert ratio(helper, product((1024, 512), n_tokens=64), product((1024, 512))) > 4


def test_only_the_used_experts_are_computed(helper: Helper) -> None:
    eight, two = (product((1024, 512, 16), n_experts_used=n) for n in (8, 2))
    assert 2.5 < ratio(helper, eight, two) < 6


def test_cold_weights_are_slower_than_cached_ones(helper: Helper) -> None:
    weights_bytes = 512 * KIB  # far less than a core's own cache; f32 is limited by memory
    cold = product((1024, 128), kind=F32, cold_bytes=256 * weights_bytes)
    assert ratio(helper, cold, product((1024, 128), kind=F32)) > 1.5


def test_cold_weights_take_the_memory_they_rotate_through(native_helper: Path) -> None:
    with Worker("sim") as worker:
        with_them, without = worker.call(_grown_bytes, product((1024, 1024), cold_bytes=100 * MIB))
    assert 100 * MIB <= with_them < 110 * MIB
    assert without < 5 * MIB


def _grown_bytes(spec: MatmulSpec) -> tuple[int, int]:
    """Return how much more memory than before is in use after a benchmark, and after releasing its weights."""
    helper = Helper(load("sim").ats)
    helper.bench_matmul("cpu", 1, replace(spec, cold_bytes=0), n_warmup=0, n_samples=1)  # starts what stays
    helper.bench_release()
    before = anonymous_bytes()
    helper.bench_matmul("cpu", 1, spec, n_warmup=0, n_samples=1)
    with_them = anonymous_bytes()
    helper.bench_release()
    return with_them - before, anonymous_bytes() - before


GOOD = product((256, 4))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (replace(GOOD, type_number=4), "not a type of weights"),  # a type that ggml has removed
        (replace(GOOD, type_number=-1), "not a type of weights"),
        (replace(GOOD, type_number=10_000), "not a type of weights"),
        (replace(GOOD, shape=(250, 4)), "multiple of 256 elements"),
        (replace(GOOD, shape=(256, 0)), "impossible shape"),
        (replace(GOOD, shape=(2**40, 2**40)), "impossible shape"),
        (replace(GOOD, n_tokens=0), "not a number of tokens"),
        (replace(GOOD, n_experts_used=2), "2 of 1 experts"),
        (replace(GOOD, n_experts_used=-1), "-1 of 1 experts"),
        (replace(GOOD, weights=GOOD.weights[:-1]), "whole rows"),
        (replace(GOOD, weights=b""), "whole rows"),
        (replace(GOOD, cold_bytes=-1), "whole rows"),
    ],
)
def test_a_bad_product_is_an_error(helper: Helper, spec: MatmulSpec, problem: str) -> None:
    with pytest.raises(DeviceError, match=problem):
        helper.bench_matmul("cpu", 1, spec, n_warmup=0, n_samples=1)


def test_a_tensor_larger_than_memory_is_an_error(helper: Helper) -> None:
    with pytest.raises(DeviceError, match="bytes, .* are free|out of memory"):
        helper.bench_matmul("cpu", 1, product((2**20, 2**20)), n_warmup=0, n_samples=1)


@pytest.mark.parametrize("n_threads", [0, -1, 100_000])
def test_a_bad_thread_count_is_an_error(helper: Helper, n_threads: int) -> None:
    with pytest.raises(DeviceError, match="number of threads"):
        helper.bench_matmul("cpu", n_threads, GOOD, n_warmup=0, n_samples=1)


def test_another_device_is_an_error(helper: Helper) -> None:
    with pytest.raises(DeviceError, match="measures SIM, not cuda7"):
        helper.bench_matmul("cuda7", 1, GOOD, n_warmup=0, n_samples=1)


@pytest.mark.parametrize("host_to_device", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_run_at_the_speed_of_memory(helper: Helper, host_to_device: bool, pinned: bool) -> None:
    seconds = min(
        helper.bench_transfer(
            host_to_device=host_to_device, pinned=pinned, size_bytes=16 * MIB, n_warmup=1, n_samples=5
        )
    )
    assert 0.5e9 < 16 * MIB / seconds < 500e9


def test_a_copy_of_nothing_is_an_error(helper: Helper) -> None:
    with pytest.raises(DeviceError, match="cannot be copied"):
        helper.bench_transfer(host_to_device=True, pinned=True, size_bytes=0, n_warmup=0, n_samples=1)


def test_a_large_activation_crosses_slower(helper: Helper) -> None:
    small, large = (min(helper.bench_crossing(1, size, n_warmup=1, n_samples=7)) for size in (4 * KIB, 16 * MIB))
    assert large > 10 * small
    with pytest.raises(DeviceError, match="no activation"):
        helper.bench_crossing(1, 0, n_warmup=0, n_samples=1)


@pytest.mark.parametrize("spec", [product((1024, 1024), cold_bytes=64 * MIB), None], ids=["cold", "warm"])
def test_handing_work_over_takes_longer_for_more_nodes(helper: Helper, spec: MatmulSpec | None) -> None:
    few, many = (helper.bench_host(1, spec, n_nodes=n, n_warmup=1, n_samples=9) for n in (1, 200))
    assert all(len(series) == 9 and min(series) > 0 for series in (*few, *many))
    assert min(many[0]) > 2 * min(few[0])  # the simulated device computes at once
    with pytest.raises(DeviceError, match="0 nodes make no launch"):
        helper.bench_host(1, spec, n_nodes=0, n_warmup=0, n_samples=1)


def test_pieces_of_work_on_a_device_without_queues_cost_little(helper: Helper) -> None:
    launch, handshake = helper.bench_queues(n_nodes=20, n_warmup=1, n_samples=9)
    assert len(launch) == len(handshake) == 9
    assert 0 <= min(launch) < 1e-3
    assert 0 <= min(handshake) < 1e-3
    with pytest.raises(DeviceError, match="1001 nodes make no launch"):
        helper.bench_queues(n_nodes=1001, n_warmup=0, n_samples=1)


@pytest.mark.parametrize(("shape", "n_experts_used"), [((1024, 1024), 0), ((1024, 1024, 8), 2)])
def test_contention_measures_both_sides_alone_and_together(
    helper: Helper, shape: tuple[int, ...], n_experts_used: int
) -> None:
    spec = product(shape, n_experts_used=n_experts_used, cold_bytes=64 * MIB)
    rates = helper.bench_contention(1, spec, copy_bytes=4 * MIB, duration_seconds=0.1)
    assert 0.01e9 < rates.cpu_alone < 500e9
    assert 0.1e9 < rates.link_alone < 500e9
    assert 0 < rates.cpu_while_link_busy < 2 * rates.cpu_alone
    assert 0 < rates.link_while_cpu_busy < 2 * rates.link_alone


def test_glue_of_a_model_grows_with_the_batch(helper: Helper, smollm2: Path) -> None:
    settings = LoadSettings(n_context=512, n_ubatch=64, n_threads=1, devices=(HYBRID_DEVICE,), no_alloc=True)
    ggml = Ggml(load("sim").ggml)
    with open_model(smollm2, settings, ggml) as model, open_context(model, settings, ggml) as context:
        token = helper.bench_glue(context, 1, n_warmup=1, n_samples=20)
        batch = helper.bench_glue(context, 64, n_warmup=0, n_samples=5)
        assert 0 < 3 * min(token) < min(batch)
        with pytest.raises(DeviceError, match="65 tokens"):
            helper.bench_glue(context, 65, n_warmup=0, n_samples=1)
        assert helper.trace_weights(context, 1)  # the context still works


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize(
    "name",
    ["qwen3moe-tiny", "gpt-oss-tiny", "deepseek2-tiny", "gemma3-tiny", "mamba-tiny", "qwen3next-tiny", "lfm2-tiny"],
)
def test_every_kind_of_graph_has_glue(helper: Helper, tmp_path: Path, name: str, flash_attention: bool) -> None:
    path = write_synthetic_model(tmp_path / "model.gguf", name)[0]
    settings = LoadSettings(256, 16, 1, flash_attention=flash_attention, devices=(HYBRID_DEVICE,), no_alloc=True)
    ggml = Ggml(load("sim").ggml)
    with open_model(path, settings, ggml) as model, open_context(model, settings, ggml) as context:
        for n_tokens in (1, 16):
            (sample,) = helper.bench_glue(context, n_tokens, n_warmup=0, n_samples=1)
            assert sample > 0
            assert helper.unsupported_ops(context, n_tokens) == ()
