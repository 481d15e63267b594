"""Brute force = dynamic programme = CP-SAT, on the paper's problem in integers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.crosscheck import check_placement
from planner.errors import AtsplanError
from planner.knapsack import CPU, FREE, GPU, solve_placement, solve_with_experts_last


def objective(choice: Sequence[int], gains: Sequence[int], switch: Sequence[int]) -> int:
    changes = sum(switch[i] for i in range(1, len(choice)) if choice[i] != choice[i - 1])
    return sum(gain for gain, x in zip(gains, choice, strict=True) if x) - changes


def used(choice: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(size for size, x in zip(sizes, choice, strict=True) if x)


def brute_force(
    gains: Sequence[int],
    sizes: Sequence[int],
    switch: Sequence[int],
    capacity: int,
    forced: Sequence[int] | None = None,
) -> int | None:
    forced = forced or [FREE] * len(gains)
    best = None
    for choice in itertools.product((0, 1), repeat=len(gains)):
        if used(choice, sizes) > capacity:
            continue
        if any(place not in (FREE, x) for place, x in zip(forced, choice, strict=True)):
            continue
        value = objective(choice, gains, switch)
        best = value if best is None else max(best, value)
    return best


@st.composite
def problems(draw: st.DrawFn, max_units: int = 9) -> tuple[list[int], list[int], list[int], int]:
    n = draw(st.integers(0, max_units))
    gains = draw(st.lists(st.integers(-20, 60), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    switch = draw(st.lists(st.integers(0, 25), min_size=n, max_size=n))
    return gains, sizes, switch, draw(st.integers(0, 40))


@settings(max_examples=1500, deadline=None)
@given(problems())
def test_programme_equals_brute_force(problem: tuple[list[int], list[int], list[int], int]) -> None:
    gains, sizes, switch, capacity = problem
    choice, value = solve_placement(gains, sizes, switch, capacity)
    assert used(choice, sizes) <= capacity
    assert objective(choice, gains, switch) == value
    assert value == brute_force(gains, sizes, switch, capacity)


def test_thousands_of_random_problems_equal_brute_force() -> None:
    generator = random.Random(5)
    for _ in range(3000):
        n = generator.randint(1, 7)
        gains = [generator.randint(-5, 20) for _ in range(n)]
        sizes = [generator.randint(0, 6) for _ in range(n)]
        switch = [generator.randint(0, 12) for _ in range(n)]
        capacity = generator.randint(0, 20)
        choice, value = solve_placement(gains, sizes, switch, capacity)
        assert objective(choice, gains, switch) == value == brute_force(gains, sizes, switch, capacity)


@settings(max_examples=600, deadline=None)
@given(problems(7), st.data())
def test_forced_units(problem: tuple[list[int], list[int], list[int], int], data: st.DataObject) -> None:
    gains, sizes, switch, capacity = problem
    forced = data.draw(st.lists(st.sampled_from((FREE, CPU, GPU)), min_size=len(gains), max_size=len(gains)))
    expected = brute_force(gains, sizes, switch, capacity, forced)
    if expected is None:
        with pytest.raises(AtsplanError, match="do not fit"):
            solve_placement(gains, sizes, switch, capacity, forced)
    else:
        choice, value = solve_placement(gains, sizes, switch, capacity, forced)
        assert value == expected
        assert all(place in (FREE, x) for place, x in zip(forced, choice, strict=True))


@settings(max_examples=200, deadline=None)
@given(problems(12))
def test_cp_sat_finds_the_same_objective(problem: tuple[list[int], list[int], list[int], int]) -> None:
    gains, sizes, switch, capacity = problem
    _, value = solve_placement(gains, sizes, switch, capacity)
    assert check_placement(gains, sizes, switch, capacity, value) == "optimal"


def test_cp_sat_refuses_a_wrong_objective() -> None:
    with pytest.raises(AtsplanError, match="disagree: 9 ns and 10 ns"):
        check_placement([10], [1], [0], 1, 9)


def test_cp_sat_honours_forced_units() -> None:
    problem = ([5, 7, 6], [2, 2, 2], [0, 3, 3], 4)
    forced = [FREE, CPU, FREE]
    _, value = solve_placement(*problem, forced)
    assert check_placement(*problem, value, forced) == "optimal"
    with pytest.raises(AtsplanError, match="disagree"):
        check_placement(*problem, value)


def test_hand_computed() -> None:
    # Both ends alone: 10 + 10 - 3 - 3 = 14 against all three: 10 - 4 + 10 = 16, if there is room for the middle.
    assert solve_placement([10, -4, 10], [1, 1, 1], [9, 3, 3], 3) == ([1, 1, 1], 16)
    assert solve_placement([10, -4, 10], [1, 1, 1], [9, 3, 3], 2) == ([1, 0, 1], 14)
    # Changing devices costs more than either unit gains alone, but not more than both gain together.
    assert solve_placement([1, 5, 5, 1], [1, 1, 1, 1], [0, 4, 9, 4], 2) == ([0, 1, 1, 0], 2)
    assert solve_placement([1, 5, 5, 1], [1, 1, 1, 1], [0, 4, 9, 4], 1) == ([0, 0, 0, 0], 0)
    # Density alone (10 / 6 > 9 / 5) would pick the first; the pair of smaller ones is worth more.
    assert solve_placement([11, 9, 9], [6, 5, 5], [0, 0, 0], 10) == ([0, 1, 1], 18)


def test_boundaries() -> None:
    assert solve_placement([], [], [], 10) == ([], 0)
    assert solve_placement([5], [1], [7], 0) == ([0], 0)
    assert solve_placement([5], [1], [7], 1) == ([1], 5)
    assert solve_placement([5], [0], [7], 0) == ([1], 5)
    assert solve_placement([-5], [1], [0], 9) == ([0], 0)
    assert solve_placement([0], [1], [0], 9) == ([0], 0)  # nothing gained: leave the VRAM free
    assert solve_placement([5, 5], [3, 3], [0, 0], 6) == ([1, 1], 10)
    assert solve_placement([5, 5], [3, 3], [0, 0], 5)[1] == 5


@pytest.mark.parametrize(
    "problem",
    [([1], [1, 2], [0], 1), ([1], [-1], [0], 1), ([1], [1], [-1], 1), ([1], [1], [0], -1), ([2**61], [1], [0], 1)],
)
def test_bad_input_is_refused(problem: tuple[list[int], list[int], list[int], int]) -> None:
    with pytest.raises(AtsplanError):
        solve_placement(*problem)


def test_same_problem_same_choice() -> None:
    generator = random.Random(3)
    problem = (
        [generator.choice((5, 6)) for _ in range(60)], [generator.randint(1, 3) for _ in range(60)],
        [generator.choice((0, 1)) for _ in range(60)], 50,
    )  # fmt: skip
    assert solve_placement(*problem) == solve_placement(*problem)


def test_experts_come_last() -> None:
    gains, sizes, switch = [1, 50, 1, 50], [2, 2, 2, 2], [0, 0, 0, 0]
    expert = [False, True, False, True]
    assert solve_with_experts_last(gains, sizes, switch, 6, expert) == ([1, 1, 1, 0], 52)
    # The others fit exactly: nothing is left for experts, however much they would gain.
    assert solve_with_experts_last(gains, sizes, switch, 4, expert)[0] == [1, 0, 1, 0]
    # The others do not fit: no expert even where one would.
    assert sum(solve_with_experts_last(gains, sizes, switch, 3, expert)[0][1::2]) == 0
    assert solve_with_experts_last(gains, sizes, switch, 8, [False] * 4) == solve_placement(gains, sizes, switch, 8)


@settings(max_examples=300, deadline=None)
@given(problems(7), st.data())
def test_experts_last_is_optimal_in_its_two_steps(
    problem: tuple[list[int], list[int], list[int], int], data: st.DataObject
) -> None:
    gains, sizes, switch, capacity = problem
    expert = data.draw(st.lists(st.booleans(), min_size=len(gains), max_size=len(gains)))
    choice, value = solve_with_experts_last(gains, sizes, switch, capacity, expert)
    assert used(choice, sizes) <= capacity
    assert objective(choice, gains, switch) == value
    without_experts = [CPU if e else FREE for e in expert]
    assert value >= (brute_force(gains, sizes, switch, capacity, without_experts) or 0)
