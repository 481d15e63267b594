"""The work list of a profile: every distinct measurement, each with the time it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from planner.errors import InvalidFileError
from planner.experts import find_blocks
from planner.gguf_model import GgufModel
from planner.measurements import (
    Contention,
    CrossingTiming,
    ExpertTiming,
    GlueTiming,
    HostTiming,
    KernelTiming,
    LinkTiming,
    QueueTiming,
    WeightUse,
)
from planner.memory import KV_GRANULE
from planner.problem import find_units
from planner.units import KIB, MIB, format_count
from runtime.inspect_model import Inspection

from . import bench
from .bench import Kernel
from .measure import Effort

LINK_SIZES_BYTES = (16 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
CROSSING_SIZES_BYTES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
CONTENTION_COPY_BYTES = 16 * MIB
CONTENTION_PHASE_SECONDS = 0.8
HOST_LAUNCH_NODES = 20  # about a layer without its streamed products
HOST_SAMPLES = 15
GPU_COLD_BYTES = 256 * MIB  # more than the last-level cache of any GPU

KERNELS_BUDGET_SECONDS = 20.0  # for all series of products, unless single products are slow
MAX_SERIES_SECONDS = 0.5
OTHER_EFFORT = Effort(budget_seconds=0.15)

Timing: TypeAlias = (
    KernelTiming | GlueTiming | LinkTiming | CrossingTiming | HostTiming | QueueTiming | ExpertTiming | Contention
)


@dataclass(frozen=True)
class Job:
    label: str
    expected_seconds: float
    measure: Callable[[], Timing]  # for a Worker, so a partial() of a function that is importable by name


@dataclass(frozen=True)
class Machine:
    """What is measured on. `device` names the process's device, `gpu` the one to measure: "" for the CPU alone."""

    device: str
    gpu: str
    threads: tuple[int, ...]
    cpu_cold_bytes: int

    @property
    def gpu_cold_bytes(self) -> int:
        return 0 if self.gpu == "sim" else GPU_COLD_BYTES


