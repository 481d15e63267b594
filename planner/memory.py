"""Where VRAM goes. Every term is llama.cpp's own accounting or measured, so that no plan exceeds its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .errors import AtsplanError, InfeasibleError
from .measurements import MemoryCase, Profile, WeightUse
from .plan import VramBudget
from .units import KIB, MIB, format_size, mib_ceil
from .workload import Workload, kv_label

KV_GRANULE = 256  # llama.cpp's KV cache holds, and its attention reads, a multiple of so many tokens

# Each buffer is rounded up by the driver (2 MiB pages), and scratch pools grow a little with the batch's shape.
_MARGIN_BYTES = 12 * MIB
# Every weight on the host may end a run of the GPU, and every run becomes a captured graph. On an H200, plans of models
# with 169 to 289 weights took 4 to 34 MiB less than accounted for, those of one with 561 up to 26 MiB more.
_MARGIN_BYTES_PER_WEIGHT = 96 * KIB
# Desktops and browsers take and give back so much from one minute to the next.
DISPLAY_RESERVE_BYTES = 256 * MIB
_ENTRIES_PER_PAGE = 512  # pages of pinned host memory that a page of the card's page tables knows

_TENSOR_ALIGNMENT = 128  # ggml's CUDA buffers
_ROW_MULTIPLE = 512  # elements; the CUDA backend pads the last row of quantised tensors to it
_UNPADDED_TYPES = frozenset({"f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64"})


@dataclass(frozen=True)
class FixedMemory:
    """VRAM in bytes that a plan takes whatever it places where."""

    resident_bytes: int  # weights that are never decided about
    context_bytes: int
    compute_bytes: int
    overhead_bytes: int
    margin_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.context_bytes + self.compute_bytes + self.overhead_bytes + self.margin_bytes


def vram_bytes(weight: WeightUse) -> int:
    """Return what the weight takes in VRAM: its bytes, the padding of its last row, the alignment."""
    return -(-(weight.size_bytes + padding_bytes(weight)) // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT


def padding_bytes(weight: WeightUse) -> int:
    """Return the zeros that follow the weight's last row in VRAM."""
    rest = weight.shape[0] % _ROW_MULTIPLE if weight.shape else 0
    if not rest or weight.type in _UNPADDED_TYPES:
        return 0
    return math.ceil(weight.size_bytes * (_ROW_MULTIPLE - rest) / math.prod(weight.shape))


def granule_bytes(weights: Iterable[WeightUse]) -> int:
    """Return the unit in which VRAM is handed out: 1 MiB, less for models under 4 GiB.

    Smaller weights are always resident. For SmolLM2-135M, nearly every weight is under 1 MiB.
    """
    total = sum(weight.size_bytes for weight in weights)
    granule = MIB
    while granule > 4 * KIB and granule * 4096 > total:
        granule //= 2
    return granule


def decided(weights: Sequence[WeightUse]) -> tuple[bool, ...]:
    """Tell of each of a model's weights whether a plan chooses its place: products of at least a granule.

    Inputs stay on the host, everything else in VRAM.
    """
    granule = granule_bytes(weights)
    return tuple(weight.is_product and weight.size_bytes >= granule for weight in weights)


