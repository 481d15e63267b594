"""Rates borrowed from another model's profile: exact where the machine follows the law, and never kept quiet about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.borrowed import _relative_line, borrow
from planner.errors import MismatchError
from planner.library import read_plan_or_profile
from planner.library_check import check_file
from planner.measurements import GlueTiming, Profile, Series
from planner.records import read_record, write_record
from planner.replay import simulate_plan
from planner.solve import solve
from planner.units import GIB, MIB
from planner.workload import Workload
from tests.unit.planner_profiles import (
    LLAMA2_70B,
    MIXTRAL,
    QWEN3_14B,
    QWEN3_30B,
    TINY,
    Machine,
    Shapes,
    synthetic_profile,
)

PLANS = Path(__file__).parents[2] / "plans"


def without_times(profile: Profile) -> Profile:
    """Return what a model's description knows."""
    return replace(
        profile, kernels=(), glue=(), link=(), crossings=(), host=(), contention=(), experts=(), device_overhead_bytes=0
    )


@pytest.mark.parametrize(("shapes", "other"), [(QWEN3_14B, LLAMA2_70B), (LLAMA2_70B, TINY), (QWEN3_30B, MIXTRAL)])
def test_times_that_follow_the_law_are_found_exactly(shapes: Shapes, other: Shapes) -> None:
    expected = synthetic_profile(shapes)
    found = borrow(without_times(expected), synthetic_profile(other))
    assert found.rates_from == other.name
    assert found.notes == ()
    assert found.link == expected.link
    assert found.device_overhead_bytes == expected.device_overhead_bytes

    def times(profile: Profile, kinds: set[str]) -> dict[object, float]:
        return {
            (k.op, k.type, k.shape, k.n_experts_used, k.device, k.n_threads): k.seconds.median
            for k in profile.kernels
            if k.n_tokens == 1 and k.type in kinds
        }

    assert times(found, {"q4_K", "q6_K"}) == pytest.approx(times(expected, {"q4_K", "q6_K"}), rel=1e-6)
    # One size of f32 was measured: only the products of other types tell the latency.
    assert times(found, {"f32"}) == pytest.approx(times(expected, {"f32"}), rel=0.3)
    copies = {(t.matrix_bytes, t.n_experts): t.seconds.median for t in found.experts}
    known = {(t.matrix_bytes, t.n_experts): t.seconds.median for t in expected.experts}
    assert copies == pytest.approx({key: known[key] for key in copies})
    assert bool(copies) == bool(shapes.n_experts)


def test_batches_of_products_follow_their_arithmetic() -> None:
    expected = synthetic_profile(QWEN3_14B)
    found = borrow(expected, synthetic_profile(LLAMA2_70B))
    product = next(weight for weight in expected.weights if weight.name == "blk.0.ffn_up.weight")
    output = expected.weights[-1]
    for device, n_threads in (("cpu", 8), ("gpu", 0)):
        seconds = found.kernel_seconds(product, device, 512, n_threads)
        assert seconds == pytest.approx(expected.kernel_seconds(product, device, 512, n_threads), rel=0.02)
        # The output is computed for the last token only.
        assert found.kernel_seconds(output, device, 512, n_threads) == found.kernel_seconds(
            output, device, 1, n_threads
        )


def test_the_rest_of_the_graph_follows_layers_and_the_kv_cache() -> None:
    machine = synthetic_profile(LLAMA2_70B, Machine(gpu_launch=0.0))
    model = synthetic_profile(QWEN3_14B)
    machine = replace(machine, glue=(GlueTiming(1, 4096, Series((5e-3,))), GlueTiming(512, 4096, Series((80e-3,)))))
    decode, batch = borrow(model, machine).glue
    kv_seconds = [4096 * layers * 2 * 1024 * 2 / Machine().gpu_rate for layers in (80, 40)]
    assert decode.seconds.median == pytest.approx((5e-3 - kv_seconds[0]) / 2 + kv_seconds[1])
    assert batch.seconds.median == pytest.approx(80e-3 / 2 * 5120 / 8192)
    both = replace(machine, glue=(*machine.glue, GlueTiming(1, 512, Series((3e-3,)))))
    assert [(g.n_tokens, g.n_context) for g in borrow(model, both).glue] == [(1, 4096), (512, 4096), (1, 512)]
    shorter = borrow(model, both).glue[-1].seconds.median
    assert shorter == pytest.approx((3e-3 - kv_seconds[0] / 8) / 2 + kv_seconds[1] / 8)


