"""Plans: within the budget, near the bound, the same every time, and honest about what is not worth it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.decode import DecodeProblem
from planner.errors import AtsplanError, InfeasibleError
from planner.joint import lower_bound, solve_joint
from planner.measurements import Profile
from planner.memory import fixed_memory, granule_bytes
from planner.patterns import group_units, spread
from planner.plan import Plan, WeightClass
from planner.problem import build_graph, costs, find_units
from planner.records import from_json, to_json
from planner.replay import plan_classes
from planner.solve import Objective, solve, static_problem
from planner.units import GIB, MIB
from planner.workload import Workload
from tests.unit.planner_profiles import QWEN3_14B, TINY, Machine, Shapes, profile_of, synthetic_profile

SMALL = Shapes("Small", 6, 2048, 2048, 512, 8192, 16000)
QUICK = Workload(n_prompt_tokens=512, n_generated_tokens=64, n_context=4096, n_threads=8)


def problem_of(profile: Profile, available_bytes: int, n_threads: int = 8) -> DecodeProblem:
    graph, units = build_graph(profile.weights), find_units(profile.weights)
    return DecodeProblem(
        graph, costs(profile, graph, 1, n_threads), units, group_units(profile.weights, graph, units),
        available_bytes, granule_bytes(profile.weights),
    )  # fmt: skip


def budget_for(profile: Profile, weights_bytes: int) -> int:
    return fixed_memory(profile, QUICK, budget_bytes=0).total_bytes + weights_bytes


def check(plan: Plan, profile: Profile, budget_bytes: int) -> None:
    """What must hold for every plan."""
    vram = plan.vram
    assert vram.budget_bytes == budget_bytes
    assert vram.idle_bytes >= 0
    assert budget_bytes == (
        vram.weights_bytes + vram.context_bytes + vram.compute_bytes + vram.ring_bytes + vram.overhead_bytes
        + vram.margin_bytes + vram.idle_bytes
    )  # fmt: skip
    assert [p.name for p in plan.placements] == list(dict.fromkeys(weight.name for weight in profile.weights))
    for placement in plan.placements:
        assert (placement.decode == "gpu") == (placement.prefill == "gpu")
        if "stream" in (placement.decode, placement.prefill):
            assert vram.ring_bytes >= placement.size_bytes
    assert plan.solver.bound_seconds <= plan.solver.value_seconds
    assert plan.prefill_min_tokens >= 2
    assert from_json(to_json(plan).encode(), Plan, "plan") == plan


@pytest.mark.parametrize("objective", ["joint", "paper"])
@pytest.mark.parametrize("n_mib", [0, 1, 20, 60, 150, 300, 5000])
def test_every_budget(objective: Objective, n_mib: int) -> None:
    profile = synthetic_profile(SMALL)
    budget = budget_for(profile, n_mib * MIB + 12345)
    plan = solve(profile, budget, QUICK, objective=objective)
    check(plan, profile, budget)
    classes = {placement.decode for placement in plan.placements if placement.size_bytes > MIB}
    if n_mib == 0:
        assert classes == {"cpu"}
        assert plan.vram.ring_bytes == 0
    if n_mib == 5000:
        assert {p.decode for p in plan.placements if p.name != "token_embd.weight"} == {"gpu"}
        assert plan.vram.ring_bytes == 0
        assert plan.prediction.prefill_link_bytes_per_ubatch == 0


def test_budget_below_the_minimum() -> None:
    profile = synthetic_profile(SMALL)
    with pytest.raises(InfeasibleError, match="^1 MiB are missing"):
        solve(profile, budget_for(profile, -1), QUICK)


@pytest.mark.parametrize(("n_threads", "busy_rate"), [(4, 25e9), (8, 40e9), (16, 63e9)])
def test_qwen3_14b_comes_within_a_tenth_of_the_two_pipes(n_threads: int, busy_rate: float) -> None:
    profile = synthetic_profile(QWEN3_14B)
    plan = solve(profile, 6 * GIB, replace(QUICK, n_threads=n_threads))
    check(plan, profile, 6 * GIB)
    on_host = sum(p.size_bytes for p in plan.placements if not p.is_resident and p.name != "token_embd.weight")
    two_pipes = on_host / (busy_rate + 54.9e9)
    assert two_pipes <= plan.prediction.decode_seconds_per_token <= two_pipes / 0.9
    assert plan.vram.idle_bytes < 0.03 * 6 * GIB
    assert {p.prefill for p in plan.placements if not p.is_resident} == {"stream", "cpu"}  # cpu: the embedding
    assert plan.prediction.prefill_link_bytes_per_ubatch == on_host


def test_same_inputs_same_plan() -> None:
    profile = synthetic_profile(SMALL)
    budget = budget_for(profile, 100 * MIB)
    first, second = solve(profile, budget, QUICK), solve(profile, budget, QUICK)
    assert replace(first, solver=second.solver) == second


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.floats(2e9, 80e9), st.floats(1.0, 2.5), st.floats(1e9, 100e9), st.floats(1.0, 2.0), st.integers(30, 200),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_no_placement_beats_the_bound(cpu_rate, slowdown, link_rate, link_slowdown, n_mib, random) -> None:  # type: ignore[no-untyped-def]
    machine = Machine(
        cpu_rates={8: cpu_rate}, cpu_busy_rates={8: cpu_rate / slowdown},
        link_rate=link_rate, link_busy_rate=link_rate / link_slowdown,
    )  # fmt: skip
    profile = synthetic_profile(replace(SMALL, n_layers=3), machine)
    problem = problem_of(profile, n_mib * MIB)
    bound, weight = lower_bound(problem)
    assert 0 < weight < 1
    ring = 40 * MIB
    found = [candidate.seconds for candidate in solve_joint(problem, weight, lambda candidate: candidate.seconds)]
    for _ in range(20):
        classes: list[WeightClass] = [random.choice(("gpu", "stream", "cpu")) for _ in problem.units]
        for unit in random.sample(range(len(classes)), len(classes)):
            if problem.vram_bytes(classes) > problem.available_bytes:
                classes[unit] = random.choice(("stream", "cpu"))
        if all(problem.ring_bytes[u] <= ring for u, cls in enumerate(classes) if cls == "stream"):
            found.append(problem.simulate(classes, ring).seconds)
    assert bound <= min(found) * (1 + 1e-6)


def test_close_to_the_best_of_all_placements() -> None:
    profile = synthetic_profile(replace(SMALL, n_layers=1, n_vocab=4000))
    problem = problem_of(profile, 30 * MIB)
    _, weight = lower_bound(problem)
    best = solve_joint(problem, weight, lambda candidate: candidate.seconds)[0]
    assert problem.vram_bytes(best.classes) + best.ring_bytes <= 30 * MIB
    every = min(
        problem.simulate(classes, 30 * MIB - problem.vram_bytes(classes)).seconds
        for classes in itertools.product(("gpu", "stream", "cpu"), repeat=len(problem.units))
        if all(
            cls != "stream" or problem.ring_bytes[u] <= 30 * MIB - problem.vram_bytes(classes)
            for u, cls in enumerate(classes)
        )
        and problem.vram_bytes(classes) <= 30 * MIB
    )
    assert every <= best.seconds <= 1.1 * every


def test_slow_link_leaves_the_plain_hybrid_and_says_so() -> None:
    profile = synthetic_profile(SMALL, Machine(link_rate=0.3e9))
    plan = solve(profile, budget_for(profile, 100 * MIB), QUICK)
    assert "stream" not in {placement.decode for placement in plan.placements}
    assert any("Streaming does not pay" in note for note in plan.notes)


def test_more_threads_are_not_always_better() -> None:
    machine = Machine(cpu_rates={4: 27e9, 8: 44e9, 16: 20e9}, cpu_busy_rates={4: 25e9, 8: 40e9, 16: 15e9})
    profile = synthetic_profile(SMALL, machine)
    plan = solve(profile, budget_for(profile, 100 * MIB), replace(QUICK, n_threads=0))
    assert plan.workload.n_threads == 8


def test_check_confirms_the_static_optimum() -> None:
    profile = synthetic_profile(TINY)
    plan = solve(profile, budget_for(profile, 30 * MIB), QUICK, objective="paper", check=True)
    assert any("CP-SAT proves the optimum" in note for note in plan.notes)


def test_paper_objective_by_hand() -> None:
    """Room for exactly the two matrices that gain most per MiB: the static problem's answer is known."""
    profile = synthetic_profile(TINY)
    plan = solve(profile, budget_for(profile, 0), QUICK, objective="paper", margin_bytes=0)
    gains, sizes, switch, experts = static_problem(problem_of(profile, 0))
    assert len(gains) == 15
    assert not any(experts)
    assert min(gains) > 0
    assert switch[0] == round(1e9 * (25e-6 + 2 * 2048 * 4 / 54.9e9) / 2)
    assert sizes[0] == -(-profile.weights[2].size_bytes // granule_bytes(profile.weights))
    assert plan.solver.status == "optimal"
    assert plan.solver.value_seconds == plan.solver.bound_seconds > 0


def test_refusals() -> None:
    profile = synthetic_profile(TINY)
    for workload, words in (
        (replace(QUICK, n_ubatch=256), "micro-batches of 512"),
        (replace(QUICK, n_threads=5), "no times for 5 threads; it has 4, 8, 16"),
        (replace(QUICK, n_prompt_tokens=0, n_generated_tokens=0), "There are no tokens to plan for"),
        (replace(QUICK, n_prompt_tokens=4090), "do not fit into a context of 4096. Give --ctx 4154"),
        (replace(QUICK, n_context=100_000), "Profile again with --ctx 100000"),
    ):
        with pytest.raises(AtsplanError, match=words):
            solve(profile, GIB, workload)
    no_gpu = replace(profile, hardware=replace(profile.hardware, gpu=None))
    with pytest.raises(InfeasibleError, match="no GPU"):
        solve(no_gpu, GIB, QUICK)
    small_host = replace(profile.hardware.cpu, memory_bytes=40 * MIB)
    with pytest.raises(InfeasibleError, match="would stay in host memory"):
        solve(replace(profile, hardware=replace(profile.hardware, cpu=small_host)), budget_for(profile, 0), QUICK)


def test_budget_is_cut_to_the_card() -> None:
    profile = synthetic_profile(TINY)
    plan = solve(profile, 100 * GIB, QUICK)
    assert plan.vram.budget_bytes == 24 * GIB
    assert "The budget was cut to 24.00 GiB: the card has no more." in plan.notes


def test_the_plan_is_for_the_gpu_that_was_profiled() -> None:
    profile = synthetic_profile(TINY)
    assert solve(profile, 2 * GIB, QUICK).device == "cuda0"  # of profiles that do not tell
    second = replace(profile, state=replace(profile.state, device="cuda1"))
    assert solve(second, 2 * GIB, QUICK).device == "cuda1"


def test_budget_is_cut_to_what_was_free() -> None:
    profile = synthetic_profile(TINY)
    desktop = replace(profile, state=replace(profile.state, gpu_memory_free_bytes=21 * GIB))
    plan = solve(desktop, 22 * GIB, QUICK)
    assert plan.vram.budget_bytes == 21 * GIB
    assert any("cut to 21.00 GiB: 21.00 GiB were free when it was profiled." in note for note in plan.notes)
    assert solve(desktop, 20 * GIB, QUICK).vram.budget_bytes == 20 * GIB
    shown = replace(desktop, state=replace(desktop.state, gpu_has_display=True))
    plan = solve(shown, 22 * GIB, QUICK)
    assert plan.vram.budget_bytes == 21 * GIB - 256 * MIB
    assert any(
        "cut to 20.75 GiB: 21.00 GiB were free when it was profiled, less 256 MiB for" in note for note in plan.notes
    )


def test_nearly_everything_is_decided_in_a_very_small_model() -> None:
    shapes = Shapes("Smol", 30, 576, 576, 192, 1536, 49152, tied=True)
    shapes = replace(shapes, n_embd=768, n_head_dims=768, n_kv_dims=256)  # rows of q4_K hold 256 elements
    profile = synthetic_profile(shapes)
    plan = solve(profile, budget_for(profile, 20 * MIB), QUICK)
    check(plan, profile, plan.vram.budget_bytes)
    assert plan.vram.idle_bytes < MIB
    assert sum(placement.decode == "stream" for placement in plan.placements) > 10


def test_experts_are_placed_as_blocks() -> None:
    profile = moe_profile(n_layers=6)
    budget = budget_for(profile, 150 * MIB)
    for objective in ("joint", "paper"):
        plan = solve(profile, budget, QUICK, objective=objective)  # type: ignore[arg-type]
        check(plan, profile, budget)
        for layer in range(6):
            block = {p.decode for p in plan.placements if p.name.startswith(f"blk.{layer}.") and "exps" in p.name}
            assert len(block) == 1


def moe_profile(n_layers: int) -> Profile:
    dense = synthetic_profile(replace(SMALL, n_layers=n_layers))
    weights = tuple(
        replace(w, op="MUL_MAT_ID", name=w.name.replace(".weight", "_exps.weight"), shape=(*w.shape, 4),
                size_bytes=4 * w.size_bytes, n_experts_used=2)
        if ".ffn_" in w.name and "norm" not in w.name else w
        for w in dense.weights
    )  # fmt: skip
    return profile_of("MoE", weights, SMALL, Machine(), 4096, 512)


def test_classes_of_a_plan_are_those_that_were_simulated() -> None:
    profile = synthetic_profile(SMALL)
    plan = solve(profile, budget_for(profile, 100 * MIB), QUICK)
    problem = problem_of(profile, 0)
    from planner.timeline import simulate

    decode = plan_classes(profile, plan, "decode")
    again = simulate(problem.graph, problem.costs, decode, plan.vram.ring_bytes)
    assert again.seconds == plan.prediction.decode_seconds_per_token
    streamed = sum(p.size_bytes for p in plan.placements if p.decode == "stream")
    assert streamed == plan.prediction.decode_link_bytes_per_token > 0


def test_longer_prompts_take_longer_and_more_vram_is_never_worse() -> None:
    profile = synthetic_profile(SMALL)
    plans = [solve(profile, budget_for(profile, n * MIB), QUICK) for n in (60, 100, 140, 180)]
    seconds = [plan.prediction.decode_seconds_per_token for plan in plans]
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(seconds))
    prompts = [
        solve(profile, budget_for(profile, 100 * MIB), replace(QUICK, n_prompt_tokens=n)).prediction.prefill_seconds
        for n in (1, 40, 512, 600, 2048)
    ]
    assert prompts == sorted(prompts)


def test_spread_is_even() -> None:
    assert spread(range(10), 5) == [1, 3, 5, 7, 9]
    assert spread(range(9), 3, 0.5) == [1, 4, 7]
    assert spread(range(3), 0) == []
    assert spread(range(3), 9) == [0, 1, 2]
    for n, k in itertools.product(range(1, 30), repeat=2):
        assert len(spread(range(n), k, 0.3)) == min(n, k)
