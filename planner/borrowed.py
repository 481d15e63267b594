"""Plan for a machine that one does not have: a model's graph with the rates of another model's profile from there.

A kernel's time is taken from those of the same kind and type: linear in the bytes it reads for one token, and in its
arithmetic for a batch. Copies, crossings and contention belong to the machine and are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from .errors import MismatchError
from .experts import find_blocks, fit_line
from .measurements import ExpertTiming, GlueTiming, KernelTiming, Profile, Series, WeightUse
from .memory import fixed_memory
from .problem import build_graph, find_units
from .workload import Workload

_SHORTEST_SECONDS = 1e-9  # of a kernel; less is no measurement


def borrow(model: Profile, machine: Profile) -> Profile:
    """Return what a profile of `model`'s model on `machine`'s machine would roughly say.

    Of `model` only the graph and the memory are used, not its timings. Raises MismatchError if the two profiles have
    different micro-batches or are of different llama.cpp versions, whose graphs differ.
    """
    if model.n_ubatch != machine.n_ubatch:
        raise MismatchError(
            f"{model.model.name} was profiled with micro-batches of {model.n_ubatch} tokens, {machine.model.name} with "
            f"{machine.n_ubatch}.",
            f"Profile it again with --ubatch {machine.n_ubatch}.",
        )
    versions = {profile.software.llama_cpp_python for profile in (model, machine)}
    if len(versions) > 1:
        raise MismatchError(
            f"The profiles are of different versions of llama-cpp-python: {' and '.join(sorted(versions))}.",
            "Other versions build other graphs: profile again with the version of the other machine.",
        )
    rates = _Rates(machine)
    kernels = tuple(_kernels(model, machine, rates))
    return replace(
        machine,
        model=model.model,
        n_context=model.n_context,
        weights=model.weights,
        kernels=kernels,
        glue=tuple(_glue(model, machine, rates.gpu_bytes_per_second())),
        memory=model.memory,
        experts=tuple(_experts(model, machine)),
        routing=model.routing,
        rates_from=machine.model.name,
        notes=tuple(
            f"{machine.model.name} has no {kind}: its times are estimated from those of {nearest}."
            for kind, nearest in sorted(rates.replaced.items())
        ),
    )


class _Rates:
    """Lines through a profile's kernels. `replaced` collects the types that it lacks, and what stands in for each."""

    def __init__(self, profile: Profile) -> None:
        graph = build_graph(profile.weights)
        sizes = {(weight.type, weight.shape): weight.size_bytes for weight in profile.products}
        # Computed for the last token of a batch only, whatever the number of tokens in its timing.
        terminal = {(w.op, w.shape) for w, last in zip(profile.weights, graph.is_terminal, strict=True) if last}
        self._points = [
            (kernel, _work(kernel.shape, sizes[kernel.type, kernel.shape], kernel.n_experts_used, kernel.n_tokens))
            for kernel in profile.kernels
            if (kernel.type, kernel.shape) in sizes
            and (kernel.n_tokens == 1 or (kernel.op, kernel.shape) not in terminal)
        ]
        self._bits = {k.type: _bits(sizes[k.type, k.shape], k.shape) for k, _ in self._points}
        self.replaced: dict[str, str] = {}
        self._line = cache(self._fit)

    def gpu_bytes_per_second(self) -> float:
        """Return the highest rate at which the GPU reads weights; infinite if none was measured."""
        decode = [(k, work) for k, work in self._points if (k.device, k.n_tokens) == ("gpu", 1)]
        return max((work / _seconds(kernel) for kernel, work in decode), default=math.inf)

    def seconds(self, weight: WeightUse, n_experts: int, device: str, n_tokens: int, n_threads: int) -> float:
        latency, slope = self._line(weight.op, self._stand_in(weight), device, n_tokens, n_threads)
        return latency + slope * _work(weight.shape, weight.size_bytes, n_experts, n_tokens)

    def _stand_in(self, weight: WeightUse) -> str:
        """Return the weight's type, or the measured one with the most similar size."""
        if weight.type not in self._bits and self._bits:
            own = _bits(weight.size_bytes, weight.shape)
            self.replaced[weight.type] = min(self._bits, key=lambda kind: (abs(math.log(self._bits[kind] / own)), kind))
        return self.replaced.get(weight.type, weight.type)

    def _fit(self, op: str, kind: str, device: str, n_tokens: int, n_threads: int) -> tuple[float, float]:
        """Return (latency, seconds per unit of work) of such kernels, if possible of this type and operation."""
        here = [
            (k.op, k.type, work, _seconds(k))
            for k, work in self._points
            if (k.device, k.n_tokens, k.n_threads) == (device, n_tokens, n_threads)
        ]
        if not here:
            raise MismatchError(
                f"The profile has no times for batches of {n_tokens} tokens on the {device.upper()}.",
                "Take another profile of that machine.",
            )
        of_kind = [point for point in here if point[1] == kind] or here
        chosen = [point for point in of_kind if point[0] == op] or of_kind
        if len({work for _, _, work, _ in chosen}) > 1:
            return _relative_line([point[2:] for point in chosen])
        # One size tells no latency: take that of all kernels.
        _, per_work = _relative_line([point[2:] for point in chosen])
        seconds = per_work * chosen[0][2]
        latency = min(seconds, _relative_line([point[2:] for point in here])[0])
        return latency, (seconds - latency) / chosen[0][2]


