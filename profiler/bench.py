"""The measurements that need the device, as functions that a Worker calls in its own process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from planner.gguf_model import GgufTensor, read_tensor_bytes
from planner.measurements import (
    Contention,
    CrossingTiming,
    ExpertTiming,
    GlueTiming,
    HostTiming,
    KernelKind,
    KernelTiming,
    LinkTiming,
    QueueTiming,
    Series,
    WeightUse,
)
from planner.units import MIB
from runtime.bindings import Ggml, Helper, MatmulSpec
from runtime.library import HYBRID_DEVICE, load
from runtime.session import LoadSettings, open_context, open_model

from .measure import Effort, measure

MAX_WEIGHT_BYTES = 16 * MIB  # of real weights; larger tensors are filled with repetitions of them


@dataclass(frozen=True)
class Kernel:
    """A product that is measured once for all weights of its kind. `source` is one of them."""

    kind: KernelKind
    source: GgufTensor

    def fits(self, weight: WeightUse) -> bool:
        return weight.kernel == self.kind


def matmul(
    device: str,
    kernel: Kernel,
    place: str,
    n_threads: int,
    n_tokens: int,
    n_rows: int,
    cold_bytes: int,
    effort: Effort,
) -> KernelTiming:
    """Measure seconds per product: with `n_threads` if `place` is "cpu", on `device` itself if it is "gpu".

    `n_tokens` is the batch that the timing stands for, `n_rows` how many tokens of it reach this kernel.
    """
    helper = _helper(device)
    spec = _matmul_spec(device, kernel, n_rows, cold_bytes)
    backend = "cpu" if place == "cpu" else device
    series = measure(lambda n: helper.bench_matmul(backend, max(n_threads, 1), spec, n_warmup=0, n_samples=n), effort)
    return KernelTiming(*kernel.kind, place, n_tokens, n_threads, series)


def glue(device: str, path: Path, n_context: int, n_ubatch: int, n_tokens: int, effort: Effort) -> GlueTiming:
    """Measure everything but products with weights for `n_tokens`, as far as the GPU can compute it."""
    ggml, helper = Ggml(load(device).ggml), _helper(device)
    settings = LoadSettings(n_context, n_ubatch, n_threads=1, devices=(HYBRID_DEVICE,), no_alloc=True)
    with open_model(path, settings, ggml) as model, open_context(model, settings, ggml) as context:
        series = measure(lambda n: helper.bench_glue(context, n_tokens, n_warmup=0, n_samples=n), effort)
    return GlueTiming(n_tokens, n_context, series)


def transfer(device: str, direction: str, pinned: bool, size_bytes: int, effort: Effort) -> LinkTiming:
    """Measure seconds per copy, when one copy follows the other. `direction` is "h2d" or "d2h"."""
    helper = _helper(device)
    series = measure(
        lambda n: helper.bench_transfer(
            host_to_device=direction == "h2d", pinned=pinned, size_bytes=size_bytes, n_warmup=0, n_samples=n
        ),
        effort,
    )
    return LinkTiming(direction, pinned, size_bytes, series)


def crossing(device: str, n_threads: int, activation_bytes: int, effort: Effort) -> CrossingTiming:
    """Measure seconds that a round trip GPU -> CPU -> GPU adds to the work on both."""
    helper = _helper(device)
    series = measure(lambda n: helper.bench_crossing(n_threads, activation_bytes, n_warmup=1, n_samples=n), effort)
    return CrossingTiming(n_threads, activation_bytes, series)


def host(device: str, kernel: Kernel, n_threads: int, cold_bytes: int, n_nodes: int, n_samples: int) -> HostTiming:
    """Measure what handing over work costs: right after products for one token that emptied the caches, and without."""
    specs = (_matmul_spec(device, kernel, 1, cold_bytes), None)
    helper = _helper(device)
    cold, warm = (
        helper.bench_host(n_threads, spec, n_nodes=n_nodes, n_warmup=2, n_samples=n_samples) for spec in specs
    )
    return HostTiming(n_threads, *map(Series, (*cold, *warm)))


def queues(device: str, n_nodes: int, n_samples: int) -> QueueTiming:
    """Measure what the GPU loses between launches, and where copies and launches wait for each other."""
    series = _helper(device).bench_queues(n_nodes=n_nodes, n_warmup=2, n_samples=n_samples)
    return QueueTiming(*map(Series, series))


def expert_copies(
    device: str, matrix_bytes: tuple[int, ...], n_experts: int, cold_bytes: int, effort: Effort
) -> ExpertTiming:
    """Measure streaming `n_experts` experts at once."""
    helper = _helper(device)
    series = measure(
        lambda n: helper.bench_experts(matrix_bytes, n_experts, cold_bytes=cold_bytes, n_warmup=1, n_samples=n), effort
    )
    return ExpertTiming(matrix_bytes, n_experts, series)


def contention(
    device: str, kernel: Kernel, n_threads: int, cold_bytes: int, copy_bytes: int, phase_seconds: float
) -> Contention:
    """Measure products for one token against copies of `copy_bytes`, each alone and both together."""
    spec = _matmul_spec(device, kernel, 1, cold_bytes)
    rates = _helper(device).bench_contention(n_threads, spec, copy_bytes=copy_bytes, duration_seconds=phase_seconds)
    return Contention(
        n_threads, rates.cpu_alone, rates.cpu_while_link_busy, rates.link_alone, rates.link_while_cpu_busy
    )


def release(device: str) -> None:
    """Free the weights that were measured: only the driver's context, kernels and scratch memory remain."""
    _helper(device).bench_release()


def _matmul_spec(device: str, kernel: Kernel, n_tokens: int, cold_bytes: int) -> MatmulSpec:
    row_bytes = kernel.source.size_bytes // math.prod(kernel.source.shape[1:])
    weights = read_tensor_bytes(kernel.source, max(MAX_WEIGHT_BYTES // row_bytes, 1) * row_bytes)
    kind = kernel.kind
    type_number = Ggml(load(device).ggml).type_number(kind.type)
    return MatmulSpec(type_number, kind.shape, kind.n_experts_used, n_tokens, weights, cold_bytes)


def _helper(device: str) -> Helper:
    return Helper(load(device).ats)
