"""Decode under a plan while loads come and go, adaptive and static in turns, in a process of its own."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from planner.hardware import Hardware
from planner.plan import Plan
from planner.pressure import CPU_LOAD, LINK_LOAD, QUIET, Agreement, Phase, PressureRun
from planner.records import from_json, read_record, to_json
from planner.trace import TokenSample, Trace

from . import child
from .card_watch import CardWatch
from .engine import PlanEngine
from .library import load
from .load_processes import Load

LOADS = (QUIET, CPU_LOAD, QUIET, LINK_LOAD, QUIET)
_START_SECONDS = 900  # for everything before the first phase
_N_PROMPT, _N_BEHIND = 512, 256  # tokens of the prompt, and behind it before the context is cut back to it
_N_CHANGE_OVER = 5  # tokens before a turn in which the ring is filled and graphs are captured again
_N_TURN = 15  # tokens of a turn at least, as fast as in the warm-up: the controller needs them to try a pattern
_DIGITS = 6  # of times: microseconds

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Task:
    model_path: str
    plan_path: str
    hardware: Hardware  # where it runs
    warmup_seconds: float
    quiet_seconds: float  # of each run
    load_seconds: float  # of each run
    turn_seconds: float  # at least
    n_load_processes: int  # of the CPU load


@dataclass(frozen=True)
class Answer:
    adaptive: PressureRun
    static: PressureRun
    agreement: Agreement
    turn_seconds: float  # under load


@dataclass(frozen=True)
class Turn:
    """A run of tokens, and after each of them the likeliest next one and how far its logit is above the second."""

    phase: int
    is_adaptive: bool
    first_token: int
    end_token: int
    likeliest: tuple[int, ...]
    gaps: tuple[float, ...]


def total_seconds(task: Task) -> float:
    """Return what the runs take from the first token on, without the tokens between their turns."""
    return task.warmup_seconds + 2 * sum(_phase_seconds(task, load) for load in LOADS)


def run(task: Task) -> Answer:
    """Run `task` in a child process. Raises AtsplanError."""
    answer = child.call(
        "runtime.pressure_worker",
        to_json(task),
        purpose="Measuring under load failed",
        timeout_seconds=_START_SECONDS + 10 * total_seconds(task),
    )
    return from_json(answer.encode(), Answer, "the measurement")


def run_task(task: Task) -> Answer:
    """Run `task` in this process. Raises AtsplanError."""
    plan = read_record(task.plan_path, Plan)
    with ExitStack() as stack:
        loads = {
            CPU_LOAD: stack.enter_context(Load(["cpu"] * task.n_load_processes, plan.device)),
            LINK_LOAD: stack.enter_context(Load(["link", "gpu"], plan.device)),
        }
        engine = stack.enter_context(
            PlanEngine(load(plan.device), Path(task.model_path), plan, is_adaptive=True, keeps_trace=True)
        )
        card = stack.enter_context(CardWatch(engine.library.pci_bus_id))
        for processes in loads.values():
            processes.wait_ready()
        decoder = _Decoder(engine)
        n_tokens = len(decoder.decode(task.warmup_seconds)[0])
        turn_seconds = turn_seconds_of(task, n_tokens)
        turns: list[Turn] = []
        for phase, (before, name) in enumerate(pairwise((QUIET, *LOADS))):
            seconds = _phase_seconds(task, name)
            n_pairs = _n_turns(seconds, turn_seconds)
            for index in range(2 * n_pairs):
                is_adaptive = index % 2 == 0
                decoder.change_over(is_adaptive, seed=len(turns) // 2)
                if index == 0:  # the phase's tokens count from the moment when the load changes
                    _change_load(loads, before, name)
                first_token = engine.load.n_tokens
                likeliest, gaps = decoder.decode(seconds / n_pairs)
                turns.append(Turn(phase, is_adaptive, first_token, engine.load.n_tokens, likeliest, gaps))
        trace = _rounded_trace(engine.load.trace(task.hardware, card.samples))
    adaptive, static = (pressure_run(trace, turns, is_adaptive) for is_adaptive in (True, False))
    return Answer(adaptive, static, agreement_of(turns), task.load_seconds / _n_turns(task.load_seconds, turn_seconds))


def _change_load(loads: Mapping[str, Load], before: str, now: str) -> None:
    """Of a quiet phase there is none."""
    if before in loads:
        loads[before].stop()
    if now in loads:
        loads[now].go()


def pressure_run(trace: Trace, turns: Sequence[Turn], is_adaptive: bool) -> PressureRun:
    """Return the tokens of one run's turns. Phases begin and end for both runs at the same time."""
    tokens: list[TokenSample] = []
    phases = []
    for phase, name in enumerate(LOADS):
        of_phase = [turn for turn in turns if turn.phase == phase]
        first_token = len(tokens)
        for turn in of_phase:
            if turn.is_adaptive == is_adaptive:
                tokens += trace.tokens[turn.first_token : turn.end_token]
        first, last = trace.tokens[of_phase[0].first_token], trace.tokens[of_phase[-1].end_token - 1]
        start_seconds = round(max(0.0, first.at_seconds - first.seconds), _DIGITS)
        phases.append(Phase(name, start_seconds, last.at_seconds, first_token, len(tokens) - first_token))
    changes = trace.changes if is_adaptive else ()
    return PressureRun(replace(trace, is_adaptive=is_adaptive, tokens=tuple(tokens), changes=changes), tuple(phases))


