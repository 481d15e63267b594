"""The timeline of one token under a plan."""

from __future__ import annotations

from dataclasses import replace

from .errors import MismatchError
from .experts import find_experts
from .measurements import Profile
from .plan import Plan
from .problem import build_graph, costs, find_units
from .solve import plan_classes
from .timeline import Timeline, simulate


def simulate_plan(profile: Profile, plan: Plan) -> Timeline:
    """Return one token in steady state, with events. Raises MismatchError if the profile is of another model."""
    placed = {placement.name for placement in plan.placements}
    if any(weight.name not in placed for weight in profile.weights):
        raise MismatchError("The profile is of another model than the plan.", "Give the plan's own profile.")
    graph = build_graph(profile.weights)
    decode = costs(profile, graph, 1, plan.workload.n_threads)
    classes = plan_classes(profile, plan, "decode")
    experts = find_experts(profile, find_units(profile.weights), decode) if plan.experts else None
    if plan.experts is not None and experts is not None:
        decode = replace(decode, expert_steps=experts.steps(classes, plan.experts.cache_bytes))
    return simulate(graph, decode, classes, plan.vram.ring_bytes, with_events=True)
