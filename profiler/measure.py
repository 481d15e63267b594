"""Repeat a measurement until it is steady or has cost enough, and keep every sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.measurements import Series

TakeSamples = Callable[[int], tuple[float, ...]]  # n_samples -> seconds each

SAMPLE_SECONDS = 1e-3  # the native helper repeats quick work within one sample until it lasts this long
MIN_SAMPLES = 3  # unless one of them costs more than the budget


@dataclass(frozen=True)
class Effort:
    """What one series may cost. Slow work gets one sample, quick work `max_samples`."""

    budget_seconds: float
    max_samples: int = 15

    def n_samples(self, seconds: float) -> int:
        """Return how many samples of work that takes `seconds` to take."""
        sample_seconds = max(seconds, SAMPLE_SECONDS)
        if sample_seconds > self.budget_seconds:
            return 1
        return max(MIN_SAMPLES, min(self.max_samples, int(self.budget_seconds / sample_seconds)))


def measure(take: TakeSamples, effort: Effort) -> Series:
    """Return a series. A noisy one is measured again, once, and the steadier of the two is kept."""
    samples = take(1)
    n_more = effort.n_samples(samples[0]) - 1
    if n_more == 0:
        return Series(samples)
    series = Series(samples + take(n_more))
    if not series.is_noisy:
        return series
    return min(series, Series(take(n_more + 1)), key=relative_mad)


def relative_mad(series: Series) -> float:
    """Return the median absolute deviation as a fraction of the median; 0 for a median of 0."""
    return series.mad / abs(series.median) if series.median else 0.0
