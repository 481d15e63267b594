"""Decoding: what one token costs under any placement of the units, and what is left of VRAM beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .experts import PREDICTION_BYTES, Experts
from .patterns import UnitGroups
from .plan import WeightClass
from .problem import Costs, Graph, Unit
from .timeline import Timeline, simulate


@dataclass(frozen=True)
class DecodeProblem:
    """What a token costs everywhere, and how much VRAM there is for decided weights and the ring."""

    graph: Graph
    costs: Costs
    units: tuple[Unit, ...]
    groups: UnitGroups
    available_bytes: int
    granule: int
    experts: Experts | None = None  # None: a layer's experts are computed together

    @cached_property
    def costs_alone(self) -> Costs:
        """The costs with experts split, none of them cached, as if every use were a step of its own."""
        if self.experts is None:
            return self.costs
        cpu = list(self.costs.cpu)
        for uses, step in self.experts.steps(["cpu"] * len(cpu), 0).items():
            for use in uses:
                cpu[use] = step.seconds / len(uses) / self.costs.cpu_slowdown  # which is in the step already
        return replace(self.costs, cpu=tuple(cpu))

    @cached_property
    def cpu_seconds(self) -> tuple[float, ...]:
        """Per unit, on the CPU while the link is busy."""
        cpu = self.costs_alone.cpu
        return tuple(sum(cpu[use] for use in unit.uses) * self.costs.cpu_slowdown for unit in self.units)

    @cached_property
    def crossing_seconds(self) -> tuple[float, ...]:
        """Per unit, what a CPU step costs beyond its computation, shared by the uses that could share a step."""
        return tuple(
            sum(
                (self.costs.down[use] + self.costs.up[use]) / (1 if self.graph.leaves_cpu[use] else 2) for use in u.uses
            )
            for u in self.units
        )

    @cached_property
    def link_seconds(self) -> tuple[float, ...]:
        return tuple(sum(self.costs.link[use] for use in unit.uses) for unit in self.units)

    @cached_property
    def serial_gpu_seconds(self) -> tuple[float, ...]:
        """Per unit, its GPU work that nothing can run beside."""
        return tuple(sum(self.costs.gpu[use] for use in unit.uses if self._is_serial[use]) for unit in self.units)

    @cached_property
    def serial_seconds(self) -> float:
        """GPU work of every plan that nothing can run beside: nodes without weights and small weights."""
        decided = {use for unit in self.units for use in unit.uses}
        return sum(
            self.costs.gpu_before[use] + (0.0 if use in decided else self.costs.gpu[use])
            for use, serial in enumerate(self._is_serial)
            if serial
        )

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """Per use of a weight, its unit, or -1."""
        owner = {use: index for index, unit in enumerate(self.units) for use in unit.uses}
        return tuple(owner.get(use, -1) for use in range(len(self.graph.inputs)))

    @cached_property
    def ring_bytes(self) -> tuple[int, ...]:
        """Per unit, the largest piece that its streaming needs in the ring at once."""
        return tuple(max(self.graph.ring_bytes[use] for use in unit.uses) for unit in self.units)

    @cached_property
    def split_units(self) -> frozenset[int]:
        """Units whose experts are decoded one by one when they are on the CPU; streaming all of them never pays."""
        return frozenset(block.unit for block in self.experts.blocks) if self.experts else frozenset()

    def is_terminal(self, unit: int) -> bool:
        return any(self.graph.is_terminal[use] for use in self.units[unit].uses)

    @cached_property
    def _is_serial(self) -> list[bool]:
        """Per use, whether everything else comes before it or after it."""
        inputs = self.graph.inputs
        n = len(inputs)
        before = [0] * n  # bit sets
        for use in range(n):
            for source in inputs[use]:
                before[use] |= before[source] | 1 << source
        n_after = [0] * n
        after = [0] * n
        for use in range(n - 1, -1, -1):
            n_after[use] = after[use].bit_count()
            for source in inputs[use]:
                after[source] |= after[use] | 1 << use
        return [before[use].bit_count() + n_after[use] == n - 1 for use in range(n)]

    def vram_bytes(self, classes: Sequence[WeightClass]) -> int:
        return sum(unit.vram_bytes for unit, cls in zip(self.units, classes, strict=True) if cls == "gpu")

    def expand(self, classes: Sequence[WeightClass]) -> list[WeightClass]:
        """Return classes per use of a weight from classes per unit."""
        expanded: list[WeightClass] = ["gpu"] * len(self.graph.inputs)
        for unit, cls in zip(self.units, classes, strict=True):
            for use in unit.uses:
                expanded[use] = cls
        return expanded

    def shares_ring(self, classes: Sequence[WeightClass]) -> bool:
        """Tell whether single experts are kept in the ring: while decoding, nothing else passes through it."""
        return "stream" not in classes and bool(self._split_blocks(classes))

    def simulate(self, classes: Sequence[WeightClass], ring_bytes: int, *, is_rough: bool = False) -> Timeline:
        costs, expanded = self.costs, self.expand(classes)
        if self.experts is not None:
            steps = self.experts.steps(expanded, self.cache_bytes(classes, ring_bytes) or 0)
            costs = replace(costs, expert_steps=steps)
        return simulate(self.graph, costs, expanded, ring_bytes, is_rough=is_rough)

    def residents_room_bytes(self, ring_bytes: int) -> int:
        """Return the VRAM for residents beside a ring and the least that single experts need."""
        if self.experts is None:
            return self.available_bytes - ring_bytes
        least = self.experts.vram_bytes(range(len(self.experts.blocks)), 0)
        return self.available_bytes - max(ring_bytes + PREDICTION_BYTES, least)

    def room_bytes(self, classes: Sequence[WeightClass]) -> int:
        """Return the VRAM left for a ring, and for cached experts, in it or beside it."""
        room = self.available_bytes - self.vram_bytes(classes)
        if self.shares_ring(classes):
            return room - PREDICTION_BYTES
        return room - self.experts.vram_bytes(self._split_blocks(classes), 0) if self.experts else room

    def least_ring_bytes(self, classes: Sequence[WeightClass]) -> int:
        """Return the ring that decoding needs: for what it streams, or for the experts of one layer."""
        if self.experts is not None and self.shares_ring(classes):
            return self.experts.vram_bytes(self._split_blocks(classes), 0) - PREDICTION_BYTES
        return max((size for size, cls in zip(self.ring_bytes, classes, strict=True) if cls == "stream"), default=0)

    def cache_bytes(self, classes: Sequence[WeightClass], ring_bytes: int) -> int | None:
        """Return what cached experts get beside residents and ring; None if none are decoded one by one."""
        active = self._split_blocks(classes)
        if self.experts is None or not active:
            return None
        shared = ring_bytes + PREDICTION_BYTES
        beside = self.available_bytes - self.vram_bytes(classes) - ring_bytes
        return max(0, self.experts.cache_bytes(active, shared if self.shares_ring(classes) else beside))

    def experts_bytes(self, classes: Sequence[WeightClass], ring_bytes: int) -> int:
        """Return the VRAM that single experts take beside the ring."""
        cache_bytes = self.cache_bytes(classes, ring_bytes)
        if self.experts is None or cache_bytes is None:
            return 0
        if self.shares_ring(classes):
            return PREDICTION_BYTES
        return self.experts.vram_bytes(self._split_blocks(classes), cache_bytes)

    def _split_blocks(self, classes: Sequence[WeightClass]) -> list[int]:
        if self.experts is None:
            return []
        return [i for i, block in enumerate(self.experts.blocks) if classes[block.unit] == "cpu"]
