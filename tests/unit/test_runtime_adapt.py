"""The controller on a machine of two pipes whose speeds change: it follows, settles, and comes back."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import replace

import pytest

from planner.plan import ExpertPolicy, WeightCosts
from runtime.adapt import Controller
from runtime.adapt_policy import Measured, Policy, Visit
from tests.unit.adapt_machines import (
    CPU,
    LINK,
    REST,
    Machine,
    N,
    SharedLink,
    controller_of,
    no_transfers,
    plan,
    recorded,
    recorded_plan,
    run,
    visit,
)


@pytest.mark.parametrize("n_streamed", [0, 10, 60, 120])
def test_settles_at_the_best_split_from_a_bad_plan(n_streamed: int) -> None:
    controller, machine = controller_of(n_streamed), Machine()
    seconds, decisions = run(controller, machine, 100)
    assert seconds[-1] <= 1.03 * machine.best_seconds(N)
    assert all(later - earlier >= 5 for (earlier, _), (later, _) in itertools.pairwise(decisions))


CHANGES = [{"cpu": 0.5}, {"link": 0.5}, {"cpu": 0.6, "link": 0.7}, {"rest": 15e-3}, {"cpu": 0.3, "stall": 10e-3}]


@pytest.mark.parametrize("change", CHANGES)
def test_follows_a_change_within_ten_tokens_and_comes_back(change: dict[str, float]) -> None:
    controller, machine = controller_of(), Machine(noise=0.02)
    before, _ = run(controller, machine, 100)
    loaded = replace(machine, **change)
    static = loaded.token(N, len(controller.streamed)).seconds
    seconds, decisions = run(controller, loaded, 60)
    assert decisions and decisions[0][0] <= 5
    first = seconds[decisions[0][0] + 1]
    if len(change) == 1 and "rest" not in change:  # else there is little to gain
        assert first - before[-1] <= 0.75 * (static - before[-1])
    assert seconds[-1] <= 1.06 * loaded.best_seconds(N)
    after, _ = run(controller, machine, 200)  # while it waits for the link, the rest shows only in a trial
    assert after[-1] <= 1.03 * machine.best_seconds(N)


def test_lanes_out_of_balance_are_noticed_though_nothing_deviates() -> None:
    """Trials have become rare; then threads come back, and the CPU is faster only when it has settled."""
    controller, machine = controller_of(), Machine(noise=0.01)
    run(controller, machine, 100)
    run(controller, replace(machine, cpu=0.7), 1000)
    controller.restart("the number of threads has changed")
    run(controller, replace(machine, cpu=0.785), 20)
    faster = replace(machine, cpu=0.9)
    run(controller, faster, 60)
    assert faster.token(N, len(controller.streamed)).seconds <= 1.03 * faster.best_seconds(N)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_does_not_flap(noise: float) -> None:
    controller, machine = controller_of(), Machine(noise=noise)
    run(controller, machine, 100)
    seconds, decisions = run(controller, machine, 1000)
    assert len([decision for _, decision in decisions if "trial" not in decision.reason]) <= 3
    assert sum(seconds) / 1000 <= 1.03 * machine.best_seconds(N)


def test_an_imbalance_without_deviation_is_seen_soon() -> None:
    """Both lanes change by less than what counts as a deviation, in opposite directions."""
    controller, machine = controller_of(), Machine(noise=0.01)
    run(controller, machine, 30)
    changed = replace(machine, cpu=0.88, link=1.1)
    run(controller, changed, 60)
    assert changed.token(N, len(controller.streamed)).seconds <= 1.03 * changed.best_seconds(N)


@pytest.mark.parametrize("every", [25, 40, 60, 100])
def test_stalls_are_not_taken_for_an_imbalance(every: int) -> None:
    """Now and then something holds a token up for 0.1 s: a look at the lanes falls on one of them sooner or later."""
    controller, machine = controller_of(), Machine(noise=0.02)
    run(controller, machine, 100)
    decisions = 0
    for i in range(1200):
        token = machine.token(N, len(controller.streamed))
        if i % every == every - 1:
            token = replace(token, seconds=token.seconds + 0.1, cpu_seconds=token.cpu_seconds + 0.1)
        decisions += controller.add(token) is not None
    assert decisions <= 3
    assert machine.token(N, len(controller.streamed)).seconds <= 1.03 * machine.best_seconds(N)


@pytest.mark.parametrize(("per_weight", "limit"), [(1e-3, 1.02), (3e-3, 1.06)])
def test_a_model_that_is_wrong_for_good_costs_little(per_weight: float, limit: float) -> None:
    """Every other split is slower than the model has it, always: trials become rare."""
    controller = controller_of()
    start, seconds = len(controller.streamed), 0.0
    for _ in range(4000):
        n = len(controller.streamed)
        token = Measured(0.070 + abs(n - start) * per_weight, (N - n) * CPU, 0.005, n * LINK / 2, 0)
        seconds += token.seconds
        controller.add(token)
    assert seconds <= limit * 4000 * 0.070


def test_a_small_model_does_not_follow_every_whim() -> None:
    """Its tokens are short: what changes within half a second of the last change is not acted upon yet."""
    base = plan(60)
    costs = WeightCosts(CPU / 8, 1e-5, LINK / 8, 2e-5, 1000)
    prediction = replace(base.prediction, decode_cpu_busy_seconds=60 * CPU / 8, decode_gpu_busy_seconds=REST / 8)
    small = replace(base, placements=tuple(replace(p, costs=costs) for p in base.placements), prediction=prediction)
    controller, machine = Controller(Policy(small, no_transfers)), Machine(noise=0.02)
    changed_at, seconds = [], 0.0
    for i in range(1100):
        is_slow = i >= 100 and i // 50 % 2
        token = replace(machine, link=0.5 if is_slow else 1.0).token(N, len(controller.streamed))
        short = Measured(*(value / 8 for value in vars(token).values()))
        seconds += short.seconds
        decision = controller.add(short)
        if decision and decision.reason.startswith("the link is"):
            changed_at.append(seconds)
    episodes = [later - earlier for earlier, later in itertools.pairwise(changed_at)]
    assert len(changed_at) > 3
    assert min(episodes) > 0.04  # patterns of one episode
    assert sum(pause > 0.1 for pause in episodes) == sum(pause > 0.5 for pause in episodes)


def test_bursts_do_not_upset_it() -> None:
    """Every tenth token takes five times as long, as when other programs take the CPU away."""
    controller, machine = controller_of(), Machine(noise=0.02)
    run(controller, machine, 100)
    settled = controller.streamed
    decisions = []
    for i in range(400):
        token = machine.token(N, len(controller.streamed))
        if i % 10 == 0:
            token = replace(token, seconds=5 * token.seconds, cpu_seconds=token.cpu_seconds + 4 * token.seconds)
        decisions.append(controller.add(token))
    assert abs(len(controller.streamed) - len(settled)) <= 0.1 * N
    assert len([decision for decision in decisions if decision]) <= 8


def test_a_link_that_is_measured_late_is_not_taken_for_an_idle_one() -> None:
    """On an H200, when other programs began to use it: the measured time of the link is a token late, and a mean."""
    controller = Controller(Policy(recorded_plan(), no_transfers))
    for _ in range(20):
        assert controller.add(recorded(34.2, 24.8, 6.8, 34.1)) is None
    assert len(controller.streamed) == 59
    loaded = [(34.3, 24.4, 7.5, 34.2), (46.3, 25.2, 18.5, 34.3), (54.7, 25.6, 25.4, 42.2), (53.4, 24.3, 26.3, 52.5)]
    decisions = [controller.add(recorded(*token)) for token in loaded]
    assert decisions[:3] == [None] * 3
    assert 1300 <= len(controller.streamed) / N * 3614 <= 1420  # found by trial then: 1386
    for token in [(50.7, 36.1, 7.9, 30.5), (45.1, 33.5, 6.3, 39.7), (44.8, 34.0, 7.6, 46.2), (42.2, 30.1, 9.5, 45.1),
                  (42.1, 30.2, 9.2, 41.9), (43.5, 32.3, 7.6, 38.3), (43.6, 33.0, 8.0, 31.9), (44.2, 30.3, 10.2, 38.0),
                  (38.2, 30.6, 5.1, 37.2), (45.9, 31.2, 10.8, 29.9)]:  # fmt: skip
        assert controller.add(recorded(*token)) is None  # the best of those that were measured


@pytest.mark.parametrize("meter", [0.6, 0.8, 1.0])
def test_what_visits_teach_counts_more_than_a_meter(meter: float) -> None:
    """A meter that shows too little makes it stream more first; that tokens then wait longer tells what is wrong."""
    controller, machine = controller_of(80), Machine(noise=0.02)
    run(controller, machine, 100)
    loaded = replace(machine, link=0.6)
    for _ in range(31):  # too soon for a trial
        token = loaded.token(N, len(controller.streamed))
        controller.add(replace(token, link_seconds=meter * token.link_seconds))
    assert loaded.token(N, len(controller.streamed)).seconds <= 1.06 * loaded.best_seconds(N)


def test_a_link_that_looks_slower_than_tokens_is_not_waited_for() -> None:
    """The GPU has become slower, and the link looks it: tokens that take less than copies seem to tell better."""
    policy, machine = Policy(plan(60), no_transfers), Machine(rest=20e-3)
    visits = []
    for n_streamed in (80, 60):  # at first it streamed more
        token = replace(machine.token(N, n_streamed), link_seconds=1.5 * n_streamed * LINK * 1.6)
        visits.append(Visit(tuple(range(n_streamed)), token, (token,) * 6))
    model = policy.model(visits, None)
    assert policy.waits_for_link(visits[1].measured)
    assert len(policy.best(model)) > 60


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_teaches_nothing(noise: float) -> None:
    """Tokens take the same under both patterns, up to noise of the CPU's and bursts, and wait about as long."""
    policy, generator = Policy(plan(60), no_transfers), random.Random(2)

    def token() -> Measured:
        cpu = 0.06 * (1 + noise * generator.uniform(-1, 1)) + 0.2 * (generator.random() < 0.1)
        wait = 0.03 * (1 + noise * generator.uniform(-1, 1))
        return Measured(cpu + wait, cpu, wait, 0.0, 0)

    for n_tokens in [(3, 6), (6, 6)] * 500:
        visits = []
        for n_streamed, n in zip((30, 60), n_tokens, strict=True):
            tokens = tuple(token() for _ in range(n))
            visits.append(Visit(tuple(range(n_streamed)), Measured(0.09, 0.06, 0.03, 0.0, 0), tokens))
        assert policy.model(visits, None).link_factor == 1.0


