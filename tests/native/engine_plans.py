"""Plans for tests: any classes for the weights of a model, with the sizes that llama.cpp itself reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.gguf_model import read_model_info
from planner.hardware import Cpu, Gpu, Hardware, Software
from planner.measurements import WeightUse
from planner.plan import ExpertPolicy, Placement, Plan, Prediction, SolverReport, VramBudget, WeightClass, WeightCosts
from planner.workload import Workload
from runtime.inspect_model import _inspect

MATMULS = ("MUL_MAT", "MUL_MAT_ID")
HARDWARE = Hardware(Cpu("test", 2, 2, ("avx2",), 1 << 20, 1 << 34), Gpu("sim", 1 << 33, "0.0", 0, 0, "sim"))


def weights_of(
    model: Path, n_context: int = 256, n_ubatch: int = 32, *, flash_attention: bool = True
) -> tuple[WeightUse, ...]:
    """Return the weights as `inspect_model` does, but in this process: a child of its own takes a second."""
    return _inspect(str(model), "sim", [n_context], n_ubatch, "f16", "f16", flash_attention).weights_decode


def plan_for(
    model: Path,
    placements: Sequence[Placement],
    *,
    n_context: int = 256,
    n_ubatch: int = 32,
    ring_bytes: int = 0,
    prefill_min_tokens: int = 8,
    flash_attention: bool = True,
    software: Software | None = None,
    experts: ExpertPolicy | None = None,
) -> Plan:
    """Return a plan whose figures are all zero, except those that decide what is executed.

    Of placements with the same name, it is the last: a tied embedding's is that of the output.
    """
    return Plan(
        model=read_model_info(model),
        hardware=HARDWARE,
        software=software or Software("test", "0.3.36", "", False),
        workload=Workload(16, 8, n_context, n_ubatch, 1, "f16", "f16", flash_attention),
        device="sim",
        vram=VramBudget(1 << 30, 0, 0, 0, ring_bytes, 0, 0, 0),
        prefill_min_tokens=prefill_min_tokens,
        placements=tuple({placement.name: placement for placement in placements}.values()),
        solver=SolverReport("paper", "optimal", 0.0, 0.0, 0.0),
        prediction=Prediction(0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0),
        is_simulated=True,
        experts=experts,
    )


def random_placements(weights: Sequence[WeightUse], seed: int) -> list[Placement]:
    """Return every weight's placement: matrices anywhere, independently per phase; all others resident."""
    generator = random.Random(seed)
    placements = []
    for weight in weights:
        decode: WeightClass = "gpu"
        prefill: WeightClass = "gpu"
        if weight.is_input:
            decode = prefill = "cpu"
        elif weight.op in MATMULS and generator.random() < 0.7:
            decode, prefill = generator.choice(("stream", "cpu")), generator.choice(("stream", "cpu"))
        placements.append(Placement(weight.name, weight.size_bytes, decode, prefill))
    return placements


def movable(placements: Sequence[Placement], weights: Sequence[WeightUse]) -> list[Placement]:
    """Return the placements with costs for the matrices on the host: so a run may move them between link and CPU."""
    return [
        replace(placement, costs=WeightCosts(1e-4, 1e-5, 5e-5, 1e-5, placement.size_bytes))
        if weight.op == "MUL_MAT" and not placement.is_resident
        else placement
        for placement, weight in zip(placements, weights, strict=True)
    ]


def uniform_placements(weights: Sequence[WeightUse], decode: WeightClass, prefill: WeightClass) -> list[Placement]:
    """Return all matrices in one class."""
    return [
        Placement(weight.name, weight.size_bytes, "cpu", "cpu")
        if weight.is_input
        else Placement(weight.name, weight.size_bytes, decode, prefill)
        if weight.op in MATMULS
        else Placement(weight.name, weight.size_bytes, "gpu", "gpu")
        for weight in weights
    ]
