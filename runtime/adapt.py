"""The load-aware part of a run: measure every token, and move weights between link and CPU when speeds have changed.

What is resident stays so. The engine's own counters tell how long the CPU computed, how long the link was busy, and
(the rest of the token) what nothing of that hides. Algorithm 3 of arXiv 2607.10183 decides when to look: a deviation
over 15 %, and at least five tokens since the last change. Plans of the paper's objective then get its Algorithm 2, all
others the best of a ladder of evenly spread patterns that the plan's own pattern is a rung of.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.plan import Placement, Plan

from .bindings import Statistics

DEVIATION = 0.15  # of a speed since the last decision: worth a look
MIN_GAIN = 0.02  # predicted gain of a token's time that is worth a change
N_BETWEEN = 5  # tokens between two changes, at least
N_SKIPPED = 4  # tokens after a change that are not measured: the engine fills its ring and captures its graphs again
N_WINDOW = 3  # tokens whose median is the present
MAX_SETTLING = 4  # changes in a row before speeds have to deviate again
LINK_BOUND = 0.93  # share of a token from which on the host may be waiting for the link
MIN_PROBE, MAX_PROBE = 32, 512  # tokens after which to look whether what cannot be measured is as planned again
WORSE = 1.005  # a token after a change that should have made it faster: the change is taken back
SAME = 0.95  # of a speed: not slower
_TRIAL = "a trial"
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Measured:
    """One token, in seconds. `link_seconds` is 0 where copies cannot be timed."""

    seconds: float
    cpu_seconds: float
    wait_seconds: float
    link_seconds: float
    streamed_bytes: int


@dataclass(frozen=True)
class Speeds:
    """How fast things are, as fractions of what was planned; a token's time, and what of it the CPU leaves."""

    cpu: float
    link: float
    rest_seconds: float
    wait_seconds: float  # the part of the rest in which the host waits for the GPU alone, not for the link
    token_seconds: float


@dataclass(frozen=True)
class Decision:
    """The weights to stream from now on, by index into `Policy.movable`, and why."""

    before: tuple[int, ...]
    streamed: tuple[int, ...]
    reason: str
    speeds: Speeds


class Policy:
    """Decides which of the weights that can move are streamed. Pure: no clock, no device."""

    def __init__(self, plan: Plan, choose_transfers: Callable[..., tuple[list[bool], float]]) -> None:
        self.movable: tuple[Placement, ...] = tuple(
            p for p in plan.placements if p.costs is not None and not p.is_resident
        )
        self._decided = tuple(p for p in plan.placements if p.costs is not None)
        self._choose_transfers = choose_transfers if plan.solver.objective == "paper" else None
        costs = [p.costs for p in self.movable if p.costs is not None]
        self._cpu = np.array([c.cpu_seconds for c in costs])
        self._link = np.array([c.link_seconds for c in costs])
        fits = [c.ring_bytes <= plan.vram.ring_bytes for c in costs]
        streamed = [i for i, p in enumerate(self.movable) if p.decode == "stream"]
        joining = [i for i, p in enumerate(self.movable) if p.decode == "cpu" and fits[i]]
        # A rung k streams the first k of this order. Beginnings of an even order are spread evenly, too.
        self._order = [*_even(streamed), *_even(joining)]
        self._rungs_cpu = self._cpu.sum() - np.concatenate([[0.0], np.cumsum(self._cpu[self._order])])
        self._rungs_link = np.concatenate([[0.0], np.cumsum(self._link[self._order])])
        self.planned: tuple[int, ...] = tuple(streamed)
        self._planned_wait = plan.prediction.decode_gpu_busy_seconds

    def speeds(self, measured: Measured, streamed: Sequence[int], before: Speeds | None) -> Speeds:
        """Return what `measured` tells about the present, under the classes it was measured with.

        What it does not tell is as `before`, or as planned.
        """
        chosen = list(streamed)
        cpu_planned = float(self._cpu.sum() - self._cpu[chosen].sum())
        link_planned = float(self._link[chosen].sum())
        cpu = before.cpu if before else 1.0
        if cpu_planned > 0 and measured.cpu_seconds > 0:
            cpu = cpu_planned / measured.cpu_seconds
        link = before.link if before else 1.0
        if link_planned > 0 and measured.link_seconds > 0:
            link = link_planned / measured.link_seconds
        wait = measured.wait_seconds
        if measured.link_seconds >= LINK_BOUND * measured.seconds:
            wait = min(wait, before.wait_seconds if before else self._planned_wait)
        rest = max(0.0, measured.seconds - measured.cpu_seconds - measured.wait_seconds) + wait
        return Speeds(cpu, link, rest, wait, measured.seconds)

    def token_seconds(self, speeds: Speeds, streamed: Sequence[int]) -> float:
        """Return what a token is expected to take."""
        chosen = list(streamed)
        cpu = float(self._cpu.sum() - self._cpu[chosen].sum())
        return max(speeds.rest_seconds + cpu / speeds.cpu, float(self._link[chosen].sum()) / speeds.link)

    def best(self, speeds: Speeds) -> tuple[int, ...]:
        """Return the weights to stream at these speeds, in ascending order."""
        if self._choose_transfers is not None:
            return self._paper(speeds)
        seconds = np.maximum(speeds.rest_seconds + self._rungs_cpu / speeds.cpu, self._rungs_link / speeds.link)
        return tuple(sorted(self._order[: int(np.argmin(seconds))]))

    def _paper(self, speeds: Speeds) -> tuple[int, ...]:
        assert self._choose_transfers is not None
        costs = [p.costs for p in self._decided if p.costs is not None]
        on_gpu, _ = self._choose_transfers(
            [c.cpu_seconds / speeds.cpu for c in costs],
            [c.gpu_seconds for c in costs],
            [c.crossing_seconds / 2 for c in costs],
            [c.link_seconds / speeds.link for c in costs],
            [p.is_resident for p in self._decided],
        )
        index = {p.name: i for i, p in enumerate(self.movable)}
        may = set(self._order)
        chosen = [index[p.name] for p, x in zip(self._decided, on_gpu, strict=True) if x and not p.is_resident]
        return tuple(sorted(i for i in chosen if i in may))


