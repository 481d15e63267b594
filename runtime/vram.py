"""How much VRAM a run took: the card's own account (NVML), which includes what no library accounts for."""

from __future__ import annotations

import pynvml


class VramMeter:
    """Measures one card against what was in use before llama.cpp touched it; create it before `load`."""

    def __init__(self) -> None:
        self._before = used_vram_bytes()
        self._address = ""

    def watch(self, pci_bus_id: str) -> None:
        """Say which card runs the model; "" for a simulated one."""
        self._address = pci_bus_id

    def used_bytes(self, accounted_bytes: int) -> int:
        """Return what is in use now beyond what was before, or `accounted_bytes` where NVML cannot tell.

        Everything is allocated by the first prompt and the first token, and kept: read it after those.
        """
        now = used_vram_bytes()
        if self._address not in now:
            return accounted_bytes
        return now[self._address] - self._before.get(self._address, 0)


def used_vram_bytes() -> dict[str, int]:
    """Return the bytes in use on every NVIDIA GPU, all processes together, by PCI address ("0000:c1:00.0").

    Empty where NVML is missing.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        used = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = pynvml.nvmlDeviceGetPciInfo(handle).busId
            text = address.decode() if isinstance(address, bytes) else address
            used[_short(text)] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _short(address: str) -> str:
    """NVML writes the PCI domain with eight digits, CUDA with four: `00000000:C1:00.0` -> `0000:c1:00.0`."""
    domain, rest = address.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"
