"""The load-aware part of a run: measure every token, and move weights between link and CPU when speeds have changed.

What is resident stays so. The engine's own counters tell how long the CPU computed, how long the link was busy, and
how long the host waited for the GPU. As in Algorithm 3 of arXiv 2607.10183, a deviation over 15 % makes the controller
look, and changes are at least five tokens apart. A model of the present proposes which weights to stream: for plans of
the paper's objective by its Algorithm 2, for all others by the best of a ladder of evenly spread patterns that the
plan's own pattern is a rung of. What the model proposes is measured, and the fastest of what was measured stays; of
equals, the one where tokens were fastest ever, which is tried again when a load seems to be gone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .adapt_policy import CLEAR, NOISE, Measured, Model, Policy, Visit, centre_and_spread

DEVIATION = 0.15  # of a token's time, or of a lane's, since it was last looked at
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
# Since a change or a trial, before the next trial; since a change, before a deviation counts; since a visit was cut
# short, before another one is: small models' tokens are too short to follow all noise.
MIN_TRIAL_SECONDS, MIN_CHANGE_SECONDS = 1.0, 0.5
FREE = (
    0.07  # of the time that copies took where tokens were fastest: a link that nobody else uses may take as much more
)
_TRIAL, _LINK_FASTER = "a trial", "the link is faster"


@dataclass(frozen=True)
class Decision:
    """The weights to stream from now on, by index into `Policy.movable`, and why; speeds relative to the plan."""

    before: tuple[int, ...]
    streamed: tuple[int, ...]
    reason: str
    cpu_speed: float
    link_speed: float


class Controller:
    """Watches tokens and decides when to change. `streamed` is what it decided last.

    It is either settling, going through a few patterns, or settled. In both it looks for deviations; a pattern is
    visited to the end only without one.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.streamed = policy.planned
        self._window: deque[Measured] = deque(maxlen=N_MEASURED)
        self._seconds_since_change = 0.0
        self._seconds_since_cut = math.inf  # of a visit that was cut short
        self._n_since_look, self._seconds_since_look = 0, 0.0  # since a change or a trial
        self._n_to_skip = N_SKIPPED
        self._visits: list[Visit] = []  # since speeds changed last
        self._reason = "the first tokens"
        self._model: Model | None = None
        self._usual: list[Measured] | None = None  # once settled: what tokens took then
        self._is_final = False  # the pattern is the fastest of those visited
        self._backoff = 1
        self._home: Visit | None = None  # where tokens were fastest, ever
        self._free_link_seconds = math.inf  # once settled: what copies take if the link is as free as there

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
        self._n_since_look += 1
        self._seconds_since_look += measured.seconds
        self._seconds_since_change += measured.seconds
        self._seconds_since_cut += measured.seconds
        self._n_to_skip -= 1
        if self._n_to_skip >= 0 or not self._policy.movable:
            return None
        self._window.append(measured)
        if len(self._window) < N_FIRST:
            return None
        recent = list(self._window)[-N_FIRST:]
        if self._usual is None:
            may_cut = bool(self._visits) and self._seconds_since_cut >= MIN_CHANGE_SECONDS
            reason = self._deviation_of_lanes(recent) if may_cut else ""
            if reason:
                self._seconds_since_cut = 0.0
                return self._start(reason, recent, _cautious(recent, recent))
            n_needed = N_MEASURED if self._visits else N_FIRST
            return self._settle(_typical(self._window)) if len(self._window) == n_needed else None
        reason = self._deviation(recent, self._usual)
        if reason and self._seconds_since_change >= MIN_CHANGE_SECONDS:
            return self._start(reason, recent, _cautious(recent, recent if reason == _LINK_FASTER else self._window))
        if self._is_time_for_a_trial():
            self._n_since_look, self._seconds_since_look = 0, 0.0
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)  # unless another pattern turns out to be better
            self._model = None  # what cannot be measured is assumed to be as planned
            return self._start(_TRIAL, self._window, _cautious(self._window, self._window))
        return None

    def _is_time_for_a_trial(self) -> bool:
        """Tell whether to try something though speeds have not changed; the more trials were in vain, the rarer."""
        n = self._n_since_look
        min_look = MIN_LOOK if len(self._visits) == 1 else MIN_TRIAL  # what other patterns took counts for longer
        may_try = n >= MIN_TRIAL * self._backoff
        may_look = n >= min_look * self._backoff and n % N_MEASURED == 0
        if self._seconds_since_look < MIN_TRIAL_SECONDS or not (may_try or may_look):
            return False
        measured, (cpu, link) = _typical(self._window), self._policy.lanes(self.streamed)
        if may_try and (cpu == 0 or link == 0 or self._policy.waits_for_link(measured)):
            return True  # a lane that does nothing is not measured, nor is waiting that the link hides
        if not may_look:
            return False
        model = self._policy.model([Visit(self.streamed, measured, tuple(self._window))], None)
        expected = self._policy.token_seconds(model, self.streamed)
        return self._policy.token_seconds(model, self._policy.best(model)) < (1 - CLEAR) * expected

    def _deviation_of_lanes(self, recent: Sequence[Measured]) -> str:
        """Return which lane is slower or faster than under the pattern before, beyond what the change may have done."""
        before = self._visits[-1]
        ratios = self._ratios(before.streamed)
        is_free = self._is_free(recent, self._as_at_home()[1])
        for direction, farther in (("slower", max), ("faster", min)):
            cpu, link = (farther(1.0, ratio) for ratio in ratios)
            usual = [
                replace(m, cpu_seconds=_product(m.cpu_seconds, cpu), link_seconds=_product(m.link_seconds, link))
                for m in before.tokens
            ]
            for reason in _deviations(recent, usual):
                if reason.endswith(direction) and "GPU" not in reason and (reason != _LINK_FASTER or is_free):
                    return reason
        return ""

    def _deviation(self, recent: Sequence[Measured], usual: Sequence[Measured]) -> str:
        """Return what has changed, or "". A link that others use comes and goes: it is faster only once it is free."""
        free = self._free_link_seconds
        is_free = self._is_free(recent, free)
        for reason in _deviations(recent, usual):
            if reason != _LINK_FASTER or is_free:
                return reason
        was_free = statistics.median(m.link_seconds for m in usual) <= (1 + DEVIATION) * free
        return _LINK_FASTER if is_free and not was_free else ""

    @staticmethod
    def _is_free(recent: Sequence[Measured], free_link_seconds: float) -> bool:
        return all(m.link_seconds <= (1 + FREE) * free_link_seconds for m in recent)

    def _start(self, reason: str, tokens: Iterable[Measured], measured: Measured) -> Decision | None:
        """Speeds have changed: what was measured before no longer counts."""
        tokens = tuple(tokens)
        self._forget(reason)
        self._n_to_skip = 0
        if reason != _TRIAL:
            self._backoff = 1
        self._window.extend(tokens)
        return self._settle(measured)

    def _forget(self, reason: str) -> None:
        self._visits, self._reason, self._is_final, self._usual = [], reason, False, None
        self._window.clear()

    def _settle(self, measured: Measured) -> Decision | None:
        earlier = next((v.measured.seconds for v in self._visits if v.streamed == self.streamed), None)
        if earlier is not None and abs(measured.seconds / earlier - 1) > DEVIATION:  # speeds have changed meanwhile
            self._visits, self._is_final = [], False
        visit = Visit(self.streamed, measured, tuple(self._window))
        self._visits.append(visit)
        self._model = model = self._policy.model(self._visits, self._model)
        if not self._is_final and len(self._visits) < MAX_VISITS:
            promising = self._promising(model, measured)
            if promising is not None:
                return self._change(promising, self._reason, model)
        preferred = self._preferred()
        if not self._is_final and preferred != self.streamed:
            self._is_final = True
            return self._change(preferred, "the fastest so far", model)
        self._usual = list(self._window)
        visited = [visit.streamed for visit in self._visits]
        if self.streamed != visited[0] and (self._home is None or self._home.streamed not in visited):
            self._backoff = 1  # else it is known what could be tried first
        if self._home is None or measured.seconds < (1 - SAME) * self._home.measured.seconds:
            self._home = visit
        self._free_link_seconds = self._as_at_home()[1]
        return None

    def _promising(self, model: Model, measured: Measured) -> tuple[int, ...] | None:
        """Return a pattern that is worth a visit, if there is one."""
        visited = [visit.streamed for visit in self._visits]
        home = self._home.streamed if self._home is not None else self.streamed
        best = self._best(model)
        expected_now = self._policy.token_seconds(model, self.streamed)
        error = measured.seconds / expected_now if expected_now > 0 else 1.0
        promised = error * self._policy.token_seconds(model, best)
        gains = promised < (1 - MIN_GAIN) * min(visit.measured.seconds for visit in self._visits)
        if gains and best not in visited:
            return best
        may_go_home = home not in visited and self._is_quiet(measured) and not self._reason.endswith("slower")
        return home if may_go_home else None

    def _preferred(self) -> tuple[int, ...]:
        """Return the fastest of the visited patterns; of those that are hardly slower, the one that was it ever."""
        fastest = min(self._visits, key=lambda visit: visit.measured.seconds)
        home = self._home.streamed if self._home is not None else self._policy.planned
        for pattern, tolerance in ((home, MIN_GAIN), (self.streamed, SAME)):
            seconds = [visit.measured.seconds for visit in self._visits if visit.streamed == pattern]
            if seconds and min(seconds) <= (1 + tolerance) * fastest.measured.seconds:
                return pattern
        return fastest.streamed

    def _is_quiet(self, measured: Measured) -> bool:
        """Tell whether CPU and link are hardly slower than where tokens were fastest."""
        if self._home is None:
            return False
        cpu, link = self._as_at_home()
        return measured.link_seconds <= (1 + FREE) * link and measured.cpu_seconds <= (1 + DEVIATION) * cpu

    def _as_at_home(self) -> tuple[float, float]:
        """Return what CPU and link would take here if they were as fast as where tokens were fastest; else infinity."""
        if self._home is None:
            return math.inf, math.inf
        cpu, link = self._ratios(self._home.streamed)
        return _product(self._home.measured.cpu_seconds, cpu), _product(self._home.measured.link_seconds, link)

    def _ratios(self, streamed: tuple[int, ...]) -> tuple[float, float]:
        """Return how much CPU and link have to do here relative to there; infinity for what does nothing there."""
        here, there = self._policy.lanes(self.streamed), self._policy.lanes(streamed)
        cpu, link = (now / before if before else math.inf for now, before in zip(here, there, strict=True))
        return cpu, link

    def _best(self, model: Model) -> tuple[int, ...]:
        """Return what to stream; where tokens were fastest is as good as anything that is hardly better."""
        best = self._policy.best(model)
        if self._home is not None:
            home = self._home.streamed
            if self._policy.token_seconds(model, home) <= (1 + HOME) * self._policy.token_seconds(model, best):
                return home
        return best

    def _change(self, streamed: tuple[int, ...], reason: str, model: Model) -> Decision:
        self._n_since_look, self._seconds_since_look, self._seconds_since_change = 0, 0.0, 0.0
        self.interrupt()
        before, self.streamed = self.streamed, streamed
        cpu_speed = self._policy.cpu_speed(model, before)
        link_speed = 1 / model.link_factor if model.link_factor > 0 else 1.0
        text = f"{reason}: CPU at {cpu_speed:.0%}, link at {link_speed:.0%} of the plan"
        return Decision(before, streamed, text, cpu_speed, link_speed)