class Controller:
    """Watches tokens and decides when to change. `streamed` is what it decided last."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.streamed = policy.planned
        self._window: deque[Measured] = deque(maxlen=N_WINDOW)
        self._reference: Speeds | None = None  # at the last decision
        self._n_since_change = 0
        self._n_to_skip = N_SKIPPED
        self._n_settling = MAX_SETTLING  # changes that may still follow without a new deviation
        self._before: tuple[tuple[int, ...], Speeds] | None = None  # the last change, until its effect is known
        self._probe_interval = MIN_PROBE

    def interrupt(self) -> None:
        """Leave out the next tokens: after a prompt or a pause the engine starts afresh, as after a change."""
        self._n_to_skip = N_SKIPPED
        self._window.clear()

    def add(self, measured: Measured) -> Decision | None:
        """Take up one token; return what to change before the next one, if anything."""
        self._n_since_change += 1
        self._n_to_skip -= 1
        if self._n_to_skip >= 0 or not self._policy.movable:
            return None
        self._window.append(measured)
        if self._n_since_change < N_BETWEEN or len(self._window) < N_WINDOW:
            return None
        present = _median(self._window)
        speeds = self._policy.speeds(present, self.streamed, self._reference)
        before, self._before = self._before, None
        if before is not None and _is_worse(speeds, before[1]):
            self._n_settling = 0
            return self._change(before[0], "no gain, back", speeds)
        reason = "settling" if self._reference else "the first tokens"
        if self._n_settling == 0:
            reason = _deviation(speeds, self._reference)
            if reason:
                self._probe_interval = MIN_PROBE
            elif self.streamed != self._policy.planned and self._n_since_change >= self._probe_interval:
                reason = _TRIAL
                self._probe_interval = min(2 * self._probe_interval, MAX_PROBE)
                speeds = self._policy.speeds(present, self.streamed, None)
            else:
                return None
            self._n_settling = MAX_SETTLING
        best = self._policy.best(speeds)
        now = self._policy.token_seconds(speeds, self.streamed)
        gain = 1.0 - self._policy.token_seconds(speeds, best) / now if now > 0 else 0.0
        if best == self.streamed or gain < MIN_GAIN:
            self._n_settling = 0
            if reason != _TRIAL:
                self._reference = speeds
            return None
        self._n_settling -= 1
        self._before = (self.streamed, speeds)
        return self._change(best, reason, speeds)

    def _change(self, streamed: tuple[int, ...], reason: str, speeds: Speeds) -> Decision:
        self._reference = speeds
        self._n_since_change = 0
        self.interrupt()
        before, self.streamed = self.streamed, streamed
        return Decision(
            before, streamed, f"{reason}: CPU at {speeds.cpu:.0%}, link at {speeds.link:.0%} of the plan", speeds
        )


def _is_worse(now: Speeds, then: Speeds) -> bool:
    """Tell whether a token takes longer although nothing has become slower."""
    return now.token_seconds > then.token_seconds * WORSE and now.cpu > SAME * then.cpu and now.link > SAME * then.link


def measured_token(seconds: float, before: Statistics, after: Statistics) -> Measured:
    """Return one token from the engine's counters before and after it."""
    return Measured(
        seconds=seconds,
        cpu_seconds=max(0, after.cpu_ns - before.cpu_ns) / 1e9,
        wait_seconds=max(0, after.wait_gpu_ns - before.wait_gpu_ns) / 1e9,
        link_seconds=max(0, after.link_busy_ns - before.link_busy_ns) / 1e9,
        streamed_bytes=max(0, after.streamed_bytes - before.streamed_bytes),
    )


def _deviation(now: Speeds, then: Speeds | None) -> str:
    """Return which speed has changed by more than DEVIATION since `then`, or ""."""
    if then is None:
        return "the first tokens"
    if abs(now.cpu / then.cpu - 1) > DEVIATION:
        return f"the CPU is {'slower' if now.cpu < then.cpu else 'faster'}"
    if abs(now.link / then.link - 1) > DEVIATION:
        return f"the link is {'slower' if now.link < then.link else 'faster'}"
    if abs(now.token_seconds / then.token_seconds - 1) > DEVIATION:
        return f"the GPU is {'slower' if now.token_seconds > then.token_seconds else 'faster'}"
    return ""


def _median(window: Sequence[Measured]) -> Measured:
    return Measured(
        seconds=statistics.median(m.seconds for m in window),
        cpu_seconds=statistics.median(m.cpu_seconds for m in window),
        wait_seconds=statistics.median(m.wait_seconds for m in window),
        link_seconds=statistics.median(m.link_seconds for m in window),
        streamed_bytes=window[-1].streamed_bytes,
    )


def _even(items: Sequence[int]) -> list[int]:
    """Order items so that every beginning is spread evenly: by the golden-ratio sequence of their places."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: (i * _GOLDEN % 1, i))]