def test_a_type_that_was_not_measured_is_said_in_the_plan() -> None:
    described = without_times(synthetic_profile(TINY))
    weights = tuple(replace(weight, type="q4_0") if "ffn_up" in weight.name else weight for weight in described.weights)
    machine = synthetic_profile(LLAMA2_70B)
    plan = solve(borrow(replace(described, weights=weights), machine), 600 * MIB, Workload(n_threads=8))
    assert plan.hardware == machine.hardware
    assert plan.notes[:2] == (
        "Speeds are estimated: they were measured there with another model, Llama-2-70B.",
        "Llama-2-70B has no q4_0: its times are estimated from those of q4_K.",
    )


def test_experts_from_a_machine_that_measured_none_are_computed_together() -> None:
    profile = borrow(synthetic_profile(QWEN3_30B), synthetic_profile(QWEN3_14B))
    assert profile.experts == ()
    assert any("has no f32" in note for note in profile.notes)  # routers
    assert solve(profile, 6 * GIB, Workload(n_threads=8)).experts is None


def test_shapes_that_were_not_measured_lie_on_the_line_of_the_others() -> None:
    expected = synthetic_profile(QWEN3_14B)
    partial = replace(expected, kernels=tuple(kernel for kernel in expected.kernels if 17408 not in kernel.shape))
    product = next(weight for weight in expected.weights if weight.name == "blk.0.ffn_up.weight")
    for device, n_threads in (("cpu", 8), ("gpu", 0)):
        known = expected.kernel_seconds(product, device, 1, n_threads)
        assert borrow(expected, partial).kernel_seconds(product, device, 1, n_threads) == pytest.approx(known)


def test_what_cannot_be_compared_is_refused() -> None:
    model, machine = synthetic_profile(TINY), synthetic_profile(QWEN3_14B)
    with pytest.raises(MismatchError, match=r"with micro-batches of 256 tokens, Qwen3-14B with 512\. Profile it again"):
        borrow(synthetic_profile(TINY, n_ubatch=256), machine)
    other = replace(machine, software=replace(machine.software, llama_cpp_python="0.3.1"))
    with pytest.raises(MismatchError, match=r"versions of llama-cpp-python: 0\.3\.1 and 0\.3\.36"):
        borrow(model, other)


def test_estimates_are_not_shared(tmp_path: Path) -> None:
    profile = borrow(synthetic_profile(TINY), synthetic_profile(QWEN3_14B))
    path = tmp_path / "profile.json"
    write_record(path, profile)
    assert "its speeds are estimated" in check_file(path, is_shared=True)
    assert read_plan_or_profile(path) == profile


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)], (1.0, 2.0)),
        ([(10.0, 5.0)], (0.0, 0.5)),
        ([(10.0, 4.0), (10.0, 4.0)], (0.0, 0.4)),
        ([(1.0, 4.0), (2.0, 2.0)], (2.4, 0.0)),  # the mean of least squared relative error
        ([(1.0, 1.0), (2.0, 3.0)], (0.0, 15 / 13)),
    ],
)
def test_lines(points: list[tuple[float, float]], line: tuple[float, float]) -> None:
    assert _relative_line(points) == pytest.approx(line)


def test_shipped_profiles_predict_each_other_roughly() -> None:
    """Of one machine, with 62 times as large a model of other types: a plan made so is usable.

    The CPU's products are faster for the large model's types than for the small one's.
    """
    folder = PLANS / "h200-140g-xeon-16c"
    large = read_record(folder / "synthetic-qwen3-14b-q4-k-m/profile.json", Profile)
    small = read_record(folder / "synthetic-smollm2-135m-q4-1/profile.json", Profile)
    workload = Workload(n_threads=8)
    direct, estimated = (solve(p, 6 * GIB, workload) for p in (large, borrow(large, small)))
    ratio = estimated.prediction.decode_seconds_per_token / direct.prediction.decode_seconds_per_token
    assert 0.8 < ratio < 1.5
    assert simulate_plan(large, estimated).seconds < 1.5 * direct.prediction.decode_seconds_per_token
