"""The native helper and a few ggml functions as Python calls: numbers, strings and frozen dataclasses in and out.

Every native failure becomes a DeviceError with the library's own words. Callers only pass contexts and pointers on.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llama_cpp import llama_cpp

from planner.errors import DeviceError
from planner.plan import WeightClass

from .native_api import (
    GGML_PROTOTYPES,
    HELPER_PROTOTYPES,
    ContentionStruct,
    DevicePropertiesStruct,
    LocationCallback,
    MatmulSpecStruct,
    MemoryCallback,
    OpCallback,
    RoutingCallback,
    StatisticsStruct,
    WeightCallback,
    declare,
)

CLASS_NUMBERS: dict[WeightClass, int] = {"gpu": 0, "stream": 1, "cpu": 2}

Context = Any  # llama_context *, opaque

_COUNTER_NAMES = [name for name, *_ in StatisticsStruct._fields_]
_COUNTERS = struct.Struct(f"{len(_COUNTER_NAMES)}q")


@dataclass(frozen=True)
class Statistics:
    """What the hybrid device did since the last reset. Nanoseconds, bytes, counts; see atsplan.h for each."""

    n_graphs: int
    n_compiles: int
    total_ns: int
    cpu_ns: int
    wait_gpu_ns: int
    launch_ns: int
    copy_issue_ns: int
    streamed_bytes: int
    activation_bytes: int
    n_cpu_steps: int
    n_gpu_steps: int
    n_streamed: int
    n_slot_stalls: int
    link_busy_ns: int
    ring_bytes: int
    pinned_bytes: int
    n_experts_resident: int
    n_experts_streamed: int
    n_experts_cpu: int
    expert_bytes: int
    unpinned_bytes: int
    # Not in older benchmark files:
    expert_cpu_ns: int = 0
    expert_gpu_ns: int = 0
    expert_decide_ns: int = 0
    n_experts_predicted: int = 0
    n_experts_predicted_used: int = 0


@dataclass(frozen=True)
class TracedWeight:
    """One weight operand of a compute graph. Activation bytes are for the whole batch; `shape` has four numbers."""

    name: str
    op: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int
    input_bytes: int
    output_bytes: int
    n_experts_used: int
    is_input: bool
    node: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class BufferMemory:
    """llama.cpp's accounting for one buffer type, in bytes."""

    buffer_type: str
    is_host: bool
    model_bytes: int
    context_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class WeightLocation:
    name: str
    buffer_type: str
    is_host: bool


@dataclass(frozen=True)
class MatmulSpec:
    """One matrix product to time. `weights` holds whole rows of the tensor and is repeated to fill it."""

    type_number: int
    shape: tuple[int, ...]  # one to three numbers, innermost first
    n_experts_used: int  # 0: MUL_MAT, else MUL_MAT_ID
    n_tokens: int
    weights: bytes
    cold_bytes: int


@dataclass(frozen=True)
class ContentionRates:
    """Bytes per second, alone and while the other side is busy."""

    cpu_alone: float
    cpu_while_link_busy: float
    link_alone: float
    link_while_cpu_busy: float


