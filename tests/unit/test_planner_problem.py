"""What is decided as one, what depends on what, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import AtsplanError
from planner.measurements import Contention, GlueTiming, HostTiming, Profile, QueueTiming, Series, WeightUse
from planner.problem import Curve, Kernels, build_graph, costs, find_units, mean_past
from planner.workload import Workload
from tests.unit.planner_profiles import QWEN3_14B, TINY, Machine, Shapes, dense_weights, synthetic_profile


def use(name: str, op: str = "MUL_MAT", inputs: tuple[int, ...] = (), n_bytes: int = 8, n_in: int = 4, n_out: int = 4, **extra: bool) -> WeightUse:  # fmt: skip # noqa: E501
    return WeightUse(name, op, "f16", (n_in, n_out), max(1, n_bytes << 20), n_in, n_out, inputs, **extra)


def names(profile: Profile, uses: tuple[int, ...]) -> list[str]:
    return [profile.weights[i].name for i in uses]


def test_units_of_a_dense_model_are_its_matrices() -> None:
    profile = synthetic_profile(TINY)
    units = find_units(profile.weights)
    assert len(units) == 2 * 7 + 1
    assert names(profile, units[0].uses) == ["blk.0.attn_q.weight"]
    assert names(profile, units[-1].uses) == ["output.weight"]
    assert not any(unit.is_expert for unit in units)


def test_tied_embedding_is_a_unit_of_its_own_for_the_output_only() -> None:
    weights = dense_weights(replace(TINY, tied=True))
    units = find_units(weights)
    assert units[-1].uses == (len(weights) - 1,)
    assert all(0 not in unit.uses for unit in units)


def test_experts_of_a_layer_are_one_unit() -> None:
    weights = (
        use("embd", "GET_ROWS", is_input=True),
        use("blk.0.o", inputs=(0,)),
        use("blk.0.router", inputs=(1,), n_bytes=0),
        use("blk.0.gate_exps", "MUL_MAT_ID", inputs=(1, 2)),
        use("blk.0.gate_bias", "ADD_ID", inputs=(3,), n_bytes=0),
        use("blk.0.up_exps", "MUL_MAT_ID", inputs=(1, 2)),
        use("blk.0.down_exps", "MUL_MAT_ID", inputs=(4, 5)),
        use("blk.0.shared", inputs=(1,)),
        use("blk.1.o", inputs=(1, 6, 7)),
        use("blk.1.router", inputs=(8,), n_bytes=0),
        use("blk.1.gate_up_exps", "MUL_MAT_ID", inputs=(8, 9)),
        use("blk.1.down_exps", "MUL_MAT_ID", inputs=(9, 10)),
    )
    units = find_units(weights)
    assert [unit.uses for unit in units] == [(1,), (3, 5, 6), (7,), (8,), (10, 11)]
    assert [unit.is_expert for unit in units] == [False, True, False, False, True]
    assert units[1].size_bytes == 24 << 20


def test_a_matrix_used_twice_is_one_unit_and_takes_vram_once() -> None:
    units = find_units((use("a"), use("b", inputs=(0,)), use("a", inputs=(1,))))
    assert [unit.uses for unit in units] == [(0, 2), (1,)]
    assert units[0].vram_bytes == 8 << 20


def test_inputs_that_the_trace_cut_short_are_filled_in() -> None:
    weights = dense_weights(QWEN3_14B)
    graph = build_graph(weights)
    by_name = {weight.name: i for i, weight in enumerate(weights)}

    def inputs(name: str) -> list[str]:
        return [weights[i].name for i in graph.inputs[by_name[name]]]

    assert len(weights[by_name["blk.30.attn_q.weight"]].inputs) == 8
    for layer in (0, 30):
        p = f"blk.{layer}."
        assert inputs(p + "ffn_down.weight") == [p + "ffn_gate.weight", p + "ffn_up.weight"]
        assert inputs(p + "ffn_up.weight") == inputs(p + "ffn_gate.weight") == [p + "ffn_norm.weight"]
        assert p + "attn_output.weight" in inputs(p + "ffn_norm.weight")
        assert inputs(p + "attn_v.weight") == inputs(p + "attn_q.weight") == [p + "attn_norm.weight"]
    assert inputs("blk.30.attn_norm.weight") == ["blk.29.ffn_down.weight"]
    assert [w.name for w, last in zip(weights, graph.is_terminal, strict=True) if last] == ["output.weight"]


def test_activation_between_up_and_down_can_stay_on_the_cpu_attention_cannot() -> None:
    weights = dense_weights(TINY)
    graph = build_graph(weights)
    leaves = {weight.name for weight, leaves in zip(weights, graph.leaves_cpu, strict=True) if leaves}
    assert {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"} <= leaves
    assert not {"blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"} & leaves


def test_costs_come_from_the_measurements() -> None:
    profile = synthetic_profile(TINY, Machine(cpu_busy_rates={4: 13.5e9, 8: 40e9, 16: 63e9}, link_busy_rate=27.45e9))
    graph = build_graph(profile.weights)
    one = costs(profile, graph, 1, 4)
    down = next(i for i, weight in enumerate(profile.weights) if weight.name == "blk.0.ffn_down.weight")
    weight = profile.weights[down]
    assert one.cpu[down] == profile.kernel_seconds(weight, "cpu", 1, 4)
    assert one.gpu[down] == profile.kernel_seconds(weight, "gpu", 1)
    assert one.link[down] == pytest.approx(4e-6 + weight.size_bytes / 54.9e9)
    assert one.down[down] == pytest.approx((25e-6 + 2 * 4096 * 4 / 54.9e9) / 2)
    assert sum(one.gpu_before) == pytest.approx(18e-6 * 2)
    assert one.gpu_before[down] == 0.0
    assert (one.cpu_slowdown, one.link_slowdown) == (pytest.approx(2.0), pytest.approx(2.0))
    full, half = costs(profile, graph, 512, 4), costs(profile, graph, 256, 4)
    assert full.cpu[down] == profile.kernel_seconds(weight, "cpu", 512, 4)
    assert half.cpu[down] == pytest.approx(one.cpu[down] + (full.cpu[down] - one.cpu[down]) * 255 / 511)
    assert full.gpu[-1] == one.gpu[-1]  # the output is computed for the last token only


def test_attention_reads_what_is_there_already() -> None:
    times = {(1, 512): 1e-3, (1, 4096): 3e-3, (512, 512): 10e-3, (512, 4096): 24e-3}
    glue = tuple(GlueTiming(n, n_read, Series((seconds,))) for (n, n_read), seconds in times.items())
    profile = replace(synthetic_profile(TINY), glue=glue)
    graph = build_graph(profile.weights)

    def total(n_tokens: int, n_past: float | None) -> float:
        return sum(costs(profile, graph, n_tokens, 4, n_past).gpu_before)

    assert total(1, None) == pytest.approx(3e-3)  # a full context
    assert total(1, 1e9) == pytest.approx(3e-3)
    assert total(1, 2303) == pytest.approx(2e-3)
    assert total(1, 2300) == pytest.approx(2e-3)  # whole blocks are read
    assert total(512, 0) == pytest.approx(10e-3)
    assert total(512, 1792) == pytest.approx(17e-3)
    assert mean_past(Workload(n_prompt_tokens=512, n_generated_tokens=256, n_ubatch=512)) == (0, 640)
    assert mean_past(Workload(n_prompt_tokens=4096, n_generated_tokens=100, n_ubatch=512)) == (1792, 4146)
    assert mean_past(Workload(n_prompt_tokens=100, n_generated_tokens=0, n_ubatch=512)) == (0, 100)


def test_handing_over_is_warm_and_what_cold_caches_add() -> None:
    profile = synthetic_profile(TINY)
    graph = build_graph(profile.weights)
    old = costs(profile, graph, 1, 4)  # warm times were not measured
    assert (old.host_launch, old.host_stream, old.host_crossing) == (5e-6, 3e-6, 5e-6)
    assert old.host_cold == (0.0, 0.0, 0.0)
    assert (old.launch_gap, old.handshake) == (0.0, 0.0)
    series = [Series((n * 1e-6,)) for n in (20, 21, 22, 6, 3, 99)]
    queue = QueueTiming(Series((2e-6,)), Series((4e-6,)))
    new = costs(replace(profile, host=(HostTiming(4, *series),), queue=queue), graph, 1, 4)
    assert (new.host_launch, new.host_stream, new.host_crossing) == (6e-6, 3e-6, 22e-6)  # warm is never slower
    assert new.host_cold == pytest.approx((14e-6, 18e-6, 0.0))
    assert (new.launch_gap, new.handshake) == (2e-6, 4e-6)
    down = next(i for i, weight in enumerate(profile.weights) if weight.name == "blk.0.ffn_down.weight")
    assert new.coldness[down] == profile.weights[down].size_bytes / 4 / 2**20


def test_padded_weights_take_a_second_copy() -> None:
    padded = synthetic_profile(Shapes("t", 1, 2048, 2048, 256, 4096 + 256, 8192))
    graph = build_graph(padded.weights)
    of = costs(padded, graph, 1, 4)
    down, up = (
        next(i for i, weight in enumerate(padded.weights) if weight.name == f"blk.0.ffn_{role}.weight")
        for role in ("down", "up")
    )
    n_zeros = padded.weights[down].size_bytes // (2048 * 4352) * 256
    assert of.link[up] == pytest.approx(4e-6 + padded.weights[up].size_bytes / 54.9e9)
    assert of.link[down] == pytest.approx(2 * 4e-6 + (padded.weights[down].size_bytes + n_zeros) / 54.9e9, rel=1e-3)
    assert (of.padding[up], of.padding[down]) == (0.0, pytest.approx(4e-6, rel=1e-2))
    assert costs(synthetic_profile(TINY), build_graph(dense_weights(TINY)), 1, 4).padding == ()


def test_missing_measurements_are_named() -> None:
    profile = synthetic_profile(TINY)
    graph = build_graph(profile.weights)
    with pytest.raises(
        AtsplanError, match=r"no time for blk\.0\.attn_q\.weight \(q4_K\) on the CPU at 1 tokens with 5"
    ):
        costs(profile, graph, 1, 5)
    with pytest.raises(AtsplanError, match="no link rate"):
        costs(replace(profile, link=()), graph, 1, 4)


def test_glue_without_norms_goes_to_attention() -> None:
    weights = tuple(
        weight for weight in dense_weights(Shapes("t", 1, 2048, 2048, 256, 4096, 9999)) if weight.op != "MUL"
    )
    renumbered = tuple(
        replace(weight, inputs=tuple(max(0, i - 1) for i in weight.inputs)) for weight in weights[:5]
    )  # the norm before them is gone
    graph = build_graph(renumbered)
    spread = costs(
        replace(synthetic_profile(Shapes("t", 1, 2048, 2048, 256, 4096, 9999)), weights=renumbered), graph, 1, 4
    ).gpu_before
    assert [i for i, value in enumerate(spread) if value] == [4]


def test_curve() -> None:
    assert Curve([])(5) == 0.0
    assert Curve([(3, 7)])(100) == 7
    line = Curve([(4, 8), (0, 0), (2, 2), (2, 4)])
    assert [line(x) for x in (0, 1, 2, 3, 4, 6)] == [0, 1.5, 3, 5.5, 8, 13]
    assert Curve([(1, 5), (2, 1)])(9) == 0.0


def test_products_share_the_memory_with_copies() -> None:
    """The kind that looks fastest reads no faster than the heaviest one did for longer, where copies suffer from it."""
    rates = {8: 40e9}
    profile = synthetic_profile(TINY, Machine(cpu_rates=rates, cpu_busy_rates={8: 30e9}, link_rate=50e9))
    graph = build_graph(profile.weights)
    alone = costs(profile, graph, 1, 8).cpu
    weights = profile.weights
    for link_busy, is_limited in ((50e9, False), (49e9, False), (45e9, True)):
        contention = (Contention(8, 20e9, 15e9, 50e9, link_busy),)
        limited = costs(replace(profile, contention=contention), graph, 1, 8)
        for weight, before, after in zip(weights, alone, limited.cpu, strict=True):
            least = weight.size_bytes / 20e9 if before and is_limited else 0.0
            assert after == pytest.approx(max(before, least))
        assert limited.cpu_slowdown == pytest.approx(20 / 15)


def test_experts_share_the_memory_with_copies_too() -> None:
    mixture = replace(TINY, n_experts=8, n_experts_used=4)
    profile = synthetic_profile(mixture, Machine(cpu_rates={8: 40e9}, cpu_busy_rates={8: 30e9}))
    weight = next(weight for weight in profile.weights if weight.n_experts_used)
    contention = (Contention(8, 10e9, 8e9, 50e9, 40e9),)
    for n in (1, 4):
        alone = Kernels(profile).expert_seconds(weight, 8)(n)
        seconds = Kernels(replace(profile, contention=contention)).expert_seconds(weight, 8)(n)
        assert seconds == pytest.approx(max(alone, n * weight.size_bytes / 8 / 10e9)) and seconds > alone
