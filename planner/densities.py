"""Where the time goes: what a MiB of each kind of weight costs on the CPU and on the GPU. The paper's figure 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from .explain import role_of
from .measurements import Profile, WeightUse
from .units import MIB, format_count, format_size

_MICROSECONDS = 1e6
_BAR_WIDTH = 20


@dataclass(frozen=True)
class Density:
    """The weights of one role and type, over all layers. Seconds are of one token, per MiB of weights.

    For experts they count the routed ones, of whose layer only a part is read.
    """

    role: str
    type: str
    n_weights: int
    size_bytes: int
    cpu_seconds_per_mib: float
    gpu_seconds_per_mib: float | None  # None without a GPU

    @property
    def gain_seconds_per_mib(self) -> float:
        """What a MiB in VRAM saves per token; without a GPU, what it costs on the CPU."""
        return self.cpu_seconds_per_mib - (self.gpu_seconds_per_mib or 0.0)


def densities(profile: Profile, n_threads: int) -> list[Density]:
    """Return one density per role and type, the highest gain first. Raises KeyError for unmeasured thread counts."""
    groups: dict[tuple[str, str], list[WeightUse]] = {}
    for weight in profile.products:
        groups.setdefault((role_of(weight.name)[1], weight.type), []).append(weight)
    found = []
    for (role, kind), weights in groups.items():
        size_bytes = sum(weight.size_bytes for weight in weights)
        cpu = profile.total_seconds(weights, "cpu", 1, n_threads)
        gpu = profile.total_seconds(weights, "gpu", 1) if profile.has_gpu else None
        mib = size_bytes / MIB
        found.append(Density(role, kind, len(weights), size_bytes, cpu / mib, gpu / mib if gpu is not None else None))
    return sorted(found, key=lambda density: -density.gain_seconds_per_mib)


def best_thread_count(profile: Profile) -> int:
    """Return the measured thread count with which the CPU computes one token of the whole model fastest."""
    return min(profile.thread_counts, key=lambda n: profile.total_seconds(profile.products, "cpu", 1, n), default=0)


def density_table(items: Sequence[Density], n_threads: int) -> Table:
    """Return the densities with bars: what each MiB in VRAM saves."""
    table = Table(
        title=f"Microseconds per MiB and token ({format_count(n_threads, 'CPU thread')})",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False,
    )  # fmt: skip
    table.add_column("weights", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for heading in ("CPU", "GPU", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    highest = max((item.gain_seconds_per_mib for item in items), default=0.0)
    for item in items:
        share = max(0.0, item.gain_seconds_per_mib / highest) if highest > 0 else 0.0
        table.add_row(
            f"{item.role} {item.type}", format_size(item.size_bytes), microseconds(item.cpu_seconds_per_mib),
            microseconds(item.gpu_seconds_per_mib), microseconds(item.gain_seconds_per_mib),
            Text("█" * round(share * _BAR_WIDTH), style="green"),
        )  # fmt: skip
    return table


def microseconds(seconds: float | None) -> str:
    """Return three significant digits: `40.5`, `3.21`, `0.41`; all digits before the point."""
    if seconds is None:
        return "-"
    value = seconds * _MICROSECONDS
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
