"""A finished plan on the simulator again: what its token and its prompt take, by a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from .errors import MismatchError
from .experts import find_experts
from .measurements import Profile
from .memory import decided
from .plan import Plan, WeightClass
from .problem import build_graph, costs, find_units, mean_past
from .prompt import PromptProblem
from .timeline import Timeline, simulate


def simulate_plan(profile: Profile, plan: Plan) -> Timeline:
    """Return one token in steady state, with events. Raises MismatchError if the profile is of another model."""
    if profile.sizes != {placement.name: placement.size_bytes for placement in plan.placements}:
        raise MismatchError("The profile is of another model than the plan.", "Give the plan's own profile.")
    graph = build_graph(profile.weights)
    _, n_past = mean_past(plan.workload)
    decode = costs(profile, graph, 1, plan.workload.n_threads, n_past)
    classes = plan_classes(profile, plan, "decode")
    experts = find_experts(profile, find_units(profile.weights), decode) if plan.experts else None
    if plan.experts is not None and experts is not None:
        decode = replace(decode, expert_steps=experts.steps(classes, plan.experts.cache_bytes))
    return simulate(graph, decode, classes, plan.vram.ring_bytes, with_events=True)


def prompt_seconds(profile: Profile, plan: Plan) -> float:
    """Return the time of the workload's prompt. The profile must be of the plan's model."""
    graph, n_threads = build_graph(profile.weights), plan.workload.n_threads
    experts = find_experts(profile, find_units(profile.weights), costs(profile, graph, 1, n_threads))
    prompt = PromptProblem(profile, graph, (), n_threads, plan.workload, experts)
    return prompt.seconds(
        plan_classes(profile, plan, "decode"),
        plan_classes(profile, plan, "prefill"),
        plan.vram.ring_bytes,
        plan.prefill_min_tokens,
        plan.workload.n_prompt_tokens,
        plan.experts.cache_bytes if plan.experts else None,
    )


def plan_classes(profile: Profile, plan: Plan, phase: Literal["decode", "prefill"]) -> list[WeightClass]:
    """Return the plan's classes per use of a weight, as the simulator takes them."""
    by_name = {placement.name: getattr(placement, phase) for placement in plan.placements}
    uses = zip(profile.weights, decided(profile.weights), strict=True)
    return [by_name[weight.name] if is_decided else "gpu" for weight, is_decided in uses]
