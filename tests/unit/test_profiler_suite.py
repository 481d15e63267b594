"""What is measured twice, and which of the two is kept; what a process takes of the card."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest

from planner.measurements import LinkTiming, Series
from profiler import bench, suite
from profiler.jobs import Job, Timing
from profiler.worker import Worker

STEADY, FASTER, UNSTEADY = (1.0, 1.0, 1.0), (0.9, 0.9, 0.9), (1.0, 2.0, 3.0)


class NoWorker:
    """Calls at once, in this process."""

    def call(self, function: Callable[[], Timing]) -> Timing:
        return function()


WORKER = cast(Worker, NoWorker())


def job(label: str, *series: tuple[float, ...]) -> Job:
    """Return a job that gives one series after the other."""
    left = list(series)
    return Job(label, 1.0, lambda: LinkTiming("h2d", True, 1, Series(left.pop(0))))


@pytest.mark.parametrize(
    ("again", "kept", "remarks"),
    [(FASTER, FASTER, []), ((4.0, 4.0, 4.0), UNSTEADY, ["x: unsteady, MAD 50% of the median"])],
)
def test_what_is_unsteady_is_measured_again_at_the_end(
    again: tuple[float, ...], kept: tuple[float, ...], remarks: list[str]
) -> None:
    work = [job("x", UNSTEADY, again), *(job(f"{i}", STEADY) for i in range(9))]
    labels: list[str] = []
    timings, found = suite._run(work, WORKER, lambda fraction, label: labels.append(label))
    assert [cast(LinkTiming, timing).seconds.samples for timing in timings] == [kept, *[STEADY] * 9]
    assert found == remarks
    assert labels == ["x", *map(str, range(9)), "x, again"]


def test_a_machine_that_is_busy_for_long_is_not_measured_twice() -> None:
    work = [job("x", UNSTEADY), job("y", UNSTEADY), job("z", STEADY)]
    _, remarks = suite._run(work, WORKER, lambda fraction, label: None)
    assert len(remarks) == 2


def test_what_a_process_takes_of_the_card_is_what_comes_back_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"browser": 1000}
    processes = set(multiprocessing.active_children())

    @contextmanager
    def free_vram(card: str) -> Iterator[Callable[[], int]]:
        assert card == "cuda0"
        yield lambda: 8000 - sum(others.values()) - 450 * len(set(multiprocessing.active_children()) - processes)

    monkeypatch.setattr(suite, "_free_vram", free_vram)
    monkeypatch.setattr(suite, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(bench, "release", os.path.basename)  # the helper need not be built
    _, _, overhead_bytes = suite._measure(
        [Job("x", 1.0, partial(LinkTiming, "h2d", True, 1, Series(STEADY)))], "sim", "cuda0", lambda *_: others.clear()
    )
    assert others == {}  # the browser was closed meanwhile
    assert overhead_bytes == 450
