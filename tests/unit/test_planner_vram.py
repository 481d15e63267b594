"""Plans of mixtures of experts never place more than they account for, whatever the machine and the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError
from planner.experts import PREDICTION_BYTES, ExpertRates, Experts, find_blocks
from planner.measurements import Profile
from planner.memory import fixed_memory
from planner.plan import Plan
from planner.problem import build_graph, find_units
from planner.solve import solve
from planner.units import MIB
from planner.workload import Workload
from tests.unit.planner_profiles import Machine, Shapes, synthetic_profile
from tests.unit.test_planner_experts import zipf_routing

SHAPES = st.builds(
    lambda n_layers, n_experts, n_used, n_ff: Shapes(
        "Small", n_layers, 512, 512, 256, n_ff, 4096, n_experts=n_experts, n_experts_used=n_used
    ),
    st.integers(1, 6),
    st.sampled_from((4, 16, 64)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((256, 768)),
)
MACHINES = st.builds(
    lambda cpu, link, latency: Machine(
        cpu_rates={4: 27e9 * cpu}, cpu_busy_rates={4: 25e9 * cpu}, link_rate=54.9e9 * link,
        link_busy_rate=50e9 * link, expert_rate=50e9 * link, expert_latency=latency,
    ),
    st.sampled_from((0.05, 0.3, 1.0, 5.0)),
    st.sampled_from((0.05, 0.3, 1.0, 2.0)),
    st.sampled_from((5e-6, 150e-6)),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@example(
    Shapes("Small", 6, 512, 512, 256, 256, 4096, n_experts=64, n_experts_used=1),
    Machine(
        cpu_rates={4: 1.35e9}, cpu_busy_rates={4: 1.25e9}, link_rate=110e9, link_busy_rate=100e9, expert_rate=100e9
    ),
    None,
    0.1796875,
)  # the last of a layer's weights is larger than the ring
@given(SHAPES, MACHINES, st.sampled_from((None, 0.5, 2.0)), st.floats(0, 1.05))
def test_what_is_placed_is_accounted_for(shapes: Shapes, machine: Machine, skew: float | None, share: float) -> None:
    profile = synthetic_profile(shapes, machine)
    if skew is not None:
        profile = replace(profile, routing=zipf_routing(shapes, skew))
    workload = Workload(n_threads=4)
    everything = sum(weight.size_bytes for weight in profile.weights)
    budget_bytes = fixed_memory(profile, workload, budget_bytes=0).total_bytes + 8 * MIB + round(share * everything)
    check(profile, solve(profile, budget_bytes, workload), budget_bytes)


def check(profile: Profile, plan: Plan, budget_bytes: int) -> None:
    vram, by_name = plan.vram, {placement.name: placement for placement in plan.placements}
    parts = {name: size for name, size in vars(vram).items() if name != "budget_bytes"}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == vram.budget_bytes <= budget_bytes
    for weight, ring_bytes in zip(profile.weights, build_graph(profile.weights).ring_bytes, strict=True):
        placement = by_name[weight.name]
        if not weight.is_input and "stream" in (placement.decode, placement.prefill):
            assert ring_bytes <= vram.ring_bytes
    if plan.experts is None:
        assert vram.experts_bytes == 0
        return
    blocks = find_blocks(profile.weights, find_units(profile.weights))
    experts = Experts(blocks, (ExpertRates((0.0,), 1.0, 1.0, 1.0, 1.0),) * len(blocks), (None,) * len(blocks))
    active = experts.active(["cpu" if w.is_input else by_name[w.name].decode for w in profile.weights])
    assert active
    needed = experts.vram_bytes(active, plan.experts.cache_bytes)
    if plan.shares_ring:
        assert needed - PREDICTION_BYTES <= vram.ring_bytes
        assert vram.experts_bytes == PREDICTION_BYTES
    else:
        assert needed <= vram.experts_bytes


def test_no_room_at_all_is_said() -> None:
    profile = synthetic_profile(Shapes("Small", 2, 512, 512, 256, 512, 4096, n_experts=16, n_experts_used=4))
    minimum = fixed_memory(profile, Workload(n_threads=4), budget_bytes=0).total_bytes
    with pytest.raises(InfeasibleError, match="^1 MiB are missing"):
        solve(profile, minimum - 1, Workload(n_threads=4))
