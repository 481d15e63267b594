"""How many samples are taken, which series is kept, and what counts as unsteady, on recorded timings."""

from __future__ import annotations

import pytest

from planner.measurements import Series
from profiler.measure import Effort, measure, relative_mad


class Recording:
    """Plays back timings in order, and remembers how many samples each call asked for."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)
        self.calls: list[int] = []

    def __call__(self, n_samples: int) -> tuple[float, ...]:
        self.calls.append(n_samples)
        taken, self._left = self._left[:n_samples], self._left[n_samples:]
        return tuple(taken)


@pytest.mark.parametrize(
    ("seconds", "n_samples"),
    [
        (1e-6, 15),  # one sample repeats it until it lasts a millisecond
        (0.01, 15),
        (0.05, 10),
        (0.2, 3),  # at least three, if one is within the budget
        (0.5, 3),
        (0.6, 1),
    ],
)
def test_slow_work_gets_fewer_samples(seconds: float, n_samples: int) -> None:
    assert Effort(budget_seconds=0.5).n_samples(seconds) == n_samples


def test_a_steady_series_is_measured_once() -> None:
    recording = Recording(0.1, 0.101, 0.099)
    assert measure(recording, Effort(0.3)) == Series((0.1, 0.101, 0.099))
    assert recording.calls == [1, 2]


def test_an_unsteady_series_is_measured_again_and_the_steadier_kept() -> None:
    recording = Recording(0.1, 0.2, 0.3, 0.10, 0.10, 0.11)
    assert measure(recording, Effort(0.3)) == Series((0.10, 0.10, 0.11))
    assert recording.calls == [1, 2, 3]


def test_the_first_series_is_kept_if_the_second_is_worse() -> None:
    assert measure(Recording(0.1, 0.15, 0.2, 0.1, 0.3, 0.9), Effort(0.3)) == Series((0.1, 0.15, 0.2))


def test_very_slow_work_has_one_sample() -> None:
    recording = Recording(7.0)
    assert measure(recording, Effort(0.3)) == Series((7.0,))
    assert recording.calls == [1]


def test_a_series_that_a_busy_machine_disturbed() -> None:
    """Seconds of a product on a machine with other work: most samples agree, a few waited for a time slice."""
    recorded = Series((36.6e-6, 36.9e-6, 36.4e-6, 8012e-6, 36.7e-6, 36.5e-6, 4006e-6, 36.6e-6, 37.1e-6))
    assert recorded.median == 36.7e-6
    assert recorded.mad == pytest.approx(0.2e-6)
    assert not recorded.is_noisy
    assert relative_mad(recorded) == pytest.approx(0.2 / 36.7)


def test_more_than_a_tenth_of_the_median_is_noisy() -> None:
    assert not Series((0.9, 1.0, 1.1)).is_noisy
    assert Series((0.8, 1.0, 1.2)).is_noisy
    assert relative_mad(Series((0.8, 1.0, 1.2))) == pytest.approx(0.2)
    assert relative_mad(Series((0.0, 0.0))) == 0.0
