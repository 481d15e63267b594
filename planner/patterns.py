"""Ways to spread places over the layers. Alike units are interchangeable; what differs is how they take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import permutations

from .measurements import WeightUse
from .problem import Costs, Graph, Unit

_GOLDEN = 0.6180339887498949  # phases that are multiples of it never fall into step with each other
_MAX_PERMUTED_ROLES = 3


@dataclass(frozen=True)
class UnitGroups:
    """Units (by index) that belong together, each group in order of use."""

    by_kind: tuple[tuple[int, ...], ...]  # same operation, type and shape: they cost the same everywhere
    by_role: tuple[tuple[int, ...], ...]  # same place in their layer, the largest roles first
    by_layer: tuple[tuple[int, ...], ...]  # neighbours without work in between that only the GPU can do


def group_units(weights: Sequence[WeightUse], graph: Graph, units: Sequence[Unit]) -> UnitGroups:
    kinds: dict[object, list[int]] = {}
    roles: dict[object, list[int]] = {}
    layers: list[list[int]] = []
    siblings: dict[tuple[tuple[int, ...], object], int] = {}
    for index, unit in enumerate(units):
        first = weights[unit.uses[0]]
        shapes = tuple((weights[use].op, weights[use].shape) for use in unit.uses)
        kinds.setdefault((shapes, tuple(weights[use].type for use in unit.uses)), []).append(index)
        inputs = graph.inputs[unit.uses[0]]
        ordinal = siblings.get((inputs, first.shape), 0)
        siblings[inputs, first.shape] = ordinal + 1
        roles.setdefault((shapes, len(inputs), ordinal), []).append(index)
        previous = units[index - 1] if index else None
        if previous is None or graph.leaves_cpu[previous.uses[-1]] or (inputs and inputs[0] > previous.uses[-1]):
            layers.append([])
        layers[-1].append(index)

    def size(group: Sequence[int]) -> int:
        return sum(units[index].size_bytes for index in group)

    return UnitGroups(
        by_kind=tuple(tuple(group) for group in kinds.values()),
        by_role=tuple(tuple(group) for group in sorted(roles.values(), key=size, reverse=True)),
        by_layer=tuple(tuple(group) for group in layers),
    )


def spread(items: Sequence[int], n_chosen: int, phase: float = 0.0) -> list[int]:
    """Return `n_chosen` of `items` at even distances. `phase` in [0, 1) shifts them."""
    n = len(items)
    if n_chosen <= 0 or n == 0:
        return []
    if n_chosen >= n:
        return list(items)
    chosen = []
    for i, item in enumerate(items):
        if int((i + 1) * n_chosen / n + phase + 1e-9) > int(i * n_chosen / n + phase + 1e-9):
            chosen.append(item)
    return chosen[:n_chosen]


def resident_patterns(groups: UnitGroups, counts: Sequence[int]) -> Iterator[set[int]]:
    """Yield ways to choose counts[k] units of kind k: evenly, role by role, and layer by layer."""
    yield {unit for k, kind in enumerate(groups.by_kind) for unit in spread(kind, counts[k], k * _GOLDEN % 1)}
    for roles in (groups.by_role, groups.by_role[::-1]):
        rank = {unit: r for r, role in enumerate(roles) for unit in role}
        chosen: set[int] = set()
        for k, kind in enumerate(groups.by_kind):
            left = counts[k]
            for r in sorted({rank[unit] for unit in kind}):
                of_role = [unit for unit in kind if rank[unit] == r]
                chosen.update(spread(of_role, left, k * _GOLDEN % 1))
                left -= min(left, len(of_role))
        yield chosen
    yield {unit for k, kind in enumerate(groups.by_kind) for unit in _whole_layers(groups, kind, counts[k])}


def _whole_layers(groups: UnitGroups, kind: Sequence[int], count: int) -> list[int]:
    """Choose units of a kind so that those of one layer share their fate, at even distances of layers."""
    members = set(kind)
    layers = [[unit for unit in layer if unit in members] for layer in groups.by_layer]
    layers = [layer for layer in layers if layer]
    n_whole = count * len(layers) // max(1, len(kind))
    whole = spread(range(len(layers)), n_whole)
    chosen = [unit for index in whole for unit in layers[index]]
    rest = [unit for index, layer in enumerate(layers) if index not in set(whole) for unit in layer]
    return (chosen + rest)[:count]


def take_turns(
    graph: Graph,
    costs: Costs,
    unit_of: Sequence[int],
    residents: Set[int],
    ring_bytes: int,
    eagerness: float,
    reserve: float,
    kept: Set[int] = frozenset(),
) -> set[int]:
    """Return the host units to stream if each is streamed whenever its copy would have arrived by then.

    `unit_of` is the unit of every use, or -1. The link gains a lead while other work goes on, up to `reserve` of the
    ring; a streamed unit spends it. `eagerness` above 1 streams more. The units `kept` stay on the CPU.
    """
    link_total = sum(costs.link)
    if not link_total:
        return set()
    full = reserve * ring_bytes * link_total / sum(r for r, s in zip(graph.ring_bytes, costs.link, strict=True) if s)
    is_streamed: dict[int, bool] = {}
    lead = 0.0
    for _ in range(2):  # the second round starts with the lead that the first one ended with
        is_streamed.clear()
        for use, unit in enumerate(unit_of):
            passed = costs.gpu_before[use]
            if unit < 0 or unit in residents:
                passed += costs.gpu[use]
            else:
                needed = costs.link[use] / eagerness
                fits = unit not in kept and graph.ring_bytes[use] <= ring_bytes
                if is_streamed.setdefault(unit, fits and lead >= needed):
                    lead -= needed
                    passed += costs.gpu[use]
                else:
                    passed += costs.cpu[use] * costs.cpu_slowdown + costs.down[use] + costs.up[use]
            lead = min(lead + passed, full)
    return {unit for unit, streamed in is_streamed.items() if streamed}


def stream_orders(groups: UnitGroups, host: Sequence[int]) -> list[list[int]]:
    """Return orders in which host units (those not in VRAM) become streamed, one after another.

    Every prefix of an order is spread evenly over the layers: unit by unit, layer by layer, or role by role.
    """
    orders = [even_order([[unit] for unit in host]), even_order(_restrict(groups.by_layer, host))]
    roles = _restrict(groups.by_role, host)
    head, tail = roles[:_MAX_PERMUTED_ROLES], roles[_MAX_PERMUTED_ROLES:]
    for arrangement in permutations(head):
        orders.append([unit for role in (*arrangement, *tail) for unit in even_order([[u] for u in role])])
    return orders


def _restrict(groups: Sequence[Sequence[int]], host: Sequence[int]) -> list[list[int]]:
    members = set(host)
    kept = [[unit for unit in group if unit in members] for group in groups]
    return [group for group in kept if group]


def even_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """Order groups so that every prefix is spread evenly: by the golden-ratio sequence of their places."""
    ranked = sorted(range(len(groups)), key=lambda i: (i * _GOLDEN % 1, i))
    return [unit for i in ranked for unit in groups[i]]
