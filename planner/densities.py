"""Where the time goes: what a MiB of each kind of weight costs on the CPU and on the GPU. The paper's figure 9."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table

from .explain import role_of
from .measurements import Profile, WeightUse
from .units import MIB, format_count, format_size

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Density:
    """The weights of one role and type, over all layers together. Without a GPU, its seconds are None.

    Of experts, seconds count those that the tokens are routed to, sizes all.
    """

    role: str
    type: str
    n_weights: int
    size_bytes: int
    cpu_seconds: float  # of one token
    gpu_seconds: float | None
    batch_cpu_seconds: float  # of a micro-batch
    batch_gpu_seconds: float | None

    @property
    def cpu_seconds_per_mib(self) -> float:
        """What a MiB costs per token on the CPU."""
        return self.cpu_seconds / (self.size_bytes / MIB)

    @property
    def gpu_seconds_per_mib(self) -> float | None:
        return None if self.gpu_seconds is None else self.gpu_seconds / (self.size_bytes / MIB)

    @property
    def gain_seconds_per_mib(self) -> float:
        """What a MiB in VRAM saves per token; without a GPU, what it costs on the CPU."""
        return self.cpu_seconds_per_mib - (self.gpu_seconds_per_mib or 0.0)


def densities(profile: Profile, n_threads: int) -> list[Density]:
    """Return one density per role and type, the highest gain first. Raises AtsplanError for what is not measured."""
    groups: dict[tuple[str, str], list[WeightUse]] = {}
    for weight in profile.products:
        groups.setdefault((role_of(weight.name)[1], weight.type), []).append(weight)
    found = [
        Density(
            role=role,
            type=kind,
            n_weights=len(weights),
            size_bytes=sum(weight.size_bytes for weight in weights),
            cpu_seconds=profile.total_seconds(weights, "cpu", 1, n_threads),
            gpu_seconds=profile.total_seconds(weights, "gpu", 1) if profile.has_gpu else None,
            batch_cpu_seconds=profile.total_seconds(weights, "cpu", profile.n_ubatch, n_threads),
            batch_gpu_seconds=profile.total_seconds(weights, "gpu", profile.n_ubatch) if profile.has_gpu else None,
        )
        for (role, kind), weights in groups.items()
    ]
    return sorted(found, key=lambda density: -density.gain_seconds_per_mib)


def best_thread_count(profile: Profile) -> int:
    """Return the measured thread count with which the CPU computes one token of the whole model fastest."""
    return min(profile.thread_counts, key=lambda n: profile.total_seconds(profile.products, "cpu", 1, n), default=0)


def density_table(profile: Profile, n_threads: int) -> Table:
    """Return the densities with the time that all weights of a kind take. Fits into 80 columns."""
    gpu = " and the simulated GPU" if profile.is_simulated else " and the GPU" if profile.has_gpu else ""
    table = Table(
        title=f"Milliseconds on the CPU ({format_count(n_threads, 'thread')}){gpu}",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("weights", no_wrap=True)
    batch = format_count(profile.n_ubatch, "token")
    for heading in ("size", "gain\nus/MiB", "1 token\nCPU", "\nGPU", f"{batch}\nCPU", "\nGPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in densities(profile, n_threads):
        times = (item.cpu_seconds, item.gpu_seconds, item.batch_cpu_seconds, item.batch_gpu_seconds)
        gain = None if item.gpu_seconds is None else item.gain_seconds_per_mib * _MICROSECONDS
        numbers = (gain, *(None if seconds is None else seconds * 1e3 for seconds in times))
        table.add_row(f"{item.role} {item.type}", format_size(item.size_bytes), *map(_four_digits, numbers))
    return table


def _four_digits(value: float | None) -> str:
    """Return at most two decimals, and fewer for large values."""
    return "-" if value is None else f"{value:.{2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0}f}"


def microseconds(seconds: float | None) -> str:
    """Return three significant digits: `40.5`, `3.21`, `0.41`; all digits before the point."""
    if seconds is None:
        return "-"
    value = seconds * _MICROSECONDS
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
