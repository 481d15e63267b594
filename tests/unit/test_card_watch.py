"""Watching a card: what NVML says becomes samples; what it does not say, or its absence, disturbs nobody."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pynvml
import pytest

from runtime import card_watch
from runtime.card_watch import CardWatch

ADDRESS = "0000:c1:00.0"
FREE_BYTES = 5 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a card that is held down by power and heat; its attributes can be changed."""
    card = SimpleNamespace(clock=1410, reasons=0x1 | 0x2 | 0x4 | 0x40, n_asked=0)

    def memory(_handle: object) -> SimpleNamespace:
        card.n_asked += 1
        return SimpleNamespace(free=FREE_BYTES)

    def temperature(_handle: object, _sensor: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda _: SimpleNamespace(busId=b"00000000:C1:00.0"),
        "nvmlDeviceGetClockInfo": lambda _handle, _clock: card.clock,
        "nvmlDeviceGetTemperature": temperature,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: card.reasons,
        "nvmlDeviceGetMemoryInfo": memory,
    }.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setattr(card_watch, "INTERVAL_SECONDS", 0.01)
    return card


def wait_for(watch: CardWatch, n_samples: int) -> None:
    until = time.monotonic() + 5
    while len(watch.samples) < n_samples and time.monotonic() < until:
        time.sleep(0.005)


def test_samples(card: SimpleNamespace) -> None:
    started = time.perf_counter() - 100
    with CardWatch(ADDRESS, started) as watch:
        wait_for(watch, 3)
    n_samples = len(watch.samples)
    time.sleep(0.05)
    assert len(watch.samples) == n_samples >= 3  # it has stopped
    first, second, *_ = watch.samples
    assert 100 <= first.at_seconds < second.at_seconds < 110
    assert (first.clock_mhz, first.temperature_celsius, first.free_vram_bytes) == (1410, 0, FREE_BYTES)
    assert first.throttle_reasons == ("power limit", "heat (hardware)")  # neither idle nor clocks that the user set


@pytest.mark.parametrize("address", ["", "0000:01:00.0"])
def test_a_card_that_nvml_does_not_know(card: SimpleNamespace, address: str) -> None:
    with CardWatch(address) as watch:
        time.sleep(0.03)
    assert watch.samples == ()


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with CardWatch(ADDRESS) as watch:
        time.sleep(0.03)
    assert watch.samples == ()


def test_a_card_that_is_lost_keeps_its_samples(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    with CardWatch(ADDRESS) as watch:
        wait_for(watch, 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lose)
        time.sleep(0.05)
        n_samples = len(watch.samples)
        time.sleep(0.03)
        assert len(watch.samples) == n_samples >= 2
    watch.stop()  # a second time


def test_a_driver_that_hangs_is_not_waited_for(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: answer.wait() and SimpleNamespace(free=0))
    monkeypatch.setattr(card_watch, "_PATIENCE_SECONDS", 0.05)
    started = time.monotonic()
    with CardWatch(ADDRESS) as watch:
        assert watch.samples == ()
    assert time.monotonic() - started < 1
    answer.set()
