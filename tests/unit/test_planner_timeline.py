"""The simulator on graphs small enough to follow by hand. Seconds are whole numbers, crossings tenths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import WeightClass
from planner.problem import Costs, Graph
from planner.timeline import Timeline, ring_blockers, simulate


def graph_of(
    inputs: Sequence[Sequence[int]], leaves_cpu: Sequence[int] = (), ring: Sequence[int] | None = None
) -> Graph:
    n = len(inputs)
    return Graph(
        inputs=tuple(tuple(sources) for sources in inputs),
        leaves_cpu=tuple(i in leaves_cpu for i in range(n)),
        is_terminal=(False,) * n,
        ring_bytes=tuple(ring or [1] * n),
    )


def costs_of(
    cpu: Sequence[float],
    gpu: Sequence[float],
    link: Sequence[float] = (),
    before: Sequence[float] = (),
    cpu_slowdown: float = 1.0,
    link_slowdown: float = 1.0,
    host: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Costs:
    n = len(cpu)
    return Costs(
        n_tokens=1, n_threads=1, cpu=tuple(cpu), gpu=tuple(gpu), gpu_before=tuple(before or [0.0] * n),
        link=tuple(link or [0.0] * n), down=(0.1,) * n, up=(0.2,) * n,
        host_launch=host[0], host_stream=host[1], host_crossing=host[2],
        cpu_slowdown=cpu_slowdown, link_slowdown=link_slowdown,
    )  # fmt: skip


CHAIN = graph_of([(), (0,), (1,)])


def seconds(graph: Graph, costs: Costs, classes: Sequence[WeightClass], ring_bytes: int = 0) -> float:
    return simulate(graph, costs, classes, ring_bytes).seconds


def test_gpu_alone_adds_up() -> None:
    timeline = simulate(CHAIN, costs_of([9, 9, 9], [1, 2, 3], before=[0.5, 0, 0]), ["gpu"] * 3, 0)
    assert timeline.seconds == pytest.approx(6.5)
    assert timeline.gpu_busy_seconds == pytest.approx(6.5)
    assert (timeline.cpu_busy_seconds, timeline.link_busy_seconds, timeline.n_cpu_steps) == (0, 0, 0)


def test_crossing_to_the_cpu_and_back() -> None:
    assert seconds(CHAIN, costs_of([9, 5, 9], [1, 1, 1]), ["gpu", "cpu", "gpu"]) == pytest.approx(1 + 0.1 + 5 + 0.2 + 1)


def test_neighbours_on_the_cpu_share_a_crossing_unless_the_gpu_must_work_between_them() -> None:
    costs = costs_of([5, 6, 9], [1, 1, 1])
    assert seconds(CHAIN, costs, ["cpu", "cpu", "gpu"]) == pytest.approx(0.1 + 11 + 0.2 + 1)
    apart = graph_of([(), (0,), (1,)], leaves_cpu=[0])
    assert seconds(apart, costs, ["cpu", "cpu", "gpu"]) == pytest.approx(0.3 + 5 + 0.3 + 6 + 1)
    with_glue = costs_of([5, 6, 9], [1, 1, 1], before=[0, 2, 0])
    assert seconds(CHAIN, with_glue, ["cpu", "cpu", "gpu"]) == pytest.approx(0.3 + 5 + 2 + 0.3 + 6 + 1)


def test_handing_work_over_takes_the_cpu_lanes_time() -> None:
    host = (0.01, 0.0, 0.02)
    hidden = costs_of([9, 5, 9], [1, 1, 1], host=host)  # the GPU makes the step's input meanwhile
    assert seconds(CHAIN, hidden, ["gpu", "cpu", "gpu"]) == pytest.approx(0.01 + 1 + 0.1 + 5 + 0.2 + 1)
    slow = (2.0, 0.0, 0.5)  # first launch 2, then crossing and second launch 2.5 before the CPU starts
    exposed = costs_of([9, 5, 9], [1, 1, 1], host=slow)
    assert seconds(CHAIN, exposed, ["gpu", "cpu", "gpu"]) == pytest.approx(2 + 2.5 + 5 + 0.2 + 1)
    streams = costs_of([9, 9, 9], [1, 1, 1], link=[0.1] * 3, host=(1.0, 2.0, 0.0))
    assert seconds(CHAIN, streams, ["stream"] * 3, ring_bytes=6) == pytest.approx(1 + 3 * 2 + 3)


def test_the_first_work_after_a_cpu_step_finds_cold_caches() -> None:
    warm = costs_of([9, 5, 9], [1, 1, 1], link=[1] * 3)
    costs = replace(warm, host_cold=(2.0, 8.0, 4.0), coldness=(0.0, 0.5, 9.0))  # the step fills half a cache
    # The first launch waits for 2 / 2, its product is there after 2.1; the crossing takes 4 / 2 more, until 3.
    assert seconds(CHAIN, costs, ["gpu", "cpu", "gpu"]) == pytest.approx(3 + 5 + 0.2 + 1)
    # The second launch is the first with a stream: 8 / 2 more.
    assert seconds(CHAIN, costs, ["gpu", "cpu", "stream"], ring_bytes=9) == pytest.approx(3 + 4 + 5 + 0.2 + 1)
    full = replace(costs, coldness=(0.0, 3.0, 0.0))  # a cache is not emptied twice
    assert seconds(CHAIN, full, ["gpu", "cpu", "gpu"]) == pytest.approx(6 + 5 + 0.2 + 1)
    assert seconds(CHAIN, costs, ["gpu"] * 3) == 3  # no CPU step: warm
    # Two steps: after the larger one a full launch and crossing, after the smaller one half of both.
    apart = graph_of([(), (0,), (1,), (2,), (3,)])
    two = replace(costs_of([9, 5, 9, 5, 9], [1] * 5), host_cold=(2.0, 0.0, 4.0), coldness=(0.0, 0.5, 0.0, 1.0, 0.0))
    expected = (2 + 4) + 5 + (1 + 2) + 5 + 0.2 + 1
    assert seconds(apart, two, ["gpu", "cpu", "gpu", "cpu", "gpu"]) == pytest.approx(expected)


def test_streams_of_a_prompt_are_launched_one_by_one() -> None:
    chain = graph_of([(), (0,)], ring=[5, 5])
    costs = costs_of([9, 9], [4, 4], link=[5, 5])
    assert simulate(chain, costs, ["stream", "stream"], 20).first_seconds == pytest.approx(10 + 8)
    apart = simulate(chain, costs, ["stream", "stream"], 20, may_merge=False)
    assert apart.first_seconds == pytest.approx(5 + 5 + 4)


def test_pieces_of_gpu_work_cost_time() -> None:
    chain = graph_of([(), (0,)], ring=[10, 10])
    whole = costs_of([9, 9], [1, 1], link=[10, 10])
    both: list[WeightClass] = ["stream", "stream"]
    assert seconds(chain, whole, both, ring_bytes=10) == pytest.approx(22)
    assert seconds(chain, replace(whole, handshake=1.0), both, ring_bytes=10) == pytest.approx(22 + 2)
    assert seconds(chain, replace(whole, launch_gap=0.5), both, ring_bytes=10) == pytest.approx(22 + 1)


def test_zeros_behind_a_weight_are_queued_too() -> None:
    costs = replace(costs_of([9, 9, 9], [1, 1, 1], link=[0.1] * 3, host=(1.0, 2.0, 0.0)), padding=(0.0, 0.5, 0.0))
    assert seconds(CHAIN, costs, ["stream"] * 3, ring_bytes=6) == pytest.approx(1 + 3 * 2 + 0.5 + 3)


def test_independent_gpu_work_runs_beside_the_cpu() -> None:
    # norm -> gate, up -> down: up is queued before the CPU starts on gate.
    layer = graph_of([(), (0,), (0,), (1, 2)])
    costs = costs_of([0, 5, 5, 5], [1, 2, 2, 1])
    assert seconds(layer, costs, ["gpu", "cpu", "gpu", "gpu"]) == pytest.approx(1 + 0.1 + 5 + 0.2 + 1)
    slow_up = costs_of([0, 5, 5, 5], [1, 2, 7, 1])
    assert seconds(layer, slow_up, ["gpu", "cpu", "gpu", "gpu"]) == pytest.approx(1 + 7 + 1)
    # The other way round the CPU's turn comes after gate, which it does not need: still one after the other.
    assert seconds(layer, costs, ["gpu", "gpu", "cpu", "gpu"]) == pytest.approx(1 + 2 + 0.1 + 5 + 0.2 + 1)


def test_a_cpu_step_that_needs_what_the_gpu_makes_meanwhile_is_a_new_step() -> None:
    layer = graph_of([(), (0,), (0,), (1, 2)])
    timeline = simulate(layer, costs_of([0, 5, 5, 4], [1, 2, 2, 1]), ["gpu", "cpu", "gpu", "cpu"], 0)
    assert timeline.n_cpu_steps == 2
    assert timeline.seconds == pytest.approx(1 + 0.1 + 5 + 0.2 + 0.1 + 4 + 0.2)


def test_link_runs_ahead_across_tokens_while_the_ring_allows() -> None:
    chain = graph_of([(), (0,)], ring=[10, 10])
    costs = costs_of([9, 9], [1, 1], link=[10, 10])
    both: list[WeightClass] = ["stream", "stream"]
    assert seconds(chain, costs, both, ring_bytes=20) == pytest.approx(20)  # the link never waits
    assert seconds(chain, costs, both, ring_bytes=10) == pytest.approx(22)  # every copy waits for the reader before
    first = simulate(chain, costs, both, 20).first_seconds
    assert first == pytest.approx(21)  # nothing was there yet: two copies, then the last product


def test_copy_hides_behind_the_cpu() -> None:
    chain = graph_of([(), (0,)], ring=[10, 10])
    costs = costs_of([12, 9], [1, 1], link=[10, 10])
    assert seconds(chain, costs, ["cpu", "stream"], ring_bytes=10) == pytest.approx(0.1 + 12 + 0.2 + 1)


def test_launch_waits_for_all_the_copies_it_shares() -> None:
    # Two streams of 5 in a ring of 20 are one launch: the first product waits for both copies.
    chain = graph_of([(), (0,)], ring=[5, 5])
    costs = costs_of([9, 9], [4, 4], link=[5, 5])
    assert simulate(chain, costs, ["stream", "stream"], 20).first_seconds == pytest.approx(10 + 8)
    assert simulate(chain, costs, ["stream", "stream"], 12).first_seconds == pytest.approx(5 + 5 + 4)


def test_slowdown_counts_as_much_as_the_other_lane_is_busy() -> None:
    chain = graph_of([(), (0,)], ring=[10, 10])
    timeline = simulate(chain, costs_of([8, 0], [0, 0], link=[0, 4], cpu_slowdown=1.5), ["cpu", "stream"], 10)
    # All busy: 8 x 1.5 = 12 and the link 4 of 12.3; hence the CPU takes 8 x (1 + 0.5 x 4 / 12.3).
    assert timeline.cpu_busy_seconds == pytest.approx(8 * (1 + 0.5 * 4 / 12.3))
    rough = simulate(
        chain, costs_of([8, 0], [0, 0], link=[0, 4], cpu_slowdown=1.5), ["cpu", "stream"], 10, is_rough=True
    )
    assert rough.cpu_busy_seconds == pytest.approx(12)


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[Graph, Costs, list[WeightClass], int]:
    n = draw(st.integers(1, 12))
    inputs = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(n)]
    ring = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    times = [draw(st.lists(st.integers(1, 9).map(float), min_size=n, max_size=n)) for _ in range(3)]
    classes = draw(st.lists(st.sampled_from(["gpu", "stream", "cpu"]), min_size=n, max_size=n))
    leaves = draw(st.sets(st.integers(0, n - 1)))
    graph = graph_of([sorted(sources) for sources in inputs], sorted(leaves), ring)
    return graph, costs_of(times[0], times[1], times[2]), classes, draw(st.integers(9, 30))


@settings(max_examples=300, deadline=None)
@given(small_problems())
def test_lanes_do_one_thing_at_a_time_and_bound_the_round(problem: tuple[Graph, Costs, list[WeightClass], int]) -> None:
    graph, costs, classes, ring_bytes = problem
    timeline = simulate(graph, costs, classes, ring_bytes, with_events=True)
    for lane, busy in (
        ("gpu", timeline.gpu_busy_seconds), ("cpu", timeline.cpu_busy_seconds), ("link", timeline.link_busy_seconds),
    ):  # fmt: skip
        events = [event for event in timeline.events if event.lane == lane]
        assert sum(event.end_seconds - event.start_seconds for event in events) == pytest.approx(busy)
        assert all(a.end_seconds <= b.start_seconds + 1e-9 for a, b in itertools.pairwise(events))
        assert timeline.seconds >= busy * (1 - 1e-3)
    _check_dependencies(graph, classes, timeline)


def _check_dependencies(graph: Graph, classes: Sequence[WeightClass], timeline: Timeline) -> None:
    computed = {use: event for event in timeline.events if event.lane != "link" for use in event.uses}
    for event in timeline.events:
        for use in event.uses:
            if event.lane == "link":
                assert computed[use].start_seconds >= event.end_seconds - 1e-9
                continue
            for source in graph.inputs[use]:
                if computed[source] is not event:
                    assert computed[source].end_seconds <= event.start_seconds + 1e-9
    assert set(computed) == set(range(len(classes)))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(27, 60))
def test_ring_regions_are_free_when_the_blocker_is_done(sizes: list[int], ring_bytes: int) -> None:
    blockers = ring_blockers(sizes, range(1, len(sizes) + 1), ring_bytes)
    starts, following = [], 0
    for size in sizes:
        following = 0 if following + size > ring_bytes else following
        starts.append(following)
        following += size
    n = len(sizes)
    for i, distance in enumerate(blockers):
        assert 1 <= distance <= n
        for nearer in range(1, distance):
            j = (i - nearer) % n
            assert starts[j] + sizes[j] <= starts[i] or starts[i] + sizes[i] <= starts[j]


def test_ring_layout_by_hand() -> None:
    assert ring_blockers([4, 4, 4], [1, 2, 3], 8) == [
        1,
        3,
        2,
    ]  # 0-4, 4-8, 0-4; the next round's first follows the third
    assert ring_blockers([5], [1], 8) == [1]
    assert ring_blockers([3, 3, 3, 3], [1, 2, 3, 4], 12) == [4, 4, 4, 4]


def test_large_weights_take_turns_at_the_ends_of_the_ring() -> None:
    """In turn, the third would start at 0 and overlap both others: its copy could not hide behind a launch."""
    assert ring_blockers([5, 5, 7, 5, 5, 7], [1, 2, 3, 4, 5, 6], 12) == [2, 2, 2, 2, 2, 2]
    assert ring_blockers([2, 3, 7, 2, 3, 7], [2, 2, 3, 5, 5, 6], 12) == [
        3,
        3,
        3,
        3,
        3,
        3,
    ]  # of one launch: side by side
