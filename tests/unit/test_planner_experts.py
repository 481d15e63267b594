"""Experts one by one: what is split, how many are streamed, what the cache holds, and what plans make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.experts import (
    ExpertBlock,
    ExpertRates,
    Experts,
    copy_lines,
    expected_step,
    find_blocks,
    find_experts,
    fit_line,
)
from planner.measurements import Contention, ExpertTiming, LayerRouting, Profile, Routing, Series, WeightUse
from planner.plan import Plan, WeightClass
from planner.problem import Costs, ExpertStep, Graph, build_graph, costs, find_units
from planner.replay import prompt_seconds, simulate_plan
from planner.solve import solve
from planner.timeline import simulate
from planner.units import GIB, KIB, MIB
from planner.workload import Workload
from tests.unit.planner_profiles import MIXTRAL, QWEN3_30B, Machine, Shapes, dense_weights, synthetic_profile

SMALL = Shapes("Small", 6, 512, 512, 256, 512, 4096, n_experts=16, n_experts_used=4)

# One expert: 2 s on the CPU alone, 3 s during copies, 1 s over the link; the GPU needs 0.5 s, 0.2 of it to compute.
RATES = ExpertRates(cpu=(0.0, 2.0, 4.0, 6.0, 8.0), cpu_slowdown=1.5, link=1.0, latency=0.5, gpu=0.2)


def block(first: int, unit: int, family: str = "a", n_used: int = 4) -> ExpertBlock:
    return ExpertBlock((first, first + 1), unit, 8, n_used, (60, 40), (family,), scratch_bytes=7)


def experts(families: str, frequencies: Sequence[Sequence[float] | None] | None = None) -> Experts:
    blocks = tuple(block(10 * i, i, family) for i, family in enumerate(families))
    shares = tuple(None if f is None else tuple(f) for f in frequencies or [None] * len(blocks))
    return Experts(blocks, (RATES,) * len(blocks), shares)


ALL_CPU: list[WeightClass] = ["cpu"] * 40


def test_link_and_cpu_end_together() -> None:
    # 4 missing: none streamed 8; one max(1.5, 9); two max(2.5, 6); three max(3.5, 3); four 4.5.
    assert [RATES.n_to_stream(n) for n in range(5)] == [0, 1, 2, 2, 3]
    # 1: max(1.5, 0); 2: max(1.5, 3) against 2.5; 3: max(2.5, 3) against 3.5.
    slow_link = replace(RATES, link=100.0)
    assert [slow_link.n_to_stream(n) for n in range(5)] == [0] * 5
    fast_link = replace(RATES, link=0.001)
    assert [fast_link.n_to_stream(n) for n in range(5)] == [0, 1, 2, 3, 4]


def test_expected_step_by_hand() -> None:
    nothing_cached = expected_step(RATES, 4, 100, 0.0)
    assert nothing_cached == ExpertStep(3.5, 3.0, 3.0, 0.2, 300.0, 0.0, 3.0, 1.0)
    everything = expected_step(RATES, 4, 100, 1.0)
    assert everything == ExpertStep(0.5, 0.0, 0.0, 0.2, 0.0, 4.0, 0.0, 0.0)
    # Half of two experts: both missing 1/4 (both streamed: 2.5), one missing 1/2 (streamed: 1.5), none 1/4 (0.5).
    half = expected_step(RATES, 2, 100, 0.5)
    assert half.seconds == pytest.approx(0.25 * 2.5 + 0.5 * 1.5 + 0.25 * 0.5)
    assert half.link_seconds == pytest.approx(0.25 * 2 + 0.5 * 1)
    assert (half.n_resident, half.n_streamed, half.n_cpu) == (1.0, pytest.approx(1.0), 0.0)


def test_the_cpu_alone_is_not_slowed_down() -> None:
    slow_link = replace(RATES, link=100.0)
    assert expected_step(slow_link, 4, 100, 0.0).seconds == 8.0


def test_vram_as_the_engine_allocates_it() -> None:
    two = experts("aab")
    spare = 6 * 100 + 7  # per family: room for 4 streamed experts, and 2 that are copied ahead
    prediction = 256 * KIB
    assert two.vram_bytes([0, 1, 2], 0) == 2 * spare + prediction
    # 1000 bytes: two thirds for the first family's two blocks, 6 slots; one third for the other, 3 slots.
    assert two.vram_bytes([0, 1, 2], 1000) == 2 * spare + prediction + 6 * 100 + 3 * 100
    assert two.vram_bytes([0], 1 << 30) == spare + prediction + 8 * 100  # never more than all of the block
    assert two.cache_bytes([0, 1, 2], prediction + 10_000) == 2400
    assert two.cache_bytes([0], prediction + spare + 400) == 400
    assert two.cache_bytes([0], 100) < 0
    assert two.vram_bytes([], 1000) == 0


def test_uniform_routing_shares_the_cache_evenly() -> None:
    steps = experts("aa").steps(ALL_CPU, 800)  # 8 of 16 experts
    assert steps.keys() == {(0, 1), (10, 11)}
    assert all(step.n_resident == 2.0 for step in steps.values())
    only_second: list[WeightClass] = ["gpu"] * 10 + ["cpu"] * 30
    assert experts("aa").steps(only_second, 800) == {(10, 11): expected_step(RATES, 4, 100, 1.0)}
    split_unit: list[WeightClass] = ["gpu", *ALL_CPU[1:]]
    assert (0, 1) not in experts("aa").steps(split_unit, 800)


def test_the_cache_holds_the_most_used_experts() -> None:
    skewed = [[1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25], [0.9, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1]]
    steps = experts("aa", skewed).steps(ALL_CPU, 500)  # 1.0, 1.0 | 0.9, 0.8, 0.7
    assert steps[0, 1].n_resident == pytest.approx(2.0)
    assert steps[10, 11].n_resident == pytest.approx(2.4)


def test_a_cache_that_is_never_filled_holds_nothing() -> None:
    slow_link = Experts((block(0, 0),), (replace(RATES, link=100.0),), (None,))
    assert slow_link.steps(ALL_CPU, 800)[0, 1].n_resident == 0.0


def test_an_expert_now_and_then_fills_the_cache() -> None:
    slow_link = Experts((block(0, 0),), (replace(RATES, link=15.0),), (None,))  # 15.5 s for one, 8 s for all on the CPU
    assert slow_link.rates[0].n_to_stream(4) == 0
    assert slow_link.steps(ALL_CPU, 400)[0, 1].n_resident == 2.0


def batch_costs(n_tokens: int) -> Costs:
    nothing = (0.0,) * 40
    cpu, gpu = [0.0] * 40, [0.0] * 40
    cpu[0] = cpu[1] = 6.0  # of all experts that the tokens use
    gpu[0] = gpu[1] = 0.25
    return Costs(n_tokens, 1, tuple(cpu), tuple(gpu), *(nothing,) * 4, 0.0, 0.0, 0.0, 1.5, 1.0)


def test_experts_of_several_tokens_by_hand() -> None:
    one = experts("a")
    assert one.blocks[0].max_tokens == 128
    assert one.blocks[0].n_touched(1) == pytest.approx(4)
    assert one.blocks[0].n_touched(2) == pytest.approx(6)
    # 6 of 8 experts. The CPU takes 2 s for each, 3 s during copies; the GPU 0.3 + 0.5 s and 1 s for each:
    # none streamed 12; four max(4.8, 6); five max(5.8, 3).
    step = one.batch_steps(ALL_CPU, 0, batch_costs(2))[0, 1]
    assert step.seconds == pytest.approx(5.8)
    assert (step.n_resident, step.n_streamed, step.n_cpu) == (0.0, 5.0, pytest.approx(1.0))
    assert (step.link_seconds, step.gpu_seconds, step.link_bytes) == (5.0, 0.5, 500.0)
    # A cache of four holds half of them; of the other 3: two max(2.8, 3), three 3.8.
    cached = one.batch_steps(ALL_CPU, 400, batch_costs(2))[0, 1]
    assert (cached.n_resident, cached.n_streamed, cached.seconds) == (pytest.approx(3.0), 2.0, pytest.approx(3.0))
    assert one.batch_steps(ALL_CPU, 0, batch_costs(129)) == {}


def test_room_limits_what_is_streamed_for_several_tokens() -> None:
    wide = ExpertBlock((0, 1), 0, 100, 4, (60, 40), ("a",), 7)
    rates = replace(RATES, link=1e-6, cpu_slowdown=1.0)
    without, cached = (
        Experts((wide,), (rates,), (None,)).batch_steps(ALL_CPU, n_bytes, batch_costs(64))[0, 1]
        for n_bytes in (0, 1000)
    )
    assert without.n_streamed == 6  # slots for one use
    assert cached.n_streamed == pytest.approx(6 + 10 - cached.n_resident, abs=1)


def test_policy_tells_the_engine_the_mean_of_all_blocks() -> None:
    other = replace(RATES, link=3.0, latency=1.5)
    policy = Experts((block(0, 0), block(10, 1)), (RATES, other), (None, None)).policy(ALL_CPU, 77)
    assert policy is not None
    assert (policy.cache_bytes, policy.link_seconds, policy.link_latency_seconds) == (77, 2.0, 1.0)
    assert policy.cpu_seconds == pytest.approx(2.0 * 1.5)
    assert experts("a").policy(["gpu"] * 10, 77) is None


def test_pieces_of_the_bound() -> None:
    (piece,) = experts("a").relaxed(0, 0.5, may_stream=True)
    assert piece == (4 * min(0.5 * 2.0 * 1.5, 0.5 * 1.0), 800)
    assert experts("a").relaxed(0, 1.0, may_stream=False) == [(4 * 2.0, 800)]
    pieces = experts("a", [[2.0, 1.0, 1.0, 0, 0, 0, 0, 0]]).relaxed(0, 1.0, may_stream=False)
    assert pieces[:3] == [(4.0, 100), (2.0, 100), (2.0, 100)]
    assert len(pieces) == 8


def test_line_through_copies() -> None:
    timings = [ExpertTiming((5, 5), n, Series((0.5 + 2.0 * n,))) for n in (1, 2, 4)]
    timings.append(ExpertTiming((6, 6), 1, Series((9.0,))))
    assert fit_line(timings, (5, 5)) == pytest.approx((0.5, 2.0))
    assert fit_line(timings, (6, 6)) == (0.0, 9.0)
    assert fit_line([ExpertTiming((1,), n, Series((float(n * n),))) for n in (1, 2, 3)], (1,))[0] == 0.0


def test_experts_are_copied_as_fast_as_long_copies() -> None:
    """Measured alone, they take 9 s each and 1 s more. Long copies: 3 s for 10 bytes."""
    timings = tuple(ExpertTiming((4, 6), n, Series((1.0 + 9.0 * n,))) for n in (1, 2, 4))
    profile = replace(synthetic_profile(SMALL), experts=timings)

    def line(*link_rates: float) -> tuple[float, float]:
        contention = tuple(Contention(n, 1.0, 1.0, rate, rate) for n, rate in enumerate(link_rates, 1))
        return copy_lines(replace(profile, contention=contention))[4, 6]

    assert line(10 / 3, 2.0) == pytest.approx((10.0 - 3.0, 3.0))
    assert line(0.1) == line() == pytest.approx((1.0, 9.0))  # never slower than alone
    dense = replace(profile, weights=tuple(w for w in profile.weights if not w.n_experts_used))
    contention = (Contention(1, 1.0, 1.0, 10 / 3, 10 / 3),)  # with copies of another kind
    assert copy_lines(replace(dense, contention=contention))[4, 6] == pytest.approx((1.0, 9.0))


def test_blocks_of_a_mixture_of_experts() -> None:
    weights = dense_weights(SMALL)
    units = find_units(weights)
    blocks = find_blocks(weights, units)
    assert len(blocks) == SMALL.n_layers
    assert [weights[use].name for use in blocks[3].uses] == [
        "blk.3.ffn_gate_exps.weight", "blk.3.ffn_up_exps.weight", "blk.3.ffn_down_exps.weight"
    ]  # fmt: skip
    first = blocks[1]  # with a q4_K down matrix
    assert first.matrix_bytes == (512 * 512 // 256 * 144,) * 3
    assert (first.n_experts, first.n_used) == (16, 4)
    assert blocks[1].family == blocks[3].family != blocks[2].family
    assert units[first.unit].uses == first.uses
    assert first.max_tokens == 128
    assert 129 * 512 * 4 < first.scratch_bytes < 129 * 512 * 4 + 128 * KIB


def test_unusual_blocks_are_left_whole() -> None:
    def found(change: dict[str, dict[str, object]]) -> list[tuple[str, ...]]:
        weights = [replace(w, **change.get(w.name.split(".")[-2], {})) for w in dense_weights(SMALL)[:15]]  # type: ignore[arg-type]
        return [tuple(weights[use].name for use in b.uses) for b in find_blocks(weights, find_units(weights))]

    assert len(found({})) == 1
    assert found({"ffn_gate_exps": {"input_bytes": 4 * 512 * 4}, "ffn_up_exps": {"input_bytes": 4 * 512 * 4}}) == []
    assert found({"ffn_up_exps": {"n_experts_used": 3}}) == []
    assert found({"ffn_down_exps": {"inputs": (10,)}}) == []  # the result of gate leaves the block


def test_biases_leave_single_products() -> None:
    def use(name: str, op: str, inputs: tuple[int, ...], n_columns: int = 1) -> WeightUse:
        shape = (512, 512, 16) if op == "MUL_MAT_ID" else (512, 16)
        return WeightUse(name, op, "f16", shape, 8 * MIB, 2048 * n_columns, 8192, inputs, n_experts_used=4)

    weights = [
        WeightUse("router", "MUL_MAT", "f32", (512, 16), 1, 2048, 64),
        use("gate", "MUL_MAT_ID", (0,)), use("gate.bias", "ADD_ID", (1,)),
        use("up", "MUL_MAT_ID", (0,)), use("up.bias", "ADD_ID", (3,)),
        use("down", "MUL_MAT_ID", (1, 3), 4),
    ]  # fmt: skip
    units = find_units(weights)
    assert [unit.uses for unit in units if unit.is_expert] == [(1, 3, 5)]
    assert [b.uses for b in find_blocks(weights, units)] == [(1,), (3,)]


def test_experts_are_one_step_on_the_cpu() -> None:
    profile = synthetic_profile(SMALL)
    graph = build_graph(profile.weights)
    decode = costs(profile, graph, 1, 16)
    expert_uses = [w.op == "MUL_MAT_ID" for w in profile.weights]
    classes: list[WeightClass] = ["cpu" if is_expert else "gpu" for is_expert in expert_uses]
    assert simulate(graph, decode, classes, 0).n_cpu_steps == SMALL.n_layers


def test_a_step_of_experts_in_the_timeline() -> None:
    # One product before, the experts (0.1 down, 3.5 together, 0.2 up), one product after.
    graph = Graph(((), (0,), (1,), (2,)), (False, False, True, False), (False,) * 4, (1,) * 4)
    step = ExpertStep(3.5, 3.0, 2.0, 0.2, 200.0, 1.0, 2.0, 1.0)
    c = Costs(
        1, 1, cpu=(9.0,) * 4, gpu=(1.0,) * 4, gpu_before=(0.0,) * 4, link=(0.0,) * 4, down=(0.1,) * 4, up=(0.2,) * 4,
        host_launch=0.0, host_stream=0.0, host_crossing=0.0, cpu_slowdown=2.0, link_slowdown=1.0,
        expert_steps={(1, 2): step},
    )  # fmt: skip
    timeline = simulate(graph, c, ["gpu", "cpu", "cpu", "gpu"], 0, with_events=True)
    assert timeline.seconds == pytest.approx(1 + 0.1 + 3.5 + 0.2 + 1)
    assert (timeline.cpu_busy_seconds, timeline.link_busy_seconds) == (3.0, 2.0)
    assert timeline.gpu_busy_seconds == pytest.approx(2.2)
    assert timeline.n_cpu_steps == 1
    assert {event.lane for event in timeline.events if event.uses == (1, 2)} == {"cpu", "gpu", "link"}
    apart = simulate(graph, c, ["gpu", "cpu", "gpu", "gpu"], 0)  # another step than the one that is split
    assert apart.seconds == pytest.approx(1 + 0.1 + 9 + 0.2 + 1 + 1)


def test_streamed_weights_share_the_link_with_experts() -> None:
    graph = Graph(((), (0,), (1,)), (False, True, False), (False,) * 3, (1,) * 3)
    step = ExpertStep(4.0, 0.0, 4.0, 0.0, 400.0, 0.0, 4.0, 0.0)
    c = Costs(
        1, 1, cpu=(0.0,) * 3, gpu=(0.0,) * 3, gpu_before=(0.0,) * 3, link=(0.0, 0.0, 7.0),
        down=(0.0,) * 3, up=(0.0,) * 3,
        host_launch=0.0, host_stream=0.0, host_crossing=0.0, cpu_slowdown=1.0, link_slowdown=1.0,
        expert_steps={(1,): step},
    )  # fmt: skip
    assert simulate(graph, c, ["gpu", "cpu", "stream"], 2).seconds == pytest.approx(11.0)  # 4 + 7 per token


def zipf_routing(shapes: Shapes, power: float) -> Routing:
    weights = [1 / (expert + 1) ** power for expert in range(shapes.n_experts)]
    layers = []
    for layer in range(shapes.n_layers):  # the most used experts differ from layer to layer
        counts = [round(1e6 * weights[(expert * 7 + layer) % shapes.n_experts]) for expert in range(shapes.n_experts)]
        layers.append(LayerRouting(f"blk.{layer}.ffn_gate_exps.weight", tuple(counts)))
    return Routing(10_000, tuple(layers))


def test_routing_figures() -> None:
    uniform = Routing(10, (LayerRouting("a", (5,) * 10), LayerRouting("b", (5,) * 10)))
    assert uniform.entropy_fraction == pytest.approx(1.0)
    assert uniform.top_tenth_fraction == pytest.approx(0.1)
    one = Routing(10, (LayerRouting("a", (50, *(0,) * 9)),))
    assert (one.entropy_fraction, one.top_tenth_fraction) == (0.0, 1.0)
    half = Routing(10, (LayerRouting("a", (25, 25, 0, 0)),))
    assert half.entropy_fraction == pytest.approx(0.5)


def test_frequencies_come_from_the_profile() -> None:
    profile = replace(synthetic_profile(SMALL), routing=zipf_routing(SMALL, 1.0))
    units = find_units(profile.weights)
    found = find_experts(profile, units, costs(profile, build_graph(profile.weights), 1, 16))
    assert found is not None
    assert all(f is not None and sum(f) == pytest.approx(4) for f in found.frequencies)
    first = found.frequencies[0]
    assert first is not None
    assert first[0] == max(first)
    assert first[0] / first[7] == pytest.approx(49 % 16 + 1, rel=1e-3)


def plan_for(profile: Profile, vram_bytes: int, n_threads: int = 16, objective: str = "joint") -> Plan:
    return solve(profile, vram_bytes, Workload(n_threads=n_threads), objective=objective)  # type: ignore[arg-type]


def resident_layers(plan: Plan) -> int:
    return sum("down_exps" in p.name and p.is_resident for p in plan.placements)


@pytest.fixture(scope="module")
def qwen() -> Profile:
    return synthetic_profile(QWEN3_30B)


@pytest.mark.parametrize("n_threads", [4, 16])
def test_splitting_beats_whole_layers_on_the_cpu(qwen: Profile, n_threads: int) -> None:
    whole = plan_for(replace(qwen, experts=()), 6 * GIB, n_threads)
    split = plan_for(qwen, 6 * GIB, n_threads)
    assert whole.experts is None
    assert split.experts is not None
    gain = whole.prediction.decode_seconds_per_token / split.prediction.decode_seconds_per_token
    assert gain > (1.25 if n_threads == 16 else 1.7)
    assert not any("exps" in p.name and p.decode == "stream" for p in split.placements)
    assert sum(split.prediction.decode_experts) == pytest.approx(8 * (48 - resident_layers(split)))
    vram = split.vram
    assert split.shares_ring
    assert vram.ring_bytes > split.experts.cache_bytes > 0
    parts = (
        vram.weights_bytes, vram.context_bytes, vram.compute_bytes, vram.ring_bytes, vram.overhead_bytes,
        vram.margin_bytes, vram.idle_bytes, vram.experts_bytes,
    )  # fmt: skip
    assert sum(parts) == vram.budget_bytes
    assert vram.idle_bytes < 16 * MIB
    timeline = simulate_plan(qwen, split)
    assert timeline.seconds == pytest.approx(split.prediction.decode_seconds_per_token)


def test_uniform_routing_fills_layers_and_skewed_routing_the_cache(qwen: Profile) -> None:
    uniform = plan_for(replace(qwen, routing=zipf_routing(QWEN3_30B, 0.0)), 6 * GIB)
    skewed = plan_for(replace(qwen, routing=zipf_routing(QWEN3_30B, 1.0)), 6 * GIB)
    assert uniform.experts is not None
    assert skewed.experts is not None
    assert resident_layers(uniform) >= 10
    assert resident_layers(skewed) <= 5
    assert skewed.experts.cache_bytes > 2.5 * GIB > GIB > uniform.experts.cache_bytes
    assert skewed.prediction.decode_seconds_per_token < 0.8 * uniform.prediction.decode_seconds_per_token
    assert skewed.prediction.decode_experts[0] > 0.5 * sum(skewed.prediction.decode_experts)


def test_uniform_routing_is_never_slower_than_whole_layers(qwen: Profile) -> None:
    plan = plan_for(qwen, 6 * GIB)
    graph, units = build_graph(qwen.weights), find_units(qwen.weights)
    decode = costs(qwen, graph, 1, 16)
    split = find_experts(qwen, units, decode)
    assert split is not None
    smaller_first = dict.fromkeys((*range(1, 48, 4), *range(3, 48, 4), *range(0, 48, 2)))
    layers = [split.blocks[i].unit for i in smaller_first]
    room = plan.vram.ring_bytes + plan.vram.idle_bytes - split.vram_bytes(range(48), 0)
    room += sum(
        units[unit].vram_bytes for unit in layers if plan_class(plan, qwen.weights[units[unit].uses[0]]) == "gpu"
    )
    classes: list[WeightClass] = ["cpu" if w.op == "MUL_MAT_ID" else "gpu" for w in qwen.weights]
    n_layers = 0
    for unit in layers:
        if units[unit].vram_bytes <= room:
            room -= units[unit].vram_bytes
            n_layers += 1
            for use in units[unit].uses:
                classes[use] = "gpu"
    assert n_layers == 13  # without a ring that prompts pass through
    whole_layers = simulate(graph, replace(decode, expert_steps=split.steps(classes, 0)), classes, 0)
    assert plan.prediction.decode_seconds_per_token <= whole_layers.seconds


def plan_class(plan: Plan, weight: WeightUse) -> WeightClass:
    return next(p.decode for p in plan.placements if p.name == weight.name)


def test_the_papers_objective_knows_no_single_experts(qwen: Profile) -> None:
    plan = plan_for(qwen, 6 * GIB, objective="paper")
    assert plan.experts is None
    assert plan.vram.experts_bytes == 0
    assert plan.prediction.decode_experts == (0, 0, 0)


def test_a_link_that_is_too_slow_leaves_experts_together() -> None:
    machine = Machine(link_rate=0.5e9, link_busy_rate=0.5e9, expert_rate=0.4e9, expert_latency=2e-3)
    plan = plan_for(synthetic_profile(QWEN3_30B, machine), 6 * GIB)
    assert plan.experts is None
    assert any("Streaming does not pay" in note for note in plan.notes)


def test_large_experts(qwen: Profile) -> None:
    profile = synthetic_profile(MIXTRAL)
    whole = plan_for(replace(profile, experts=()), 8 * GIB, 4)
    split = plan_for(profile, 8 * GIB, 4)
    assert split.prediction.decode_seconds_per_token < 0.8 * whole.prediction.decode_seconds_per_token


def test_everything_fits(qwen: Profile) -> None:
    plan = plan_for(qwen, 23 * GIB)
    assert plan.experts is None
    assert all(p.decode == "gpu" for p in plan.placements if "exps" in p.name)


@pytest.mark.parametrize(("n_threads", "n_tokens"), [(4, 12), (16, 4)])
def test_short_prompts_copy_only_experts_that_are_used(qwen: Profile, n_threads: int, n_tokens: int) -> None:
    workload = Workload(n_prompt_tokens=n_tokens, n_threads=n_threads)
    split, whole = (solve(profile, 6 * GIB, workload) for profile in (qwen, replace(qwen, experts=())))
    assert split.prefill_min_tokens > n_tokens
    assert split.prediction.prefill_seconds < 0.85 * whole.prediction.prefill_seconds
    assert prompt_seconds(qwen, split) == pytest.approx(split.prediction.prefill_seconds)


def test_few_tokens_read_many_experts(qwen: Profile) -> None:
    graph = build_graph(qwen.weights)
    down = next(i for i, w in enumerate(qwen.weights) if "down_exps" in w.name)
    one, four, all_tokens = (costs(qwen, graph, n, 16).cpu[down] for n in (1, 4, 512))
    assert four / one == pytest.approx(128 * (1 - (1 - 8 / 128) ** 4) / 8)
    assert four < all_tokens
