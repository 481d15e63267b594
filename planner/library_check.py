"""Whether a shared file can be trusted: it loads, its parts add up, and its prediction follows from its profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import __version__, cache, library
from .errors import AtsplanError
from .measurements import Profile
from .memory import decided, fixed_memory, vram_bytes
from .plan import Plan
from .replay import prompt_seconds, simulate_plan

TOLERANCE = 0.02  # of a prediction
OTHER_TOLERANCE = 0.1  # of one that another version of atsplan made, and may have estimated differently


def check_file(path: Path, *, is_shared: bool = False) -> list[str]:
    """Return what is wrong with a plan or a profile, one line each; empty if nothing is.

    A shared one must also be measured, lie where its hardware and model say, and have its profile beside it.
    """
    try:
        record = library.read_library_file(path) if is_shared else library.read_plan_or_profile(path)
        if record is None:
            return []
        problems = list(_shared_problems(path, record)) if is_shared else []
        if isinstance(record, Profile):
            return [*problems, *_profile_problems(record)]
        if is_shared:
            beside = library.profile_of(record, path.parent)
            profile = beside.record if beside else None
        else:
            profile = library.find_profile_of(record, path)
        if profile is None:
            problems.append(f"the profile that it was made from {'is not beside it' if is_shared else 'was not found'}")
        return [*problems, *_plan_problems(record), *(_prediction_problems(record, profile) if profile else ())]
    except AtsplanError as error:
        return [error.message.removeprefix(f"{path}: ").removesuffix(".")]


def _shared_problems(path: Path, record: Plan | Profile) -> Iterator[str]:
    expected = library.place_of(record)
    if path.parts[-3:-1] != expected.parts:
        yield f"it belongs into the folder {expected}"
    if record.is_simulated:
        yield "its timings are simulated"
    if isinstance(record, Profile) and record.rates_from:
        yield "its speeds are estimated"
    if "/" in record.model.file_name:
        yield "the model's file name holds a folder"
    if isinstance(record, Profile) and record.state.gpu_uuid:
        yield "it holds the GPU's UUID, which identifies a machine"


def _profile_problems(profile: Profile) -> Iterator[str]:
    if not profile.weights or not profile.kernels:
        yield "nothing was measured"
    if cache.is_too_noisy(profile) and not profile.is_simulated:
        yield f"{cache.noisy_fraction(profile):.0%} of its series are unsteady"


def _plan_problems(plan: Plan) -> Iterator[str]:
    vram = plan.vram
    parts = sum(value for name, value in vars(vram).items() if name != "budget_bytes")
    if parts != vram.budget_bytes:
        yield f"the parts of VRAM add up to {parts} bytes, the budget is {vram.budget_bytes}"
    peak = vram.budget_bytes - vram.idle_bytes - vram.margin_bytes
    if plan.prediction.peak_vram_bytes != peak:
        yield f"the predicted peak of VRAM is {plan.prediction.peak_vram_bytes} bytes, the parts add up to {peak}"


def _prediction_problems(plan: Plan, profile: Profile) -> Iterator[str]:
    sizes = {weight.name: weight.size_bytes for weight in profile.weights}
    if sizes != {placement.name: placement.size_bytes for placement in plan.placements}:
        yield "its weights are not those of its profile"
        return
    if plan.software != profile.software:
        yield "it was made for other software than its profile"
    fixed = fixed_memory(profile, plan.workload, plan.vram.margin_bytes, plan.vram.budget_bytes)
    is_current = plan.software.atsplan == __version__
    resident = {placement.name for placement in plan.placements if placement.is_resident}
    uses = zip(profile.weights, decided(profile.weights), strict=True)
    chosen = {weight.name: vram_bytes(weight) for weight, is_decided in uses if is_decided and weight.name in resident}
    expected = {
        "weights": fixed.resident_bytes + sum(chosen.values()), "context": fixed.context_bytes,
        "compute": fixed.compute_bytes, "overhead": fixed.overhead_bytes,
    }  # fmt: skip
    if not is_current and plan.vram.overhead_bytes == profile.device_overhead_bytes:
        del expected["overhead"]  # versions before 0.4.0 did not account for page tables
    for name, size in expected.items():
        found = getattr(plan.vram, f"{name}_bytes")
        if found != size:
            yield f"{found} bytes of VRAM for {name}, by its profile {size}"
    predicted = plan.prediction
    tolerance = TOLERANCE if is_current else OTHER_TOLERANCE
    for name, found_seconds, seconds in (
        ("a token", predicted.decode_seconds_per_token, simulate_plan(profile, plan).seconds),
        ("the prompt", predicted.prefill_seconds, prompt_seconds(profile, plan)),
    ):
        if abs(found_seconds - seconds) > tolerance * seconds:
            yield f"{found_seconds:.6g} s for {name} predicted, by its profile {seconds:.6g} s"
