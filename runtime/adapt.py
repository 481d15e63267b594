"""The load-aware part of a run: measure every token, and move weights between link and CPU when speeds have changed.

What is resident stays so. The engine's own counters tell how long the CPU computed, how long the link was busy, and
how long the host waited for the GPU. As in Algorithm 3 of arXiv 2607.10183, a deviation over 15 % makes the controller
look, and changes are at least five tokens apart. A model of the present proposes which weights to stream: for plans of
the paper's objective by its Algorithm 2, for all others by the best of a ladder of evenly spread patterns that the
plan's own pattern is a rung of. What the model proposes is measured, and the fastest of what was measured stays.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.patterns import even_order
from planner.plan import Placement, Plan

DEVIATION = 0.15  # of a token's time, or of a lane's, since it was last looked at
NOISE = 3.0  # a deviation is also this many times the usual one
MIN_GAIN = 0.02  # of a token's time that the model must promise
SAME = 0.01  # of a token's time: no difference
HOME = 0.03  # of a token's time that a known pattern may be worse by the model, which errs by as much
N_SKIPPED = 4  # tokens after a change that are not measured: the engine fills its ring and captures its graphs again
N_FIRST = 3  # tokens that tell what has changed
N_MEASURED = 6  # tokens that tell what a change was good for
MAX_VISITS = 3  # patterns that are measured before one of them stays
MIN_TRIAL = 32  # tokens after which to try what cannot be measured, in case it is as planned again
MIN_LOOK = 12  # tokens after which to see whether lanes are out of balance, though nothing deviates
MAX_BACKOFF = 16  # times as many tokens where trials are in vain
# Since a change, before a trial and before a deviation counts: small models' tokens are too short to follow all noise.
MIN_TRIAL_SECONDS, MIN_CHANGE_SECONDS = 1.0, 0.5
CLEAR = 0.05  # of a token's time, and NOISE times the usual deviations: a pattern is slower for certain
LINK_BOUND = 0.88  # share of a token from which on the host may be waiting for the link
FREE = 0.07  # of the least time that copies ever took: a link that nobody else uses may take as much more
N_STEADY = 10  # tokens in a row that tell that others leave more of the link, though it is not free
_TRIAL, _LINK_FASTER = "a trial", "the link is faster"


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
class Decision:
    """The weights to stream from now on, by index into `Policy.movable`, and why; speeds relative to the plan."""

    before: tuple[int, ...]
    streamed: tuple[int, ...]
    reason: str
    cpu_speed: float
    link_speed: float


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

    def model(self, visits: Sequence[Visit], before: Model | None, least_wait_seconds: float = math.inf) -> Model:
        """Return what visits tell about the present; what they do not tell is as `before`, or as planned.

        Where the host waits for the link, it would wait for the GPU `least_wait_seconds` at most, or as planned.
        """
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
            wait = min([wait, *(others or [self._planned_wait, least_wait_seconds])])
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


class Controller:
    """Watches tokens and decides when to change. `streamed` is what it decided last.

    It is either settling, going through a few patterns, or settled: then it waits for a deviation.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.streamed = policy.planned
        self._window: deque[Measured] = deque(maxlen=N_MEASURED)
        self._n_since_change = 0
        self._seconds_since_change = 0.0
        self._n_to_skip = N_SKIPPED
        self._visits: list[Visit] = []  # since speeds changed last
        self._reason = "the first tokens"
        self._model: Model | None = None
        self._usual: list[Measured] | None = None  # once settled: what tokens took then
        self._is_final = False  # the pattern is the fastest of those visited
        self._backoff = 1
        self._home: Visit | None = None  # the best pattern in quiet: as planned, unless another one proves faster
        self._least_link_factor: float | None = None  # of all that were measured
        self._n_faster = 0  # tokens in a row for which the link was faster, though not free

    def interrupt(self) -> None:
        """Leave out the next tokens: after a prompt or a pause the engine starts afresh, as after a change."""
        self._n_to_skip = N_SKIPPED
        self._window.clear()

    def restart(self, reason: str) -> None:
        """Settle anew: what was measured before no longer counts."""
        self._forget(reason)
        self._backoff = 1
        self._n_to_skip = max(self._n_to_skip, 1)

    def add(self, measured: Measured) -> Decision | None:
        """Take up one token; return what to change before the next one, if anything."""
        self._n_since_change += 1
        self._seconds_since_change += measured.seconds
        self._n_to_skip -= 1
        if self._n_to_skip >= 0 or not self._policy.movable:
            return None
        self._window.append(measured)
        if self._usual is None:
            n_needed = N_MEASURED if self._visits else N_FIRST
            return self._settle(_typical(self._window)) if len(self._window) == n_needed else None
        if len(self._window) < N_FIRST:
            return None
        recent = list(self._window)[-N_FIRST:]
        reason = self._deviation(recent, self._usual)
        if reason and self._seconds_since_change >= MIN_CHANGE_SECONDS:
            return self._start(reason, recent, _cautious(recent, recent if reason == _LINK_FASTER else self._window))
        if self._is_time_for_a_trial():
            self._n_since_change, self._seconds_since_change = 0, 0.0
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)  # unless another pattern turns out to be better
            self._model = None  # what cannot be measured is assumed to be as planned
            return self._start(_TRIAL, self._window, _cautious(self._window, self._window))
        return None

    def _is_time_for_a_trial(self) -> bool:
        """Tell whether to try something though speeds have not changed; the more trials were in vain, the rarer."""
        n = self._n_since_change
        min_look = MIN_LOOK if len(self._visits) == 1 else MIN_TRIAL  # what other patterns took counts for longer
        may_try = n >= MIN_TRIAL * self._backoff
        may_look = n >= min_look * self._backoff and n % N_MEASURED == 0
        if self._seconds_since_change < MIN_TRIAL_SECONDS or not (may_try or may_look):
            return False
        measured, (cpu, link) = _typical(self._window), self._policy.lanes(self.streamed)
        if may_try and (cpu == 0 or link == 0 or self._policy.waits_for_link(measured) or self._may_go_home(measured)):
            return True  # a lane that does nothing is not measured, nor is waiting that the link hides
        if not may_look:
            return False
        visit = Visit(self.streamed, measured, tuple(self._window))
        model = self._policy.model([visit], None, self._least_wait(measured))
        expected = self._policy.token_seconds(model, self.streamed)
        return self._policy.token_seconds(model, self._policy.best(model)) < (1 - CLEAR) * expected

    def _deviation(self, recent: Sequence[Measured], usual: Sequence[Measured]) -> str:
        """Return what has changed, or "". That others leave more of the link has to last, unless it is free again."""
        reason = _deviation(recent, usual)
        free = self._policy.lanes(self.streamed)[1] * (self._least_link_factor or 0.0)  # seconds
        is_free = all(self._has_free_link(m) for m in recent)
        if not reason and is_free and _typical(usual).link_seconds > (1 + DEVIATION) * free:
            return _LINK_FASTER
        self._n_faster = self._n_faster + 1 if reason == _LINK_FASTER and not is_free else 0
        return reason if self._n_faster == 0 or self._n_faster >= N_STEADY else ""

    def _start(self, reason: str, tokens: Iterable[Measured], measured: Measured) -> Decision | None:
        """Speeds have changed: what was measured before no longer counts."""
        tokens = tuple(tokens)
        self._forget(reason)
        self._n_to_skip = 0
        self._window.extend(tokens)
        return self._settle(measured)

    def _forget(self, reason: str) -> None:
        self._visits, self._reason, self._is_final, self._usual = [], reason, False, None
        self._n_faster = 0
        self._window.clear()

    def _settle(self, measured: Measured) -> Decision | None:
        earlier = next((v.measured.seconds for v in self._visits if v.streamed == self.streamed), None)
        if earlier is not None and abs(measured.seconds / earlier - 1) > DEVIATION:  # speeds have changed meanwhile
            self._visits, self._is_final = [], False
        visit = Visit(self.streamed, measured, tuple(self._window))
        self._visits.append(visit)
        self._model = model = self._policy.model(self._visits, self._model, self._least_wait(measured))
        if self._policy.lanes(self.streamed)[1] > 0 and measured.link_seconds > 0:
            self._least_link_factor = min(model.link_factor, self._least_link_factor or model.link_factor)
        fastest = min(self._visits, key=lambda visit: visit.measured.seconds)
        if not self._is_final and len(self._visits) < MAX_VISITS:
            goes_home = self._reason == _TRIAL and self._may_go_home(measured)
            best = self._home.streamed if goes_home and self._home is not None else self._best(model)
            expected_now = self._policy.token_seconds(model, self.streamed)
            error = measured.seconds / expected_now if expected_now > 0 else 1.0
            promised = error * self._policy.token_seconds(model, best)
            known = any(visit.streamed == best for visit in self._visits)
            if not known and (goes_home or promised < (1 - MIN_GAIN) * fastest.measured.seconds):
                return self._change(best, self._reason, model)
        preferred = self._preferred(fastest.measured.seconds)
        if not self._is_final and preferred != self.streamed:
            self._is_final = True
            return self._change(preferred, "the fastest so far", model)
        self._usual = list(self._window)
        if self.streamed != self._visits[0].streamed:
            self._backoff = 1
        self._note_home(visit)
        return None

    def _preferred(self, least_seconds: float) -> tuple[int, ...]:
        """Return the fastest of the visited patterns; of those that are hardly slower, the one to come home to."""
        home = self._home.streamed if self._home is not None else self._policy.planned
        for pattern, tolerance in ((home, MIN_GAIN), (self.streamed, SAME)):
            seconds = [visit.measured.seconds for visit in self._visits if visit.streamed == pattern]
            if seconds and min(seconds) <= (1 + tolerance) * least_seconds:
                return pattern
        return min(self._visits, key=lambda visit: visit.measured.seconds).streamed

    def _note_home(self, settled: Visit) -> None:
        """Take the pattern for the best one in quiet if it is faster than that ever was, and right beside it, too."""
        if self._home is None:
            self._home = settled
        elif settled.measured.seconds < (1 - SAME) * self._home.measured.seconds:
            home = next((v for v in reversed(self._visits) if v.streamed == self._home.streamed), None)
            if home and (home is settled or settled.measured.seconds < (1 - MIN_GAIN) * home.measured.seconds):
                self._home = settled

    def _has_free_link(self, measured: Measured) -> bool:
        """Tell whether copies take hardly longer than they ever did."""
        least = self._policy.lanes(self.streamed)[1] * (self._least_link_factor or 0.0)
        return measured.link_seconds <= (1 + FREE) * least

    def _may_go_home(self, measured: Measured) -> bool:
        """Tell whether it may be quiet again, under another pattern than the one for that."""
        return self._home is not None and self.streamed != self._home.streamed and self._has_free_link(measured)

    def _least_wait(self, measured: Measured) -> float:
        """Return how long the host waited in quiet, if others seem to leave the GPU alone."""
        if self._home is None or not self._has_free_link(measured):
            return math.inf
        return self._home.measured.wait_seconds

    def _best(self, model: Model) -> tuple[int, ...]:
        """Return what to stream; the pattern for quiet is as good as anything that is hardly better."""
        best = self._policy.best(model)
        if self._home is not None:
            home = self._home.streamed
            if self._policy.token_seconds(model, home) <= (1 + HOME) * self._policy.token_seconds(model, best):
                return home
        return best

    def _change(self, streamed: tuple[int, ...], reason: str, model: Model) -> Decision:
        self._n_since_change, self._seconds_since_change = 0, 0.0
        self.interrupt()
        before, self.streamed = self.streamed, streamed
        cpu_speed = self._policy.cpu_speed(model, before)
        link_speed = 1 / model.link_factor if model.link_factor > 0 else 1.0
        text = f"{reason}: CPU at {cpu_speed:.0%}, link at {link_speed:.0%} of the plan"
        return Decision(before, streamed, text, cpu_speed, link_speed)


