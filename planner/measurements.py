"""What the profiler measured: one model on one machine. Times are seconds, sizes are bytes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .errors import AtsplanError
from .hardware import Hardware, MachineState, Software

if TYPE_CHECKING:
    import pandas

# History: 1 = first version.
PROFILE_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Series:
    """Repeated measurements of one quantity, warm-ups excluded, in the order they were taken."""

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("at least one sample is needed")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mad(self) -> float:
        """Median absolute deviation, in the unit of the samples."""
        centre = self.median
        return statistics.median(abs(sample - centre) for sample in self.samples)

    @property
    def is_noisy(self) -> bool:
        """MAD above 10 % of the median."""
        return self.mad > 0.10 * abs(self.median)


@dataclass(frozen=True)
class ModelInfo:
    """A GGUF model. `fingerprint` hashes graph-shaping metadata and the tensor table, not the weights."""

    name: str
    architecture: str
    fingerprint: str
    file_name: str  # of the first shard, without its folder
    file_bytes: int  # all shards
    n_layers: int
    n_embd: int
    n_context_train: int


class KernelKind(NamedTuple):
    """What a kernel's time depends on, apart from the device, the tokens and the threads."""

    op: str
    type: str
    shape: tuple[int, ...]
    n_experts_used: int


@dataclass(frozen=True)
class WeightUse:
    """One weight tensor as llama.cpp's graph uses it, in order of first use.

    `shape` is ggml's `ne`, innermost first. `inputs` are indices (into the profile's tuple) of the nearest
    earlier weights whose results this one depends on. Activation sizes are for one token.
    """

    name: str
    op: str  # "MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "MUL", "ADD", ...
    type: str  # ggml's name: "q4_K", "f32"
    shape: tuple[int, ...]
    size_bytes: int
    input_bytes: int
    output_bytes: int
    inputs: tuple[int, ...] = ()
    n_experts_used: int = 0  # MUL_MAT_ID only
    is_input: bool = False  # read by rows at the start of the graph; llama.cpp keeps it in host memory

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or any(n < 1 for n in self.shape):
            raise ValueError(f"{self.name} is empty")

    @property
    def kernel(self) -> KernelKind:
        return KernelKind(self.op, self.type, self.shape, self.n_experts_used)

    @property
    def is_product(self) -> bool:
        """Whether activations are multiplied with it. Nearly all of a model's bytes are."""
        return self.op in ("MUL_MAT", "MUL_MAT_ID") and not self.is_input


def heaviest_kind(weights: Iterable[WeightUse]) -> KernelKind:
    """Return the kind of products with the most bytes of weights: what profiles measure against copies."""
    bytes_by_kind: Counter[KernelKind] = Counter()
    for weight in weights:
        if weight.is_product:
            bytes_by_kind[weight.kernel] += weight.size_bytes
    return max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind])


@dataclass(frozen=True)
class KernelTiming:
    """Execution time of one (op, type, shape) on one device. For the GPU n_threads = 0."""

    op: str
    type: str
    shape: tuple[int, ...]
    n_experts_used: int
    device: str  # "cpu" | "gpu"
    n_tokens: int
    n_threads: int
    seconds: Series

    @property
    def kernel(self) -> KernelKind:
        return KernelKind(self.op, self.type, self.shape, self.n_experts_used)


@dataclass(frozen=True)
class GlueTiming:
    """GPU time of the nodes without weights (attention, norms, rope, ...) of a whole graph."""

    n_tokens: int
    n_context: int  # tokens that attention reads
    seconds: Series


@dataclass(frozen=True)
class LinkTiming:
    direction: str  # "h2d" | "d2h"
    pinned: bool
    size_bytes: int
    seconds: Series

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or min(self.seconds.samples) <= 0:
            raise ValueError("a copy of something takes some time")


@dataclass(frozen=True)
class CrossingTiming:
    """GPU -> CPU -> GPU round trip with an activation of `activation_bytes` each way and a trivial CPU graph."""

    n_threads: int
    activation_bytes: int
    seconds: Series


@dataclass(frozen=True)
class HostTiming:
    """What handing over work costs the thread that also computes on the CPU.

    With caches full of weights, as the first one of its kind finds them after a CPU step, and in a row (warm).
    """

    n_threads: int
    launch: Series  # one launch of a few GPU nodes
    stream: Series  # queueing one streamed weight
    crossing: Series  # queueing both ways of an activation
    warm_launch: Series | None = None  # None: not measured, taken to be the cold one
    warm_stream: Series | None = None
    warm_crossing: Series | None = None


@dataclass(frozen=True)
class QueueTiming:
    """What the GPU loses beyond copies and kernels where its work comes in pieces."""

    launch: Series  # going from one launch to the next
    handshake: Series  # from a copy to the launch that waits for it, and from there to the copy that waits for it


@dataclass(frozen=True)
class Contention:
    """Rates in bytes per second, alone and while the other side is busy."""

    n_threads: int
    cpu_alone: float
    cpu_while_link_busy: float
    link_alone: float
    link_while_cpu_busy: float


