"""Profile one model on this machine, from the header to the finished record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import AtsplanError, DeviceError
from planner.gguf_model import GgufModel, model_info, read_gguf
from planner.hardware import Cpu, MachineState
from planner.measurements import (
    Contention,
    CrossingTiming,
    ExpertTiming,
    GlueTiming,
    HostTiming,
    KernelTiming,
    LinkTiming,
    MemoryCase,
    ModelInfo,
    Profile,
    QueueTiming,
    Series,
    heaviest_kind,
)
from planner.units import GIB, MIB
from planner.workload import Workload, kv_label
from runtime.inspect_model import Inspection, inspect_model

from . import bench, jobs
from .detect import (
    BUSY_LOAD_FRACTION,
    detect_cpu,
    detect_hardware,
    detect_software,
    machine_state,
    nvml_gpu,
    resolve_device,
)
from .jobs import Job, Machine, Timing
from .measure import relative_mad
from .worker import Worker

MEMORY_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
USUAL_KV_TYPES = ("f16", "q8_0", "q4_0")  # accounted for in every profile
UNKNOWN_CACHE_BYTES = 64 * MIB  # where the kernel does not tell
MAX_COLD_BYTES = 2 * GIB
SETTLING_SECONDS = 0.5  # the driver may clear up after a process that has ended already
MAX_REPEATED_FRACTION = 0.2  # of all series: where more are unsteady, the machine is busy for long

OnProgress = Callable[[float, str], None]  # the done fraction, and what comes next


@dataclass(frozen=True)
class Settings:
    """`device` is "cuda0", ..., "sim", or "none" for the CPU alone. Contexts and batches are in tokens."""

    device: str
    threads: tuple[int, ...]
    n_context: int
    n_ubatch: int

    @classmethod
    def for_model(
        cls,
        info: ModelInfo,
        device: str = "auto",
        threads: tuple[int, ...] = (),
        n_context: int | None = None,
        n_ubatch: int = Workload.n_ubatch,
    ) -> Settings:
        """Fill in what suits the model and this machine. Raises DeviceError for a device that is not here."""
        device = resolve_device(device)
        n_context = n_context or min(Workload.n_context, info.n_context_train)
        return cls(device, threads or default_threads(detect_cpu()), n_context, min(n_ubatch, n_context))


def default_threads(cpu: Cpu) -> tuple[int, ...]:
    """Return the thread counts worth measuring: all cores and half of them."""
    return tuple(sorted({max(1, cpu.physical_cores // 2), cpu.physical_cores}))


def profile_model(
    path: str | os.PathLike[str],
    settings: Settings | None = None,
    on_progress: OnProgress = lambda fraction, label: None,
) -> Profile:
    """Measure every weight of the GGUF model at `path` on this machine: median seconds per kernel, bytes, rates.

    Without `settings`, on the first GPU at the default context. Nothing is cached. Takes seconds to minutes, and
    memory for a few copies of one weight. Works in child processes: a script calls it under
    `if __name__ == "__main__":`.
    Raises InvalidFileError for a model that llama.cpp cannot use, DeviceError for a device that is absent or fails.
    """
    on_progress(0.0, "the model's graph")
    model = read_gguf(path)
    info = model_info(model)
    settings = settings or Settings.for_model(info)
    hardware = detect_hardware(settings.device)
    state = machine_state(settings.device)
    device = _inspected_device(settings.device)
    inspection, memory, notes = _inspect(model.paths[0], device, settings, info.n_context_train)
    machine = Machine(
        device=device,
        gpu="" if settings.device == "none" else device,
        threads=settings.threads,
        cpu_cold_bytes=_cold_bytes(hardware.cpu),
    )
    work = list(_jobs(model, inspection, machine, settings))
    timings, remarks, overhead_bytes = _measure(work, device, settings.device, on_progress)
    if state.load_average > BUSY_LOAD_FRACTION * hardware.cpu.physical_cores:
        notes.append(f"other programs kept the CPU busy at the start (load average {state.load_average:.1f})")
    on_progress(1.0, "done")
    return Profile(
        model=info,
        hardware=hardware,
        software=detect_software(),
        state=state,
        n_context=settings.n_context,
        n_ubatch=settings.n_ubatch,
        is_simulated=settings.device == "sim",
        weights=inspection.weights_decode,
        kernels=tuple(timing for timing in timings if isinstance(timing, KernelTiming)),
        glue=tuple(timing for timing in timings if isinstance(timing, GlueTiming)),
        link=tuple(timing for timing in timings if isinstance(timing, LinkTiming)),
        crossings=tuple(timing for timing in timings if isinstance(timing, CrossingTiming)),
        host=tuple(timing for timing in timings if isinstance(timing, HostTiming)),
        contention=tuple(timing for timing in timings if isinstance(timing, Contention)),
        memory=memory,
        device_overhead_bytes=overhead_bytes,
        notes=(*notes, *remarks),
        experts=tuple(timing for timing in timings if isinstance(timing, ExpertTiming)),
        queue=next((timing for timing in timings if isinstance(timing, QueueTiming)), None),
    )


def _inspected_device(device: str) -> str:
    """Return the native helper's device: it always has one, though not always one to measure."""
    return "sim" if device == "none" else device


