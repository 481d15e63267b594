"""What this machine is: CPU from /proc and /sys, GPU from NVML, software from what is installed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner import __version__
from planner.errors import DeviceError
from planner.hardware import Cpu, Gpu, Hardware, MachineState, Software
from planner.units import GIB, KIB, MIB
from runtime.build import find_llama
from runtime.control_groups import cpu_quotas, read_file
from runtime.host_memory import memory_limits
from runtime.identity import cuda_gpu_uuids, llama_cpp_commit

BUSY_LOAD_FRACTION = 0.5  # of the cores; above it, other programs disturb the measurements

_ROOT = Path("/")
_ISA = {  # flag in /proc/cpuinfo -> ggml's name, where ggml has kernels for it
    "pni": "SSE3", "ssse3": "SSSE3", "avx": "AVX", "avx_vnni": "AVX_VNNI", "avx2": "AVX2", "f16c": "F16C",
    "fma": "FMA", "bmi2": "BMI2", "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8",
    "asimd": "NEON", "asimddp": "DOTPROD", "asimdhp": "FP16_VA", "i8mm": "MATMUL_INT8", "sve": "SVE", "sme": "SME",
}  # fmt: skip
_GPU_REMEDY = "Check CUDA_VISIBLE_DEVICES and the driver (nvidia-smi), or profile with --device sim."


def resolve_device(text: str) -> str:
    """Return "cuda0", "cuda1", ..., "sim" or "none" for what a person typed: one of these, "auto" or a GPU's UUID.

    "auto" is the first GPU that CUDA shows, or "none". Raises DeviceError for anything that is not here.
    """
    if text in ("sim", "none"):
        return text
    is_uuid = re.match(r"(GPU|MIG)-", text, re.IGNORECASE)
    if not is_uuid and text != "auto":
        _cuda_number(text)
    uuids = cuda_gpu_uuids()
    if text == "auto" and not uuids:
        return "none"
    if not find_llama().has_cuda:
        raise DeviceError(
            "llama-cpp-python was built without CUDA.",
            "Install it with CUDA (make does, where nvcc is), or use --device sim or --device none.",
        )
    if is_uuid:
        matching = [index for index, uuid in enumerate(uuids) if uuid.startswith(text[4:].lower())]
        if len(matching) != 1:
            raise DeviceError(f"CUDA shows {'several' if matching else 'no'} GPUs with the UUID {text}.", _GPU_REMEDY)
        return f"cuda{matching[0]}"
    device = "cuda0" if text == "auto" else text.lower()
    _uuid_of(device, uuids)
    return device


def detect_hardware(device: str) -> Hardware:
    """Return the CPU, and the GPU that `device` ("cuda0", ..., "sim", "none") names. Raises DeviceError."""
    cpu = detect_cpu()
    if device == "none":
        return Hardware(cpu, None)
    if device == "sim":
        memory_bytes = round(cpu.memory_bytes / GIB) * GIB  # it keeps its weights in the host's memory
        return Hardware(cpu, Gpu("simulated", memory_bytes, "", 0, 0, "sim"))
    return Hardware(cpu, _detect_gpu(device))


def detect_software() -> Software:
    """Return what is installed, without loading it. Raises AtsplanError without llama-cpp-python."""
    llama = find_llama()
    return Software(__version__, llama.version, llama_cpp_commit(), llama.has_cuda)


def machine_state(device: str) -> MachineState:
    """Return what changes from one moment to the next. Raises DeviceError if the GPU is not there."""
    facts: dict[str, Any] = {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_clock_mhz": _cpu_clock_mhz(_ROOT),
        "load_average": os.getloadavg()[0],
    }
    if device not in ("none", "sim"):
        with nvml_gpu(device) as (nvml, gpu, board):
            facts |= {
                "device": device,
                "driver": as_text(nvml.nvmlSystemGetDriverVersion()),
                "gpu_uuid": as_text(nvml.nvmlDeviceGetUUID(gpu)),
                "gpu_memory_free_bytes": int(nvml.nvmlDeviceGetMemoryInfo(gpu).free),
                "gpu_has_display": is_wsl(_ROOT) or bool(_number(nvml, lambda: nvml.nvmlDeviceGetDisplayActive(board))),
                "gpu_clock_mhz": _number(nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
                "gpu_temperature_celsius": _number(
                    nvml, lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
                ),
            }
    return MachineState(**facts)


def is_wsl(root: Path) -> bool:
    """Tell whether this is Linux under Windows, where Windows has the GPU's driver and draws on it."""
    return "microsoft" in read_file(root / "proc/version").lower()