@dataclass(frozen=True)
class ExpertTiming:
    """Streaming `n_experts` experts at once: what copying them and handing them over adds to a plain crossing."""

    matrix_bytes: tuple[int, ...]  # of one expert, in order of use
    n_experts: int
    seconds: Series

    def __post_init__(self) -> None:
        if self.n_experts < 1:
            raise ValueError("at least one expert is copied")


@dataclass(frozen=True)
class LayerRouting:
    weight: str  # the name of the layer's first tensor of experts
    counts: tuple[int, ...]  # how often each expert was used


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of some text were routed to."""

    n_tokens: int
    layers: tuple[LayerRouting, ...]

    @property
    def entropy_fraction(self) -> float:
        """Mean over layers of the entropy of the experts' shares, as a fraction of its maximum: 1 is uniform."""
        return statistics.fmean(_entropy_fraction(layer.counts) for layer in self.layers)

    @property
    def top_tenth_fraction(self) -> float:
        """Share of all uses that go to the most used tenth of all experts: 0.1 is uniform."""
        counts = sorted((count for layer in self.layers for count in layer.counts), reverse=True)
        return sum(counts[: math.ceil(len(counts) / 10)]) / max(1, sum(counts))


def _entropy_fraction(counts: Sequence[int]) -> float:
    total = sum(counts)
    shares = [count / total for count in counts if count]
    return -sum(share * math.log(share) for share in shares) / math.log(max(2, len(counts)))


@dataclass(frozen=True)
class MemoryCase:
    """llama.cpp's own accounting for one setting, with every layer offloaded. Bytes on the device, except `host_`."""

    n_context: int
    n_ubatch: int
    type_k: str
    type_v: str
    flash_attention: bool
    context_bytes: int  # KV cache and recurrent state
    compute_bytes: int
    host_compute_bytes: int


@dataclass(frozen=True)
class Profile:
    model: ModelInfo
    hardware: Hardware
    software: Software
    state: MachineState
    n_context: int
    n_ubatch: int
    is_simulated: bool  # the GPU side was the sim device: timings say nothing about a real GPU
    weights: tuple[WeightUse, ...]
    kernels: tuple[KernelTiming, ...]
    glue: tuple[GlueTiming, ...]
    link: tuple[LinkTiming, ...]
    crossings: tuple[CrossingTiming, ...]
    host: tuple[HostTiming, ...]
    contention: tuple[Contention, ...]
    memory: tuple[MemoryCase, ...]
    device_overhead_bytes: int  # driver context, kernels, scratch pools: used on the card beyond llama.cpp's accounting
    notes: tuple[str, ...] = field(default=())  # flagged series and other warnings
    experts: tuple[ExpertTiming, ...] = ()
    routing: Routing | None = None  # None: not measured, every expert is assumed to be used equally often
    queue: QueueTiming | None = None  # None: not measured, nothing is lost
    rates_from: str = ""  # the model from whose times those of this one are estimated; "" where they were measured
    schema_version: int = PROFILE_SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights: there are none")

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return tuple(sorted({timing.n_threads for timing in self.kernels if timing.device == "cpu"}))

    def kernel_seconds(self, weight: WeightUse, device: str, n_tokens: int, n_threads: int = 0) -> float:
        """Return the median seconds of `weight` on `device` ("cpu" or "gpu"). Raises AtsplanError if not measured."""
        seconds = self._medians.get((weight.kernel, device, n_tokens, n_threads))
        if seconds is None:
            threads = f" with {n_threads} threads" if device == "cpu" else ""
            raise AtsplanError(
                f"The profile has no time for {weight.name} ({weight.type}) on the {device.upper()} "
                f"at {n_tokens} tokens{threads}.",
                "Profile again with --force.",
            )
        return seconds

    @cached_property
    def _medians(self) -> dict[tuple[KernelKind, str, int, int], float]:
        return {(k.kernel, k.device, k.n_tokens, k.n_threads): k.seconds.median for k in self.kernels}

    @property
    def products(self) -> tuple[WeightUse, ...]:
        return tuple(weight for weight in self.weights if weight.is_product)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of every weight by name; a tied embedding, which is used twice, counts once."""
        return {weight.name: weight.size_bytes for weight in self.weights}

    @property
    def has_gpu(self) -> bool:
        return any(timing.device == "gpu" for timing in self.kernels)

    def total_seconds(self, weights: Iterable[WeightUse], device: str, n_tokens: int, n_threads: int = 0) -> float:
        """Return the sum of `kernel_seconds`."""
        return sum(self.kernel_seconds(weight, device, n_tokens, n_threads) for weight in weights)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per weight: name, op, type, bytes, and a column of seconds per device, tokens and threads."""
        import pandas

        rows = []
        for weight in self.weights:
            row: dict[str, object] = {
                "name": weight.name, "op": weight.op, "type": weight.type, "size_bytes": weight.size_bytes,
            }  # fmt: skip
            for timing in self.kernels:
                if weight.kernel == timing.kernel:
                    threads = f"_{timing.n_threads}_threads" if timing.device == "cpu" else ""
                    row[f"{timing.device}_{timing.n_tokens}_tokens{threads}_seconds"] = timing.seconds.median
            rows.append(row)
        return pandas.DataFrame(rows)
