"""What a machine is: stable facts, which are hashed, apart from its state at one moment, which is not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

MAX_PINNED_FRACTION = 0.9  # of host memory: pinned pages cannot be swapped, and the system needs the rest


@dataclass(frozen=True)
class Cpu:
    model: str
    physical_cores: int
    logical_cores: int
    isa: tuple[str, ...]  # the vector extensions that ggml has kernels for, sorted
    last_level_cache_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    compute_capability: str  # "9.0"
    pcie_generation: int  # the link's maximum, not its idle state
    pcie_width: int
    backend: str  # "cuda" | "sim"


@dataclass(frozen=True)
class MachineState:
    """Recorded beside a measurement and never hashed. Clocks in MHz; 0 or "" where unknown."""

    taken_at: str = ""  # UTC, ISO 8601
    driver: str = ""
    gpu_uuid: str = ""
    gpu_memory_free_bytes: int = 0
    gpu_clock_mhz: int = 0
    gpu_temperature_celsius: int = 0
    cpu_clock_mhz: int = 0
    load_average: float = 0.0
    device: str = ""  # CUDA's name of the GPU among those that the process saw: "cuda0"
    gpu_has_display: bool = False  # programs on a screen take and give back VRAM all the time


@dataclass(frozen=True)
class Hardware:
    cpu: Cpu
    gpu: Gpu | None

    @property
    def gpu_name(self) -> str:
        """For people to read."""
        if self.gpu is None:
            return "no GPU"
        return "simulated GPU" if self.gpu.backend == "sim" else self.gpu.name

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits over the stable facts. RAM is rounded to GiB: kernels reserve varying amounts."""
        facts = asdict(self)
        facts["cpu"]["memory_bytes"] = round(self.cpu.memory_bytes / 1024**3)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Software:
    """Versions that change timings or placements. A plan runs only on the llama.cpp it was made for."""

    atsplan: str
    llama_cpp_python: str
    llama_cpp_commit: str  # "" where the build does not tell
    cuda_build: bool

    def has_same_llama(self, other: Software) -> bool:
        """Tell whether both have the same llama.cpp. A commit that one of them does not know is no difference."""
        commits = {self.llama_cpp_commit, other.llama_cpp_commit} - {"", "unknown"}
        return self.llama_cpp_python == other.llama_cpp_python and len(commits) < 2