def _kernels(model: Profile, machine: Profile, rates: _Rates) -> Iterator[KernelTiming]:
    graph = build_graph(model.weights)
    lanes = [("cpu", n) for n in machine.thread_counts]
    lanes += [("gpu", 0)] if machine.has_gpu else []
    kinds = {
        weight.kernel: (weight, last)
        for weight, last in zip(model.weights, graph.is_terminal, strict=True)
        if weight.is_product
    }
    for kind, (weight, is_terminal) in kinds.items():
        n_used = kind.n_experts_used
        for device, n_threads in lanes:
            for n_tokens in sorted({1, machine.n_ubatch}):
                n_computed = 1 if is_terminal else n_tokens
                fewer = {1, n_used // 2} - {0} if n_used and n_tokens == 1 and device == "cpu" else set()
                for n in sorted({n_used, *fewer}):
                    seconds = rates.seconds(weight, n, device, n_computed, n_threads)
                    timed = kind._replace(n_experts_used=n)
                    yield KernelTiming(*timed, device, n_tokens, n_threads, Series((seconds,)))


def _glue(model: Profile, machine: Profile, rate: float) -> Iterator[GlueTiming]:
    """Scale the nodes without weights: reading the KV cache to its size, a token's rest to layers, a batch to width."""
    layers = model.model.n_layers / max(1, machine.model.n_layers)
    for timing in machine.glue:
        n_context = timing.n_context
        if timing.n_tokens > 1:
            seconds = timing.seconds.median * layers * model.model.n_embd / max(1, machine.model.n_embd)
        else:
            n_context = model.n_context if n_context == machine.n_context else min(n_context, model.n_context)
            rest = max(0.0, timing.seconds.median - _context_bytes(machine, timing.n_context) / rate)
            seconds = rest * layers + _context_bytes(model, n_context) / rate
        yield GlueTiming(timing.n_tokens, n_context, Series((seconds,)))


def _context_bytes(profile: Profile, n_context: int) -> int:
    return fixed_memory(profile, Workload(n_context=n_context, n_ubatch=profile.n_ubatch)).context_bytes


def _experts(model: Profile, machine: Profile) -> Iterator[ExpertTiming]:
    """Scale copies of experts to their size. Without any the plan decodes a layer's experts together."""
    lines = {timing.matrix_bytes: fit_line(machine.experts, timing.matrix_bytes) for timing in machine.experts}
    if not lines:
        return
    latency = sum(latency for latency, _ in lines.values()) / len(lines)
    seconds_per_byte = sum(slope for _, slope in lines.values()) / max(1, sum(map(sum, lines)))
    kinds = {block.matrix_bytes: block.n_used for block in find_blocks(model.weights, find_units(model.weights))}
    for matrix_bytes, n_used in kinds.items():
        for n_experts in sorted({1, n_used}):
            seconds = latency + n_experts * sum(matrix_bytes) * seconds_per_byte
            yield ExpertTiming(matrix_bytes, n_experts, Series((seconds,)))


def _work(shape: Sequence[int], size_bytes: int, n_experts: int, n_tokens: int) -> float:
    """Return the bytes that one token reads, or the multiplications of a batch; at least 1."""
    share = n_experts / max(1, math.prod(shape[2:])) if n_experts else 1.0
    return max(1.0, share * (size_bytes if n_tokens == 1 else math.prod(shape) * n_tokens))


def _bits(size_bytes: int, shape: Sequence[int]) -> float:
    return max(1, 8 * size_bytes) / max(1, math.prod(shape))


def _seconds(kernel: KernelTiming) -> float:
    return max(kernel.seconds.median, _SHORTEST_SECONDS)


def _relative_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (intercept, slope), neither below 0, with the least sum of squared relative errors."""
    n = len(points)
    inverse = sum(1 / y for _, y in points)
    inverse_squares = sum(1 / y**2 for _, y in points)
    ratios = sum(x / y for x, y in points)
    ratio_squares = sum((x / y) ** 2 for x, y in points)
    mixed = sum(x / y**2 for x, y in points)
    determinant = inverse_squares * ratio_squares - mixed**2
    if n > 1 and determinant > 1e-9 * inverse_squares * ratio_squares:
        intercept = (inverse * ratio_squares - ratios * mixed) / determinant
        slope = (ratios * inverse_squares - inverse * mixed) / determinant
        if intercept >= 0 and slope >= 0:
            return intercept, slope
        if slope < 0:
            return inverse / inverse_squares, 0.0
    return 0.0, ratios / ratio_squares