def _deviation(recent: Sequence[Measured], usual: Sequence[Measured]) -> str:
    """Return what has changed, or "". All of the recent tokens must deviate, and by more than the usual ones do."""
    token = statistics.median(m.seconds for m in usual)
    for name, values, usual_values in (
        ("CPU", [m.cpu_seconds for m in recent], [m.cpu_seconds for m in usual]),
        ("link", [m.link_seconds for m in recent], [m.link_seconds for m in usual]),
        ("GPU", [m.seconds for m in recent], [m.seconds for m in usual]),
    ):
        centre, spread = _centre_and_spread(usual_values)
        limit = max(DEVIATION * centre, NOISE * spread, MIN_GAIN * token)
        if all(value > centre + limit for value in values):
            return f"the {name} is slower"
        if all(value < centre - limit for value in values):
            return f"the {name} is faster"
    return ""


def _waits_longer(one: Visit, other: Visit) -> bool:
    """Tell whether tokens took longer under `one`, and the host waited longer: both beyond doubt."""
    for values, other_values in (
        ([m.seconds for m in one.tokens], [m.seconds for m in other.tokens]),
        ([m.wait_seconds for m in one.tokens], [m.wait_seconds for m in other.tokens]),
    ):
        (centre, spread), (other_centre, other_spread) = _centre_and_spread(values), _centre_and_spread(other_values)
        if centre - other_centre <= max(CLEAR * other.measured.seconds, NOISE * (spread + other_spread)):
            return False
    return True


def _cautious(tokens: Sequence[Measured], link_tokens: Iterable[Measured]) -> Measured:
    """Return medians, but the link at its slowest.

    What others copy comes in bursts, and what a token measures is late: a running mean.
    """
    return replace(_typical(tokens), link_seconds=max(m.link_seconds for m in link_tokens))


def _centre_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the median of how far the values are from it."""
    centre = statistics.median(values)
    return centre, statistics.median(abs(value - centre) for value in values)


def _typical(window: Sequence[Measured]) -> Measured:
    """Return medians: a single token that others' work held up tells nothing about the next ones."""
    return Measured(
        seconds=statistics.median(m.seconds for m in window),
        cpu_seconds=statistics.median(m.cpu_seconds for m in window),
        wait_seconds=statistics.median(m.wait_seconds for m in window),
        link_seconds=statistics.median(m.link_seconds for m in window),
        streamed_bytes=window[-1].streamed_bytes,
    )
