"""Turn a plan into llama.cpp's load parameters, and check that every weight landed where the plan says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.errors import DeviceError, MismatchError
from planner.plan import ExpertPolicy, Placement, Plan

from .bindings import WeightLocation
from .library import HOST_DEVICE, HYBRID_DEVICE
from .session import LoadSettings, Override

MAX_OVERRIDES = 4096  # llama.cpp's limit

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_NUMBERS_PER_PATTERN = 64  # std::regex recurses; short alternations keep it shallow


def load_settings(plan: Plan) -> LoadSettings:
    """Return the settings that place the weights as planned: host weights by name, the rest by default.

    A tied output matrix has the embedding's name. Resident, it needs no override: llama.cpp keeps the embedding
    on the host and copies the matrix to the device. On the host, both uses share one pinned copy.
    """
    workload = plan.workload
    patterns = group_names([placement.name for placement in plan.host_placements])
    if len(patterns) > MAX_OVERRIDES:
        raise DeviceError(f"The plan needs {len(patterns)} placement patterns; llama.cpp takes {MAX_OVERRIDES}.")
    return LoadSettings(
        n_context=workload.n_context,
        n_ubatch=workload.n_ubatch,
        n_threads=workload.n_threads,
        type_k=workload.type_k,
        type_v=workload.type_v,
        flash_attention=workload.flash_attention,
        devices=(HYBRID_DEVICE,),
        overrides=tuple(Override(pattern, HOST_DEVICE) for pattern in patterns),
    )


def device_options(plan: Plan) -> dict[str, int]:
    """Return the options of the hybrid device that the plan decides, as ats_set_option() takes them."""
    experts = plan.experts or ExpertPolicy(0, 0.0, 0.0, 0.0)  # without times, experts are computed together
    return {
        "ring_bytes": plan.vram.ring_bytes,
        "prefill_min_tokens": plan.prefill_min_tokens,
        "expert_cache_bytes": experts.cache_bytes,
        "expert_cpu_ns": round(experts.cpu_seconds * 1e9),
        "expert_cpu_base_ns": round(experts.cpu_base_seconds * 1e9),
        "expert_link_ns": round(experts.link_seconds * 1e9),
        "expert_link_latency_ns": round(experts.link_latency_seconds * 1e9),
    }


def group_names(names: Sequence[str]) -> list[str]:
    """Return anchored regular expressions that match exactly `names`, one for many numbers of the same name.

    `blk.0.up`, `blk.2.up` -> `^blk\\.(0|2)\\.up$`. llama.cpp compiles every pattern once per tensor, so few matter.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        number = _NUMBER.search(name)
        start, end = number.span() if number else (len(name), len(name))
        groups.setdefault((name[:start], name[end:]), []).append(name[start:end])
    patterns = []
    for (before, after), numbers in groups.items():
        for first in range(0, len(numbers), _MAX_NUMBERS_PER_PATTERN):
            part = "|".join(numbers[first : first + _MAX_NUMBERS_PER_PATTERN])
            middle = f"({part})" if part else ""
            patterns.append(f"^{_escape(before)}{middle}{_escape(after)}$")
    return patterns


def check_locations(placements: Sequence[Placement], locations: Sequence[WeightLocation], pinned_type: str) -> None:
    """Compare where weights are with where the plan wants them. Raises MismatchError that names up to three.

    Host weights must lie in the buffer type `pinned_type`.
    """
    host_names = {placement.name for placement in placements if not placement.is_resident}
    resident_names = {placement.name for placement in placements if placement.is_resident}
    found: dict[str, set[str]] = {}
    for location in locations:
        where = location.buffer_type if location.is_host or location.buffer_type == pinned_type else "VRAM"
        found.setdefault(location.name, set()).add(where)
    unplanned = [name for name in found if name not in host_names and name not in resident_names]
    if unplanned:
        raise MismatchError(
            f"The plan has no placement for {_some(unplanned)}.", "It belongs to another model: solve again."
        )
    absent = [name for name in (*host_names, *resident_names) if name not in found]
    if absent:
        raise MismatchError(f"The model does not use {_some(absent)} of the plan.", "Profile and solve again.")
    misplaced = [
        f"{name} ({', '.join(sorted(found[name]))} instead of {wanted})"
        for names, wanted in ((host_names, pinned_type), (resident_names, "VRAM"))
        for name in sorted(names)
        if wanted not in found[name] or (wanted == pinned_type and len(found[name]) > 1)
    ]
    if misplaced:
        raise MismatchError(f"Weights are not where the plan puts them: {_some(misplaced)}.", "Solve again.")


def _escape(text: str) -> str:
    """Escape for std::regex (ECMAScript), which refuses the escapes of letters and of `-` that re.escape makes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", text)


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
