"""The card's own account of itself: memory, which no library counts completely, and how busy it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import pynvml

SAMPLE_INTERVAL_SECONDS = 0.05


class VramMeter:
    """Measures one card against what was in use before llama.cpp touched it; create it before `load`."""

    def __init__(self) -> None:
        self._before = vram()
        self._address = ""

    def watch(self, pci_bus_id: str) -> None:
        """Say which card runs the model; "" for a simulated one."""
        self._address = pci_bus_id

    @property
    def free_before_bytes(self) -> int | None:
        """What was free before, or None where NVML cannot tell."""
        before = self._before.get(self._address)
        return before.free_bytes if before else None

    def used_bytes(self, accounted_bytes: int) -> int:
        """Return what is in use now beyond what was before, or `accounted_bytes` where NVML cannot tell.

        Everything is allocated by the first prompt and the first tokens, and kept: read it after those.
        """
        now, before = vram().get(self._address), self._before.get(self._address)
        return max(0, now.used_bytes - before.used_bytes) if now and before else accounted_bytes


class BusyMeter:
    """Samples how much of the time the card computes, while its `with` block runs."""

    def __init__(self, pci_bus_id: str) -> None:
        self._address = pci_bus_id
        self._stop = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def busy_fraction(self) -> float | None:
        """The mean, or None where NVML cannot tell."""
        return sum(self._samples) / len(self._samples) if self._samples else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        with gpu_handles() as gpus:
            while self._address in gpus and not self._stop.wait(SAMPLE_INTERVAL_SECONDS):
                try:
                    self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(gpus[self._address]).gpu / 100)
                except pynvml.NVMLError:
                    return


@dataclass(frozen=True)
class Vram:
    """Of one card, all processes together."""

    used_bytes: int
    free_bytes: int


def vram() -> dict[str, Vram]:
    """Return what is in use and free on every NVIDIA GPU, by PCI address ("0000:c1:00.0")."""
    with gpu_handles() as gpus:
        try:
            found = {address: pynvml.nvmlDeviceGetMemoryInfo(handle) for address, handle in gpus.items()}
        except pynvml.NVMLError:
            return {}
    return {address: Vram(int(memory.used), int(memory.free)) for address, memory in found.items()}


@contextmanager
def gpu_handles() -> Iterator[dict[str, object]]:
    """Give NVML's handles by PCI address; none where NVML is missing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield {}
        return
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = {_short(pynvml.nvmlDeviceGetPciInfo(handle).busId): handle for handle in handles}
    except pynvml.NVMLError:
        found = {}
    try:
        yield found
    finally:
        with suppress(pynvml.NVMLError):  # somebody else has
            pynvml.nvmlShutdown()


def _short(address: str | bytes) -> str:
    """NVML writes the PCI domain with eight digits, CUDA with four: `00000000:C1:00.0` -> `0000:c1:00.0`."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, rest = text.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"
