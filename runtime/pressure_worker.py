"""Decode continuously under a plan while loads come and go, in a process of its own."""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from planner.hardware import Hardware
from planner.plan import Plan
from planner.pressure import CPU_LOAD, LINK_LOAD, QUIET, Phase, PressureRun
from planner.records import from_json, read_record, to_json
from planner.trace import Trace

from . import child
from .card_watch import CardWatch
from .engine import Engine, PlanEngine
from .library import load
from .load_processes import Load

LOADS = (QUIET, CPU_LOAD, QUIET, LINK_LOAD, QUIET)
_START_SECONDS = 900  # for everything before the first phase
_N_PROMPT, _N_CYCLE = 512, 256  # tokens: the context goes from one to the sum of both, again and again
_DIGITS = 6  # of times: microseconds

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Task:
    model_path: str
    plan_path: str
    hardware: Hardware  # where it runs
    is_adaptive: bool
    warmup_seconds: float
    quiet_seconds: float
    load_seconds: float
    n_load_processes: int  # of the CPU load


@dataclass(frozen=True)
class Answer:
    """The run, and after each of its tokens the likeliest next one and how far its logit is above the second."""

    run: PressureRun
    likeliest: tuple[int, ...]
    gaps: tuple[float, ...]


def total_seconds(task: Task) -> float:
    """Return what the run takes from its first token on."""
    return task.warmup_seconds + sum(_phase_seconds(task, load) for load in LOADS)


def run(task: Task) -> Answer:
    """Run `task` in a child process. Raises AtsplanError."""
    answer = child.call(
        "runtime.pressure_worker",
        to_json(task),
        purpose="Measuring under load failed",
        timeout_seconds=_START_SECONDS + 2 * total_seconds(task),
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
            PlanEngine(load(plan.device), Path(task.model_path), plan, is_adaptive=task.is_adaptive, keeps_trace=True)
        )
        card = stack.enter_context(CardWatch(engine.library.pci_bus_id))
        for processes in loads.values():
            processes.wait_ready()
        decoder = _Decoder(engine)
        decoder.decode(task.warmup_seconds)
        phases = []
        for name in LOADS:
            if name in loads:
                loads[name].go()
            first_token = len(decoder.likeliest)
            decoder.decode(_phase_seconds(task, name))
            phases.append((name, first_token, len(decoder.likeliest)))
            if name in loads:
                loads[name].stop()
        trace = engine.load.trace(task.hardware, card.samples)
    tokens = trace.tokens
    found = tuple(
        Phase(
            load=name,
            start_seconds=round(max(0.0, tokens[first].at_seconds - tokens[first].seconds), _DIGITS),
            end_seconds=round(tokens[last - 1].at_seconds, _DIGITS),
            first_token=first,
            n_tokens=last - first,
        )
        for name, first, last in phases
    )
    return Answer(PressureRun(_rounded_trace(trace), found), tuple(decoder.likeliest), tuple(decoder.gaps))


class _Decoder:
    """Decodes random tokens, the same in every run, at about the same depth of the context."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._generator = engine, random.Random(0)
        self._n_prompt = min(_N_PROMPT, engine.n_context // 2)
        self._n_longest = min(engine.n_context, self._n_prompt + _N_CYCLE)
        self._prompt = [self._token() for _ in range(self._n_prompt)]
        self.likeliest: list[int] = []
        self.gaps: list[float] = []
        engine.evaluate(self._prompt)

    def decode(self, seconds: float) -> None:
        """Decode for so long, but one token at least."""
        until = time.perf_counter() + seconds
        while True:
            if self._engine.n_tokens == self._n_longest:
                self._cut_back()
            self._engine.evaluate([self._token()])
            logits = self._engine.logits()
            likeliest = int(np.argmax(logits))
            highest = float(logits[likeliest])
            logits[likeliest] = -np.inf
            self.likeliest.append(likeliest)
            self.gaps.append(highest - float(logits.max()))
            if time.perf_counter() >= until:
                return

    def _cut_back(self) -> None:
        """Leave only the prompt in the context."""
        n_kept = self._engine.keep_prefix([*self._prompt, 0])
        if n_kept < self._n_prompt:  # recurrent states cannot be cut
            self._engine.evaluate(self._prompt[n_kept:])

    def _token(self) -> int:
        return self._generator.randrange(self._engine.n_vocab)


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
