"""What happens in the measuring process reaches the caller: results, errors with their remedy, and its death."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time

import pytest

from planner.errors import AtsplanError, DeviceError
from planner.units import parse_size
from profiler.worker import Worker


def test_results_and_errors_come_back_from_one_other_process() -> None:
    with Worker("sim") as worker:
        assert worker.call(math.hypot, 3.0, 4.0) == 5.0
        child = worker.call(os.getpid)
        assert child != os.getpid()
        with pytest.raises(AtsplanError) as caught:
            worker.call(parse_size, "6Gb")
        assert caught.value.message == "'6Gb' is not a size."
        assert caught.value.remedy.startswith("Write it like 6G")
        assert worker.call(os.getpid) == child


def test_a_death_is_an_error_that_quotes_the_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker("cuda0") as worker, pytest.raises(DeviceError) as caught:
        worker.call(os.write, 2, b"ggml.c:1: GGML_ASSERT(a == b) failed\n")
        worker.call(os.abort)
    assert caught.value.message == "Measuring on cuda0 ended abruptly: GGML_ASSERT(a == b) failed"
    assert capfd.readouterr() == ("", "")


def test_what_does_not_end_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(DeviceError, match=r"did not end within 0\.5 s"), Worker("sim", timeout_seconds=0.5) as worker:
        worker.call(time.sleep, 60)
    assert time.monotonic() - started < 10


def test_an_interrupt_does_not_wait_for_the_child() -> None:
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Worker("sim") as worker:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        worker.call(time.sleep, 60)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert time.monotonic() - started < 10


def test_a_silent_death_is_an_error_too() -> None:
    with Worker("sim") as worker, pytest.raises(DeviceError, match="no reason given"):
        worker.call(ctypes.string_at, 0)
