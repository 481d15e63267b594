"""What a profile says, as a table by tensor role."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table

from planner.densities import best_thread_count
from planner.explain import role_of
from planner.measurements import Profile, WeightUse
from planner.units import MIB, format_count, format_size


@dataclass(frozen=True)
class RoleTotals:
    """All weights of one role together: a layer's `ffn_up`, say, over all layers. Seconds per token or batch."""

    role: str
    n_weights: int
    size_bytes: int
    decode_cpu_seconds: float
    decode_gpu_seconds: float | None  # None without a GPU, as for prefill
    prefill_cpu_seconds: float
    prefill_gpu_seconds: float | None

    @property
    def gain_seconds_per_mib(self) -> float | None:
        """Time of one token saved by each MiB of this role in VRAM."""
        if self.decode_gpu_seconds is None:
            return None
        return (self.decode_cpu_seconds - self.decode_gpu_seconds) / (self.size_bytes / MIB)


def totals_by_role(profile: Profile, n_threads: int) -> list[RoleTotals]:
    """Return one row per role of the weights that are multiplied with, the largest first."""
    roles: dict[str, list[WeightUse]] = {}
    for weight in profile.products:
        roles.setdefault(role_of(weight.name)[1], []).append(weight)
    rows = [
        RoleTotals(
            role=role,
            n_weights=len(weights),
            size_bytes=sum(weight.size_bytes for weight in weights),
            decode_cpu_seconds=profile.total_seconds(weights, "cpu", 1, n_threads),
            decode_gpu_seconds=profile.total_seconds(weights, "gpu", 1) if profile.has_gpu else None,
            prefill_cpu_seconds=profile.total_seconds(weights, "cpu", profile.n_ubatch, n_threads),
            prefill_gpu_seconds=profile.total_seconds(weights, "gpu", profile.n_ubatch) if profile.has_gpu else None,
        )
        for role, weights in roles.items()
    ]
    return sorted(rows, key=lambda row: row.size_bytes, reverse=True)


def role_table(profile: Profile) -> Table:
    n_threads = best_thread_count(profile)
    gpu = " and the simulated GPU" if profile.is_simulated else " and the GPU" if profile.has_gpu else ""
    title = f"{profile.model.name}: milliseconds on the CPU ({format_count(n_threads, 'thread')}){gpu}"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
    )
    table.add_column("weights", no_wrap=True)
    for heading in (
        "count",
        "size",
        "1 token\nCPU",
        "\nGPU",
        "gain\nus/MiB",
        f"{profile.n_ubatch} tokens\nCPU",
        "\nGPU",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in totals_by_role(profile, n_threads):
        table.add_row(
            row.role, str(row.n_weights), format_size(row.size_bytes),
            _milliseconds(row.decode_cpu_seconds), _milliseconds(row.decode_gpu_seconds),
            "-" if row.gain_seconds_per_mib is None else _four_digits(row.gain_seconds_per_mib * 1e6),
            _milliseconds(row.prefill_cpu_seconds), _milliseconds(row.prefill_gpu_seconds),
        )  # fmt: skip
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else _four_digits(seconds * 1e3)


def _four_digits(value: float) -> str:
    """Return at most two decimals, and fewer for large values, so that the table fits into 80 columns."""
    return f"{value:.{2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0}f}"