def fixed_memory(
    profile: Profile, workload: Workload, margin_bytes: int | None = None, budget_bytes: int | None = None
) -> FixedMemory:
    """Return the VRAM that does not depend on the placement; for a budget, with page tables for what does not fit.

    Without `margin_bytes`, with one for what is not accounted for.
    Raises AtsplanError if the workload's settings are not among the profile's memory cases.
    """
    context_bytes, compute_bytes = _context_and_compute(profile, workload)
    are_decided = decided(profile.weights)
    always_resident = {
        weight.name: vram_bytes(weight)
        for weight, is_decided in zip(profile.weights, are_decided, strict=True)
        if not weight.is_input and not is_decided
    }
    if margin_bytes is None:
        margin_bytes = _MARGIN_BYTES + _MARGIN_BYTES_PER_WEIGHT * sum(are_decided)
    fixed = FixedMemory(
        resident_bytes=sum(always_resident.values()),
        context_bytes=context_bytes,
        compute_bytes=compute_bytes,
        overhead_bytes=profile.device_overhead_bytes,
        margin_bytes=margin_bytes,
    )
    if budget_bytes is None:
        return fixed
    weights_bytes = sum(profile.sizes.values()) - fixed.resident_bytes
    excess_bytes = max(0, weights_bytes - (budget_bytes - fixed.total_bytes))  # page tables not counted
    page_tables_bytes = min(-(-weights_bytes // _ENTRIES_PER_PAGE), -(-excess_bytes // (_ENTRIES_PER_PAGE - 1)))
    return replace(fixed, overhead_bytes=fixed.overhead_bytes + page_tables_bytes)


def available_bytes(fixed: FixedMemory, budget_bytes: int) -> int:
    """Return the VRAM left for weights and the ring. Raises InfeasibleError if not even the fixed part fits."""
    missing = fixed.total_bytes - budget_bytes
    if missing > 0:
        raise InfeasibleError(
            f"{mib_ceil(missing)} MiB are missing: {format_size(budget_bytes)} of VRAM cannot hold the minimum of "
            f"{mib_ceil(fixed.total_bytes)} MiB (context {mib_ceil(fixed.context_bytes)}, compute buffers "
            f"{mib_ceil(fixed.compute_bytes)}, driver {mib_ceil(fixed.overhead_bytes)}, small weights "
            f"{mib_ceil(fixed.resident_bytes)}, margin {mib_ceil(fixed.margin_bytes)}).",
            "Give more VRAM or a smaller --ctx, or profile with a smaller --ubatch.",
        )
    return -missing


def vram_budget(
    fixed: FixedMemory, budget_bytes: int, weights_bytes: int, ring_bytes: int, experts_bytes: int = 0
) -> VramBudget:
    """Account for a finished placement with `weights_bytes` of decided weights in VRAM.

    Raises AtsplanError if it exceeds the budget: that is a mistake of the planner, and it must not be run.
    """
    idle = available_bytes(fixed, budget_bytes) - weights_bytes - ring_bytes - experts_bytes
    if idle < 0:
        raise AtsplanError(f"The placement exceeds the budget by {mib_ceil(-idle)} MiB. This is a bug in atsplan.")
    return VramBudget(
        budget_bytes=budget_bytes,
        weights_bytes=fixed.resident_bytes + weights_bytes,
        context_bytes=fixed.context_bytes,
        compute_bytes=fixed.compute_bytes,
        ring_bytes=ring_bytes,
        overhead_bytes=fixed.overhead_bytes,
        margin_bytes=fixed.margin_bytes,
        idle_bytes=idle,
        experts_bytes=experts_bytes,
    )


def _context_and_compute(profile: Profile, workload: Workload) -> tuple[int, int]:
    """Return bytes of the KV cache and of the compute buffers, linear in n_context between recorded cases."""
    wanted = (workload.n_ubatch, workload.type_k, workload.type_v, workload.flash_attention)
    cases = sorted(
        (case for case in profile.memory if _settings(case) == wanted),
        key=lambda case: case.n_context,
    )
    if not cases:
        known = sorted({_describe(*_settings(case)) for case in profile.memory})
        raise AtsplanError(
            f"The profile has no memory figures for {_describe(*wanted)}; it has {'; '.join(known) or 'none'}.",
            f"Run: atsplan profile MODEL --ubatch {workload.n_ubatch} "
            f"--kv-type {kv_label(workload.type_k, workload.type_v)}"
            if workload.flash_attention
            else "Profiles are of flash attention; quantised values need it.",
        )
    if workload.n_context > cases[-1].n_context:
        raise InfeasibleError(
            f"A context of {workload.n_context} tokens is needed; the profile knows up to {cases[-1].n_context}.",
            f"Profile again with --ctx {workload.n_context}.",
        )
    n_context = min(-(-workload.n_context // KV_GRANULE) * KV_GRANULE, cases[-1].n_context)
    above = next(case for case in cases if case.n_context >= n_context)
    below = next((case for case in reversed(cases) if case.n_context <= n_context), above)
    if above.n_context == below.n_context:
        return above.context_bytes, above.compute_bytes
    share = (n_context - below.n_context) / (above.n_context - below.n_context)
    return (
        math.ceil(below.context_bytes + share * (above.context_bytes - below.context_bytes)),
        math.ceil(below.compute_bytes + share * (above.compute_bytes - below.compute_bytes)),
    )


def _settings(case: MemoryCase) -> tuple[int, str, str, bool]:
    return case.n_ubatch, case.type_k, case.type_v, case.flash_attention


def _describe(n_ubatch: int, type_k: str, type_v: str, flash_attention: bool) -> str:
    attention = "with" if flash_attention else "without"
    return f"n_ubatch {n_ubatch}, KV types {type_k}/{type_v}, {attention} flash attention"