def describe_model(path: str | os.PathLike[str], n_context: int, n_ubatch: int) -> Profile:
    """Return a profile without times: the model's graph and memory, for at most `n_context` tokens. Takes seconds."""
    model = read_gguf(path)
    info = model_info(model)
    settings = Settings("none", (), min(n_context, info.n_context_train), n_ubatch)
    inspection, memory, notes = _inspect(model.paths[0], "sim", settings, info.n_context_train)
    return Profile(
        model=info, hardware=detect_hardware("none"), software=detect_software(), state=MachineState(),
        n_context=settings.n_context, n_ubatch=n_ubatch, is_simulated=False,
        weights=inspection.weights_decode, kernels=(), glue=(), link=(), crossings=(), host=(), contention=(),
        memory=memory, device_overhead_bytes=0, notes=tuple(notes),
    )  # fmt: skip


def _cold_bytes(cpu: Cpu) -> int:
    """Return how many bytes of weights push each other out of the CPU's caches; they do not forget the oldest first."""
    cache_bytes = cpu.last_level_cache_bytes or UNKNOWN_CACHE_BYTES
    return min(4 * cache_bytes, MAX_COLD_BYTES, cpu.memory_bytes // 8)


def _inspect(
    path: Path, device: str, settings: Settings, n_context_train: int
) -> tuple[Inspection, tuple[MemoryCase, ...], list[str]]:
    """Return the graph, the memory cases for a grid of contexts and KV types, and notes on what does not work."""
    contexts = sorted({settings.n_context, *(n for n in MEMORY_CONTEXTS if n <= n_context_train)})
    first, *others = USUAL_KV_TYPES
    inspection = inspect_model(path, device, contexts, settings.n_ubatch, first, first)
    memory, notes = list(inspection.memory), []
    if inspection.unsupported_ops:
        notes.append(f"the GPU leaves to the CPU what it cannot compute: {', '.join(inspection.unsupported_ops)}")
    for kv_type in others:
        try:
            memory += _kv_memory(path, device, contexts, settings.n_ubatch, kv_type, kv_type, inspection)
        except AtsplanError as error:
            notes.append(error.message)
    return inspection, tuple(memory), notes


def with_kv_types(profile: Profile, path: Path, device: str, type_k: str, type_v: str) -> Profile:
    """Return the profile with the memory that a KV cache of these types takes. Raises DeviceError if it cannot be."""
    path = read_gguf(path).paths[0]
    device = _inspected_device(device)
    contexts = sorted({case.n_context for case in profile.memory})
    usual = inspect_model(path, device, [profile.n_context], profile.n_ubatch)
    memory = _kv_memory(path, device, contexts, profile.n_ubatch, type_k, type_v, usual)
    return replace(profile, memory=profile.memory + memory)


def _kv_memory(
    path: Path, device: str, contexts: Sequence[int], n_ubatch: int, type_k: str, type_v: str, usual: Inspection
) -> tuple[MemoryCase, ...]:
    try:
        inspection = inspect_model(path, device, contexts, n_ubatch, type_k, type_v)
        reason = "the GPU would leave attention to the CPU."
    except AtsplanError as error:
        inspection, reason = None, error.message
    if inspection is None or inspection.unsupported_ops != usual.unsupported_ops:
        raise DeviceError(
            f"The KV cache cannot be {kv_label(type_k, type_v)}: {reason}", "Take f16, or another --kv-type."
        )
    return inspection.memory


def _jobs(model: GgufModel, inspection: Inspection, machine: Machine, settings: Settings) -> Iterator[Job]:
    weights = inspection.weights_decode
    kernels = jobs.distinct_kernels(model, weights)
    yield from jobs.kernel_jobs(kernels, inspection, machine, settings.n_ubatch)
    if machine.gpu:
        activation_bytes = max(weight.input_bytes for weight in weights) * settings.n_ubatch
        kind = heaviest_kind(weights)
        heaviest = next(kernel for kernel in kernels if kernel.kind == kind)
        yield from jobs.glue_jobs(model.paths[0], machine, settings.n_context, settings.n_ubatch)
        yield from jobs.link_jobs(machine)
        yield from jobs.crossing_jobs(machine, activation_bytes)
        yield from jobs.host_jobs(machine, heaviest)
        yield from jobs.queue_jobs(machine)
        yield from jobs.expert_jobs(weights, machine)
        yield from jobs.contention_jobs(machine, heaviest)


def _measure(
    work: Sequence[Job], device: str, card: str, on_progress: OnProgress
) -> tuple[list[Timing], list[str], int]:
    """Do the work in a process of its own. Also return the bytes of `card` that come back when this process ends.

    It frees the weights it measured before, so these bytes are what a process takes beside its buffers: the driver's
    context, kernels, cuBLAS' workspaces, captured graphs, and the scratch pools that backends grow for the largest
    batches and keep. What other programs take or free while it measures does not count.
    """
    with _free_vram(card) as free_bytes:
        with Worker(device) as worker:
            timings, remarks = _run(work, worker, on_progress)
            worker.call(bench.release, device)
            free_before_bytes = free_bytes()
        time.sleep(SETTLING_SECONDS)
        return timings, remarks, max(0, free_bytes() - free_before_bytes)


@contextmanager
def _free_vram(device: str) -> Iterator[Callable[[], int]]:
    """Give a function that returns the card's free bytes, whoever has the others; 0 for "sim" and "none".

    The driver stays open from one call to the next: else a card without users is shut down and started in between.
    """
    if device in ("none", "sim"):
        yield lambda: 0
        return
    with nvml_gpu(device) as (nvml, gpu, _):
        yield lambda: int(nvml.nvmlDeviceGetMemoryInfo(gpu).free)


def _run(work: Sequence[Job], worker: Worker, on_progress: OnProgress) -> tuple[list[Timing], list[str]]:
    """Do the work. What was unsteady is measured again at the end: what disturbed it may have passed by then.

    Also return remarks on what is still unsteady.
    """
    total = sum(job.expected_seconds for job in work)
    done = 0.0
    timings = []
    for job in work:
        on_progress(done / total, job.label)
        timings.append(worker.call(job.measure))
        done += job.expected_seconds
    unsteady = _unsteady(timings)
    if len(unsteady) <= MAX_REPEATED_FRACTION * len(work):
        for index, series in unsteady.items():
            on_progress(1.0, f"{work[index].label}, again")
            again = worker.call(work[index].measure)
            repeated = _series(again)
            if repeated and repeated.median < series.median:  # disturbances only ever take time
                timings[index] = again
    return timings, [
        f"{work[index].label}: unsteady, MAD {relative_mad(series):.0%} of the median"
        for index, series in _unsteady(timings).items()
    ]


def _unsteady(timings: Sequence[Timing]) -> dict[int, Series]:
    """Return the noisy series, by index."""
    every = enumerate(map(_series, timings))
    return {index: series for index, series in every if series and series.is_noisy}


def _series(timing: Timing) -> Series | None:
    """Return the samples of a timing that consists of one series."""
    return None if isinstance(timing, (Contention, HostTiming, QueueTiming)) else timing.seconds
