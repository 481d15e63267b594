"""The work list: every distinct product once, for each place and batch, and what else is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import InvalidFileError
from planner.gguf_model import GgufModel, GgufTensor
from planner.measurements import MemoryCase, WeightUse
from planner.units import KIB, MIB
from profiler.jobs import (
    Machine,
    batch_rows,
    contention_jobs,
    crossing_jobs,
    distinct_kernels,
    expert_jobs,
    glue_jobs,
    kernel_jobs,
    link_jobs,
)
from runtime.inspect_model import Inspection
from tests.unit.planner_profiles import QWEN3_30B, dense_weights


def use(name: str, op: str = "MUL_MAT", shape: tuple[int, ...] = (256, 8), n_experts_used: int = 0) -> WeightUse:
    return WeightUse(name, op, "q4_K", shape, 1152, shape[0] * 4, 32, n_experts_used=n_experts_used)


WEIGHTS = (
    use("embedding", "GET_ROWS"),
    use("norm", "MUL"),
    use("first"),
    use("second"),
    use("wide", shape=(256, 16)),
    use("experts", "MUL_MAT_ID", (256, 8, 4), 2),
    use("embedding"),
)
PREFILL = (*WEIGHTS[:-1], replace(WEIGHTS[-1], input_bytes=WEIGHTS[-1].input_bytes // 64))
INSPECTION = Inspection(WEIGHTS, PREFILL, tuple[MemoryCase, ...](), 0)
MODEL = GgufModel(
    {},
    tuple(
        GgufTensor(name, "q4_K", 12, (256, 8), 1152, Path("model.gguf"), 0)
        for name in dict.fromkeys(weight.name for weight in WEIGHTS)
    ),
    (Path("model.gguf"),),
    9999,
)
GPU = Machine(device="cuda0", gpu="cuda0", threads=(2, 4), cpu_cold_bytes=64 * MIB)
CPU_ALONE = replace(GPU, device="sim", gpu="")


def test_equal_products_are_one_kernel() -> None:
    kernels = distinct_kernels(MODEL, WEIGHTS)
    assert [kernel.source.name for kernel in kernels] == ["first", "wide", "experts"]
    assert [weight.name for weight in WEIGHTS if kernels[0].fits(weight)] == ["first", "second", "embedding"]


def test_a_weight_that_the_file_lacks_is_an_error() -> None:
    with pytest.raises(InvalidFileError, match="multiplies with missing"):
        distinct_kernels(MODEL, (use("missing"),))


def test_the_output_sees_one_token_of_a_batch() -> None:
    first, wide, experts = distinct_kernels(MODEL, WEIGHTS)
    assert batch_rows(first, INSPECTION, 64) == 64  # the output has the shape of others that see all
    assert batch_rows(wide, INSPECTION, 64) == 64
    assert batch_rows(experts, INSPECTION, 64) == 64
    alone = Inspection((WEIGHTS[-1],), (PREFILL[-1],), (), 0)
    assert batch_rows(first, alone, 64) == 1


def test_every_kernel_is_measured_everywhere() -> None:
    kernels = distinct_kernels(MODEL, WEIGHTS)
    labels = [job.label for job in kernel_jobs(kernels, INSPECTION, GPU, 64)]
    assert labels[:6] == [
        "MUL_MAT q4_K 256x8, 1 token, 2 threads",
        "MUL_MAT q4_K 256x8, 64 tokens, 2 threads",
        "MUL_MAT q4_K 256x8, 1 token, 4 threads",
        "MUL_MAT q4_K 256x8, 64 tokens, 4 threads",
        "MUL_MAT q4_K 256x8, 1 token, GPU",
        "MUL_MAT q4_K 256x8, 64 tokens, GPU",
    ]
    assert len(labels) == len(set(labels)) == 18 + 2
    assert "MUL_MAT_ID q4_K 256x8x4, 1 expert, 1 token, 4 threads" in labels  # of the 2 that a token uses
    assert len(list(kernel_jobs(kernels, INSPECTION, CPU_ALONE, 64))) == 12 + 2
    assert len(list(kernel_jobs(kernels, INSPECTION, CPU_ALONE, 1))) == 6 + 2


def test_the_series_share_a_budget() -> None:
    kernels = distinct_kernels(MODEL, WEIGHTS)
    few = sum(job.expected_seconds for job in kernel_jobs(kernels, INSPECTION, GPU, 64))
    many = sum(job.expected_seconds for job in kernel_jobs(kernels * 20, INSPECTION, GPU, 64))
    assert few < 12
    assert many < 25


def test_round_trips_cover_the_largest_activation() -> None:
    labels = [job.label for job in crossing_jobs(GPU, 100 * KIB)]
    assert labels == [f"round trips, {size} KiB, {threads} threads" for threads in (2, 4) for size in (4, 64, 1024)]
    assert len(list(crossing_jobs(GPU, 1024 * MIB))) == 2 * 5


def test_streaming_is_measured_per_kind_of_experts() -> None:
    labels = [job.label for job in expert_jobs(dense_weights(QWEN3_30B), GPU)]
    assert labels == [
        f"streaming {n}, {size} MiB each" for size in ("2.9", "2.5") for n in ("1 expert", "4 experts", "8 experts")
    ]
    assert list(expert_jobs(WEIGHTS, GPU)) == []


def test_the_rest_of_the_work_list() -> None:
    assert len(list(link_jobs(GPU))) == 2 * 2 * 6
    assert len(list(glue_jobs(Path("model.gguf"), GPU, 256, 64))) == 2
    assert len(list(glue_jobs(Path("model.gguf"), GPU, 256, 1))) == 1
    assert [job.label.split(", ", 2)[2] for job in glue_jobs(Path("model.gguf"), GPU, 4096, 300)] == [
        f"{n}, context {n_read}" for n_read in (512, 4096) for n in ("1 token", "300 tokens")
    ]
    assert len(list(contention_jobs(GPU, distinct_kernels(MODEL, WEIGHTS)[0]))) == 2