def _deviations(recent: Sequence[Measured], usual: Sequence[Measured]) -> Iterator[str]:
    """Yield what has changed. All of the recent tokens must deviate, and by more than the usual ones do."""
    token = statistics.median(m.seconds for m in usual)
    for name, values, usual_values in (
        ("CPU", [m.cpu_seconds for m in recent], [m.cpu_seconds for m in usual]),
        ("link", [m.link_seconds for m in recent], [m.link_seconds for m in usual]),
        ("GPU", [m.seconds for m in recent], [m.seconds for m in usual]),
    ):
        centre, spread = centre_and_spread(usual_values)
        limit = max(DEVIATION * centre, NOISE * spread, MIN_GAIN * token)
        if all(value > centre + limit for value in values):
            yield f"the {name} is slower"
        if all(value < centre - limit for value in values):
            yield f"the {name} is faster"


def _product(seconds: float, ratio: float) -> float:
    return seconds * ratio if math.isfinite(ratio) else math.inf


def _cautious(tokens: Sequence[Measured], link_tokens: Iterable[Measured]) -> Measured:
    """Return medians, but the link at its slowest.

    What others copy comes in bursts, and what a token measures is late: a running mean.
    """
    return replace(_typical(tokens), link_seconds=max(m.link_seconds for m in link_tokens))


def _typical(window: Sequence[Measured]) -> Measured:
    """Return medians: a single token that others' work held up tells nothing about the next ones."""
    return Measured(
        seconds=statistics.median(m.seconds for m in window),
        cpu_seconds=statistics.median(m.cpu_seconds for m in window),
        wait_seconds=statistics.median(m.wait_seconds for m in window),
        link_seconds=statistics.median(m.link_seconds for m in window),
        streamed_bytes=window[-1].streamed_bytes,
    )