def test_a_change_that_does_not_pay_is_taken_back() -> None:
    controller = controller_of()
    start = controller.streamed

    def token() -> Measured:  # a link that looks idle, and is not: every other split is slower
        n = len(controller.streamed)
        return Measured(0.070 + abs(n - len(start)) * 1e-3, (N - n) * CPU, 0.005, n * LINK / 2, 0)

    for _ in range(100):
        controller.add(token())
    assert controller.streamed == start


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_others_use_in_bursts(seed: int) -> None:
    """It looks faster now and then: no reason to stream more each time. When it is free again, that is seen at once."""
    policy = Policy(recorded_plan(), no_transfers)
    controller, machine = Controller(policy), SharedLink(policy, random.Random(seed))

    def decode(n: int, is_shared: bool) -> int:
        tokens = (machine.token(controller.streamed, is_shared) for _ in range(n))
        return sum(controller.add(token) is not None for token in tokens)

    decode(150, is_shared=False)
    quiet = controller.streamed
    n_decisions = decode(450, is_shared=True)
    assert len(controller.streamed) < len(quiet)
    assert n_decisions <= 8
    decode(10, is_shared=False)
    assert controller.streamed == quiet


@pytest.mark.parametrize("seed", range(5))
def test_what_was_best_in_quiet_is_tried_when_a_load_is_gone(seed: int) -> None:
    """By its model others are as good then: the CPU is not quite as fast yet, and waiting for the link hides much."""
    policy = Policy(recorded_plan(), no_transfers)
    controller, machine = Controller(policy), SharedLink(policy, random.Random(seed))
    patterns = []
    for cpu_load, n_tokens in ((0.0, 150), (0.6, 300), (0.08, 60), (0.0, 60)):
        for _ in range(n_tokens):
            controller.add(machine.token(controller.streamed, False, cpu_load))
        patterns.append(controller.streamed)
    assert len(patterns[1]) > len(patterns[0])
    assert patterns[3] == patterns[0]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_better_than_ever_is_not_tried_last(seed: int) -> None:
    """The CPU is faster than in quiet when a load of the link ends."""
    policy = Policy(recorded_plan(), no_transfers)
    controller, machine = Controller(policy), SharedLink(policy, random.Random(seed))
    for is_shared, cpu_load, n_tokens in ((False, 0.0, 150), (True, 0.0, 150), (True, -0.25, 150)):
        for _ in range(n_tokens):
            controller.add(machine.token(controller.streamed, is_shared, cpu_load))
    seconds = []
    for _ in range(100):
        token = machine.token(controller.streamed, False, -0.25)
        seconds.append(token.seconds)
        controller.add(token)
    assert statistics.median(seconds[6:11]) <= 1.05 * statistics.median(seconds[50:])


