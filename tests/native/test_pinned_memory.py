"""What cannot be pinned is the rest, not everything; the user is told, and the results are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.plan import Plan
from planner.units import MIB
from runtime import commands
from runtime.bindings import Helper
from runtime.engine import Engine, PlanEngine
from runtime.library import load
from runtime.session import LoadSettings
from tests.native.engine_plans import plan_for, uniform_placements, weights_of
from tests.native.test_run_command import SOFTWARE, detect

TOKENS = [5, 77, 99, 42, 7, 100, 3, 9]


def host_weights_bytes(plan: Plan) -> int:
    return sum(placement.size_bytes for placement in plan.host_placements)


@pytest.mark.parametrize(("max_pinned_bytes", "n_pieces_pinned"), [(0, 2), (70 * MIB, 1), (1, 0)])
def test_the_rest_is_pageable(native_helper: Path, smollm2: Path, max_pinned_bytes: int, n_pieces_pinned: int) -> None:
    library = load("sim")
    Helper(library.ats).bench_release()  # what other tests measured with is pinned as well
    weights = weights_of(smollm2)
    plan = plan_for(smollm2, uniform_placements(weights, "stream", "stream"))
    host_bytes = host_weights_bytes(plan)
    with Engine(library, smollm2, LoadSettings(256, 32, 1)) as plain:
        plain.evaluate(TOKENS)
        expected = plain.logits()
    with PlanEngine(library, smollm2, plan, max_pinned_bytes=max_pinned_bytes) as engine:
        unpinned_bytes = engine.statistics().unpinned_bytes
        engine.evaluate(TOKENS)
        np.testing.assert_array_equal(engine.logits(), expected)
        assert engine.statistics().unpinned_bytes == unpinned_bytes
    if n_pieces_pinned == 2:
        assert unpinned_bytes == 0
    elif n_pieces_pinned == 1:  # a piece is 64 MiB at most, and holds whole weights
        assert 0 < host_bytes - unpinned_bytes <= 64 * MIB < host_bytes
    else:
        assert unpinned_bytes == pytest.approx(host_bytes, rel=0.01)
    assert engine.statistics().unpinned_bytes == 0  # nothing is held any more


def test_the_user_is_told(
    native_helper: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of(smollm2)
    plan = plan_for(smollm2, uniform_placements(weights, "cpu", "cpu"), software=SOFTWARE)
    monkeypatch.setattr("runtime.engine.available_memory_bytes", lambda: host_weights_bytes(plan))
    with commands.open_plan(plan, smollm2, detect, anyway=False):
        assert "MiB of weights in host memory could not be pinned; they are slow" in capsys.readouterr().err
