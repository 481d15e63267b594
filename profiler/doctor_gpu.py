"""The doctor's look at the GPU that CUDA calls cuda0, through NVML. What NVML does not tell is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import DeviceError
from planner.memory import DISPLAY_RESERVE_BYTES
from planner.units import MIB, format_size
from runtime.control_groups import read_file
from runtime.identity import cuda_gpu_uuids

from .detect import as_text, nvml_gpu
from .findings import Finding

MIN_COMPUTE_CAPABILITY = (7, 0)
MUCH_HELD = 0.1  # of the card's memory, by others
LOWERED_LIMIT = 0.95  # of the default power limit
BUSY_STATES = (0, 1, 2)  # performance states in which a GPU runs its link at full speed
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # by generation
_SIMULATE = "Without an NVIDIA GPU, plans can be tried with --device sim."
_VENDORS = {"0x8086": "Intel", "0x1002": "AMD", "0x10de": "NVIDIA"}
_SLOWED = {  # bits of nvmlDeviceGetCurrentClocksEventReasons
    0x04: "its power limit", 0x08: "the hardware", 0x20: "its temperature", 0x40: "its temperature (hardware)",
    0x80: "the power supply",
}  # fmt: skip


@dataclass(frozen=True)
class GpuReport:
    findings: tuple[Finding, ...]
    free_bytes: int = 0  # of cuda0
    driver_cuda_major: int = 0  # the newest CUDA that the driver runs


def examine_gpu(root: Path) -> GpuReport:
    """Return findings about the driver and about cuda0. Takes no GPU memory."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport((_no_driver(str(error)),))
    try:
        return _examine(nvml, root)
    except nvml.NVMLError as error:
        return GpuReport(
            (Finding("driver", "error", f"The NVIDIA driver fails: {error}.", "Reboot, or reinstall it."),)
        )
    except DeviceError as error:
        return GpuReport((Finding("GPU", "error", error.message, error.remedy),))
    finally:
        nvml.nvmlShutdown()


def _no_driver(reason: str) -> Finding:
    if "mismatch" in reason.lower():
        text = "The NVIDIA driver was updated while its old version is running."
        return Finding("driver", "error", text, "Reboot.")
    text = f"No NVIDIA driver answers: {reason}."
    remedy = f"Install NVIDIA's driver and reboot; in a container, start it with --gpus all. {_SIMULATE}"
    return Finding("driver", "error", text, remedy)


def _examine(nvml: Any, root: Path) -> GpuReport:
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion) or 0
    major, minor = cuda // 1000, cuda % 1000 // 10
    text = f"{as_text(nvml.nvmlSystemGetDriverVersion())}, runs CUDA up to {major}.{minor}."
    findings = [Finding("driver", "ok", text)]
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = cuda_gpu_uuids()
    if not handles or not uuids:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if handles and visible is not None:
            text, remedy = f"CUDA_VISIBLE_DEVICES={visible} hides every GPU.", "Unset it, or set it to a GPU's UUID."
        elif handles:
            text = f"The driver knows {len(handles)} GPUs, but CUDA shows none."
            remedy = (
                "Install libcuda of the driver's version; in a container, NVIDIA_DRIVER_CAPABILITIES needs compute."
            )
        else:
            text, remedy = "The driver finds no GPU.", f"Check that it is plugged in and on (lspci). {_SIMULATE}"
        return GpuReport((*findings, Finding("GPU", "error", text, remedy)), driver_cuda_major=major)
    with nvml_gpu("cuda0") as (_, gpu, board):
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        findings += [
            _choice(nvml, handles, gpu, board, uuids),
            _capability(nvml, gpu),
            _vram(nvml, gpu, root),
            *_link(nvml, board),
            *_ecc(nvml, board),
            *_display(nvml, board, root),
            *_speed(nvml, board),
        ]
    return GpuReport(tuple(findings), int(memory.free), major)


