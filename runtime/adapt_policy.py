"""What tokens take at present under any pattern of streamed weights, by what the last ones took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.patterns import even_order
from planner.plan import Placement, Plan

NOISE = 3.0  # a deviation is also this many times the usual one
CLEAR = 0.05  # of a token's time, and NOISE times the usual deviations: a pattern is slower for certain
LINK_BOUND = 0.88  # share of a token from which on the host may be waiting for the link


@dataclass(frozen=True)
class Measured:
    """One token, or medians of several, in seconds. `link_seconds` is 0 where copies cannot be timed."""

    seconds: float
    cpu_seconds: float
    wait_seconds: float
    link_seconds: float
    streamed_bytes: int


@dataclass(frozen=True)
class Model:
    """What a token takes at present: lanes relative to the plan, and what the CPU takes beside its weights."""

    cpu_base_seconds: float
    cpu_factor: float
    link_factor: float
    rest_seconds: float  # neither computing on the CPU nor waiting for the link


@dataclass(frozen=True)
class Visit:
    """A pattern, what tokens took under it, and the tokens that tell."""

    streamed: tuple[int, ...]
    measured: Measured
    tokens: tuple[Measured, ...]


class Policy:
    """Knows what tokens should take under any pattern. Pure: no clock, no device."""

    def __init__(self, plan: Plan, choose_transfers: Callable[..., tuple[list[bool], float]]) -> None:
        # Where single experts are kept in the ring, nothing may stream: they would need as much VRAM again beside it.
        self.movable: tuple[Placement, ...] = tuple(
            p for p in plan.placements if p.costs is not None and not p.is_resident and not plan.shares_ring
        )
        self._decided = tuple(p for p in plan.placements if p.costs is not None)
        self._choose_transfers = choose_transfers if plan.solver.objective == "paper" else None
        costs = [p.costs for p in self.movable if p.costs is not None]
        self._cpu = np.array([c.cpu_seconds for c in costs])
        self._link = np.array([c.link_seconds for c in costs])
        streamed = [i for i, p in enumerate(self.movable) if p.decode == "stream"]
        joining = [
            i
            for i, p in enumerate(self.movable)
            if p.decode == "cpu" and p.costs is not None and p.costs.ring_bytes <= plan.vram.ring_bytes
        ]
        # A rung k streams the first k of this order. Beginnings of an even order are spread evenly, too. One weight
        # stays on the CPU, else nothing would tell how fast that is.
        order = [*even_order([[i] for i in streamed]), *even_order([[i] for i in joining])]
        self._order = order[: max(len(streamed), len(self.movable) - 1)]
        self._rungs_cpu = self._cpu.sum() - np.concatenate([[0.0], np.cumsum(self._cpu[self._order])])
        self._rungs_link = np.concatenate([[0.0], np.cumsum(self._link[self._order])])
        self.planned: tuple[int, ...] = tuple(streamed)
        # What cannot move: experts that are decoded one by one.
        self._planned_cpu_base = max(0.0, plan.prediction.decode_cpu_busy_seconds - self.lanes(streamed)[0])
        self._planned_wait = plan.prediction.decode_gpu_busy_seconds

    def lanes(self, streamed: Sequence[int]) -> tuple[float, float]:
        """Return planned seconds of the CPU and of the link."""
        chosen = set(streamed)
        on_cpu = [i for i in range(len(self.movable)) if i not in chosen]
        return float(self._cpu[on_cpu].sum()), float(self._link[list(streamed)].sum())

    def model(self, visits: Sequence[Visit], before: Model | None) -> Model:
        """Return what visits tell about the present; what they do not tell is as `before`, or as planned."""
        now = visits[-1]
        cpu_planned = self.lanes(now.streamed)[0]
        measured = now.measured
        base, factor = (before.cpu_base_seconds, before.cpu_factor) if before else (0.0, 1.0)
        if cpu_planned + self._planned_cpu_base > 0 and measured.cpu_seconds > 0:
            factor = measured.cpu_seconds / (cpu_planned + self._planned_cpu_base)
            base = factor * self._planned_cpu_base
            far = max(visits, key=lambda visit: abs(self.lanes(visit.streamed)[0] - cpu_planned))
            far_planned = self.lanes(far.streamed)[0]
            if abs(far_planned - cpu_planned) > 0.1 * max(far_planned, cpu_planned):
                slope = (far.measured.cpu_seconds - measured.cpu_seconds) / (far_planned - cpu_planned)
                factor = max(slope, 0.3 * factor)
                if cpu_planned > 0:
                    factor = min(factor, measured.cpu_seconds / cpu_planned)
                base = measured.cpu_seconds - factor * cpu_planned
        link = self._link_factor(visits, before)
        bound = [v for v in visits if self.lanes(v.streamed)[1] * link >= LINK_BOUND * v.measured.seconds]
        wait = measured.wait_seconds
        if now in bound:
            others = [v.measured.wait_seconds for v in visits if v not in bound]
            wait = min([wait, *(others or [self._planned_wait])])
        rest = max(0.0, measured.seconds - measured.cpu_seconds - measured.wait_seconds) + wait
        return Model(base, factor, link, rest)

    def _link_factor(self, visits: Sequence[Visit], before: Model | None) -> float:
        """Return how long copies take, relative to the plan.

        It is measured by a running mean, which is late; how long tokens take limits it.
        """
        now = visits[-1]
        links = [self.lanes(visit.streamed)[1] for visit in visits]
        factor = before.link_factor if before else 1.0
        if links[-1] > 0 and now.measured.link_seconds > 0:
            factor = now.measured.link_seconds / links[-1]
        with_link = [(link, visit) for link, visit in zip(links, visits, strict=True) if link > 0]
        waiting = [
            more.measured.seconds / link
            for link, more in with_link
            if any(other < link and _waits_longer(more, less) for other, less in zip(links, visits, strict=True))
        ]
        return min([max([factor, *waiting]), *(visit.measured.seconds / link for link, visit in with_link)])

    def waits_for_link(self, measured: Measured) -> bool:
        return measured.link_seconds >= LINK_BOUND * measured.seconds

    def token_seconds(self, model: Model, streamed: Sequence[int]) -> float:
        """Return what a token is expected to take."""
        cpu, link = self.lanes(streamed)
        has_cpu_steps = cpu > 0 or self._planned_cpu_base > 0
        host = model.rest_seconds + (model.cpu_base_seconds if has_cpu_steps else 0.0) + cpu * model.cpu_factor
        return max(host, link * model.link_factor)

    def cpu_speed(self, model: Model, streamed: Sequence[int]) -> float:
        """Return the CPU's speed relative to the plan; 1 where it does nothing."""
        cpu, _ = self.lanes(streamed)
        planned, taken = cpu + self._planned_cpu_base, model.cpu_base_seconds + cpu * model.cpu_factor
        return planned / taken if planned > 0 and taken > 0 else 1.0

    def best(self, model: Model) -> tuple[int, ...]:
        """Return the weights to stream, in ascending order."""
        if self._choose_transfers is not None:
            return self._paper(model)
        host = model.rest_seconds + model.cpu_base_seconds + self._rungs_cpu * model.cpu_factor
        seconds = np.maximum(host, self._rungs_link * model.link_factor)
        return tuple(sorted(self._order[: int(np.argmin(seconds))]))

    def _paper(self, model: Model) -> tuple[int, ...]:
        assert self._choose_transfers is not None
        costs = [p.costs for p in self._decided if p.costs is not None]
        on_gpu, _ = self._choose_transfers(
            [c.cpu_seconds * model.cpu_factor for c in costs],
            [c.gpu_seconds for c in costs],
            [c.crossing_seconds / 2 for c in costs],
            [c.link_seconds * model.link_factor for c in costs],
            [p.is_resident for p in self._decided],
        )
        index = {p.name: i for i, p in enumerate(self.movable)}
        may = set(self._order)
        chosen = [index[p.name] for p, x in zip(self._decided, on_gpu, strict=True) if x and not p.is_resident]
        return tuple(sorted(i for i in chosen if i in may))


def _waits_longer(one: Visit, other: Visit) -> bool:
    """Tell whether tokens took longer under `one`, and the host waited longer: both beyond doubt."""
    for values, other_values in (
        ([m.seconds for m in one.tokens], [m.seconds for m in other.tokens]),
        ([m.wait_seconds for m in one.tokens], [m.wait_seconds for m in other.tokens]),
    ):
        (centre, spread), (other_centre, other_spread) = centre_and_spread(values), centre_and_spread(other_values)
        if centre - other_centre <= max(CLEAR * other.measured.seconds, NOISE * (spread + other_spread)):
            return False
    return True


def centre_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the median of how far the values are from it."""
    centre = statistics.median(values)
    return centre, statistics.median(abs(value - centre) for value in values)
