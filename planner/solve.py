"""From a profile and a budget to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from . import __version__
from .crosscheck import check_placement
from .decode import DecodeProblem
from .errors import AtsplanError, InfeasibleError
from .experts import find_experts
from .hardware import MAX_PINNED_FRACTION
from .joint import Candidate, estimate, lower_bound, prompt_rings, solve_joint
from .knapsack import solve_with_experts_last
from .measurements import Profile, WeightUse
from .memory import (
    DISPLAY_RESERVE_BYTES,
    available_bytes,
    fixed_memory,
    granule_bytes,
    vram_budget,
)
from .patterns import group_units
from .plan import Placement, Plan, Prediction, SolverReport, WeightClass, WeightCosts
from .problem import build_graph, costs, find_units, mean_past
from .prompt import PromptProblem
from .units import format_size
from .workload import Workload

Objective = Literal["joint", "paper"]

_NANOSECONDS = 1e9
_WORTH_STREAMING = 0.02  # a smaller gain is within the error of prediction: keep it as plain as llama.cpp
_PROVEN = 1e-3  # relative distance from the bound that counts as optimal
_ASSUMED_MIN_TOKENS = 32  # from about so many tokens on, streaming beats the CPU on most machines
_MUCH_IDLE = 0.03  # of the budget


@dataclass(frozen=True)
class _Solution:
    candidate: Candidate
    prefill: list[WeightClass]  # per use
    min_tokens: int
    prompt_seconds: float


def solve(
    profile: Profile,
    budget_bytes: int,
    workload: Workload,
    *,
    objective: Objective = "joint",
    check: bool = False,
    margin_bytes: int | None = None,
) -> Plan:
    """Return the plan that takes the least time for the workload within `budget_bytes` of VRAM. Deterministic.

    `objective="paper"` solves the static problem only: VRAM or CPU, streaming for prompts. `check` solves the static
    problem a second time with CP-SAT. `n_threads = 0` chooses among the measured ones.
    Raises InfeasibleError if the budget or host memory is too small, AtsplanError if the profile lacks something.
    Source: "paper" is Algorithm 1 of arXiv 2607.10183; "joint" is our extension by streaming, see notebooks/README.md.
    """
    started = time.perf_counter()
    notes = _check_inputs(profile, workload)
    budget_bytes, more = _cut_budget(profile, budget_bytes)
    notes += more
    fixed = fixed_memory(profile, workload, margin_bytes, budget_bytes)
    base = _decode_problem(profile, workload, available_bytes(fixed, budget_bytes))
    n_threads = workload.n_threads or _best_thread_count(profile, workload, base)
    problem = _at_threads(profile, workload, base, n_threads)
    prompt = PromptProblem(profile, problem.graph, problem.unit_of, n_threads, workload, problem.experts)

    if objective == "paper":
        problem = replace(problem, experts=None)
        solution, value, bound = _solve_static(problem, prompt, workload)
        is_optimal = True
    else:
        solution, bound, more = _solve_joint(problem, prompt, workload)
        notes += more
        value = solution.candidate.seconds
        is_optimal = value <= bound * (1 + _PROVEN)
    if check:
        notes.append(_cross_check(problem))

    candidate = solution.candidate
    if candidate.cache_bytes is None:
        problem = replace(problem, experts=None)
    decode = problem.expand(candidate.classes)
    steps = problem.experts.steps(decode, candidate.cache_bytes or 0).values() if problem.experts else ()
    has_ring = "stream" in (*decode, *solution.prefill) or problem.shares_ring(candidate.classes)
    ring_bytes = candidate.ring_bytes if has_ring else 0
    experts_bytes = problem.experts_bytes(candidate.classes, candidate.ring_bytes)
    vram = vram_budget(fixed, budget_bytes, problem.vram_bytes(candidate.classes), ring_bytes, experts_bytes)
    placements = _placements(profile.weights, decode, solution.prefill, _weight_costs(problem, decode))
    timeline = problem.simulate(candidate.classes, candidate.ring_bytes)
    _check_host_memory(profile, placements)
    if vram.idle_bytes > _MUCH_IDLE * budget_bytes:
        everything = all(cls == "gpu" for cls in candidate.classes)
        reason = "everything fits" if everything else "no further weight fits or pays"
        notes.append(f"{format_size(vram.idle_bytes)} of the budget stay idle: {reason}.")
    return Plan(
        model=profile.model,
        hardware=profile.hardware,
        software=profile.software,
        workload=replace(workload, n_threads=n_threads),
        device="sim" if profile.is_simulated else profile.state.device or "cuda0",
        vram=vram,
        prefill_min_tokens=solution.min_tokens,
        placements=placements,
        solver=SolverReport(
            objective=objective,
            status="optimal" if is_optimal else "feasible",
            value_seconds=value,
            bound_seconds=min(bound, value),
            solve_seconds=time.perf_counter() - started,
        ),
        prediction=Prediction(
            decode_seconds_per_token=timeline.seconds,
            prefill_seconds=solution.prompt_seconds,
            decode_link_bytes_per_token=_streamed_bytes(profile, decode) + round(sum(s.link_bytes for s in steps)),
            prefill_link_bytes_per_ubatch=_streamed_bytes(profile, solution.prefill),
            peak_vram_bytes=budget_bytes - vram.idle_bytes - vram.margin_bytes,
            decode_cpu_busy_seconds=timeline.cpu_busy_seconds,
            decode_gpu_busy_seconds=timeline.gpu_busy_seconds,
            decode_link_busy_seconds=timeline.link_busy_seconds,
            decode_experts=(
                sum(step.n_resident for step in steps),
                sum(step.n_streamed for step in steps),
                sum(step.n_cpu for step in steps),
            ),
        ),
        is_simulated=profile.is_simulated,
        experts=problem.experts.policy(decode, candidate.cache_bytes or 0) if problem.experts else None,
        notes=tuple(notes),
        profiled_at=profile.state.taken_at,
    )


def static_problem(problem: DecodeProblem) -> tuple[list[int], list[int], list[int], list[bool]]:
    """Return the paper's problem in integers, per unit: gains and switching costs in ns, sizes in granules, experts."""
    c = problem.costs
    gains, switch = [], []
    for unit in problem.units:
        gains.append(round(sum(c.cpu[use] - c.gpu[use] for use in unit.uses) * _NANOSECONDS))
        switch.append(round(c.down[unit.uses[0]] * _NANOSECONDS))
    sizes = [-(-unit.vram_bytes // problem.granule) for unit in problem.units]
    return gains, sizes, switch, [unit.is_expert for unit in problem.units]


def _cut_budget(profile: Profile, budget_bytes: int) -> tuple[int, list[str]]:
    """Return what of the budget the card can give, and a note if that is less."""
    card_bytes = profile.hardware.gpu.memory_bytes if profile.hardware.gpu is not None else 0
    free_bytes = profile.state.gpu_memory_free_bytes
    why_free = f"{format_size(free_bytes)} were free when it was profiled"
    if free_bytes and profile.state.gpu_has_display:
        free_bytes = max(1, free_bytes - DISPLAY_RESERVE_BYTES)
        why_free += f", less {format_size(DISPLAY_RESERVE_BYTES)} for what a desktop takes now and then"
    notes = []
    for limit_bytes, why in ((card_bytes, "the card has no more"), (free_bytes, why_free)):
        if 0 < limit_bytes < budget_bytes:
            budget_bytes = limit_bytes
            notes.append(f"The budget was cut to {format_size(limit_bytes)}: {why}.")
    return budget_bytes, notes


def _check_inputs(profile: Profile, workload: Workload) -> list[str]:
    """Refuse what the profile cannot answer. Return notes for the plan."""
    if profile.hardware.gpu is None or not any(kernel.device == "gpu" for kernel in profile.kernels):
        raise InfeasibleError(
            "The profile has no GPU.", "Without one, `atsplan profile MODEL --device sim` lets you try."
        )
    if not profile.thread_counts:
        raise AtsplanError("The profile has no CPU times.", "Profile again with --force.")
    if workload.n_ubatch != profile.n_ubatch:
        raise AtsplanError(
            f"The profile was measured with micro-batches of {profile.n_ubatch} tokens, not {workload.n_ubatch}.",
            f"Solve with n_ubatch {profile.n_ubatch}, or profile again.",
        )
    if workload.n_threads and workload.n_threads not in profile.thread_counts:
        known = ", ".join(map(str, profile.thread_counts))
        raise AtsplanError(
            f"The profile has no times for {workload.n_threads} threads; it has {known}.",
            f"Profile again with --threads {workload.n_threads}.",
        )
    needed = workload.n_prompt_tokens + workload.n_generated_tokens
    if not needed:
        raise AtsplanError("There are no tokens to plan for.", "Give --prompt-tokens or --generate-tokens.")
    if needed > workload.n_context:
        raise AtsplanError(
            f"{workload.n_prompt_tokens} prompt and {workload.n_generated_tokens} generated tokens do not fit into "
            f"a context of {workload.n_context}.",
            f"Give --ctx {needed} or more, or fewer tokens.",
        )
    notes = []
    if profile.is_simulated:
        notes.append("Made from simulated GPU timings: the speeds say nothing about a real GPU.")
    if profile.rates_from:
        notes.append(f"Speeds are estimated: they were measured there with another model, {profile.rates_from}.")
        notes += profile.notes
    if (workload.type_k, workload.type_v) != (Workload.type_k, Workload.type_v):
        notes.append(f"Attention was timed with a KV cache of {Workload.type_k}.")
    if profile.software.atsplan not in ("", __version__):
        notes.append(f"Measured by atsplan {profile.software.atsplan}; this version differs in speed.")
    if workload.n_context > profile.model.n_context_train > 0:
        notes.append(f"The model was trained for contexts of {profile.model.n_context_train} tokens.")
    return notes


def _decode_problem(profile: Profile, workload: Workload, room_bytes: int) -> DecodeProblem:
    """Return the problem at the first number of threads."""
    graph = build_graph(profile.weights)
    units = find_units(profile.weights)
    return DecodeProblem(
        graph=graph,
        costs=costs(profile, graph, 1, profile.thread_counts[0], mean_past(workload)[1]),
        units=units,
        groups=group_units(profile.weights, graph, units),
        available_bytes=room_bytes,
        granule=granule_bytes(profile.weights),
    )


def _at_threads(profile: Profile, workload: Workload, base: DecodeProblem, n_threads: int) -> DecodeProblem:
    _, n_past = mean_past(workload)
    decode = costs(profile, base.graph, 1, n_threads, n_past)
    return replace(base, costs=decode, experts=find_experts(profile, base.units, decode))


def _best_thread_count(profile: Profile, workload: Workload, base: DecodeProblem) -> int:
    """Return the fastest; of equals, the one with the fewest threads."""
    if len(profile.thread_counts) == 1:
        return profile.thread_counts[0]
    seconds = {n: estimate(_at_threads(profile, workload, base, n)) for n in profile.thread_counts}
    return min(seconds, key=lambda n: (seconds[n], n))


def _complete(
    problem: DecodeProblem, prompt: PromptProblem, workload: Workload, candidate: Candidate, *, is_rough: bool = False
) -> _Solution:
    """Add the prompt's side to a decode candidate; roughly, with an assumed `min_tokens`, to compare candidates."""
    decode, ring = problem.expand(candidate.classes), candidate.ring_bytes
    prefill = prompt.choose_classes(decode, ring)
    cache = candidate.cache_bytes
    min_tokens = _ASSUMED_MIN_TOKENS if is_rough else prompt.min_tokens(decode, prefill, ring, cache)
    seconds = prompt.seconds(decode, prefill, ring, min_tokens, workload.n_prompt_tokens, cache)
    return _Solution(candidate, prefill, min_tokens, seconds)


def _solve_joint(
    problem: DecodeProblem, prompt: PromptProblem, workload: Workload
) -> tuple[_Solution, float, list[str]]:
    bound, weight = lower_bound(problem)
    prompt_seconds: dict[Candidate, float] = {}

    def total_seconds(candidate: Candidate) -> float:
        if candidate not in prompt_seconds:
            rough = _complete(problem, prompt, workload, candidate, is_rough=True)
            prompt_seconds[candidate] = rough.prompt_seconds
        return prompt_seconds[candidate] + workload.n_generated_tokens * candidate.seconds

    candidates = solve_joint(problem, weight, total_seconds)
    best = candidates[0]
    plain = min((c for c in candidates if _is_plain(c)), key=total_seconds)
    if not _is_plain(best) and total_seconds(plain) <= (1 + _WORTH_STREAMING) * total_seconds(best):
        best = plain
    notes = []
    if _is_plain(best) and "cpu" in best.classes:
        notes.append(
            "Streaming does not pay while decoding here: the CPU computes what is not in VRAM, as llama.cpp can."
        )
    return _complete(problem, prompt, workload, best), bound, notes


def _is_plain(candidate: Candidate) -> bool:
    """Tell whether llama.cpp could decode so, too."""
    return "stream" not in candidate.classes and candidate.cache_bytes is None


def _solve_static(problem: DecodeProblem, prompt: PromptProblem, workload: Workload) -> tuple[_Solution, float, float]:
    """Return the paper's placement, and its objective as seconds per token twice: it is its own bound.

    Prompts are streamed through a ring, unless doing without it is faster.
    """
    everything = sum(unit.vram_bytes for unit in problem.units)
    rings = prompt_rings(problem) if everything > problem.available_bytes else [0]
    gains, sizes, switch, experts = static_problem(problem)
    on_cpu = sum(problem.costs.cpu[use] for unit in problem.units for use in unit.uses)
    found = []
    for ring in rings:
        capacity = (problem.available_bytes - ring) // problem.granule
        choice, objective = solve_with_experts_last(gains, sizes, switch, capacity, experts)
        classes: tuple[WeightClass, ...] = tuple("gpu" if x else "cpu" for x in choice)
        candidate = Candidate(classes, ring, problem.simulate(classes, ring).seconds)
        solution = _complete(problem, prompt, workload, candidate)
        total = solution.prompt_seconds + workload.n_generated_tokens * candidate.seconds
        found.append((total, ring, solution, on_cpu - objective / _NANOSECONDS))
    _, _, solution, value = min(found, key=lambda item: item[:2])
    return solution, value, value


def _cross_check(problem: DecodeProblem) -> str:
    gains, sizes, switch, experts = static_problem(problem)
    capacity = problem.available_bytes // problem.granule
    if any(experts):  # CP-SAT has no partition: check what both can solve, all units at once
        experts = [False] * len(experts)
    _, objective = solve_with_experts_last(gains, sizes, switch, capacity, experts)
    status = check_placement(gains, sizes, switch, capacity, objective)
    if status == "optimal":
        return "CP-SAT proves the optimum of the static problem (optimal)."
    return "CP-SAT found nothing better than the optimum of the static problem, without a proof in its time (feasible)."


def _weight_costs(problem: DecodeProblem, decode: Sequence[WeightClass]) -> list[WeightCosts | None]:
    """Return costs per use of a weight; None where it is not decided, or where single experts are."""
    costs = problem.costs
    split = (
        {use for i in problem.experts.active(decode) for use in problem.experts.blocks[i].uses}
        if problem.experts
        else set()
    )
    return [
        WeightCosts(
            cpu_seconds=costs.cpu[use] * costs.cpu_slowdown,
            gpu_seconds=costs.gpu[use],
            link_seconds=costs.link[use] * costs.link_slowdown,
            crossing_seconds=costs.down[use] + costs.up[use],
            ring_bytes=problem.graph.ring_bytes[use],
        )
        if unit >= 0 and use not in split
        else None
        for use, unit in enumerate(problem.unit_of)
    ]


def _placements(
    weights: Sequence[WeightUse],
    decode: Sequence[WeightClass],
    prefill: Sequence[WeightClass],
    costs: Sequence[WeightCosts | None],
) -> tuple[Placement, ...]:
    """Return one placement per name. Of a tied embedding it is that of the output; its input side is fixed."""
    placements: dict[str, Placement] = {}
    for weight, in_decode, in_prefill, of_weight in zip(weights, decode, prefill, costs, strict=True):
        if weight.is_input:
            placements.setdefault(weight.name, Placement(weight.name, weight.size_bytes, "cpu", "cpu"))
        else:
            placements[weight.name] = Placement(weight.name, weight.size_bytes, in_decode, in_prefill, of_weight)
    return tuple(placements.values())


def _streamed_bytes(profile: Profile, classes: Sequence[WeightClass]) -> int:
    return sum(weight.size_bytes for weight, cls in zip(profile.weights, classes, strict=True) if cls == "stream")


def _check_host_memory(profile: Profile, placements: Sequence[Placement]) -> None:
    host = sum(placement.size_bytes for placement in placements if not placement.is_resident)
    ram = profile.hardware.cpu.memory_bytes
    if ram > 0 and host > MAX_PINNED_FRACTION * ram:
        raise InfeasibleError(
            f"{format_size(host)} of weights would stay in host memory; this machine has {format_size(ram)}.",
            "Give more VRAM, or take a smaller quantisation of the model.",
        )