def _choice(nvml: Any, handles: list[Any], gpu: Any, board: Any, uuids: tuple[str, ...]) -> Finding:
    """CUDA orders GPUs by speed, nvidia-smi by slot, and CUDA_VISIBLE_DEVICES changes what CUDA sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = f"cuda0 is {as_text(nvml.nvmlDeviceGetName(gpu))} ({as_text(nvml.nvmlDeviceGetUUID(gpu))})"
    others = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle) != nvml.nvmlDeviceGetUUID(board)]
    why = "" if visible is None else f", by CUDA_VISIBLE_DEVICES={visible}"
    if not others:
        return Finding("GPU", "ok", f"{chosen}{why}, the only GPU.")

    def total(handle: Any) -> int:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)

    largest = max(others, key=total)
    name, uuid = as_text(nvml.nvmlDeviceGetName(largest)), as_text(nvml.nvmlDeviceGetUUID(largest))
    text = f"{chosen}{why}; CUDA shows {len(uuids)} of {1 + len(others)} GPUs."
    if total(largest) > total(board):
        text += f" {name} has more memory: {format_size(total(largest))}."
        return Finding("GPU", "warning", text, f"To use it: export CUDA_VISIBLE_DEVICES={uuid}")
    return Finding("GPU", "ok", text, "CUDA's numbers are not nvidia-smi's: choose by UUID.")


def _capability(nvml: Any, gpu: Any) -> Finding:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    if (major, minor) < MIN_COMPUTE_CAPABILITY:
        text = f"Compute capability {major}.{minor}; 7.0 or newer is needed."
        return Finding("compute", "error", text, "Use a GPU of the Volta generation (2017) or newer.")
    return Finding("compute", "ok", f"Compute capability {major}.{minor}.")


def _vram(nvml: Any, gpu: Any, root: Path) -> Finding:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    held: dict[int, int] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(nvml, partial(ask, gpu)) or []:
            held[process.pid] = process.usedGpuMemory or 0  # None where the driver does not tell
    holders = [
        f"{read_file(root / f'proc/{pid}/comm').strip() or 'a process elsewhere'} ({pid})"
        + (f" {format_size(size)}" if size else "")
        for pid, size in sorted(held.items(), key=lambda item: -item[1])
    ]
    text = f"{format_size(memory.free)} of {format_size(memory.total)} free"
    text += f"; held by {', '.join(holders[:5])}{' and others' if len(holders) > 5 else ''}." if holders else "."
    if memory.total - memory.free > MUCH_HELD * memory.total:
        rest_bytes = memory.free - DISPLAY_RESERVE_BYTES
        rest = f", or plan with --vram {rest_bytes // MIB}M at most" if rest_bytes > 0 else ""
        remedy = f"Close those programs{rest}."
        return Finding("VRAM", "warning", text, remedy)
    return Finding("VRAM", "ok", text)


def _link(nvml: Any, board: Any) -> list[Finding]:
    generation = _ask(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(board))
    width = _ask(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(board))
    generation_now = _ask(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(board))
    width_now = _ask(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(board))
    if not (generation and width and generation_now and width_now):
        return []
    rate = _LANE_BYTES_PER_SECOND.get(generation, 0.0) * width_now
    text = f"Generation {generation_now} x{width_now} now, {generation} x{width} at most"
    text += f": up to {rate / 1e9:.0f} GB/s." if rate else "."
    state = _ask(nvml, lambda: nvml.nvmlDeviceGetPerformanceState(board))
    if width_now < width:
        remedy = "Seat the card in the slot with all lanes, free the lanes that an M.2 disk shares, or check the BIOS."
        return [Finding("PCIe", "warning", f"{text} Not all lanes are used: streaming is slower.", remedy)]
    if generation_now < generation and state in BUSY_STATES:
        remedy = "Set the slot's generation to Auto in the BIOS and take out risers; PCIe power saving may be forced."
        return [Finding("PCIe", "warning", f"{text} The link is slow although the GPU is active.", remedy)]
    if generation_now < generation:
        text += " It is idle and saves power."
    return [Finding("PCIe", "ok", text)]


def _ecc(nvml: Any, board: Any) -> list[Finding]:
    mode = _ask(nvml, lambda: nvml.nvmlDeviceGetEccMode(board))
    if mode is None:
        return [Finding("ECC", "ok", "This GPU has none that can be switched.")]
    if not mode[0]:
        return [Finding("ECC", "ok", "Off.")]
    # Uncorrected (1) errors since the driver was loaded (0).
    if errors := _ask(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(board, 1, 0)):
        text = f"{errors} memory errors could not be corrected since the driver was loaded."
        return [Finding("ECC", "warning", text, "Results may be wrong: reset or reboot, and have the card checked.")]
    advice = (
        "On GDDR cards it takes about 6 % of the memory and its speed; off with: sudo nvidia-smi -e 0, then reboot."
    )
    return [Finding("ECC", "ok", "On.", advice)]


def _display(nvml: Any, board: Any, root: Path) -> list[Finding]:
    """On a machine with two kinds of graphics, a desktop on the big one takes VRAM that the other could give."""
    vendors = {read_file(path).strip() for path in (root / "sys/class/drm").glob("card*/device/vendor")}
    others = sorted(_VENDORS[vendor] for vendor in vendors & _VENDORS.keys() - {"0x10de"})
    is_active = _ask(nvml, lambda: nvml.nvmlDeviceGetDisplayActive(board))
    if is_active and others:
        text = f"The desktop runs on this GPU and takes VRAM; there is {' and '.join(others)} graphics too."
        remedy = "Plug the monitor into the mainboard, or choose on-demand graphics (prime-select on-demand)."
        return [Finding("display", "warning", text, remedy)]
    if is_active:
        return [Finding("display", "ok", "The desktop runs on this GPU.", "A text console would free its VRAM.")]
    other = f": there is {' and '.join(others)} graphics" if others else ""
    return [Finding("display", "ok", f"No desktop on this GPU{other}.")]


def _speed(nvml: Any, board: Any) -> list[Finding]:
    findings = []
    celsius = _ask(nvml, lambda: nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU))
    state = f"{celsius} °C" if celsius else "Temperature unknown"
    reasons = _ask(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(board)) or 0
    slowed = [name for bit, name in _SLOWED.items() if reasons & bit]
    if slowed:
        text = f"{state}; the GPU is slowed down by {' and '.join(slowed)}."
        findings.append(Finding("clocks", "warning", text, "Let it cool, clean the fans, check the power cables."))
    else:
        findings.append(Finding("clocks", "ok", f"{state}; nothing slows the GPU down."))
    limit = _ask(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(board))
    default = _ask(nvml, lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(board))
    if limit and default:
        text = f"Power limit {limit / 1000:.0f} W, by default {default / 1000:.0f} W."
        if limit < LOWERED_LIMIT * default:
            remedy = (
                f"sudo nvidia-smi -pl {default // 1000}; on a laptop, plug it in and choose the performance profile."
            )
            findings.append(Finding("power limit", "warning", text, remedy))
        else:
            findings.append(Finding("power limit", "ok", text))
    return findings


def _ask(nvml: Any, question: Callable[[], Any]) -> Any:
    """Return what NVML says, or None where this GPU, driver or binding does not tell."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None
