"""The timeline of one token under a plan, and a picture of it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from .errors import AtsplanError, MismatchError
from .experts import find_experts
from .measurements import Profile
from .plan import Plan
from .problem import build_graph, costs, find_units
from .solve import plan_classes
from .timeline import Timeline, simulate

_LANES = (("gpu", "GPU", "#2a9d4a"), ("link", "link", "#e0a100"), ("cpu", "CPU", "#b5489a"))


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


def write_png(path: Path, token: Timeline, title: str) -> None:
    """Draw the three lanes. Raises AtsplanError if matplotlib is missing or the file cannot be written."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise AtsplanError("A PNG needs matplotlib.", "Install it with: pip install matplotlib") from error
    figure = figures.Figure(figsize=(12, 2.6), layout="constrained")
    axes = figure.subplots()
    for row, (lane, _, colour) in enumerate(_LANES):
        spans = [
            (event.start_seconds * 1e3, (event.end_seconds - event.start_seconds) * 1e3)
            for event in token.events
            if event.lane == lane
        ]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(_LANES)), [name for _, name, _ in _LANES])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise AtsplanError(f"Cannot write {path}: {error.strerror}.") from error
