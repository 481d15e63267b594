"""What happens in the measuring process reaches the caller: results, errors with their remedy, and its death."""

from __future__ import annotations

import ctypes
import math
import os

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


def test_a_silent_death_is_an_error_too() -> None:
    with Worker("sim") as worker, pytest.raises(DeviceError, match="no reason given"):
        worker.call(ctypes.string_at, 0)
