"""The plan: where every weight lives and where it is computed, and what that was predicted to cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from .hardware import Hardware, Software
from .measurements import ModelInfo
from .workload import Workload

# History: 1 = first version.
PLAN_SCHEMA_VERSION = 1

WeightClass = Literal["gpu", "stream", "cpu"]


@dataclass(frozen=True)
class WeightCosts:
    """What one decoded token needs of a weight, in seconds while CPU and link are both busy. From the profile."""

    cpu_seconds: float
    gpu_seconds: float
    link_seconds: float
    crossing_seconds: float  # to the CPU and back, if it is computed there alone
    ring_bytes: int


@dataclass(frozen=True)
class Placement:
    """One weight's class while decoding and while processing a prompt.

    `gpu` is resident in VRAM in both phases. A host weight is `stream` (copied to VRAM ahead of each use)
    or `cpu` (computed in place), independently per phase. Weights with `costs` can change between `stream` and `cpu`
    while the plan runs.
    """

    name: str
    size_bytes: int
    decode: WeightClass
    prefill: WeightClass
    costs: WeightCosts | None = None  # None: small, an input, or experts that are decoded one by one

    def __post_init__(self) -> None:
        """Raise ValueError for what people write by hand and no engine can do."""
        if (self.decode == "gpu") != (self.prefill == "gpu"):
            raise ValueError(f"decode and prefill must both be gpu or neither; they are {self.decode}, {self.prefill}")
        if self.costs is not None and self.costs.ring_bytes < self.size_bytes:
            raise ValueError(f"costs.ring_bytes must hold the weight's {self.size_bytes} bytes")

    @property
    def is_resident(self) -> bool:
        return self.decode == "gpu"


@dataclass(frozen=True)
class VramBudget:
    """Where the budget goes, in bytes. The parts and `idle_bytes` add up to `budget_bytes`."""

    budget_bytes: int
    weights_bytes: int
    context_bytes: int
    compute_bytes: int
    ring_bytes: int
    overhead_bytes: int  # driver, kernels, and page tables of pinned memory
    margin_bytes: int
    idle_bytes: int
    experts_bytes: int = 0  # of single experts beside the ring, see Plan.shares_ring


@dataclass(frozen=True)
class ExpertPolicy:
    """Host experts of decode class `cpu` are decoded one by one: from VRAM, streamed, or on the CPU at the same time.

    The times of one expert choose how many to stream at first; the engine then measures them itself.
    """

    cache_bytes: int  # of experts that stay in VRAM; room for those of one layer that are streamed comes on top
    cpu_seconds: float
    link_seconds: float
    link_latency_seconds: float  # of the GPU's share beyond its copies
    cpu_base_seconds: float = 0.0  # of a block on the CPU beyond its experts


@dataclass(frozen=True)
class SolverReport:
    """How the placement was found. Seconds per decoded token; `bound_seconds` is a proven lower bound."""

    objective: str  # "paper" | "joint"
    status: str  # "optimal" | "feasible"
    value_seconds: float
    bound_seconds: float
    solve_seconds: float


@dataclass(frozen=True)
class Prediction:
    decode_seconds_per_token: float
    prefill_seconds: float  # for the workload's prompt
    decode_link_bytes_per_token: int
    prefill_link_bytes_per_ubatch: int
    peak_vram_bytes: int
    decode_cpu_busy_seconds: float
    decode_gpu_busy_seconds: float
    decode_link_busy_seconds: float
    decode_experts: tuple[float, float, float] = (0.0, 0.0, 0.0)  # routed per token: in VRAM, streamed, on the CPU


@dataclass(frozen=True)
class Plan:
    model: ModelInfo
    hardware: Hardware
    software: Software
    workload: Workload  # n_threads and n_ubatch are resolved here
    device: str  # "cuda0", "cuda1", ... | "sim"
    vram: VramBudget
    prefill_min_tokens: int  # batches of at least this many tokens use the prefill classes
    placements: tuple[Placement, ...]  # every weight of the model, in order of first use
    solver: SolverReport
    prediction: Prediction
    is_simulated: bool
    experts: ExpertPolicy | None = None  # None: a layer's experts are computed together
    notes: tuple[str, ...] = ()
    profiled_at: str = ""  # when its profile was measured, as MachineState.taken_at; "": unknown
    schema_version: int = PLAN_SCHEMA_VERSION

    def __post_init__(self) -> None:
        counts = Counter(placement.name for placement in self.placements)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"placements: {twice[0]:.80} is placed twice")

    @property
    def host_placements(self) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if not placement.is_resident)

    @property
    def largest_streamed_bytes(self) -> int:
        """Return what the largest weight that is streamed takes in the ring, be it in prompts only."""
        streamed = [item for item in self.placements if "stream" in (item.decode, item.prefill)]
        return max((item.costs.ring_bytes if item.costs else item.size_bytes for item in streamed), default=0)

    @property
    def shares_ring(self) -> bool:
        """Whether single experts are kept in the ring: while decoding, nothing else passes through it."""
        return self.experts is not None and all(placement.decode != "stream" for placement in self.placements)