@pytest.mark.parametrize("cpu", [0.5, 0.8])
def test_what_was_best_in_quiet_is_not_tried_under_load(cpu: float) -> None:
    """The CPU is slower for long; the link is as free as ever."""
    controller, machine = controller_of(), Machine(noise=0.01)
    run(controller, machine, 100)
    loaded = replace(machine, cpu=cpu)
    seconds, decisions = run(controller, loaded, 1000)
    assert sum(seconds) / 1000 <= 1.015 * loaded.best_seconds(N)
    assert len(decisions) <= 3


@pytest.mark.parametrize(
    ("n_streamed", "cpu", "change"),
    [(10, 0.75, {"link": 0.5}), (60, 0.75, {"link": 0.5}), (80, 0.75, {"link": 0.5}), (110, 1.0, {"link": 2.0})],
)
@pytest.mark.parametrize("n_tokens", range(7))
def test_what_begins_while_a_pattern_is_visited_is_seen_at_once(
    n_streamed: int, cpu: float, change: dict[str, float], n_tokens: int
) -> None:
    controller, machine = controller_of(n_streamed), Machine(cpu=cpu, noise=0.01)
    _, decisions = run(controller, machine, 7)
    assert len(decisions) == 1  # a visit has begun
    run(controller, machine, n_tokens)
    changed = replace(machine, **change)
    seconds, _ = run(controller, changed, 100)
    assert statistics.median(seconds[8:13]) <= 1.05 * changed.best_seconds(N)


