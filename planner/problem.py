"""What is to be decided and what everything costs: units, and the seconds of every use of a weight on every lane."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .errors import AtsplanError
from .measurements import Contention, HostTiming, Profile, WeightUse
from .memory import KV_GRANULE, decided, padding_bytes, vram_bytes
from .units import MIB
from .workload import Workload

_PerThreadCount = TypeVar("_PerThreadCount", Contention, HostTiming)

_MAX_SLOWDOWN = 1000.0  # more is no measurement
_CORE_CACHE_BYTES = 1 * MIB  # of one core alone; profiles know the shared cache only
_COMPETING = 0.05  # of the link's rate that it loses to a CPU that reads weights from the same memory
_MAX_INPUTS = 8  # a traced weight lists no more; the list may then lack the nearest ones


@dataclass(frozen=True)
class Unit:
    """Weights that are placed as one: a weight with all its uses, or the experts of one layer."""

    uses: tuple[int, ...]  # indices into Profile.weights, in order of use
    size_bytes: int  # in host memory
    vram_bytes: int
    is_expert: bool


@dataclass(frozen=True)
class ExpertStep:
    """What a token is expected to need where a layer's experts are computed one by one: all lanes start together."""

    seconds: float  # until the last lane is done
    cpu_seconds: float
    link_seconds: float
    gpu_seconds: float
    link_bytes: float
    n_resident: float  # routed experts by place
    n_streamed: float
    n_cpu: float


@dataclass(frozen=True)
class Costs:
    """Seconds per use of a weight (parallel to Profile.weights) for a batch of `n_tokens`, nothing else running.

    `gpu_before` is the time of the nodes without weights that precede the use; they are always computed on the GPU.
    """

    n_tokens: int
    n_threads: int
    cpu: tuple[float, ...]
    gpu: tuple[float, ...]
    gpu_before: tuple[float, ...]
    link: tuple[float, ...]
    down: tuple[float, ...]  # from the GPU having the input until the CPU can start
    up: tuple[float, ...]  # from the CPU having the output until the GPU can go on
    host_launch: float  # of the thread that computes on the CPU: starting GPU nodes
    host_stream: float  # likewise, queueing a streamed weight
    host_crossing: float  # likewise, queueing an activation's way down and up
    cpu_slowdown: float  # factor while the link is busy all the time
    link_slowdown: float  # factor while the CPU is busy all the time
    host_cold: tuple[float, float, float] = (0.0, 0.0, 0.0)  # what those three take longer with caches full of weights
    coldness: tuple[float, ...] = ()  # the part of a core's cache that computing a use on the CPU fills
    padding: tuple[float, ...] = ()  # of `link`: copies of the zeros behind weights, queued on their own; () if none
    launch_gap: float = 0.0  # of the GPU, per launch
    handshake: float = 0.0  # from a copy to a launch and from a launch to a copy, together
    expert_steps: Mapping[tuple[int, ...], ExpertStep] = field(default_factory=dict)  # by the uses of a CPU step


@dataclass(frozen=True)
class Graph:
    """The uses of weights in execution order, as the simulator needs them."""

    inputs: tuple[tuple[int, ...], ...]  # nearest earlier uses that each one depends on
    leaves_cpu: tuple[bool, ...]  # the next operation on this result is one that only the GPU computes
    is_terminal: tuple[bool, ...]  # nothing depends on it: computed for the last token of a batch only
    ring_bytes: tuple[int, ...]  # what a copy takes in the ring


def find_units(weights: Sequence[WeightUse]) -> tuple[Unit, ...]:
    """Return the units to decide about, in order of first use."""
    members: dict[object, list[int]] = {}
    n_products = 0  # before every layer's experts comes at least its router
    for index, (weight, is_decided) in enumerate(zip(weights, decided(weights), strict=True)):
        n_products += weight.op == "MUL_MAT"
        if is_decided:
            key = n_products if weight.op == "MUL_MAT_ID" else weight.name
            members.setdefault(key, []).append(index)
    units = []
    for uses in members.values():
        distinct = {weights[use].name: weights[use] for use in uses}.values()
        units.append(
            Unit(
                uses=tuple(uses),
                size_bytes=sum(weight.size_bytes for weight in distinct),
                vram_bytes=sum(vram_bytes(weight) for weight in distinct),
                is_expert=weights[uses[0]].op == "MUL_MAT_ID",
            )
        )
    return tuple(units)