def distinct_kernels(model: GgufModel, weights: Sequence[WeightUse]) -> list[Kernel]:
    """Return every distinct product with a weight, in order of first use."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    kernels: dict[object, Kernel] = {}
    for weight in weights:
        if weight.op in ("MUL_MAT", "MUL_MAT_ID") and weight.kernel not in kernels:
            source = tensors.get(weight.name)
            if source is None:
                raise InvalidFileError(f"llama.cpp multiplies with {weight.name}, which the file does not hold.")
            kernels[weight.kernel] = Kernel(weight.kernel, source)
    return list(kernels.values())


def batch_rows(kernel: Kernel, inspection: Inspection, n_ubatch: int) -> int:
    """Return how many tokens the kernel sees of a full micro-batch: after the last attention, only one goes on."""
    decode = {(weight.name, weight.op): weight.input_bytes for weight in inspection.weights_decode}
    rows = [
        round(weight.input_bytes * n_ubatch / decode[weight.name, weight.op])
        for weight in inspection.weights_prefill
        if kernel.fits(weight) and decode.get((weight.name, weight.op))
    ]
    return min(max(rows, default=n_ubatch) or 1, n_ubatch)


def kernel_jobs(kernels: Sequence[Kernel], inspection: Inspection, machine: Machine, n_ubatch: int) -> Iterator[Job]:
    """Yield one job per kernel, device, batch and thread count. Jobs on equal weights follow one another.

    For one token, the CPU's time is measured for fewer experts as well: the others may be computed on the GPU.
    """
    places = [("cpu", n_threads) for n_threads in machine.threads] + [("gpu", 0)] * bool(machine.gpu)
    series = []
    for kernel in kernels:
        n_rows = batch_rows(kernel, inspection, n_ubatch)
        for place, n_threads in places:
            for n_tokens in sorted({1, n_ubatch}):
                series.append((kernel, machine, place, n_threads, n_tokens, 1 if n_tokens == 1 else n_rows))
            for n_experts in _fewer_experts(kernel.kind.n_experts_used) if place == "cpu" else ():
                fewer = replace(kernel, kind=kernel.kind._replace(n_experts_used=n_experts))
                series.append((fewer, machine, place, n_threads, 1, 1))
    effort = Effort(min(MAX_SERIES_SECONDS, KERNELS_BUDGET_SECONDS / max(1, len(series))))
    for one in series:
        yield _kernel_job(*one, effort)


def _fewer_experts(n_used: int) -> list[int]:
    return sorted({1, n_used // 2} - {0, n_used}) if n_used else []


def _kernel_job(
    kernel: Kernel, machine: Machine, place: str, n_threads: int, n_tokens: int, n_rows: int, effort: Effort
) -> Job:
    is_cpu = place == "cpu"
    op, kind, shape, n_experts_used = kernel.kind
    name = f"{op} {kind} {'x'.join(map(str, shape))}"
    if n_experts_used:
        name += f", {format_count(n_experts_used, 'expert')}"
    where = format_count(n_threads, "thread") if is_cpu else "GPU"
    cold_bytes = 0 if n_rows > 1 else machine.cpu_cold_bytes if is_cpu else machine.gpu_cold_bytes
    n_active = n_experts_used or (shape[2] if len(shape) > 2 else 1)
    flops = 2.0 * shape[0] * shape[1] * n_active * n_rows
    flops_per_second = 3e10 * n_threads if is_cpu else 2e10 if machine.gpu == "sim" else 2e13
    return Job(
        f"{name}, {format_count(n_tokens, 'token')}, {where}",
        effort.budget_seconds + 3 * flops / flops_per_second,
        partial(bench.matmul, machine.device, kernel, place, n_threads, n_tokens, n_rows, cold_bytes, effort),
    )


def glue_jobs(path: Path, machine: Machine, n_context: int, n_ubatch: int) -> Iterator[Job]:
    """Yield jobs for a token and a micro-batch, with a full context and with the shortest that holds the batch."""
    shortest = -(-n_ubatch // KV_GRANULE) * KV_GRANULE
    for n_read in sorted({min(shortest, n_context), n_context}):
        for n_tokens in sorted({1, n_ubatch}):
            yield Job(
                f"attention, norms and the like, {format_count(n_tokens, 'token')}, context {n_read}",
                1.0 if n_tokens == 1 else 3.0,
                partial(bench.glue, machine.device, path, n_read, n_ubatch, n_tokens, OTHER_EFFORT),
            )


def link_jobs(machine: Machine) -> Iterator[Job]:
    for direction in ("h2d", "d2h"):
        for pinned in (True, False):
            for size_bytes in LINK_SIZES_BYTES:
                yield Job(
                    f"copies, {direction}, {'pinned' if pinned else 'pageable'}, {size_bytes // KIB} KiB",
                    0.3,
                    partial(bench.transfer, machine.device, direction, pinned, size_bytes, OTHER_EFFORT),
                )


def crossing_jobs(machine: Machine, max_activation_bytes: int) -> Iterator[Job]:
    """Yield jobs for sizes up to the first that is at least `max_activation_bytes`."""
    n_sizes = 1 + sum(size < max_activation_bytes for size in CROSSING_SIZES_BYTES)
    for n_threads in machine.threads:
        for size_bytes in CROSSING_SIZES_BYTES[:n_sizes]:
            yield Job(
                f"round trips, {size_bytes // KIB} KiB, {format_count(n_threads, 'thread')}",
                0.3,
                partial(bench.crossing, machine.device, n_threads, size_bytes, OTHER_EFFORT),
            )


def host_jobs(machine: Machine, kernel: Kernel) -> Iterator[Job]:
    for n_threads in machine.threads:
        yield Job(
            f"handing work to the GPU, {format_count(n_threads, 'thread')}",
            0.5,
            partial(
                bench.host, machine.device, kernel, n_threads, machine.cpu_cold_bytes, HOST_LAUNCH_NODES, HOST_SAMPLES
            ),
        )


def queue_jobs(machine: Machine) -> Iterator[Job]:
    measure = partial(bench.queues, machine.device, HOST_LAUNCH_NODES, HOST_SAMPLES)
    yield Job("copies and launches in turns", 0.3, measure)


def expert_jobs(weights: Sequence[WeightUse], machine: Machine) -> Iterator[Job]:
    """Yield jobs for one, half and all of the experts that a token uses, per kind of experts."""
    kinds = {block.matrix_bytes: block.n_used for block in find_blocks(weights, find_units(weights))}
    for matrix_bytes, n_used in kinds.items():
        for n_experts in (*_fewer_experts(n_used), n_used):
            yield Job(
                f"streaming {format_count(n_experts, 'expert')}, {sum(matrix_bytes) / MIB:.1f} MiB each",
                1.0,
                partial(
                    bench.expert_copies, machine.device, matrix_bytes, n_experts, machine.cpu_cold_bytes, OTHER_EFFORT
                ),
            )


def contention_jobs(machine: Machine, kernel: Kernel) -> Iterator[Job]:
    for n_threads in machine.threads:
        yield Job(
            f"CPU and link together, {format_count(n_threads, 'thread')}",
            3.0,
            partial(
                bench.contention, machine.device, kernel, n_threads, machine.cpu_cold_bytes, CONTENTION_COPY_BYTES,
                CONTENTION_PHASE_SECONDS,
            ),
        )  # fmt: skip