@pytest.mark.parametrize("n_tokens", range(3, 10))
def test_what_ends_while_a_pattern_is_visited_is_seen_at_once(n_tokens: int) -> None:
    controller, machine = controller_of(), Machine(noise=0.01)
    run(controller, machine, 100)
    quiet = controller.streamed
    run(controller, replace(machine, link=0.5), n_tokens)
    run(controller, machine, 8)
    assert controller.streamed == quiet


@pytest.mark.parametrize("change", [{"cpu": 0.5}, {"link": 0.5}])
@pytest.mark.parametrize("n_streamed", [20, 60, 110])
def test_speeds_that_come_and_go_do_not_keep_a_small_model_busy(n_streamed: int, change: dict[str, float]) -> None:
    controller = Controller(Policy(plan(n_streamed, faster=20), no_transfers))
    machine = Machine(cpu=20, link=20, rest=REST / 20, noise=0.01)
    slower = replace(machine, **{name: 20 * speed for name, speed in change.items()})
    n_changes = sum(len(run(controller, slower if i % 2 else machine, 7)[1]) for i in range(400))
    assert n_changes <= 50  # in 2,800 tokens of 2 ms


def test_a_trial_in_vain_does_not_delay_what_follows() -> None:
    """Whenever a load ends: a trial that changed nothing may have been a moment ago."""
    for n_tokens in range(100, 300, 4):
        controller, machine = controller_of(), Machine(noise=0.01)
        run(controller, machine, 100)
        quiet = controller.streamed
        run(controller, replace(machine, link=0.5), n_tokens)
        assert controller.streamed != quiet
        _, decisions = run(controller, machine, 5)
        assert decisions and controller.streamed == quiet, n_tokens


def test_a_faster_link_does_not_hide_a_slower_gpu() -> None:
    controller, machine = controller_of(), Machine(noise=0.01)
    run(controller, machine, 100)
    run(controller, replace(machine, link=0.6), 60)
    changed = replace(machine, link=0.8, rest=4 * REST)  # what others leave of the link comes and goes
    _, decisions = run(controller, changed, 6)
    assert decisions and decisions[0][1].reason.startswith("the GPU is slower")