def agreement_of(turns: Sequence[Turn]) -> Agreement:
    """Compare what a turn computed with what the next one did after the same tokens; one may have decoded more."""
    n_compared, gaps = 0, []
    for one, other in zip(turns[::2], turns[1::2], strict=True):
        pairs = list(zip(one.likeliest, other.likeliest, one.gaps, other.gaps, strict=False))
        n_compared += len(pairs)
        gaps += [max(gap, other_gap) for token, other_token, gap, other_gap in pairs if token != other_token]
    return Agreement(n_compared, len(gaps), max(gaps, default=0.0))


class _Decoder:
    """Decodes random tokens at about the same depth of the context."""

    def __init__(self, engine: PlanEngine) -> None:
        self._engine, self._generator = engine, random.Random("prompt")
        n_prompt = min(_N_PROMPT, engine.n_context // 2)
        self._n_longest = min(engine.n_context, n_prompt + _N_BEHIND)
        self._prompt = [self._random_token() for _ in range(n_prompt)]
        engine.evaluate(self._prompt)

    def change_over(self, is_adaptive: bool, *, seed: int) -> None:
        """Begin a turn. Of the same seed, turns decode the same tokens."""
        if is_adaptive:
            self._engine.load.follow()
        else:
            self._engine.load.hold()
        self._generator.seed(seed)
        self._cut_back()
        for _ in range(_N_CHANGE_OVER):
            self._next()

    def decode(self, seconds: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Decode for so long, but one token at least. Return the likeliest next tokens and their lead."""
        until = time.perf_counter() + seconds
        found = [self._next()]
        while time.perf_counter() < until:
            found.append(self._next())
        likeliest, gaps = zip(*found, strict=True)
        return likeliest, gaps

    def _next(self) -> tuple[int, float]:
        if self._engine.n_tokens == self._n_longest:
            self._cut_back()
        self._engine.evaluate([self._random_token()])
        logits = self._engine.logits()
        likeliest = int(np.argmax(logits))
        highest = float(logits[likeliest])
        logits[likeliest] = -np.inf
        return likeliest, highest - float(logits.max())

    def _cut_back(self) -> None:
        """Leave only the prompt in the context."""
        n_kept = self._engine.keep_prefix([*self._prompt, 0])
        if n_kept < len(self._prompt):  # recurrent states cannot be cut
            self._engine.evaluate(self._prompt[n_kept:])

    def _random_token(self) -> int:
        return self._generator.randrange(self._engine.n_vocab)


def turn_seconds_of(task: Task, n_warmup_tokens: int) -> float:
    """Return how long a turn is at least."""
    return max(task.turn_seconds, _N_TURN * task.warmup_seconds / n_warmup_tokens)


def _n_turns(seconds: float, turn_seconds: float) -> int:
    return max(1, int(seconds / turn_seconds + 1e-9))


def _phase_seconds(task: Task, load: str) -> float:
    return task.quiet_seconds if load == QUIET else task.load_seconds


def _rounded_trace(trace: Trace) -> Trace:
    """Leave out digits that mean nothing: a run has thousands of tokens."""
    return replace(
        trace, tokens=tuple(map(_rounded, trace.tokens)), prompts=tuple(map(_rounded, trace.prompts)),
        changes=tuple(map(_rounded, trace.changes)), card=tuple(map(_rounded, trace.card)),
    )  # fmt: skip


def _rounded(sample: Sample) -> Sample:
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}  # type: ignore[arg-type]
    changed = {name: round(value, _DIGITS) for name, value in values.items() if isinstance(value, float)}
    return replace(sample, **changed)  # type: ignore[type-var]


if __name__ == "__main__":
    sys.exit(child.answer(lambda request: run_task(from_json(request.encode(), Task, "the task"))))
