"""Measure one contender, a plan or plain llama.cpp, in a process of its own."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AtsplanError
from planner.measurements import Series
from planner.plan import Plan
from planner.records import from_json, read_record, to_json

from . import child
from .bindings import Statistics
from .engine import Engine, PlanEngine
from .library import load
from .nvml import BusyMeter, VramMeter
from .sampling import Sampler
from .session import LoadSettings

TIMEOUT_SECONDS = 3600
CUDA_GRAPHS = "cuda_graphs"  # llama.cpp's own, switched off through its environment variable
# Decoded before anything is timed: kernels are loaded and CUDA graphs captured. An adaptive plan settles meanwhile.
N_WARMUP_TOKENS = 8
N_SETTLING_TOKENS = 40
N_EXPERT_TRIAL_TOKENS = 80  # decoded with and without predicting experts, until the better one is known


@dataclass(frozen=True)
class Task:
    """What to measure. With a `plan_path` the plan runs, else plain llama.cpp with `settings`."""

    model_path: str
    device: str  # "cuda0" | "sim"
    plan_path: str | None
    settings: LoadSettings | None
    n_prompt: int
    n_generate: int
    depths: tuple[int, ...]  # tokens in the context before the prompt
    n_repeat: int
    switched_off: str | None = None  # an option of the hybrid device, such as "prefetch", or "cuda_graphs"
    is_adaptive: bool = True  # the plan follows changing speeds


@dataclass(frozen=True)
class DepthTimes:
    """Seconds for the whole prompt, until the first token is chosen, and per decoded token."""

    n_depth: int
    prefill_seconds: Series
    first_token_seconds: Series
    decode_seconds: Series


@dataclass(frozen=True)
class Measured:
    depths: tuple[DepthTimes, ...]
    load_seconds: float
    peak_vram_bytes: int  # of the card, beyond what was in use before; accounted for on a simulated device
    gpu_busy_fraction: float | None  # while decoding
    statistics: Statistics | None  # of the hybrid device, over `n_statistics_tokens` decoded tokens
    n_statistics_tokens: int


def measure(task: Task) -> Measured:
    """Run `task` in a child process. Raises AtsplanError."""
    purpose = f"Measuring {'the plan' if task.plan_path else 'llama.cpp'} failed"
    answer = child.call("runtime.bench_worker", to_json(task), purpose=purpose, timeout_seconds=TIMEOUT_SECONDS)
    return from_json(answer.encode(), Measured, "the measurement")


def run_task(task: Task) -> Measured:
    """Run `task` in this process."""
    vram = VramMeter()
    if task.switched_off == CUDA_GRAPHS:
        os.environ["GGML_CUDA_DISABLE_GRAPHS"] = "1"
    library = load(task.device)
    started = time.perf_counter()
    path = Path(task.model_path)
    engine: Engine
    n_warmup = N_WARMUP_TOKENS
    if task.plan_path is not None:
        plan = read_record(task.plan_path, Plan)
        engine = PlanEngine(library, path, plan, is_adaptive=task.is_adaptive)
        if plan.experts is not None:
            n_warmup = N_EXPERT_TRIAL_TOKENS
        elif engine.load.is_adaptive:
            n_warmup = N_SETTLING_TOKENS
        if task.switched_off not in (None, CUDA_GRAPHS):
            engine.helper.set_option(task.switched_off, 0)
    elif task.settings is not None:
        engine = Engine(library, path, task.settings)
    else:
        raise AtsplanError("Neither a plan nor settings were given to measure.")
    load_seconds = time.perf_counter() - started
    vram.watch(library.pci_bus_id)
    with engine, Sampler() as sampler:
        runner = _Runner(engine, sampler, task)
        runner.decode_seconds(0, n_warmup)
        for _ in range(2):  # a prompt's CUDA graphs are captured the second time
            for depth in task.depths:
                runner.prefill_seconds(depth)
                runner.decode_seconds(depth + task.n_prompt, min(N_WARMUP_TOKENS, task.n_generate))
        rounds = [[runner.measure(depth) for depth in task.depths] for _ in range(task.n_repeat)]
        peak_vram_bytes = vram.used_bytes(engine.accounted_vram_bytes())
        with BusyMeter(library.pci_bus_id) as busy:
            statistics = runner.statistics(task.depths[0])
    return Measured(
        depths=tuple(
            DepthTimes(depth, *(Series(samples) for samples in zip(*times, strict=True)))
            for depth, times in zip(task.depths, zip(*rounds, strict=True), strict=True)
        ),
        load_seconds=load_seconds,
        peak_vram_bytes=peak_vram_bytes,
        gpu_busy_fraction=busy.busy_fraction,
        statistics=statistics,
        n_statistics_tokens=task.n_generate,
    )


class _Runner:
    """Times prompts and decoded tokens. Tokens are random but the same for every contender."""

    def __init__(self, engine: Engine, sampler: Sampler, task: Task) -> None:
        generator = random.Random(0)
        n_tokens = max(task.depths) + task.n_prompt + task.n_generate
        self._engine, self._sampler, self._task = engine, sampler, task
        self._tokens = [generator.randrange(engine.n_vocab) for _ in range(n_tokens)]

    def measure(self, depth: int) -> tuple[float, float, float]:
        """Return seconds of the prompt, to the first token, and per decoded token."""
        prefill, first_token = self.prefill_seconds(depth)
        return prefill, first_token, self.decode_seconds(depth + self._task.n_prompt, self._task.n_generate)

    def prefill_seconds(self, depth: int) -> tuple[float, float]:
        """Return seconds of the prompt after `depth` tokens, and to the first token."""
        self._engine.evaluate_prompt(self._tokens[:depth])
        self._engine.synchronize()
        started = time.perf_counter()
        self._engine.evaluate(self._tokens[depth : depth + self._task.n_prompt])
        self._engine.synchronize()
        prefilled = time.perf_counter()
        self._engine.choose(self._sampler)
        return prefilled - started, time.perf_counter() - started

    def decode_seconds(self, first: int, n_tokens: int) -> float:
        """Return seconds per token of decoding the next `n_tokens`, starting with the `first` of all tokens."""
        started = time.perf_counter()
        for token in self._tokens[first : first + n_tokens]:
            self._engine.evaluate([token])
            self._engine.synchronize()
        return (time.perf_counter() - started) / n_tokens

    def statistics(self, depth: int) -> Statistics | None:
        """Decode once more with the hybrid device's counters on, and return them; None for plain llama.cpp."""
        self.prefill_seconds(depth)
        if isinstance(self._engine, PlanEngine):
            self._engine.helper.set_option("statistics", 1)
            self._engine.statistics(reset=True)
        self.decode_seconds(depth + self._task.n_prompt, self._task.n_generate)
        return self._engine.statistics() if isinstance(self._engine, PlanEngine) else None


if __name__ == "__main__":
    sys.exit(child.answer(lambda request: run_task(from_json(request.encode(), Task, "the task"))))