def test_of_equal_patterns_the_planned_one_stays() -> None:
    """CPU and copies share the memory's rate: the more the link carries, the slower is the CPU; nothing is gained."""
    controller, generator = controller_of(), random.Random(0)
    planned = controller.streamed
    for _ in range(1000):
        n = len(controller.streamed)
        cpu = 0.9 * (N - len(planned)) * CPU * (1 + 0.01 * generator.uniform(-1, 1))
        controller.add(Measured(cpu + 3 * REST, cpu, REST, 0.9 * n * LINK, 0))
        if controller._usual is not None:
            assert controller.streamed == planned


def test_experts_on_the_cpu_are_not_taken_for_slow_weights() -> None:
    experts, base = 0.2, plan(60)  # seconds
    predicted = replace(base.prediction, decode_cpu_busy_seconds=base.prediction.decode_cpu_busy_seconds + experts)
    controller = Controller(Policy(replace(base, prediction=predicted), no_transfers))
    machine = Machine(link=0.2, stall=experts)
    seconds, decisions = run(controller, machine, 100)
    assert [decision.cpu_speed for _, decision in decisions] == [pytest.approx(1.0)]
    assert seconds[-1] <= 1.01 * machine.best_seconds(N)
    loaded = replace(machine, cpu=0.5, stall=2 * experts)
    seconds, decisions = run(controller, loaded, 100)
    assert decisions[0][1].cpu_speed == pytest.approx(0.5, rel=0.05)
    assert seconds[-1] <= 1.03 * loaded.best_seconds(N)


def test_larger_weights_than_the_ring_are_never_streamed() -> None:
    base = plan(10)
    small_ring = replace(base, vram=replace(base.vram, ring_bytes=999))
    controller = Controller(Policy(small_ring, no_transfers))
    run(controller, Machine(cpu=0.2), 100)
    assert set(controller.streamed) <= {i for i, p in enumerate(base.placements) if p.decode == "stream"}


def test_nothing_streams_through_a_ring_that_holds_experts() -> None:
    base = replace(plan(0), experts=ExpertPolicy(0, 1.0, 1.0, 1.0))
    assert base.shares_ring
    controller = Controller(Policy(base, no_transfers))
    _, decisions = run(controller, Machine(cpu=0.2), 100)
    assert decisions == []


def test_a_weight_stays_on_the_cpu() -> None:
    controller = controller_of()
    seconds, _ = run(controller, Machine(cpu=0.01), 100)
    assert len(controller.streamed) == N - 1
    after, _ = run(controller, Machine(), 60)  # that it is as fast as ever is seen at once
    assert after[-1] <= 1.03 * Machine().best_seconds(N)
    assert after[-1] < seconds[-1]


def test_deciding_takes_under_a_millisecond() -> None:
    policy = Policy(plan(60), no_transfers)
    model = policy.model([visit(policy.planned, Machine(cpu=0.5))], None)
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        policy.best(model)
        seconds.append(time.thread_time() - started)
    assert statistics.median(seconds) < 1e-3


def test_watching_a_token_does_not_go_through_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens after every token, in the thread that computes; deciding is rare."""
    controller, machine = controller_of(), Machine(noise=0.02)
    while controller._usual is None:
        run(controller, machine, 1)

    def lanes(self: Policy, streamed: object) -> tuple[float, float]:
        raise AssertionError("settled, and nothing has changed")

    tokens = [machine.token(N, len(controller.streamed)) for _ in range(8)]  # too soon for a look at the lanes
    monkeypatch.setattr(Policy, "lanes", lanes)
    assert [controller.add(token) for token in tokens] == [None] * 8


def test_plans_of_the_paper_use_its_algorithm() -> None:
    def every_other(*columns: list[float]) -> tuple[list[bool], float]:
        assert columns[0][0] == pytest.approx(CPU / 0.5)  # the CPU takes twice as long now
        return [i % 2 == 0 for i in range(N)] + [True], 0.0

    policy = Policy(plan(0, "paper"), every_other)
    model = policy.model([visit((), Machine(cpu=0.5))], None)
    assert policy.best(model) == tuple(range(0, N, 2))
