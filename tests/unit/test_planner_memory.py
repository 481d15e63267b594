"""VRAM accounting, with every figure computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import AtsplanError, InfeasibleError
from planner.measurements import WeightUse
from planner.memory import available_bytes, decided, fixed_memory, granule_bytes, vram_budget, vram_bytes
from planner.units import KIB, MIB
from planner.workload import Workload
from tests.unit.planner_profiles import LLAMA2_70B, QWEN3_14B, Shapes, synthetic_profile

WORKLOAD = Workload(n_context=4096)


def weight(kind: str, shape: tuple[int, ...], size: int, op: str = "MUL_MAT", is_input: bool = False) -> WeightUse:
    return WeightUse("w", op, kind, shape, size, 4, 4, is_input=is_input)


def test_vram_bytes_are_padded_like_the_backend_does() -> None:
    assert vram_bytes(weight("q4_K", (5120, 100), 288000)) == 288000  # 10 x 512 elements; 2250 x 128 bytes
    assert vram_bytes(weight("f32", (3,), 12)) == 128
    # 576 = 512 + 64: 448 elements more of q8_0, at 34 bytes per 32 elements
    assert vram_bytes(weight("q8_0", (576, 64), 39168)) == -(-(39168 + 448 // 32 * 34) // 128) * 128
    assert vram_bytes(weight("f16", (576, 64), 73728)) == 73728


def test_granule_is_one_mib_for_all_but_small_models() -> None:
    assert granule_bytes([weight("f16", (1, 1), 5000 * MIB)]) == MIB
    assert granule_bytes([weight("f16", (1, 1), 4096 * MIB)]) == MIB
    assert granule_bytes([weight("f16", (1, 1), 100 * MIB)]) == 16 * KIB
    assert granule_bytes([weight("f16", (1, 1), 1)]) == 4 * KIB


def test_what_is_decided() -> None:
    weights = [
        weight("f16", (1, 1), MIB),
        weight("f16", (1, 1), MIB - 1),
        weight("f32", (1, 1), 9 * MIB, op="ADD"),
        weight("f16", (1, 1), 9000 * MIB, op="GET_ROWS", is_input=True),
    ]
    assert granule_bytes(weights) == MIB
    assert decided(weights) == (True, False, False, False)


def test_fixed_memory_of_a_14b() -> None:
    fixed = fixed_memory(synthetic_profile(), WORKLOAD, margin_bytes=7)
    assert fixed.resident_bytes == 81 * 5120 * 4  # 2 norms per layer and the last one
    assert fixed.context_bytes == 4096 * 40 * 2 * 1024 * 2
    assert fixed.overhead_bytes == 450 * MIB
    assert fixed.margin_bytes == 7
    assert fixed.total_bytes == sum(
        (fixed.resident_bytes, fixed.context_bytes, fixed.compute_bytes, fixed.overhead_bytes, 7)
    )


def test_what_does_not_fit_takes_page_tables() -> None:
    """On an H200, plans of five models with 0.7 to 34 GB in host memory took -20 to 74 MiB more than without them."""
    profile = synthetic_profile()
    fixed = fixed_memory(profile, WORKLOAD)
    weights_bytes = sum(profile.sizes.values()) - fixed.resident_bytes
    for room in (-MIB, 0, 10 * MIB, weights_bytes // 2, weights_bytes - MIB):
        with_tables = fixed_memory(profile, WORKLOAD, budget_bytes=fixed.total_bytes + room)
        tables = with_tables.overhead_bytes - fixed.overhead_bytes
        on_host = weights_bytes - max(0, room - tables)
        assert abs(512 * tables - on_host) <= 512
        assert with_tables == replace(fixed, overhead_bytes=fixed.overhead_bytes + tables)
    assert fixed_memory(profile, WORKLOAD, budget_bytes=fixed.total_bytes + weights_bytes) == fixed


def test_the_margin_grows_with_the_weights_that_may_end_a_run_of_the_gpu() -> None:
    """On an H200, plans of a 70B model took 22 to 26 MiB more than accounted for, of a 14B model 4 to 14 less."""
    few, many = (fixed_memory(synthetic_profile(shapes), WORKLOAD).margin_bytes for shapes in (QWEN3_14B, LLAMA2_70B))
    assert 20 * MIB < few < 40 * MIB
    assert many - few == 40 * 7 * 96 * KIB  # 40 layers more
    assert many > 26 * MIB + 16 * MIB


def test_embedding_on_the_host_costs_nothing_and_a_tied_one_can_live_on_both_sides() -> None:
    tied = synthetic_profile(Shapes("t", 1, 2048, 2048, 256, 4096, 32000, tied=True))
    first, last = tied.weights[0], tied.weights[-1]
    assert first.name == last.name
    is_decided = decided(tied.weights)
    assert (is_decided[0], is_decided[-1]) == (False, True)
    assert fixed_memory(tied, WORKLOAD).resident_bytes == 3 * 2048 * 4


@pytest.mark.parametrize(("n_context", "expected"), [(512, 512), (100, 512), (4096, 4096), (2304, 2304), (513, 768)])
def test_context_between_cases_is_linear_and_never_below_the_smallest(n_context: int, expected: int) -> None:
    fixed = fixed_memory(synthetic_profile(), replace(WORKLOAD, n_context=n_context))
    assert fixed.context_bytes == expected * 40 * 2 * 1024 * 2


def test_interpolation_rounds_up() -> None:
    profile = synthetic_profile()
    low, high = (replace(profile.memory[0], n_context=n, context_bytes=b) for n, b in ((256, 100), (1024, 102)))
    fixed = fixed_memory(replace(profile, memory=(high, low)), replace(WORKLOAD, n_context=500))
    assert fixed.context_bytes == 101


def test_settings_that_were_not_recorded_name_the_remedy() -> None:
    profile = synthetic_profile()
    with pytest.raises(InfeasibleError, match=r"knows up to 8192\. Profile again with --ctx 9000"):
        fixed_memory(profile, replace(WORKLOAD, n_context=9000))
    for other in (
        replace(WORKLOAD, type_k="q8_0"), replace(WORKLOAD, n_ubatch=256), replace(WORKLOAD, flash_attention=False),
    ):  # fmt: skip
        with pytest.raises(AtsplanError, match="it has n_ubatch 512, KV types f16/f16, with flash attention"):
            fixed_memory(profile, other)


def test_missing_mib_are_counted() -> None:
    fixed = fixed_memory(synthetic_profile(), WORKLOAD)
    assert available_bytes(fixed, fixed.total_bytes) == 0
    assert available_bytes(fixed, fixed.total_bytes + 5) == 5
    with pytest.raises(InfeasibleError, match="^1 MiB are missing"):
        available_bytes(fixed, fixed.total_bytes - 1)
    with pytest.raises(InfeasibleError, match="^3 MiB are missing"):
        available_bytes(fixed, fixed.total_bytes - 2 * MIB - 1)


def test_parts_add_up_to_the_budget() -> None:
    fixed = fixed_memory(synthetic_profile(QWEN3_14B), WORKLOAD)
    budget = vram_budget(fixed, 6144 * MIB, 3000 * MIB + 17, 200 * MIB)
    parts = (
        budget.weights_bytes, budget.context_bytes, budget.compute_bytes, budget.ring_bytes,
        budget.overhead_bytes, budget.margin_bytes, budget.idle_bytes,
    )  # fmt: skip
    assert sum(parts) == budget.budget_bytes == 6144 * MIB
    with pytest.raises(AtsplanError, match="exceeds the budget"):
        vram_budget(fixed, 6144 * MIB, 6000 * MIB, 0)