def build_graph(weights: Sequence[WeightUse]) -> Graph:
    """Return what depends on what. See Graph."""
    inputs = _resolve_inputs(weights)
    leaves_cpu = [False] * len(weights)
    is_terminal = [True] * len(weights)
    for index, weight in enumerate(weights):
        # Between a product and its operand, an element-wise node (the activation between up and down) can run on the
        # CPU. Attention joins three results and changes their size.
        elementwise = len(_operands(weights, inputs[index], index)) <= 2
        for source in inputs[index]:
            is_terminal[source] = False
            if not elementwise or weights[source].output_bytes != weight.input_bytes:
                leaves_cpu[source] = True
    return Graph(
        inputs=inputs,
        leaves_cpu=tuple(leaves_cpu),
        is_terminal=tuple(last and weight.op == "MUL_MAT" for last, weight in zip(is_terminal, weights, strict=True)),
        ring_bytes=tuple(-(-vram_bytes(weight) // 256) * 256 for weight in weights),
    )


def costs(profile: Profile, graph: Graph, n_tokens: int, n_threads: int, n_past: float | None = None) -> Costs:
    """Return what everything costs at this batch size, linear between 1 and the profile's n_ubatch.

    `n_past` tokens come before, on average over the batches; by default the context is full.
    Raises AtsplanError naming what the profile lacks.
    """
    kernels = Kernels(profile)
    weights = profile.weights
    tokens = [1 if last else n_tokens for last in graph.is_terminal]
    uses = range(len(weights))
    crossing = _crossing(profile, n_threads)
    copy = _copy(profile)
    contention = _nearest(profile.contention, n_threads) or Contention(n_threads, 1.0, 1.0, 1.0, 1.0)
    warm, cold = _host(profile, n_threads)
    is_decided = decided(weights)
    padding = [copy(padding_bytes(weights[i])) if is_decided[i] and padding_bytes(weights[i]) else 0.0 for i in uses]
    return Costs(
        n_tokens=n_tokens,
        n_threads=n_threads,
        cpu=tuple(kernels.seconds(weights[i], "cpu", tokens[i], n_threads) if is_decided[i] else 0.0 for i in uses),
        gpu=tuple(kernels.seconds(weights[i], "gpu", tokens[i], 0) if weights[i].is_product else 0.0 for i in uses),
        gpu_before=_spread_glue(profile, graph, n_tokens, n_past),
        link=tuple(copy(weights[i].size_bytes) + padding[i] if is_decided[i] else 0.0 for i in uses),
        down=tuple(crossing(weights[i].input_bytes * tokens[i]) / 2 for i in uses),
        up=tuple(crossing(weights[i].output_bytes * tokens[i]) / 2 for i in uses),
        host_launch=warm[0],
        host_stream=warm[1],
        host_crossing=warm[2],
        cpu_slowdown=_ratio(contention.cpu_alone, contention.cpu_while_link_busy),
        link_slowdown=_ratio(contention.link_alone, contention.link_while_cpu_busy),
        host_cold=cold,
        coldness=tuple(_active_bytes(weight) / max(1, n_threads) / _CORE_CACHE_BYTES for weight in weights),
        padding=tuple(padding) if any(padding) else (),
        launch_gap=profile.queue.launch.median if profile.queue else 0.0,
        handshake=profile.queue.handshake.median if profile.queue else 0.0,
    )


def mean_past(workload: Workload) -> tuple[float, float]:
    """Return how many tokens come before a batch of the prompt, and before a generated token, on average."""
    n_prompt = workload.n_prompt_tokens
    return max(0, n_prompt - workload.n_ubatch) / 2, n_prompt + workload.n_generated_tokens / 2


def _resolve_inputs(weights: Sequence[WeightUse]) -> tuple[tuple[int, ...], ...]:
    """Return the inputs of every use. Where the trace was cut short, the nearest ones are filled in.

    Along the residual stream everything depends on everything before. Neighbours with the same cut list are siblings
    (query, key and value; gate and up) and do not depend on each other. A trace looks through norms: a product with
    the inputs of the norm before it depends on that norm. What has no inputs depends on the token embedding.
    """
    resolved: list[tuple[int, ...]] = []
    last_product = last_norm = -1
    before_norm: tuple[int, ...] = ()
    embedding = tuple(index for index, weight in enumerate(weights) if weight.is_input)[:1]
    for index, weight in enumerate(weights):
        inputs = tuple(i for i in weight.inputs if 0 <= i < index)
        if not inputs and not weight.is_input and embedding and embedding[0] < index:
            inputs = embedding
        is_product = weight.op in ("MUL_MAT", "MUL_MAT_ID")
        if len(inputs) >= _MAX_INPUTS:
            is_sibling = last_product >= 0 and weights[last_product].inputs == weight.inputs
            inputs = resolved[last_product] if is_sibling else (last_product,)
        if is_product:
            if last_norm >= 0 and inputs == before_norm:
                inputs = (last_norm,)
            last_product = index
        elif inputs:
            last_norm, before_norm = index, inputs
        resolved.append(inputs)
    return tuple(resolved)


def _operands(weights: Sequence[WeightUse], inputs: Sequence[int], index: int) -> list[int]:
    """Return the inputs that are multiplied with. The results of a layer's own experts are; its routing is not."""
    own = [
        source
        for source in inputs
        if weights[index].op == weights[source].op == "MUL_MAT_ID"
        and not any(weight.op == "MUL_MAT" for weight in weights[source:index])
    ]
    return own or list(inputs)


class Kernels:
    """Times of the profile's kernels, for any number of tokens or experts.

    Some kinds of products read weights faster than others while they are measured, for milliseconds. Where the memory
    is what CPU and copies compete for, none does so for longer than the heaviest kind, which was measured with copies.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def _reading_seconds(self, n_bytes: float, n_threads: int) -> float:
        """Return the least time in which the CPU reads so many bytes of weights; 0 where nothing limits it."""
        rates = _nearest(self._profile.contention, n_threads)
        competes = rates is not None and rates.link_while_cpu_busy < (1 - _COMPETING) * rates.link_alone
        return n_bytes / rates.cpu_alone if rates and competes and rates.cpu_alone > 0 else 0.0

    def seconds(self, weight: WeightUse, device: str, n_tokens: int, n_threads: int) -> float:
        low = self._profile.kernel_seconds(weight, device, 1, n_threads)
        if device == "cpu":
            low = max(low, self._reading_seconds(_active_bytes(weight), n_threads))
        if n_tokens == 1:
            return low
        n_ubatch = self._profile.n_ubatch
        high = self._profile.kernel_seconds(weight, device, n_ubatch, n_threads)
        line = low + (high - low) * (n_tokens - 1) / max(1, n_ubatch - 1)
        if not weight.n_experts_used:
            return line
        # A few tokens read nearly as many experts as they are routed to, long before they compute much.
        n_experts = weight.shape[2]
        n_touched = n_experts * (1 - (1 - weight.n_experts_used / n_experts) ** n_tokens)
        return max(line, min(low * n_touched / weight.n_experts_used, high))

    def expert_seconds(self, weight: WeightUse, n_threads: int) -> Curve:
        """Return CPU seconds for one token as a function of the number of experts computed."""
        kind = weight.kernel
        one = self._reading_seconds(weight.size_bytes / weight.shape[2], n_threads)
        points = [
            (k.n_experts_used, max(k.seconds.median, k.n_experts_used * one))
            for k in self._profile.kernels
            if (k.kernel._replace(n_experts_used=kind.n_experts_used), k.device, k.n_tokens, k.n_threads)
            == (kind, "cpu", 1, n_threads)
        ]
        return Curve([(0.0, 0.0), *points])


def _spread_glue(profile: Profile, graph: Graph, n_tokens: int, n_past: float | None) -> tuple[float, ...]:
    """Spread the time of the nodes without weights evenly over the places where some must be.

    Those are norms and other small weights, and what joins results that left the CPU's reach (attention).
    """
    total = _glue(profile, n_tokens, n_past)
    is_decided = decided(profile.weights)
    places = []
    for index, weight in enumerate(profile.weights):
        follows_another = index > 0 and is_decided[index - 1] and graph.inputs[index] != graph.inputs[index - 1]
        operands = _operands(profile.weights, graph.inputs[index], index)
        joins = follows_another and any(graph.leaves_cpu[source] for source in operands)
        places.append(not weight.is_input and (joins or not is_decided[index]))
    share = total / max(1, sum(places))
    return tuple(share if place else 0.0 for place in places)


def _glue(profile: Profile, n_tokens: int, n_past: float | None) -> float:
    """Return the time of the nodes without weights: lines over the tokens that attention reads, and the batch's."""
    n_read = profile.n_context
    if n_past is not None:
        n_read = min(n_read, math.ceil((n_past + n_tokens) / KV_GRANULE) * KV_GRANULE)
    by_batch = [
        (batch, Curve((timing.n_context, timing.seconds.median) for timing in profile.glue if timing.n_tokens == batch))
        for batch in sorted({timing.n_tokens for timing in profile.glue})
    ]
    return Curve((batch, seconds(n_read)) for batch, seconds in by_batch)(n_tokens)


def _host(profile: Profile, n_threads: int) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return what a launch, a stream and a crossing take with warm caches, and what cold ones add."""
    host = _nearest(profile.host, n_threads)
    if host is None:
        return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
    cold = [host.launch.median, host.stream.median, host.crossing.median]
    measured = [host.warm_launch, host.warm_stream, host.warm_crossing]
    warm = [min(one.median, worst) if one else worst for one, worst in zip(measured, cold, strict=True)]
    launch, stream, crossing = (worst - best for best, worst in zip(warm, cold, strict=True))
    return (warm[0], warm[1], warm[2]), (launch, stream, crossing)


def _active_bytes(weight: WeightUse) -> float:
    """Return what one token reads of the weight."""
    return weight.size_bytes * (weight.n_experts_used / weight.shape[2] if weight.n_experts_used else 1.0)


def _crossing(profile: Profile, n_threads: int) -> Curve:
    same = [timing for timing in profile.crossings if timing.n_threads == n_threads]
    return Curve((timing.activation_bytes, timing.seconds.median) for timing in same or profile.crossings)


def _copy(profile: Profile) -> Curve:
    used = [timing for timing in profile.link if timing.direction == "h2d" and timing.pinned]
    if not used:
        raise AtsplanError("The profile has no link rate from pinned memory.", "Profile again with --force.")
    return Curve((timing.size_bytes, timing.seconds.median) for timing in used)


def _nearest(measured: Sequence[_PerThreadCount], n_threads: int) -> _PerThreadCount | None:
    """Return the measurement for this thread count, else for the nearest, else None."""
    return min(measured, key=lambda m: (abs(m.n_threads - n_threads), m.n_threads), default=None)


def _ratio(alone: float, busy: float) -> float:
    """Return how many times longer something takes. What is measured below 1 is noise; 0 means not measured."""
    return min(max(1.0, alone / busy), _MAX_SLOWDOWN) if alone > 0 and busy > 0 else 1.0


class Curve:
    """The line through (x, y) points, extended beyond the outer ones, never below 0. Equal x count with their mean."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        grouped: dict[float, list[float]] = {}
        for x, y in points:
            grouped.setdefault(x, []).append(y)
        self._x = sorted(grouped)
        self._y = [sum(grouped[x]) / len(grouped[x]) for x in self._x]

    def __call__(self, x: float) -> float:
        """Return y at `x`; 0 if there are no points, a constant if there is one."""
        if len(self._x) < 2:
            return self._y[0] if self._y else 0.0
        right = min(max(bisect_left(self._x, x), 1), len(self._x) - 1)
        x0, x1, y0, y1 = self._x[right - 1], self._x[right], self._y[right - 1], self._y[right]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