class Helper:
    """The native helper's C API (atsplan.h). Every method raises DeviceError when the helper reports a failure."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        declare(library, HELPER_PROTOTYPES)

    @property
    def api_version(self) -> int:
        return int(self._library.ats_api_version())

    @property
    def build_stamp(self) -> str:
        return str(self._library.ats_build_stamp().decode())

    @property
    def last_error(self) -> str:
        """Why the last failing call failed; "" if none has."""
        return str(self._library.ats_last_error().decode(errors="replace"))

    def set_classes(self, classes: Iterable[tuple[str, WeightClass, WeightClass]]) -> None:
        """Set (name, decode class, prefill class) of host-resident weights, replacing all earlier settings."""
        rows = list(classes)
        names = (ctypes.c_char_p * len(rows))(*(name.encode() for name, _, _ in rows))
        decode = (ctypes.c_int32 * len(rows))(*(CLASS_NUMBERS[decode] for _, decode, _ in rows))
        prefill = (ctypes.c_int32 * len(rows))(*(CLASS_NUMBERS[prefill] for _, _, prefill in rows))
        self._check(self._library.ats_set_classes(names, decode, prefill, len(rows)))

    def set_option(self, name: str, value: int) -> None:
        self._check(self._library.ats_set_option(name.encode(), value))

    def get_option(self, name: str) -> int:
        value = ctypes.c_int64()
        self._check(self._library.ats_get_option(name.encode(), ctypes.byref(value)))
        return value.value

    def statistics(self, *, reset: bool = False) -> Statistics:
        counters = StatisticsStruct()
        self._check(self._library.ats_get_statistics(ctypes.byref(counters), reset))
        return Statistics(**dict(zip(_COUNTER_NAMES, _COUNTERS.unpack(counters), strict=True)))  # for every token: fast

    def choose_transfers(
        self,
        cpu_seconds: Sequence[float],
        gpu_seconds: Sequence[float],
        crossing_seconds: Sequence[float],
        transfer_seconds: Sequence[float],
        is_resident: Sequence[bool],
    ) -> tuple[list[bool], float]:
        """Return (runs on the GPU, per unit in execution order; seconds of the round), minimal.

        Resident units run on the GPU. Another one runs on the CPU, or on the GPU after a transfer, which hides behind
        what the GPU does since the last CPU unit (or the start). `crossing_seconds[i]` is paid where unit i runs on
        another device than unit i - 1. Algorithm 2 of arXiv 2607.10183.
        """
        n = len(is_resident)
        arrays = [
            (ctypes.c_double * n)(*seconds)
            for seconds in (cpu_seconds, gpu_seconds, crossing_seconds, transfer_seconds)
        ]
        on_gpu, total = (ctypes.c_bool * n)(), ctypes.c_double()
        resident = (ctypes.c_bool * n)(*is_resident)
        self._check(self._library.ats_choose_transfers(n, *arrays, resident, on_gpu, ctypes.byref(total)))
        return list(on_gpu), total.value

    def trace_weights(self, context: Context, n_tokens: int) -> list[TracedWeight]:
        """Return the weight operands of the graph for `n_tokens`, in execution order. Touches no weights."""
        traced: list[TracedWeight] = []

        @WeightCallback  # type: ignore[untyped-decorator]
        def collect(_user: Any, pointer: Any) -> None:
            use = pointer.contents
            traced.append(
                TracedWeight(
                    name=use.name.decode(),
                    op=use.op.decode(),
                    type=use.type.decode(),
                    shape=tuple(use.shape),
                    size_bytes=use.size_bytes,
                    input_bytes=use.input_bytes,
                    output_bytes=use.output_bytes,
                    n_experts_used=use.n_experts_used,
                    is_input=use.is_input,
                    node=use.node,
                    inputs=tuple(index for index in use.inputs if index >= 0),
                )
            )

        self._check(self._library.ats_trace_weights(context, n_tokens, collect, None))
        return traced

    def memory_breakdown(self, context: Context) -> list[BufferMemory]:
        """Return llama.cpp's own accounting for this context, one row per buffer type."""
        rows: list[BufferMemory] = []

        @MemoryCallback  # type: ignore[untyped-decorator]
        def collect(_user: Any, pointer: Any) -> None:
            memory = pointer.contents
            rows.append(
                BufferMemory(
                    memory.buffer_type.decode(),
                    memory.is_host,
                    memory.model_bytes,
                    memory.context_bytes,
                    memory.compute_bytes,
                )
            )

        self._check(self._library.ats_memory_breakdown(context, collect, None))
        return rows

    def weight_locations(self, context: Context) -> list[WeightLocation]:
        """Return where every weight that the context's graph uses lies now."""
        rows: list[WeightLocation] = []

        @LocationCallback  # type: ignore[untyped-decorator]
        def collect(_user: Any, name: bytes, buffer_type: bytes, is_host: bool) -> None:
            rows.append(WeightLocation(name.decode(), buffer_type.decode(), is_host))

        self._check(self._library.ats_weight_locations(context, collect, None))
        return rows

    def unsupported_ops(self, context: Context, n_tokens: int) -> tuple[str, ...]:
        """Return the kinds of nodes that the inner GPU cannot compute, but for products with weights, sorted."""
        ops: set[str] = set()

        @OpCallback  # type: ignore[untyped-decorator]
        def collect(_user: Any, op: bytes) -> None:
            ops.add(op.decode())

        self._check(self._library.ats_unsupported_ops(context, n_tokens, collect, None))
        return tuple(sorted(ops))

    def bench_matmul(
        self, device: str, n_threads: int, spec: MatmulSpec, *, n_warmup: int, n_samples: int
    ) -> tuple[float, ...]:
        """Return seconds per matrix product on `device`: "cpu", "sim" or a ggml device's name."""
        native = _native_spec(spec)
        return self._samples(
            n_samples,
            lambda samples: self._library.ats_bench_matmul(
                device.encode(), n_threads, ctypes.byref(native), n_warmup, n_samples, samples
            ),
        )

    def bench_glue(self, context: Context, n_tokens: int, *, n_warmup: int, n_samples: int) -> tuple[float, ...]:
        """Return seconds of all nodes but products with weights on the inner GPU, as far as it can compute them."""
        return self._samples(
            n_samples, lambda samples: self._library.ats_bench_glue(context, n_tokens, n_warmup, n_samples, samples)
        )

    def bench_transfer(
        self, *, host_to_device: bool, pinned: bool, size_bytes: int, n_warmup: int, n_samples: int
    ) -> tuple[float, ...]:
        """Return seconds per copy of `size_bytes`."""
        return self._samples(
            n_samples,
            lambda samples: self._library.ats_bench_transfer(
                host_to_device, pinned, size_bytes, n_warmup, n_samples, samples
            ),
        )

    def bench_crossing(
        self, n_threads: int, activation_bytes: int, *, n_warmup: int, n_samples: int
    ) -> tuple[float, ...]:
        """Return seconds per GPU -> CPU -> GPU round trip."""
        return self._samples(
            n_samples,
            lambda samples: self._library.ats_bench_crossing(n_threads, activation_bytes, n_warmup, n_samples, samples),
        )

    def bench_host(
        self, n_threads: int, spec: MatmulSpec | None, *, n_nodes: int, n_warmup: int, n_samples: int
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return seconds of the host thread per launch of `n_nodes`, per streamed weight, and per crossing.

        Each one follows a product, which emptied the caches; without `spec`, they follow each other.
        """
        native = ctypes.byref(_native_spec(spec)) if spec else None
        series = [(ctypes.c_int64 * n_samples)() for _ in range(3)]
        self._check(self._library.ats_bench_host(n_threads, native, n_nodes, n_warmup, n_samples, *series))
        launch, stream, crossing = (tuple(sample / 1e9 for sample in samples) for samples in series)
        return launch, stream, crossing

    def bench_queues(
        self, *, n_nodes: int, n_warmup: int, n_samples: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return seconds that the GPU loses between launches of `n_nodes`, and per copy and launch in turns."""
        series = [(ctypes.c_int64 * n_samples)() for _ in range(2)]
        self._check(self._library.ats_bench_queues(n_nodes, n_warmup, n_samples, *series))
        launch, handshake = (tuple(sample / 1e9 for sample in samples) for samples in series)
        return launch, handshake

    def bench_contention(
        self, n_threads: int, spec: MatmulSpec, *, copy_bytes: int, duration_seconds: float
    ) -> ContentionRates:
        native = _native_spec(spec)
        rates = ContentionStruct()
        self._check(
            self._library.ats_bench_contention(
                n_threads, ctypes.byref(native), copy_bytes, round(duration_seconds * 1e9), ctypes.byref(rates)
            )
        )
        return ContentionRates(**{name: getattr(rates, name) for name, *_ in ContentionStruct._fields_})

    def bench_experts(
        self, matrix_bytes: Sequence[int], n_experts: int, *, cold_bytes: int, n_warmup: int, n_samples: int
    ) -> tuple[float, ...]:
        """Return seconds that streaming `n_experts` experts, of matrices of these sizes, adds to a crossing."""
        sizes = (ctypes.c_int64 * len(matrix_bytes))(*matrix_bytes)
        return self._samples(
            n_samples,
            lambda samples: self._library.ats_bench_experts(
                sizes, len(matrix_bytes), n_experts, cold_bytes, n_warmup, n_samples, samples
            ),
        )

    @contextmanager
    def routing_counter(self) -> Iterator[RoutingCounter]:
        """Yield a counter of routed experts, to open a context with."""
        counter = RoutingCounter(self._library, self._library.ats_routing_create())
        try:
            yield counter
        finally:
            self._library.ats_routing_free(counter.pointer)

    def bench_release(self) -> None:
        """Free the copies of weights that the micro-benchmarks keep for their next call."""
        self._check(self._library.ats_bench_release())

    def device_memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the inner GPU's memory; zeros if it does not tell."""
        free, total = ctypes.c_int64(), ctypes.c_int64()
        self._check(self._library.ats_device_memory(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def _samples(self, n_samples: int, call: Callable[[Any], int]) -> tuple[float, ...]:
        samples = (ctypes.c_int64 * n_samples)()
        self._check(call(samples))
        return tuple(nanoseconds / 1e9 for nanoseconds in samples)

    def _check(self, status: int) -> None:
        if status != 0:
            raise DeviceError(f"The native helper failed: {self.last_error}")


@dataclass(frozen=True)
class RoutingCounter:
    """Counts the experts of every token that a context evaluates, which was opened with it."""

    library: ctypes.CDLL
    pointer: int

    def counts(self) -> dict[str, tuple[int, ...]]:
        """Return how often each expert was used, by the name of its layer's first tensor of experts."""
        found: dict[str, tuple[int, ...]] = {}

        @RoutingCallback  # type: ignore[untyped-decorator]
        def collect(_user: Any, weight: bytes, counts: Any, n_experts: int) -> None:
            found[weight.decode()] = tuple(counts[:n_experts])

        self.library.ats_routing_read(self.pointer, collect, None)
        return found


def _native_spec(spec: MatmulSpec) -> MatmulSpecStruct:
    shape = (*spec.shape, 1, 1)[:3]
    native = MatmulSpecStruct(
        type=spec.type_number,
        shape=(ctypes.c_int64 * 3)(*shape),
        n_experts_used=spec.n_experts_used,
        n_tokens=spec.n_tokens,
        weights_bytes=len(spec.weights),
        cold_bytes=spec.cold_bytes,
    )
    native.weights = ctypes.cast(ctypes.c_char_p(spec.weights), ctypes.c_void_p)
    return native


class Ggml:
    """The ggml functions atsplan needs beyond llama_cpp's bindings. Pointers are plain integers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        declare(library, GGML_PROTOTYPES)

    def devices(self) -> dict[str, int]:
        """Return every registered device by name."""
        pointers = [self._library.ggml_backend_dev_get(i) for i in range(self._library.ggml_backend_dev_count())]
        return {self._library.ggml_backend_dev_name(pointer).decode(): pointer for pointer in pointers}

    def device(self, name: str) -> int:
        devices = self.devices()
        if name not in devices:
            raise DeviceError(f"There is no device '{name}' here, only {', '.join(devices)}.")
        return devices[name]

    def buffer_type(self, device_name: str) -> int:
        """Return the default buffer type of a device."""
        return int(self._library.ggml_backend_dev_buffer_type(self.device(device_name)))

    def buffer_type_name(self, device_name: str) -> str:
        return str(self._library.ggml_backend_buft_name(self.buffer_type(device_name)).decode())

    def pci_bus_id(self, device_name: str) -> str:
        """Return the device's address, such as "0000:c1:00.0"; "" if it has none."""
        properties = DevicePropertiesStruct()
        self._library.ggml_backend_dev_get_props(self.device(device_name), ctypes.byref(properties))
        return (properties.device_id or b"").decode()

    def type_number(self, name: str) -> int:
        """Return the ggml_type called `name`, such as "f16" or "q8_0". Raises DeviceError if there is none."""
        names = self.type_names()
        if name not in names:
            raise DeviceError(f"llama.cpp knows no data type '{name}'.", f"Use one of {', '.join(names)}.")
        return names.index(name)

    def type_names(self) -> Sequence[str]:
        return [(self._library.ggml_type_name(i) or b"").decode() for i in range(llama_cpp.GGML_TYPE_COUNT)]
