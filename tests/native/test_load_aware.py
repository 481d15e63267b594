"""While weights move between link and CPU, and the ring shrinks and grows, not one logit changes."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import DeviceError
from planner.plan import Plan
from runtime.adapt import Controller, Decision
from runtime.adapt_policy import Measured
from runtime.bindings import Helper
from runtime.engine import Engine, PlanEngine
from runtime.host_load import HostLoad
from runtime.library import Library, load
from runtime.load_aware import LOW_VRAM_BYTES, LoadAware
from runtime.session import LoadSettings
from tests.native.engine_plans import HARDWARE, movable, plan_for, random_placements, weights_of

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 250, size=60)]
N_PROMPT = 20
RING_BYTES = 8 << 20


@pytest.fixture(scope="module")
def library(native_helper: Path) -> Library:
    return load("sim")


@pytest.fixture(scope="module")
def plan(library: Library, smollm2: Path) -> Plan:
    weights = weights_of(smollm2)
    return plan_for(smollm2, movable(random_placements(weights, 1), weights), ring_bytes=RING_BYTES)


def logits(engine: Engine) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    with engine:
        engine.evaluate(TOKENS[:N_PROMPT])
        rows = [engine.logits()]
        for token in TOKENS[N_PROMPT:]:
            engine.evaluate([token])
            rows.append(engine.logits())
    return np.stack(rows)


def test_changing_classes_changes_no_logit(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(Engine(library, smollm2, LoadSettings(n_context=256, n_ubatch=32, n_threads=1)))
    generator = random.Random(0)
    streamed_bytes = []

    def restless(controller: Controller, measured: Measured) -> Decision | None:
        streamed_bytes.append(measured.streamed_bytes)
        if len(streamed_bytes) % 3:
            return None
        before, n = controller.streamed, len(controller._policy.movable)
        controller.streamed = tuple(sorted(generator.sample(range(n), generator.randrange(n))))
        return Decision(before, controller.streamed, "restless", 1.0, 1.0)

    monkeypatch.setattr(Controller, "add", restless)
    engine = PlanEngine(library, smollm2, plan, keeps_trace=True)
    np.testing.assert_array_equal(logits(engine), expected)
    trace = engine.load.trace(HARDWARE)
    assert len(set(streamed_bytes)) > 5  # the decisions were carried out
    assert len(trace.tokens) == len(TOKENS) - N_PROMPT
    assert [prompt.n_tokens for prompt in trace.prompts] == [N_PROMPT]
    for change, later in zip(trace.changes, trace.changes[1:], strict=False):
        assert change.streamed_bytes_after == later.streamed_bytes_before
        after = [token for token in trace.tokens if token.at_seconds > change.at_seconds]
        assert after[2].streamed_bytes == change.streamed_bytes_after  # the first ones fill the ring as well


def test_static_runs_stay_as_planned(library: Library, smollm2: Path, plan: Plan) -> None:
    engine = PlanEngine(library, smollm2, plan, is_adaptive=False, keeps_trace=True)
    logits(engine)
    trace = engine.load.trace(HARDWARE)
    assert trace.changes == () and not trace.is_adaptive
    planned = sum(p.size_bytes for p in plan.placements if p.decode == "stream")
    assert {token.streamed_bytes for token in trace.tokens[1:]} == {planned}  # the first one fills the ring as well
    assert all(0 < max(token.cpu_seconds, token.link_seconds) <= token.seconds for token in trace.tokens)
    assert all(token.cpu_seconds + token.wait_seconds <= token.seconds for token in trace.tokens)  # of one thread


def test_a_run_that_is_held_is_as_planned_and_goes_on_where_it_was(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, n_measured, n_threads, interrupted = 0.0, 0, [], []

    def stream_nothing(controller: Controller, _: Measured) -> Decision:
        nonlocal n_measured
        n_measured += 1
        before, controller.streamed = controller.streamed, ()
        return Decision(before, (), "nothing", 1.0, 1.0)

    monkeypatch.setattr(Controller, "add", stream_nothing)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(Controller, "interrupt", lambda _: interrupted.append(n_measured))
    restart, restarted = HostLoad.restart, []
    monkeypatch.setattr(HostLoad, "restart", lambda self: restarted.append(n_measured) or restart(self))
    planned_threads = replace(plan, workload=replace(plan.workload, n_threads=8))
    host_load = HostLoad(lambda: 0.0, lambda: 0.0, lambda: now, max_cores=3.0, runnable=lambda: 1)
    with PlanEngine(library, smollm2, plan) as engine:
        engine.load = LoadAware(
            engine.helper, planned_threads, n_threads.append, adapts=True, keeps_trace=True, clock=lambda: now,
            host_load=host_load,
        )  # fmt: skip
        engine.evaluate(TOKENS[:N_PROMPT])
        for index, token in enumerate(TOKENS[N_PROMPT:]):
            if index == 10:
                engine.load.hold()
            if index == 20:
                engine.load.follow()
            engine.evaluate([token])
            now += 0.06
            engine.logits()
        tokens = engine.load.trace(HARDWARE).tokens
    planned = sum(p.size_bytes for p in plan.placements if p.decode == "stream")
    assert {token.streamed_bytes for token in tokens[3:10]} == {token.streamed_bytes for token in tokens[23:]} == {0}
    assert {token.streamed_bytes for token in tokens[11:20]} == {planned}
    assert n_measured == len(tokens) - 10
    assert n_threads == [3, 8, 3]  # for the cores that are free, as planned, as before
    assert [n for n in restarted if n] == [10]
    assert interrupted[1:] == [10]  # the first tokens of a turn are not measured; the prompt's was the first


def test_ring_follows_the_free_vram(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(PlanEngine(library, smollm2, plan, is_adaptive=False))
    now = 0.0
    free = 1 << 34
    monkeypatch.setattr(Helper, "device_memory", lambda _: (free, 1 << 35))
    with PlanEngine(library, smollm2, plan) as engine:
        engine.load = LoadAware(
            engine.helper, plan, engine._set_n_threads, adapts=True, keeps_trace=False, clock=lambda: now
        )
        monkeypatch.setattr(Controller, "add", lambda *_: None)
        engine.evaluate(TOKENS[:N_PROMPT])
        rows = [engine.logits()]
        rings = []
        for index, token in enumerate(TOKENS[N_PROMPT:]):
            now += 0.6  # VRAM is looked at once a second
            free = LOW_VRAM_BYTES - 1 if 10 <= index < 20 else 1 << 34
            engine.evaluate([token])
            rows.append(engine.logits())
            rings.append(engine.statistics().ring_bytes)
        np.testing.assert_array_equal(np.stack(rows), expected)
        assert rings[5] == rings[-1] == RING_BYTES
        assert min(rings[12:20]) < RING_BYTES / 4
        assert ["shrinks" in change.reason for change in engine.load.changes] == [True, False]

        free, now = 1 << 20, now + 2
        with pytest.raises(DeviceError, match="Another program has taken the VRAM") as refused:
            for _ in range(3):  # first the ring shrinks
                now += 2
                engine.evaluate([TOKENS[0]])
                engine.logits()
        assert "smaller --vram" in refused.value.remedy


def test_threads_are_given_up_within_three_tokens(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten processes come beside eight threads on 16 cores."""
    now, n_runnable, n_threads = 0.0, 1, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(Helper, "device_memory", lambda _: (1 << 34, 1 << 35))
    planned = replace(plan, workload=replace(plan.workload, n_threads=8))
    with PlanEngine(library, smollm2, plan) as engine:
        engine.load = LoadAware(
            engine.helper, planned, n_threads.append, adapts=True, keeps_trace=False, clock=lambda: now,
            host_load=HostLoad(lambda: 0.0, lambda: 0.0, lambda: now, 16.0, lambda: n_runnable, lambda: 1),
        )  # fmt: skip
        for index, token in enumerate(TOKENS[:12]):
            if index == 9:
                n_runnable = 11
            engine.evaluate([token])
            now += 0.04
            engine.logits()
            assert n_threads == ([] if index < 11 else [6])
    assert engine.load.changes[-1].reason == "6.0 cores are free: 6 threads"
    assert engine.load.changes[-1].n_threads == 6


