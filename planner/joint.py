"""The joint problem: VRAM, streaming or CPU for every unit, so that a token takes the least time in steady state.

A Lagrangian relaxation of the two pipes, CPU and link, gives a proven lower bound and the worth of a byte of VRAM. An
exact knapsack at that worth decides how many units of each kind are resident, for several ring sizes. Even patterns of
the rest, and then small changes to the best of them, are judged by the simulator.

A layer's experts in VRAM serve that layer only; the same bytes as a cache serve the most used experts of all layers.
Both are tried, and mixtures: the cache takes what residents leave. It lies in the ring, which only prompts use then, or
beside the ring if decoding streams something else as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .decode import DecodeProblem
from .knapsack import solve_placement
from .patterns import resident_patterns, stream_orders, take_turns
from .plan import WeightClass

_RING_SLOTS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # ring sizes to try, in units that are streamed
_PROMPT_SLOTS = 1.5
_CROSSING_WEIGHTS = (0.1, 0.7)  # how much crossings count when residents are chosen: how many will share one is open
_EAGERNESS = (0.95, 1.0, 1.05, 1.15)
_RING_RESERVES = (0.5, 0.7, 0.85, 1.0)
_N_SEARCHED = 2  # best candidates that are improved by small changes
_MIN_RINGS = 3  # most promising ring sizes that are searched, and more for small models
_RINGS_TIMES_UNITS = 500
_COMMON = 0.1  # share of all bytes from which on a kind of unit is worth a ring
_RESIDENT_SHARES = (0.0, 0.5)  # of the experts' layers that would fit: the rest of their VRAM becomes a cache
_MAX_CHANGES = 600  # per candidate
_SEARCHED_UNITS = 200_000  # likewise, times units; bounds the work the same way on every machine
_PICOSECONDS = 1e12

TotalSeconds = Callable[["Candidate"], float]


@dataclass(frozen=True)
class Candidate:
    classes: tuple[WeightClass, ...]  # per unit
    ring_bytes: int
    seconds: float  # per token
    cache_bytes: int | None = None  # of single experts; None: none are decoded one by one


def lower_bound(problem: DecodeProblem) -> tuple[float, float]:
    """Return seconds per token that no placement can beat at the measured rates, and the CPU pipe's weight there.

    For any weight w in [0, 1], a token takes at least w x (CPU work + GPU work that nothing can run beside)
    + (1 - w) x link work; the placement that minimises this is a fractional knapsack. The best w gives the bound.
    A plan that streams nothing has the CPU's full speed, so its bound counts as well.
    """
    low, high = 0.0, 1.0
    for _ in range(30):  # the bound is concave in w
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if _relaxed(problem, left) < _relaxed(problem, right):
            low = left
        else:
            high = right
    weight = (low + high) / 2
    undisturbed = replace(problem, costs=replace(problem.costs, cpu_slowdown=1.0))
    bound = min(_relaxed(problem, weight), _relaxed(undisturbed, 1.0, may_stream=False))
    return max(0.0, bound), weight  # rounding can end just below zero


def plain_hybrid(problem: DecodeProblem, ring_bytes: int) -> Candidate:
    """Return the best candidate that streams nothing while decoding.

    `ring_bytes` are kept free for prompts, and whatever no further unit fits into.
    """
    problem = replace(problem, experts=None)
    undisturbed = replace(problem, costs=replace(problem.costs, cpu_slowdown=1.0))
    counts = _resident_counts(undisturbed, 1.0, 1.0, ring_bytes)
    candidates = []
    for residents in _distinct(resident_patterns(problem.groups, counts)):
        classes = _classes(problem, residents, ())
        candidates.append(_candidate(problem, classes, problem.room_bytes(classes) if ring_bytes else 0))
    return min(candidates, key=lambda candidate: candidate.seconds)


def solve_joint(problem: DecodeProblem, weight: float, total_seconds: TotalSeconds) -> list[Candidate]:
    """Return candidates, the best by `total_seconds` (prompt and generated tokens together) first.

    `weight` is that of `lower_bound`. Deterministic.
    """
    if sum(unit.vram_bytes for unit in problem.units) <= problem.available_bytes:
        return [_candidate(problem, _classes(problem, set(range(len(problem.units))), ()), 0)]
    rings = sorted(ring_sizes(problem), key=lambda ring: total_seconds(_first_guess(problem, weight, ring)))
    n_rings = max(_MIN_RINGS, _RINGS_TIMES_UNITS // len(problem.units))
    found = [candidate for ring in rings[:n_rings] for candidate in _patterns(problem, weight, ring)]
    found.sort(key=total_seconds)
    improved = [_improve(problem, candidate) for candidate in found[:_N_SEARCHED]]
    plain = [plain_hybrid(problem, ring) for ring in prompt_rings(replace(problem, experts=None))]
    return sorted([*improved, *found[_N_SEARCHED:], *plain], key=total_seconds)


def estimate(problem: DecodeProblem) -> float:
    """Return roughly the seconds per token of the best candidate, fast: enough to compare numbers of threads."""
    _, weight = lower_bound(problem)
    rings = ring_sizes(problem)
    guesses = [_first_guess(problem, weight, ring).seconds for ring in rings[:: max(1, len(rings) // 4)]]
    return min([*guesses, plain_hybrid(problem, 0).seconds])


def _first_guess(problem: DecodeProblem, weight: float, ring_bytes: int) -> Candidate:
    counts = _resident_counts(problem, weight, _CROSSING_WEIGHTS[-1], ring_bytes)
    residents = next(resident_patterns(problem.groups, counts))
    streamed = _turns(problem, residents, ring_bytes, 1.0, _RING_RESERVES[1])
    return _candidate(problem, _classes(problem, residents, streamed), ring_bytes)


def ring_sizes(problem: DecodeProblem) -> list[int]:
    """Return ring sizes in bytes to try, the smallest first: small multiples of what common units need."""
    sizes = {int(n * size) for n in _RING_SLOTS for size in _common_sizes(problem)}
    return sorted(size for size in sizes if size <= problem.room_bytes(["cpu"] * len(problem.units)))


def prompt_rings(problem: DecodeProblem) -> list[int]:
    """Return ring sizes for plans that stream in prompts only: none, and one that all common units pass through."""
    rings = ring_sizes(problem)
    roomy = [ring for ring in rings if ring >= _PROMPT_SLOTS * max(_common_sizes(problem))]
    return [0, *(roomy[:1] or rings[-1:])]


def _common_sizes(problem: DecodeProblem) -> set[int]:
    """Return the ring bytes of common kinds of units.

    The output matrix is many times larger than the rest; a ring for it would cost more than it brings.
    """
    total = sum(unit.vram_bytes for unit in problem.units)
    return {
        problem.ring_bytes[kind[0]]
        for kind in problem.groups.by_kind
        if len(kind) * problem.units[kind[0]].vram_bytes >= _COMMON * total and not problem.is_terminal(kind[0])
    } or set(problem.ring_bytes)


def _relaxed(problem: DecodeProblem, weight: float, *, may_stream: bool = True) -> float:
    """Return the Lagrangian's value: a lower bound on seconds per token for any weight in [0, 1]."""
    total = weight * problem.serial_seconds
    savings = []
    for i, (unit, cpu, link, gpu) in enumerate(
        zip(problem.units, problem.cpu_seconds, problem.link_seconds, problem.serial_gpu_seconds, strict=True)
    ):
        if problem.experts is not None and i in problem.split_units:
            single = problem.experts.relaxed(i, weight, may_stream=may_stream)
            total += math.fsum(seconds for seconds, _ in single)
            savings += single
            continue
        on_gpu = weight * gpu
        host = min(weight * cpu, on_gpu + (1 - weight) * link) if may_stream else weight * cpu
        total += host
        savings.append((host - on_gpu, unit.vram_bytes))
    room = float(problem.available_bytes)
    for saving, size in sorted(savings, key=lambda item: item[0] / item[1], reverse=True):
        if saving <= 0 or room <= 0:
            break
        total -= saving * min(1.0, room / size)
        room -= size
    return total


