"""Experts computed one by one: what the engine splits, how many experts it streams, and what that is expected to take.

It mirrors the native helper's expert_block, expert_cache, expert_division and expert_lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .measurements import ExpertTiming, Profile, WeightUse, heaviest_kind
from .plan import ExpertPolicy, WeightClass
from .problem import Costs, ExpertStep, Kernels, Unit
from .units import KIB

_MAX_MATRICES = 3
_MAX_USED = 32
_MAX_BATCH_TOKENS = 128
_MAX_BATCH_COLUMNS = 1024  # tokens times experts used
_MAX_STREAMED = 128
_WORTH_CACHING = 2.0  # of the time for all experts, to copy one more
_PADDING_BYTES = 4 * KIB  # of a tensor: alignment, and the last row of quantised ones
PREDICTION_BYTES = 256 * KIB  # for the prediction of a layer's routing; never in the ring


@dataclass(frozen=True)
class ExpertBlock:
    """Products of one layer that the engine decodes expert by expert: one input, and one result leaves them."""

    uses: tuple[int, ...]  # indices into Profile.weights, neighbours
    unit: int
    n_experts: int
    n_used: int
    matrix_bytes: tuple[int, ...]  # of one expert
    family: tuple[object, ...]  # blocks of equal families share VRAM
    scratch_bytes: int  # per family

    @property
    def expert_bytes(self) -> int:
        return sum(self.matrix_bytes)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest batch that is split."""
        return min(_MAX_BATCH_TOKENS, _MAX_BATCH_COLUMNS // self.n_used)

    def n_touched(self, n_tokens: int) -> float:
        """Return how many experts so many tokens are expected to use, if all are used equally often."""
        return self.n_experts * (1 - (1 - self.n_used / self.n_experts) ** n_tokens)

    @property
    def n_spares(self) -> int:
        """Slots for one use: those of a block, and room to copy some of the next one's ahead."""
        return self.n_used + max(1, self.n_used // 2)


@dataclass(frozen=True)
class ExpertRates:
    """What a block's experts cost one token, in seconds."""

    cpu: tuple[float, ...]  # n experts together, n = 0 ... n_used, while nothing is copied
    cpu_slowdown: float  # factor while experts are copied
    link: float  # per streamed expert
    latency: float  # the GPU's share beyond its copies, its computing included
    gpu: float  # its computing alone

    def cpu_seconds(self, n_cpu: int, n_streamed: int) -> float:
        return self.cpu[n_cpu] * (self.cpu_slowdown if n_streamed else 1.0)

    def gpu_seconds(self, n_streamed: int) -> float:
        """Return the time of the GPU's share, from the routing being known."""
        return self.latency + n_streamed * self.link

    def n_to_stream(self, n_missing: int) -> int:
        """Return how many of the experts that are not in VRAM to stream, so that link and CPU end together."""

        def seconds(n: int) -> float:
            return max(self.gpu_seconds(n), self.cpu_seconds(n_missing - n, n))

        return min(range(n_missing + 1), key=seconds)

    def fills_cache(self, n_used: int) -> bool:
        """Tell whether experts get into the cache: they are streamed, or one now and then costs little."""
        return self.n_to_stream(n_used) > 0 or self.gpu_seconds(1) <= _WORTH_CACHING * self.cpu_seconds(n_used, 0)


def find_blocks(weights: Sequence[WeightUse], units: Sequence[Unit]) -> tuple[ExpertBlock, ...]:
    """Return the blocks among the experts of every layer, in order of use."""
    blocks = []
    for index, unit in enumerate(units):
        runs: list[list[int]] = []
        for use in unit.uses if unit.is_expert else ():
            if not runs or use != runs[-1][-1] + 1:  # a weight in between (a bias) is computed on the GPU
                runs.append([])
            runs[-1].append(use)
        blocks += [_block(weights, run, index) for run in runs if _is_block(weights, run)]
    return tuple(blocks)


def _is_block(weights: Sequence[WeightUse], uses: Sequence[int]) -> bool:
    first, last = weights[uses[0]], weights[uses[-1]]
    same = {(weights[use].n_experts_used, weights[use].shape[2]) for use in uses}
    return (
        len({weights[use].name for use in uses}) == len(uses) <= _MAX_MATRICES
        and first.n_experts_used <= _MAX_USED
        and len(same) == 1
        and set(uses[:-1]) <= set(last.inputs)  # only the last result leaves the block
        and all(weights[use].input_bytes == first.input_bytes or set(uses) & set(weights[use].inputs) for use in uses)
        and first.input_bytes == first.shape[0] * 4  # one column for all experts
        and last.shape[1] % 4 == 0
    )


def _block(weights: Sequence[WeightUse], uses: Sequence[int], unit: int) -> ExpertBlock:
    used = [weights[use] for use in uses]
    first, n_experts = used[0], used[0].shape[2]
    results = 2 * sum(weight.output_bytes for weight in used)  # of the products, and of activations between them
    n_tokens = 1 + min(_MAX_BATCH_TOKENS, _MAX_BATCH_COLUMNS // first.n_experts_used)  # one alone, or several
    inputs = n_tokens * (first.input_bytes + 4 * first.n_experts_used)
    return ExpertBlock(
        uses=tuple(uses),
        unit=unit,
        n_experts=n_experts,
        n_used=first.n_experts_used,
        matrix_bytes=tuple(weight.size_bytes // n_experts for weight in used),
        family=(first.n_experts_used, *((weight.type, weight.shape[:2]) for weight in used)),
        scratch_bytes=inputs + results + (3 * len(used) + 4) * _PADDING_BYTES,
    )


@dataclass(frozen=True)
class Experts:
    """A model's blocks and what their experts cost at one number of threads.

    `frequencies` are uses per token of every expert of every block; None where all are used equally often.
    """

    blocks: tuple[ExpertBlock, ...]
    rates: tuple[ExpertRates, ...]  # per block
    frequencies: tuple[tuple[float, ...] | None, ...]  # per block

    def active(self, classes: Sequence[WeightClass]) -> list[int]:
        """Return the blocks (by index) that are split under these classes per use."""
        return [i for i, block in enumerate(self.blocks) if all(classes[use] == "cpu" for use in block.uses)]

    def vram_bytes(self, active: Iterable[int], cache_bytes: int) -> int:
        """Return what the engine allocates: cached experts, room for streamed ones, scratch."""
        total = 0
        for members, n_slots in self._slots(active, cache_bytes):
            block = self.blocks[members[0]]
            total += (n_slots + block.n_spares) * block.expert_bytes + block.scratch_bytes
        return total + PREDICTION_BYTES if total else 0

    def cache_bytes(self, active: Sequence[int], room_bytes: int) -> int:
        """Return the largest useful cache for which `vram_bytes` stays within the room; negative if nothing fits."""
        everything = sum(self.blocks[i].n_experts * self.blocks[i].expert_bytes for i in active)
        return min(room_bytes - self.vram_bytes(active, 0), everything)

    def steps(self, classes: Sequence[WeightClass], cache_bytes: int) -> dict[tuple[int, ...], ExpertStep]:
        """Return what every split block is expected to take."""
        steps = {}
        for members, n_slots in self._slots(self.active(classes), cache_bytes):
            for i, hits in zip(members, self._expected_hits(members, n_slots), strict=True):
                block = self.blocks[i]
                fraction = round(min(1.0, hits / block.n_used), 4)
                steps[block.uses] = expected_step(self.rates[i], block.n_used, block.expert_bytes, fraction)
        return steps

    def batch_steps(
        self, classes: Sequence[WeightClass], cache_bytes: int, batch: Costs
    ) -> dict[tuple[int, ...], ExpertStep]:
        """Return what every split block is expected to take for the tokens of `batch`, several of them."""
        steps = {}
        for members, n_slots in self._slots(self.active(classes), cache_bytes):
            for i, hits in zip(members, self._expected_hits(members, n_slots), strict=True):
                block = self.blocks[i]
                if batch.n_tokens <= block.max_tokens:
                    steps[block.uses] = _batch_step(block, self.rates[i], batch, hits / block.n_used, n_slots)
        return steps

    def relaxed(self, unit: int, weight: float, *, may_stream: bool) -> list[tuple[float, int]]:
        """Return (seconds, bytes) of pieces of a unit's experts: what each takes at least, in VRAM nothing.

        `weight` is that of CPU seconds, the rest that of link seconds.
        """
        pieces = []
        for block, rates, uses in zip(self.blocks, self.rates, self.frequencies, strict=True):
            if block.unit != unit:
                continue
            seconds = weight * min(rates.cpu[n] / n for n in range(1, block.n_used + 1))
            if may_stream:
                seconds = min(seconds * rates.cpu_slowdown, (1 - weight) * rates.link)
            if uses is None:
                pieces.append((seconds * block.n_used, block.n_experts * block.expert_bytes))
            else:
                pieces += [(seconds * n_uses, block.expert_bytes) for n_uses in uses]
        return pieces

    def policy(self, classes: Sequence[WeightClass], cache_bytes: int) -> ExpertPolicy | None:
        """Return what the engine is told; None if it splits nothing."""
        active = self.active(classes)
        if not active:
            return None

        def mean(seconds: Iterable[float]) -> float:
            return math.fsum(seconds) / len(active)

        lines = [self._cpu_line(i) for i in active]
        return ExpertPolicy(
            cache_bytes=cache_bytes,
            cpu_seconds=mean(slope for slope, _ in lines),
            cpu_base_seconds=mean(base for _, base in lines),
            link_seconds=mean(self.rates[i].link for i in active),
            link_latency_seconds=mean(self.rates[i].latency for i in active),
        )

    def _cpu_line(self, block: int) -> tuple[float, float]:
        """Return (seconds per expert, seconds beyond that): the line through one expert and all, during copies."""
        n_used, rates = self.blocks[block].n_used, self.rates[block]
        one, every = rates.cpu_seconds(1, 1), rates.cpu_seconds(n_used, 1)
        slope = (every - one) / (n_used - 1) if n_used > 1 and every > one else one
        return slope, max(0.0, one - slope)

    def _slots(self, active: Iterable[int], cache_bytes: int) -> list[tuple[list[int], int]]:
        """Return per family its active blocks and their slots in the cache: equally many for every block."""
        families: dict[tuple[object, ...], list[int]] = {}
        for i in active:
            families.setdefault(self.blocks[i].family, []).append(i)
        all_bytes = sum(self.blocks[i].expert_bytes for members in families.values() for i in members)
        return [
            (
                members,
                min(int(len(members) / all_bytes * cache_bytes), len(members) * self.blocks[members[0]].n_experts),
            )
            for members in families.values()
        ]

    def _expected_hits(self, members: Sequence[int], n_slots: int) -> list[float]:
        """Return per block how many routed experts of a token are cached, when the most used ones of all are."""
        block = self.blocks[members[0]]
        n_used, n_experts = block.n_used, block.n_experts
        if not self.rates[members[0]].fills_cache(n_used):
            return [0.0] * len(members)
        if any(self.frequencies[i] is None for i in members):
            return [n_used * n_slots / (len(members) * n_experts)] * len(members)
        uses = np.array([self.frequencies[i] for i in members]).ravel()
        cached = np.argsort(-uses, kind="stable")[:n_slots]
        hits = np.bincount(cached // n_experts, weights=uses[cached], minlength=len(members))
        return [float(value) for value in hits]


@lru_cache(maxsize=4096)
def expected_step(rates: ExpertRates, n_used: int, expert_bytes: int, hit_fraction: float) -> ExpertStep:
    """Return the mean over tokens, when each routed expert is in VRAM with this probability."""
    seconds = cpu = streamed = n_cpu = 0.0
    for n_missing in range(n_used + 1):
        share = math.comb(n_used, n_missing) * (1 - hit_fraction) ** n_missing * hit_fraction ** (n_used - n_missing)
        k = rates.n_to_stream(n_missing)
        on_cpu = rates.cpu_seconds(n_missing - k, k)
        seconds += share * max(rates.gpu_seconds(k), on_cpu)  # the GPU's share is there even if it is empty
        cpu += share * on_cpu
        streamed += share * k
        n_cpu += share * (n_missing - k)
    return ExpertStep(
        seconds=seconds,
        cpu_seconds=cpu,
        link_seconds=streamed * rates.link,
        gpu_seconds=rates.gpu,
        link_bytes=streamed * expert_bytes,
        n_resident=n_used * hit_fraction,
        n_streamed=streamed,
        n_cpu=n_cpu,
    )


def _batch_step(block: ExpertBlock, rates: ExpertRates, batch: Costs, hit_fraction: float, n_slots: int) -> ExpertStep:
    n_touched = block.n_touched(batch.n_tokens)
    n_resident = min(hit_fraction * n_touched, n_slots)
    n_missing = n_touched - n_resident
    gpu = sum(batch.gpu[use] for use in block.uses)
    latency = rates.latency - rates.gpu + gpu
    on_cpu = sum(batch.cpu[use] for use in block.uses) / n_touched  # per expert, with its share of the tokens
    limit = int(min(n_missing, _MAX_STREAMED, n_slots - n_resident + block.n_spares))

    def cpu_seconds(k: int) -> float:
        return (n_missing - k) * on_cpu * (rates.cpu_slowdown if k else 1.0)

    def seconds(k: int) -> float:
        return max(latency + k * rates.link, cpu_seconds(k))

    best = min(range(limit + 1), key=seconds)
    return ExpertStep(
        seconds=seconds(best),
        cpu_seconds=cpu_seconds(best),
        link_seconds=best * rates.link,
        gpu_seconds=gpu,
        link_bytes=best * block.expert_bytes,
        n_resident=n_resident,
        n_streamed=best,
        n_cpu=n_missing - best,
    )


def find_experts(profile: Profile, units: Sequence[Unit], costs: Costs) -> Experts | None:
    """Return the model's experts at the thread count of `costs`; None if it has none, or they were not measured."""
    blocks = find_blocks(profile.weights, units)
    lines = copy_lines(profile)
    if not blocks or any(block.matrix_bytes not in lines for block in blocks):
        return None
    kernels = Kernels(profile)
    rates = []
    for block in blocks:
        curves = [kernels.expert_seconds(profile.weights[use], costs.n_threads) for use in block.uses]
        latency, link = lines[block.matrix_bytes]
        gpu = sum(costs.gpu[use] for use in block.uses)
        rates.append(
            ExpertRates(
                cpu=tuple(sum(curve(n) for curve in curves) for n in range(block.n_used + 1)),
                cpu_slowdown=costs.cpu_slowdown,
                link=link * costs.link_slowdown,
                latency=latency + gpu,
                gpu=gpu,
            )
        )
    return Experts(blocks, tuple(rates), tuple(_frequencies(profile, units, block) for block in blocks))


def copy_lines(profile: Profile) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return (latency, seconds per expert) of streaming experts while the CPU is idle, by the bytes of their matrices.

    Their copies are measured alone, each time waiting for the result. The engine copies as fast as long copies by the
    same kernel are, which are measured against the CPU if experts are the heaviest weights: those of 3 MB with 50 GB/s
    instead of 39 on an H200.
    """
    rate = 0.0
    if profile.experts and heaviest_kind(profile.weights).n_experts_used:
        rate = max((rates.link_alone for rates in profile.contention), default=0.0)
    lines = {}
    for matrix_bytes in {timing.matrix_bytes for timing in profile.experts}:
        latency, seconds = fit_line(profile.experts, matrix_bytes)
        if sum(matrix_bytes) < seconds * rate:
            seconds = sum(matrix_bytes) / rate
            first = min((t for t in profile.experts if t.matrix_bytes == matrix_bytes), key=lambda t: t.n_experts)
            latency = max(0.0, first.seconds.median - first.n_experts * seconds)
        lines[matrix_bytes] = latency, seconds
    return lines


def fit_line(timings: Iterable[ExpertTiming], matrix_bytes: tuple[int, ...]) -> tuple[float, float]:
    """Return (latency, seconds per expert), not below 0: the least-squares line through the copies of such experts."""
    points = [(t.n_experts, t.seconds.median) for t in timings if t.matrix_bytes == matrix_bytes]
    mean_n = math.fsum(n for n, _ in points) / len(points)
    mean = math.fsum(seconds for _, seconds in points) / len(points)
    spread = math.fsum((n - mean_n) ** 2 for n, _ in points)
    slope = math.fsum((n - mean_n) * (seconds - mean) for n, seconds in points) / spread if spread else mean / mean_n
    return max(0.0, mean - slope * mean_n), max(0.0, slope)


def _frequencies(profile: Profile, units: Sequence[Unit], block: ExpertBlock) -> tuple[float, ...] | None:
    names = {profile.weights[use].name for use in units[block.unit].uses}
    for layer in profile.routing.layers if profile.routing else ():
        if layer.weight in names and len(layer.counts) == block.n_experts and sum(layer.counts) > 0:
            return tuple(count * block.n_used / sum(layer.counts) for count in layer.counts)
    return None
