"""Where the time goes, computed by hand, and the table of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from planner.densities import best_thread_count, densities, density_table
from planner.measurements import KernelTiming, Profile, Series
from planner.units import GIB, MIB
from tests.unit.planner_profiles import TINY, synthetic_profile


@pytest.fixture
def profile() -> Profile:
    return synthetic_profile(TINY)


def with_seconds(profile: Profile, seconds: dict[tuple[str, int, int], float]) -> Profile:
    """Give every kernel the same time per (device, tokens, threads)."""

    def timed(timing: KernelTiming) -> KernelTiming:
        key = (timing.device, timing.n_tokens, timing.n_threads)
        return replace(timing, seconds=Series((seconds.get(key, 1.0),)))

    return replace(profile, kernels=tuple(map(timed, profile.kernels)))


def test_a_kind_adds_up_its_weights(profile: Profile) -> None:
    profile = with_seconds(
        profile, {("cpu", 1, 4): 5e-3, ("gpu", 1, 0): 1e-3, ("cpu", 512, 4): 0.5, ("gpu", 512, 0): 0.1}
    )
    rows = {row.role: row for row in densities(profile, 4)}
    up = rows["ffn_up"]
    assert up.type == "q4_K"
    assert up.n_weights == TINY.n_layers == 2
    assert up.size_bytes == 2 * 2048 * 4096 * 144 // 256
    assert up.cpu_seconds == pytest.approx(10e-3)
    assert up.gpu_seconds == pytest.approx(2e-3)
    assert up.batch_cpu_seconds == pytest.approx(1.0)
    assert up.batch_gpu_seconds == pytest.approx(0.2)
    assert up.gain_seconds_per_mib == pytest.approx(8e-3 / (up.size_bytes / MIB))
    assert "attn_norm" not in rows
    assert "output" in rows
    gains = [row.gain_seconds_per_mib for row in densities(profile, 4)]
    assert gains == sorted(gains, reverse=True)


def test_without_a_gpu_there_is_no_gain(profile: Profile) -> None:
    alone = replace(profile, kernels=tuple(timing for timing in profile.kernels if timing.device == "cpu"))
    alone = with_seconds(alone, {("cpu", 1, 16): 5e-3, ("cpu", 512, 16): 0.5})
    for row in densities(alone, 16):
        assert row.gpu_seconds is row.batch_gpu_seconds is row.gpu_seconds_per_mib is None
        assert row.gain_seconds_per_mib == row.cpu_seconds_per_mib  # the order is that of the costs
    title, *lines = rendered(alone).splitlines()
    assert title.rstrip() == "Milliseconds on the CPU (16 threads)"
    (output,) = (line for line in lines if line.startswith("output"))
    assert output.split()[4:] == ["-", "5.00", "-", "500.0", "-"]


def test_the_fastest_thread_count_is_shown(profile: Profile) -> None:
    assert best_thread_count(profile) == 16
    assert best_thread_count(with_seconds(profile, {("cpu", 1, 8): 1e-3})) == 8


def test_the_table_says_what_it_measured(profile: Profile) -> None:
    text = rendered(profile)
    assert "Milliseconds on the CPU (16 threads) and the GPU" in text
    assert "512 tokens" in text
    assert "simulated GPU" in rendered(replace(profile, is_simulated=True))


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("role", ["ffn_gate", "ffn_gate_exps", "ssm_beta_alpha"])
def test_large_values_fit_the_terminal(profile: Profile, width: int, role: str) -> None:
    """A model of 2 TiB whose prompts take an hour on the CPU."""
    profile = with_seconds(
        replace(profile, kernels=tuple(timing for timing in profile.kernels if timing.n_threads in (0, 16))),
        {("cpu", 1, 16): 12.3456, ("gpu", 1, 0): 1.23456, ("cpu", 512, 16): 1234.5, ("gpu", 512, 0): 123.4},
    )
    weights = tuple(
        replace(weight, name=weight.name.replace("ffn_gate", role), size_bytes=1000 * GIB) for weight in profile.weights
    )
    lines = rendered(replace(profile, weights=weights), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    row = next(line for line in lines if line.startswith(role))
    assert row.split() == [role, "q4_K", "2000.00", "GiB", "10.85", "24691", "2469", "2469000", "246800"]
    assert len(lines) == 1 + 3 + len(densities(profile, 16))  # nothing is wrapped


def rendered(profile: Profile, width: int = 120) -> str:
    console = Console(width=width, record=True, file=None)
    with console.capture() as capture:
        console.print(density_table(profile, best_thread_count(profile)))
    return capture.get()