def detect_cpu(root: Path = _ROOT, affinity: frozenset[int] | None = None) -> Cpu:
    """Return the part of the CPU that this process may use: its affinity mask and its control groups' limits.

    `root` and `affinity` stand in for another machine's in tests.
    """
    cpus = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    cpuinfo = _cpuinfo(root)
    logical_cores = min([len(cpus), *(max(1, int(quota)) for quota in cpu_quotas(root))])
    flags = set(f"{cpuinfo.get('flags', '')} {cpuinfo.get('Features', '')}".split())
    return Cpu(
        model=cpuinfo.get("model name") or f"{platform.machine()} {cpuinfo.get('CPU part', '')}".strip(),
        physical_cores=min(_physical_cores(root, cpus), logical_cores),
        logical_cores=logical_cores,
        isa=tuple(sorted(name for flag, name in _ISA.items() if flag in flags)),
        last_level_cache_bytes=_last_level_cache_bytes(root, cpus),
        memory_bytes=min([_memory_total_bytes(root), *memory_limits(root)]),
    )


def _detect_gpu(device: str) -> Gpu:
    with nvml_gpu(device) as (nvml, gpu, board):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
        return Gpu(
            name=as_text(nvml.nvmlDeviceGetName(gpu)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
            compute_capability=f"{major}.{minor}",
            pcie_generation=_number(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(board)),
            pcie_width=_number(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(board)),
            backend="cuda",
        )


def _cuda_number(device: str) -> int:
    match = re.fullmatch(r"cuda(\d{1,3})", device.lower())
    if not match:
        raise DeviceError(f"'{device}' is not a device.", "Use auto, cuda0, cuda1, ..., a GPU's UUID, sim or none.")
    return int(match[1])


def _uuid_of(device: str, uuids: tuple[str, ...]) -> str:
    index = _cuda_number(device)
    if index >= len(uuids):
        shown = f"only cuda0 to cuda{len(uuids) - 1}" if len(uuids) > 1 else "only cuda0" if uuids else "no GPU"
        raise DeviceError(f"There is no {device} here: CUDA shows {shown}.", _GPU_REMEDY)
    return uuids[index]


@contextmanager
def nvml_gpu(device: str) -> Iterator[tuple[Any, Any, Any]]:
    """Give NVML and its handles of `device` and of the board with the link: the same, but for a MIG instance.

    CUDA and NVML number GPUs differently, so it is found by UUID.
    """
    import pynvml

    uuid = _uuid_of(device, cuda_gpu_uuids())
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceError(f"The NVIDIA driver cannot describe {device}: {error}.", _GPU_REMEDY) from error
    try:
        try:
            gpu = board = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            board = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu)
        yield pynvml, gpu, board
    except pynvml.NVMLError as error:
        raise DeviceError(f"The NVIDIA driver cannot describe {device}: {error}.", _GPU_REMEDY) from error
    finally:
        pynvml.nvmlShutdown()


def _number(nvml: Any, ask: Callable[[], int]) -> int:
    """Return what NVML says, or 0 where this GPU or driver does not tell."""
    try:
        return int(ask())
    except nvml.NVMLError:
        return 0


def as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the first processor's lines."""
    lines = read_file(root / "proc/cpuinfo").split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _cpu_clock_mhz(root: Path) -> int:
    """Return the cores' mean clock now, or 0."""
    clocks = [
        float(value) for value in re.findall(r"^cpu MHz\s*: ([\d.]+)$", read_file(root / "proc/cpuinfo"), re.MULTILINE)
    ]
    return round(sum(clocks) / len(clocks)) if clocks else 0


def _physical_cores(root: Path, cpus: frozenset[int]) -> int:
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = read_file(topology / "core_id").strip() or f"cpu {cpu}"
        cores.add((read_file(topology / "physical_package_id").strip(), core))
    return len(cores)


def _last_level_cache_bytes(root: Path, cpus: frozenset[int]) -> int:
    """Add up the caches of the highest level, each counted once however many cores share it."""
    sizes: dict[int, dict[str, int]] = {}
    for cpu in cpus:
        for cache in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            size = re.fullmatch(r"(\d+)([KM]?)", read_file(cache / "size").strip())
            level = read_file(cache / "level").strip()
            if size and level.isdigit() and read_file(cache / "type").strip() != "Instruction":
                sharers = read_file(cache / "shared_cpu_list").strip() or f"cpu {cpu}"
                sizes.setdefault(int(level), {})[sharers] = int(size[1]) * {"K": KIB, "M": MIB, "": 1}[size[2]]
    return sum(sizes[max(sizes)].values()) if sizes else 0


def _memory_total_bytes(root: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", read_file(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * KIB if match else 0