def _resident_counts(problem: DecodeProblem, weight: float, crossing_weight: float, ring_bytes: int) -> list[int]:
    """Return how many units of each kind to keep in VRAM: an exact knapsack, then whatever still fits.

    Alike units are merged into items of 1, 2, 4, ... units, which loses nothing. While the CPU computes a unit that
    is larger than the ring, the link comes to a halt: that time is lost as well.
    """
    link_rate = sum(unit.size_bytes for unit in problem.units) / sum(problem.link_seconds)
    room_bytes = problem.residents_room_bytes(ring_bytes)
    by_kind = problem.groups.by_kind
    gains, sizes, items, worthwhile = [], [], [], []
    for k, kind in enumerate(by_kind):
        unit = kind[0]
        on_gpu = weight * problem.serial_gpu_seconds[unit]
        cpu = problem.cpu_seconds[unit]
        host = weight * cpu + (1 - weight) * max(0.0, cpu - ring_bytes / 2 / link_rate)
        if unit in problem.split_units:
            host = cpu  # both pipes are in use
        elif problem.ring_bytes[unit] <= ring_bytes:
            host = min(host, on_gpu + (1 - weight) * problem.link_seconds[unit])
        host += crossing_weight * problem.crossing_seconds[unit]
        if host > on_gpu:
            worthwhile.append(k)
        left, n = len(kind), 1
        while left:
            n = min(n, left)
            gains.append(round((host - on_gpu) * _PICOSECONDS) * n)
            sizes.append(-(-problem.units[unit].vram_bytes // problem.granule) * n)
            items.append((k, n))
            left, n = left - n, 2 * n
    choice, _ = solve_placement(gains, sizes, [0] * len(items), max(0, room_bytes) // problem.granule)
    counts = [0] * len(by_kind)
    for (k, n), chosen in zip(items, choice, strict=True):
        counts[k] += n * chosen
    room = room_bytes - sum(n * problem.units[kind[0]].vram_bytes for n, kind in zip(counts, by_kind, strict=True))
    for k in sorted(worthwhile, key=lambda k: problem.units[by_kind[k][0]].vram_bytes, reverse=True):
        vram = problem.units[by_kind[k][0]].vram_bytes  # what rounding up to whole granules left over
        extra = min(len(by_kind[k]) - counts[k], max(0, room) // vram)
        counts[k] += extra
        room -= extra * vram
    return counts


def _patterns(problem: DecodeProblem, weight: float, ring_bytes: int) -> list[Candidate]:
    """Return the best candidates for one ring size among all ways to spread residents and to take turns on the host."""
    counts = [_resident_counts(problem, weight, factor, ring_bytes) for factor in _CROSSING_WEIGHTS]
    if problem.split_units:
        for share in _RESIDENT_SHARES:
            counts.append(
                [
                    round(share * n) if k[0] in problem.split_units else n
                    for n, k in zip(counts[0], problem.groups.by_kind, strict=True)
                ]
            )
    tried: dict[tuple[WeightClass, ...], float] = {}
    for residents in _distinct(chosen for c in counts for chosen in resident_patterns(problem.groups, c)):
        for streamed in _ways_to_stream(problem, residents, ring_bytes):
            classes = _classes(problem, residents, streamed)
            ring = _ring_for(problem, classes, ring_bytes)
            if classes not in tried and ring >= problem.least_ring_bytes(classes):
                tried[classes] = problem.simulate(classes, ring, is_rough=True).seconds
    best = sorted(tried, key=lambda classes: tried[classes])[:_N_SEARCHED]
    return [_candidate(problem, classes, ring_bytes) for classes in best]


def _ways_to_stream(problem: DecodeProblem, residents: set[int], ring_bytes: int) -> Iterator[Collection[int]]:
    host = [unit for unit in range(len(problem.units)) if unit not in residents]
    streamable = [u for u in host if problem.ring_bytes[u] <= ring_bytes and u not in problem.split_units]
    for order in stream_orders(problem.groups, streamable):
        yield order[: _balanced_length(problem, host, order)]
    for eagerness in _EAGERNESS:
        for reserve in _RING_RESERVES:
            yield _turns(problem, residents, ring_bytes, eagerness, reserve)


def _turns(
    problem: DecodeProblem, residents: set[int], ring_bytes: int, eagerness: float, reserve: float
) -> Collection[int]:
    return take_turns(
        problem.graph, problem.costs_alone, problem.unit_of, residents, ring_bytes, eagerness, reserve,
        problem.split_units,
    )  # fmt: skip


def _balanced_length(problem: DecodeProblem, host: Iterable[int], order: Sequence[int]) -> int:
    """Return how many units of the order to stream so that the link takes as long as everything else."""
    rest = problem.serial_seconds + sum(problem.serial_gpu_seconds)
    rest += sum(problem.cpu_seconds[unit] + problem.crossing_seconds[unit] for unit in host)
    link = 0.0
    for n, unit in enumerate(order):
        link += problem.link_seconds[unit]
        rest -= problem.cpu_seconds[unit] + problem.crossing_seconds[unit]
        if link > rest:
            return n
    return len(order)


def _improve(problem: DecodeProblem, start: Candidate) -> Candidate:
    """Return the candidate after small random changes that the simulator approves.

    The ring takes all VRAM left, unless experts are cached beside it. It stays large enough for what it can stream now,
    if only in prompts.
    """

    def ring_of(classes: Sequence[WeightClass]) -> int:
        has_cache = problem.cache_bytes(classes, 0) is not None
        return _ring_for(problem, classes, start.ring_bytes if has_cache else problem.available_bytes)

    largest = max((problem.ring_bytes[u] for u, cls in enumerate(start.classes) if cls != "gpu"), default=0)
    smallest_ring = min(start.ring_bytes, largest)
    generator = random.Random(0)  # the same plan every time
    classes = list(start.classes)
    best = problem.simulate(classes, ring_of(classes), is_rough=True).seconds
    for _ in range(min(_MAX_CHANGES, _SEARCHED_UNITS // len(classes))):
        change = _small_change(problem, classes, generator)
        old = {unit: classes[unit] for unit in change}
        if old == change or any(cls == "stream" and unit in problem.split_units for unit, cls in change.items()):
            continue
        _apply(classes, change)
        ring = ring_of(classes)
        if ring >= max(smallest_ring, problem.least_ring_bytes(classes)):
            seconds = problem.simulate(classes, ring, is_rough=True).seconds
            if seconds < best:
                best = seconds
                continue
        _apply(classes, old)
    changed = _candidate(problem, tuple(classes), ring_of(classes))
    return min(start, changed, key=lambda candidate: candidate.seconds)


def _small_change(
    problem: DecodeProblem, classes: Sequence[WeightClass], generator: random.Random
) -> dict[int, WeightClass]:
    """Return new classes of a few units: one changes sides, two swap, or one enters or leaves VRAM."""
    host = [unit for unit, cls in enumerate(classes) if cls != "gpu"]
    residents = [unit for unit, cls in enumerate(classes) if cls == "gpu"]
    at, kind = generator.randrange(len(host)), generator.random()
    unit = host[at]
    if kind < 0.3:
        return {unit: "cpu" if classes[unit] == "stream" else "stream"}
    if kind < 0.75 or not residents:
        if kind < 0.55:
            other = host[(at + 1) % len(host)]
        else:
            other = generator.choice(next(alike for alike in problem.groups.by_kind if unit in alike))
        return {unit: classes[other], other: classes[unit]}
    if kind < 0.8:
        return {unit: "gpu"}  # at the expense of the ring
    if kind < 0.85:
        return {generator.choice(residents): classes[unit]}
    change: dict[int, WeightClass] = {unit: "gpu"}
    freed = 0
    while freed < problem.units[unit].vram_bytes and len(change) <= min(4, len(residents)):
        leaving = generator.choice(residents)
        freed += 0 if leaving in change else problem.units[leaving].vram_bytes
        change[leaving] = classes[unit]
    return change


def _apply(classes: list[WeightClass], change: dict[int, WeightClass]) -> None:
    for unit, cls in change.items():
        classes[unit] = cls


def _classes(problem: DecodeProblem, residents: Collection[int], streamed: Iterable[int]) -> tuple[WeightClass, ...]:
    classes: list[WeightClass] = ["gpu" if unit in residents else "cpu" for unit in range(len(problem.units))]
    for unit in streamed:
        classes[unit] = "stream"
    return tuple(classes)


def _ring_for(problem: DecodeProblem, classes: Sequence[WeightClass], ring_bytes: int) -> int:
    """Return the ring that there is room for: all of the room, where single experts are kept in it."""
    room = problem.room_bytes(classes)
    return room if problem.shares_ring(classes) else min(ring_bytes, room)


def _candidate(problem: DecodeProblem, classes: tuple[WeightClass, ...], ring_bytes: int) -> Candidate:
    ring = _ring_for(problem, classes, ring_bytes)
    return Candidate(classes, ring, problem.simulate(classes, ring).seconds, problem.cache_bytes(classes, ring))


def _distinct(sets: Iterable[set[int]]) -> list[set[int]]:
    distinct: list[set[int]] = []
    for one in sets:
        if one not in distinct:
            distinct.append(one)
    return distinct
