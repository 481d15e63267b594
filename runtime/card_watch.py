"""Watch a card while something runs on it: clock, temperature, what holds the clock down, and free memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import pynvml

from planner.trace import CardSample

from .nvml import gpu_handles

INTERVAL_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0  # for a driver that does not answer, when the watch ends

# The bits of NVML's mask. Idle clocks and those that the user has set are no throttling.
_REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "another card's clock",
}


class CardWatch:
    """Samples one card in a thread of its own, once a second. A context manager, or `start` and `stop`.

    Without NVML, or for a simulated card (""), there are no samples. Reading them never waits for the driver.
    """

    def __init__(self, pci_bus_id: str, started: float | None = None) -> None:
        """Count `at_seconds` from `started`, a value of `time.perf_counter`; None: from now."""
        self._address = pci_bus_id
        self._started = time.perf_counter() if started is None else started
        self._samples: list[CardSample] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="card watch", daemon=True)

    @property
    def samples(self) -> tuple[CardSample, ...]:
        """All so far, in order."""
        return tuple(self._samples)

    def start(self) -> None:
        """To be called once."""
        if self._address:
            self._thread.start()

    def stop(self) -> None:
        """Take no more samples. May be called twice."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        with gpu_handles() as handles:
            handle = handles.get(self._address)
            while handle is not None:
                try:
                    self._samples.append(_sample(handle, time.perf_counter() - self._started))
                except pynvml.NVMLError:  # the card or its driver is gone
                    return
                if self._stopped.wait(INTERVAL_SECONDS):
                    return


def _sample(handle: Any, at_seconds: float) -> CardSample:
    """Return the card's state. Raises NVMLError if it does not even tell its memory; the rest may be unsupported."""
    reasons = _or_zero(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return CardSample(
        at_seconds=at_seconds,
        clock_mhz=_or_zero(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        temperature_celsius=_or_zero(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        throttle_reasons=tuple(words for bit, words in _REASONS.items() if reasons & bit),
        free_vram_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).free),
    )


def _or_zero(ask: Callable[..., Any], *arguments: Any) -> int:
    try:
        return int(ask(*arguments))
    except pynvml.NVMLError:
        return 0