def test_a_plan_that_fills_the_card_keeps_its_ring(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, now = 40 << 20, 0.0
    free = 1 << 34  # before the first tokens: the engine does not hold everything yet
    monkeypatch.setattr(Helper, "device_memory", lambda _: (free, 1 << 35))
    monkeypatch.setattr(Controller, "add", lambda *_: None)
    with PlanEngine(library, smollm2, plan) as engine:
        engine.load = LoadAware(
            engine.helper, plan, engine._set_n_threads, adapts=True, keeps_trace=False, clock=lambda: now,
            host_load=HostLoad(lambda: 0.0, lambda: 0.0, lambda: now, runnable=lambda: 1),
        )  # fmt: skip

        def reasons(n_tokens: int) -> list[str]:
            nonlocal now
            for token in TOKENS[:n_tokens]:
                now += 1.1
                engine.evaluate([token])
                engine.logits()
            return [change.reason for change in engine.load.changes]

        assert reasons(2) == []
        free = left
        assert reasons(20) == []
        free = left // 4  # taken by another program
        assert ["shrinks" in reason for reason in reasons(3)] == [True]
        free = left // 2 + RING_BYTES  # not enough for the ring to grow without shrinking again at once
        assert len(reasons(3)) == 1
        free = left + RING_BYTES
        assert ["grows" in reason for reason in reasons(3)] == [False, True]


def test_a_failed_token_is_not_measured(
    library: Library, smollm2: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with PlanEngine(library, smollm2, plan, keeps_trace=True) as engine:
        engine.evaluate([TOKENS[0]])
        engine.logits()
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "_decode", fail)
            with pytest.raises(KeyboardInterrupt):
                engine.evaluate([TOKENS[1]])
        engine.evaluate([TOKENS[1]])
        engine.logits()
        assert len(engine.load.trace(HARDWARE).tokens) == 2
