"""Machines for tests of the controller: of two pipes whose speeds are given, and as an H200 was recorded to be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from planner.hardware import Cpu, Hardware, Software
from planner.measurements import ModelInfo
from planner.plan import Placement, Plan, Prediction, SolverReport, VramBudget, WeightClass, WeightCosts
from planner.workload import Workload
from runtime.adapt import Controller, Decision
from runtime.adapt_policy import Measured, Policy, Visit

N = 120
CPU, LINK, REST = 1e-3, 0.5e-3, 5e-3  # seconds

MODEL = ModelInfo("Model", "llama", "0" * 16, "model.gguf", 1, 1, 1, 1)
HARDWARE = Hardware(Cpu("CPU", 8, 8, (), 1, 1), None)
SOFTWARE = Software("1", "1", "", False)


@dataclass
class Machine:
    """Computes host weights on the CPU and streams others at the same time; `rest` is beside the CPU's work."""

    cpu: float = 1.0
    link: float = 1.0
    rest: float = REST
    stall: float = 0.0  # seconds that the CPU takes beside its weights
    noise: float = 0.0
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def token(self, n_host: int, n_streamed: int) -> Measured:
        wobble = 1 + self.noise * self.generator.uniform(-1, 1)
        cpu = self.stall + (n_host - n_streamed) * CPU / self.cpu * wobble
        link = n_streamed * LINK / self.link
        seconds = max(self.rest + cpu, link) * 1.005
        return Measured(seconds, cpu, seconds - cpu, link, n_streamed)

    def best_seconds(self, n_host: int) -> float:
        quiet = replace(self, noise=0.0)
        return min(quiet.token(n_host, k).seconds for k in range(n_host + 1))


def plan(n_streamed: int, objective: str = "joint", faster: float = 1.0) -> Plan:
    """Return a plan for the usual machine, or for one that is so many times as fast."""
    costs = WeightCosts(CPU / faster, 1e-5, LINK / faster, 2e-5, 1000)
    streamed = set(range(0, N, N // n_streamed)) if n_streamed else set()
    placements = []
    for i in range(N):
        decode: WeightClass = "stream" if i in streamed else "cpu"
        placements.append(Placement(f"w{i}", 1000, decode, "stream", costs))
    placements.append(Placement("resident", 1000, "gpu", "gpu", costs))
    nothing = (0,) * 8
    return Plan(
        model=MODEL, hardware=HARDWARE, software=SOFTWARE, workload=Workload(), device="sim",
        vram=replace(VramBudget(*nothing), ring_bytes=4000), prefill_min_tokens=32, placements=tuple(placements),
        solver=SolverReport(objective, "feasible", 0.0, 0.0, 0.0),
        prediction=Prediction(
            (REST + (N - len(streamed)) * CPU) / faster, 0.0, 0, 0, 0, (N - len(streamed)) * CPU / faster,
            REST / faster, 0.0,
        ),
        is_simulated=True,
    )  # fmt: skip


def no_transfers(*_: object) -> tuple[list[bool], float]:
    raise AssertionError("only plans of the paper's objective use its algorithm")


def run(controller: Controller, machine: Machine, n: int) -> tuple[list[float], list[tuple[int, Decision]]]:
    seconds, decisions = [], []
    for i in range(n):
        measured = machine.token(N, len(controller.streamed))
        seconds.append(measured.seconds)
        decision = controller.add(measured)
        if decision:
            decisions.append((i, decision))
    return seconds, decisions


def visit(streamed: tuple[int, ...], machine: Machine) -> Visit:
    measured = machine.token(N, len(streamed))
    return Visit(streamed, measured, (measured,))


def controller_of(n_streamed: int = 60) -> Controller:
    return Controller(Policy(plan(n_streamed), no_transfers))


def recorded(seconds: float, cpu: float, wait: float, link: float) -> Measured:
    return Measured(seconds / 1e3, cpu / 1e3, wait / 1e3, link / 1e3, 0)


def recorded_plan() -> Plan:
    """Return a plan of 3614 MiB beside the GPU, of which 1777 are streamed: 33.6 ms of the link, 25.7 of the CPU."""
    base = plan(60)
    costs = WeightCosts(25.7e-3 / 61, 1e-5, 33.6e-3 / 59, 2e-5, 1000)
    placements = tuple(
        replace(p, costs=costs, decode="stream" if i * 59 % N < 59 else "cpu")
        for i, p in enumerate(base.placements[:N])
    )
    prediction = replace(base.prediction, decode_cpu_busy_seconds=25.7e-3, decode_gpu_busy_seconds=5.4e-3)
    return replace(base, placements=placements, prediction=prediction)


@dataclass
class SharedLink:
    """Tokens of `recorded_plan` on an H200 whose link other programs use in bursts, or not: seconds.

    What the link is seen to take is a running mean, and too little where tokens do not wait for it.
    """

    policy: Policy
    generator: random.Random
    now: float = 0.0
    seen: float = 33.6e-3

    def token(self, streamed: tuple[int, ...], is_shared: bool, cpu_load: float = 0.0) -> Measured:
        cpu, link = self.policy.lanes(streamed)
        cpu *= 1.05 + cpu_load + abs(self.generator.gauss(0, 0.03))
        link *= 1 + 0.3 * cpu_load
        host = cpu + (9e-3 if is_shared else 7e-3)
        link *= 1.5 if is_shared and self.now % 0.42 < 0.36 else 1.0
        seconds = host + 1.5e-3 * math.log1p(math.exp((link + 1.5e-3 - host) / 1.5e-3))
        visible = link * self.generator.uniform(0.7, 1.08) if is_shared and link < 0.92 * seconds else link
        self.seen = (self.seen + visible) / 2 if is_shared else visible
        self.now += seconds
        return Measured(seconds, cpu, seconds - cpu - 4e-3, self.seen, 0)
