"""The doctor's look at everything but the GPU: memory, cores, power, and the kernel underneath."""

from __future__ import annotations

import re
from pathlib import Path

from planner.hardware import MAX_PINNED_FRACTION
from planner.measurements import ModelInfo
from planner.units import format_size
from runtime.control_groups import read_file
from runtime.host_memory import available_memory_bytes

from .detect import BUSY_LOAD_FRACTION, detect_cpu, is_wsl
from .findings import Finding

FAST_CORE_FRACTION = 0.6  # of the largest capacity; slower cores hold the others up


def examine_host(root: Path, affinity: frozenset[int], load_average: float) -> list[Finding]:
    """Return findings about the machine under `root`, for a process that may use the processors in `affinity`."""
    return [
        *_system(root),
        _cores(root, affinity),
        _load(root, affinity, load_average),
        *_power(root),
    ]


def examine_memory(root: Path, model: ModelInfo | None, free_vram_bytes: int) -> list[Finding]:
    """Return findings about RAM, and about the model's size against RAM and free VRAM."""
    total = detect_cpu(root).memory_bytes
    available = min(total, available_memory_bytes(root))
    pinnable = int(MAX_PINNED_FRACTION * total)
    findings = [
        Finding(
            "RAM",
            "ok",
            f"{format_size(available)} of {format_size(total)} available. Up to {format_size(pinnable)} can be pinned "
            "for weights: RAM is the limit, ulimit -l does not count for CUDA.",
        )
    ]
    if model is None:
        return findings
    needed = model.file_bytes - free_vram_bytes  # at least so much stays in RAM
    size = f"{model.name} is {format_size(model.file_bytes)}"
    if needed > pinnable:
        text = f"{size}: RAM and free VRAM together hold {format_size(pinnable + free_vram_bytes)}."
        remedy = "Take a smaller quantisation or a smaller model, free VRAM, or add RAM."
        findings.append(Finding("model", "error", text, remedy))
    elif needed > available:
        text = f"{size}: {format_size(needed - available)} more RAM than is available now would be needed."
        findings.append(Finding("model", "warning", text, "Close programs before you run it."))
    else:
        findings.append(Finding("model", "ok", f"{size} and fits into RAM and free VRAM together."))
    return findings


def fast_cores(root: Path, affinity: frozenset[int]) -> tuple[int, int]:
    """Return the numbers of fast and of slow physical cores that may be used; 0 slow ones where all are alike."""
    fast = affinity & _cpu_list(read_file(root / "sys/devices/cpu_core/cpus")) or affinity  # Intel's hybrid CPUs
    capacity = {cpu: _capacity(root, cpu) for cpu in affinity}  # ARM's
    if min(capacity.values()) < FAST_CORE_FRACTION * max(capacity.values()):
        fast = frozenset(cpu for cpu in affinity if capacity[cpu] >= FAST_CORE_FRACTION * max(capacity.values()))
    n_fast = detect_cpu(root, fast).physical_cores
    slow = affinity - fast
    return n_fast, detect_cpu(root, slow).physical_cores if slow else 0


def _cores(root: Path, affinity: frozenset[int]) -> Finding:
    cpu = detect_cpu(root, affinity)
    n_fast, n_slow = fast_cores(root, affinity)
    if n_slow:
        kinds = f"{n_fast} fast and {n_slow} slow cores"
        remedy = f"Profile with --threads {n_fast}: a slow core holds the fast ones up."
    else:
        kinds = f"{n_fast} cores, all alike"
        remedy = f"Best thread count in general: {n_fast}, one for each core."
    return Finding("CPU", "ok", f"{cpu.model}: {kinds}; {', '.join(cpu.isa) or 'no vector extensions'}.", remedy)


def _load(root: Path, affinity: frozenset[int], load_average: float) -> Finding:
    cores = detect_cpu(root, affinity).physical_cores
    if load_average > BUSY_LOAD_FRACTION * cores:
        text = f"Other programs keep {load_average:.1f} of {cores} cores busy."
        return Finding("load", "warning", text, "Close them before you profile: a busy machine measures itself slow.")
    return Finding("load", "ok", f"Load average {load_average:.1f}.")


def _system(root: Path) -> list[Finding]:
    """Under Windows a card that is too full does not fail: its driver pages to system memory, at 2 % of the speed."""
    if not is_wsl(root):
        return [Finding("system", "ok", "Linux: a GPU that is too full fails with an error instead of paging.")]
    return [
        Finding(
            "system",
            "warning",
            "WSL: if VRAM runs over, Windows moves it to system memory without a word, and speed collapses. "
            "WSL also gives Linux only a part of the RAM, and limits pinned memory.",
            "Set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in the NVIDIA Control Panel, leave 1 GiB "
            "of VRAM free in --vram, and raise memory= in .wslconfig.",
        )
    ]


def _power(root: Path) -> list[Finding]:
    findings = []
    for supply in sorted((root / "sys/class/power_supply").glob("*")):
        if read_file(supply / "type").strip() == "Mains" and read_file(supply / "online").strip() == "0":
            remedy = "Plug it in: on battery the CPU and the GPU run at a fraction of their speed."
            findings.append(Finding("power", "warning", "The computer runs on battery.", remedy))
    profile = read_file(root / "sys/firmware/acpi/platform_profile").strip()
    if profile in ("low-power", "quiet", "cool"):
        remedy = "Choose performance: powerprofilesctl set performance."
        findings.append(Finding("power", "warning", f"The platform profile is {profile}.", remedy))
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = (
        read_file(frequency / "scaling_governor").strip(),
        read_file(frequency / "scaling_driver").strip(),
    )
    if governor == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp"):
        remedy = "sudo cpupower frequency-set -g performance"
        findings.append(
            Finding("power", "warning", "The CPU's governor powersave holds it at its lowest clock.", remedy)
        )
    return findings or [Finding("power", "ok", "Nothing known holds the CPU back.")]


def _capacity(root: Path, cpu: int) -> int:
    text = read_file(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").strip()
    return int(text) if text.isdigit() else 1024


def _cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in the kernel's notation: `0-3,8` -> 0, 1, 2, 3, 8."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
