"""The paper's Algorithm 2 against brute force over every choice, on its stated objective."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bindings import Helper
from runtime.library import load

Problem = tuple[list[float], list[float], list[float], list[float], list[bool]]


def round_seconds(choice: Sequence[bool], problem: Problem) -> float:
    """Sum of computation, crossings and the part of every transfer that nothing hides."""
    cpu, gpu, crossing, transfer, resident = problem
    total = hidden_by = 0.0
    for i, on_gpu in enumerate(choice):
        crosses = i > 0 and choice[i - 1] != on_gpu
        if not on_gpu:
            total += cpu[i] + (crossing[i] if crosses else 0.0)
            hidden_by = 0.0
            continue
        if not resident[i]:
            total += max(transfer[i] - hidden_by, 0.0)
        step = gpu[i] + (crossing[i] if crosses else 0.0)
        total += step
        hidden_by += step
    return total


def brute_force(problem: Problem) -> float:
    options = [(True,) if resident else (True, False) for resident in problem[4]]
    return min(round_seconds(choice, problem) for choice in itertools.product(*options))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 9))
    numbers = st.integers(0, 20).map(float)
    cpu, gpu, crossing, transfer = (draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(4))
    return cpu, gpu, crossing, transfer, draw(st.lists(st.booleans(), min_size=n, max_size=n))


@pytest.fixture(scope="module")
def helper(native_helper: Path) -> Helper:
    return Helper(load("sim").ats)


@settings(max_examples=600, deadline=None)
@given(problems())
def test_equals_brute_force(helper: Helper, problem: Problem) -> None:
    choice, seconds = helper.choose_transfers(*problem)
    assert all(on_gpu for on_gpu, resident in zip(choice, problem[4], strict=True) if resident)
    assert seconds == pytest.approx(round_seconds(choice, problem))
    assert seconds == pytest.approx(brute_force(problem))


def test_transfer_hides_behind_resident_work(helper: Helper) -> None:
    # Two resident units of 3 s hide all but 1 s of a 7 s transfer; 1 + 1 s beat 5 s on the CPU and two crossings.
    problem = ([9.0, 9.0, 5.0], [3.0, 3.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 7.0], [True, True, False])
    assert helper.choose_transfers(*problem) == ([True, True, True], 8.0)
    # Without anything to hide behind, the CPU is as fast and the transfer is not made.
    assert helper.choose_transfers([5.0], [1.0], [1.0], [7.0], [False]) == ([False], 5.0)


def test_nothing_to_do(helper: Helper) -> None:
    assert helper.choose_transfers([], [], [], [], []) == ([], 0.0)


def test_thousand_units_are_decided_fast(helper: Helper) -> None:
    generator = random.Random(0)
    columns = [[generator.random() for _ in range(1000)] for _ in range(4)]
    resident = [generator.random() < 0.5 for _ in range(1000)]
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        helper.choose_transfers(*columns, resident)
        seconds.append(time.thread_time() - started)
    assert statistics.median(seconds) < 4e-3  # under 1 ms where nothing else runs
