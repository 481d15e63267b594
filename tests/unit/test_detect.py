"""Detection: right values from another machine's /proc, /sys and driver, and a clear error where there is no GPU."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.errors import DeviceError
from planner.hardware import Gpu
from profiler import detect
from runtime.build import Llama

MIB = 1024**2

X86_CPU = """processor\t: {number}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Core(TM) i7-11800H
cpu MHz\t\t: {clock}
flags\t\t: fpu pni ssse3 avx avx2 f16c fma bmi2 avx512f avx512_vnni aes

"""


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine of two sockets: 8 processors on 4 cores, an L3 cache of 24 MiB per socket, 32 GiB of memory."""
    write(tmp_path, "proc/cpuinfo", "".join(X86_CPU.format(number=n, clock=2000 + 100 * n) for n in range(8)))
    write(tmp_path, "proc/meminfo", "MemTotal:       33554432 kB\nMemFree:  1 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    for cpu in range(8):
        socket, core = cpu // 4, cpu % 4 // 2
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        write(tmp_path, f"{folder}/topology/physical_package_id", f"{socket}\n")
        write(tmp_path, f"{folder}/topology/core_id", f"{core}\n")
        first = 4 * socket
        for index, (level, kind, size, sharers) in enumerate([
            (1, "Data", "48K", f"{cpu & ~1}-{cpu | 1}"),
            (1, "Instruction", "32K", f"{cpu & ~1}-{cpu | 1}"),
            (2, "Unified", "1280K", f"{cpu & ~1}-{cpu | 1}"),
            (3, "Unified", "24M", f"{first}-{first + 3}"),
        ]):  # fmt: skip
            for name, value in {"level": level, "type": kind, "size": size, "shared_cpu_list": sharers}.items():
                write(tmp_path, f"{folder}/cache/index{index}/{name}", f"{value}\n")
    return tmp_path


def test_cpu(machine: Path) -> None:
    cpu = detect.detect_cpu(machine, frozenset(range(8)))
    assert cpu.model == "Intel(R) Core(TM) i7-11800H"
    assert (cpu.logical_cores, cpu.physical_cores) == (8, 4)
    assert cpu.isa == ("AVX", "AVX2", "AVX512", "AVX512_VNNI", "BMI2", "F16C", "FMA", "SSE3", "SSSE3")
    assert cpu.last_level_cache_bytes == 48 * MIB
    assert cpu.memory_bytes == 32 * 1024 * MIB


def test_affinity_is_honoured(machine: Path) -> None:
    cpu = detect.detect_cpu(machine, frozenset({0, 1, 2}))
    assert (cpu.logical_cores, cpu.physical_cores, cpu.last_level_cache_bytes) == (3, 2, 24 * MIB)


@pytest.mark.parametrize(
    ("quota", "n_logical", "n_physical"),
    [("max 100000", 8, 4), ("600000 100000", 6, 4), ("250000 100000", 2, 2), ("50000 100000", 1, 1)],
)
def test_control_groups_limit_cores(machine: Path, quota: str, n_logical: int, n_physical: int) -> None:
    write(machine, "proc/self/cgroup", "0::/box/inner\n")
    write(machine, "sys/fs/cgroup/box/cpu.max", quota)
    write(machine, "sys/fs/cgroup/box/inner/cpu.max", "max 100000\n")
    cpu = detect.detect_cpu(machine, frozenset(range(8)))
    assert (cpu.logical_cores, cpu.physical_cores) == (n_logical, n_physical)


def test_control_groups_limit_memory(machine: Path) -> None:
    write(machine, "sys/fs/cgroup/memory.max", f"{2048 * MIB}\n")
    assert detect.detect_cpu(machine, frozenset({0})).memory_bytes == 2048 * MIB
    write(machine, "sys/fs/cgroup/memory.max", "max\n")
    assert detect.detect_cpu(machine, frozenset({0})).memory_bytes == 32 * 1024 * MIB


def test_control_groups_of_version_1(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n")
    write(machine, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000\n")
    write(machine, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(machine, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", f"{1024 * MIB}\n")
    cpu = detect.detect_cpu(machine, frozenset(range(8)))
    assert (cpu.logical_cores, cpu.memory_bytes) == (3, 1024 * MIB)
    write(machine, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    assert detect.detect_cpu(machine, frozenset(range(8))).logical_cores == 8


def test_an_arm_machine(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sve\nCPU part\t: 0xd40\n")
    cpu = detect.detect_cpu(tmp_path, frozenset(range(4)))
    assert cpu.isa == ("DOTPROD", "MATMUL_INT8", "NEON", "SVE")
    assert cpu.model.endswith("0xd40")
    assert (cpu.logical_cores, cpu.physical_cores, cpu.last_level_cache_bytes) == (4, 4, 0)  # /sys is hidden


def test_this_machine() -> None:
    cpu = detect.detect_cpu()
    assert 1 <= cpu.physical_cores <= cpu.logical_cores
    assert cpu.memory_bytes > 256 * MIB
    assert cpu.model
    state = detect.machine_state("none")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", state.taken_at)
    assert state.gpu_uuid == ""
    software = detect.detect_software()
    assert software.llama_cpp_python == "0.3.36"
    assert re.fullmatch(r"[0-9a-f]*", software.llama_cpp_commit)


class FakeNvmlError(Exception):
    pass


@dataclass
class FakeGpu:
    uuid: str
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    link: tuple[int, int] | None  # None: the driver does not tell
    board: FakeGpu | None = None  # of a MIG instance
    has_display: bool | None = None  # None: the driver does not tell


@dataclass
class FakeNvml:
    """The functions of pynvml that detection calls."""

    gpus: list[FakeGpu]
    n_open: int = 0
    NVMLError: type[Exception] = FakeNvmlError
    NVML_CLOCK_SM: int = 1
    NVML_TEMPERATURE_GPU: int = 0
    broken: bool = False
    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        if self.broken:
            raise FakeNvmlError("Driver/library version mismatch")
        self.n_open += 1

    def nvmlShutdown(self) -> None:
        self.n_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu | None:
        return gpu.board

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> bytes:
        return gpu.uuid.encode()

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetDisplayActive(self, gpu: FakeGpu) -> int:
        if gpu.has_display is None:
            raise FakeNvmlError("Not Supported")
        return int(gpu.has_display)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return self._link(gpu)[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return self._link(gpu)[1]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, _: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, _: int) -> int:
        raise FakeNvmlError("Not Supported")

    def _link(self, gpu: FakeGpu) -> tuple[int, int]:
        if gpu.link is None:
            raise FakeNvmlError("Not Supported")
        return gpu.link


OLD, NEW, SLICE = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two cards and a MIG instance. NVML lists the old card first; CUDA, fastest first, calls the new one cuda0."""
    old = FakeGpu(f"GPU-{OLD}", "GTX 1060", 6144 * MIB, 5000 * MIB, (6, 1), (3, 16))
    new = FakeGpu(f"GPU-{NEW}", "RTX 4090", 24564 * MIB, 22000 * MIB, (8, 9), (4, 16))
    instance = FakeGpu(f"MIG-{SLICE}", "H200 MIG 1g.18gb", 16384 * MIB, 16000 * MIB, (9, 0), None, board=new)
    fake = FakeNvml([old, new, instance])
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(detect, "cuda_gpu_uuids", lambda: (NEW, OLD, SLICE))
    monkeypatch.setattr(detect, "find_llama", lambda: Llama("0.3.36", Path(), has_cuda=True))
    return fake


def test_a_gpu_is_found_by_cudas_number(nvml: FakeNvml) -> None:
    assert detect.detect_hardware("cuda0").gpu == Gpu("RTX 4090", 24564 * MIB, "8.9", 4, 16, "cuda")
    gpu = detect.detect_hardware("cuda1").gpu
    assert gpu is not None and gpu.name == "GTX 1060"
    assert nvml.n_open == 0


def test_a_mig_instance_has_its_boards_link(nvml: FakeNvml) -> None:
    gpu = detect.detect_hardware("cuda2").gpu
    assert gpu == Gpu("H200 MIG 1g.18gb", 16384 * MIB, "9.0", 4, 16, "cuda")


def test_what_the_driver_does_not_tell_is_zero(nvml: FakeNvml) -> None:
    nvml.gpus[0].link = None
    gpu = detect.detect_hardware("cuda1").gpu
    assert gpu is not None and (gpu.pcie_generation, gpu.pcie_width) == (0, 0)


def test_the_state_of_a_gpu(nvml: FakeNvml) -> None:
    state = detect.machine_state("cuda0")
    assert (state.device, state.driver, state.gpu_uuid) == ("cuda0", "580.1", f"GPU-{NEW}")
    assert state.gpu_memory_free_bytes == 22000 * MIB
    assert (state.gpu_clock_mhz, state.gpu_temperature_celsius) == (1980, 0)
    assert not state.gpu_has_display


def test_a_desktop_is_noticed(nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in nvml.gpus:
        gpu.has_display = True
    assert detect.machine_state("cuda0").gpu_has_display
    for gpu in nvml.gpus:
        gpu.has_display = None
    assert not detect.machine_state("cuda0").gpu_has_display
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 6.6.87.2-microsoft-standard-WSL2")
    monkeypatch.setattr(detect, "_ROOT", tmp_path)
    assert detect.machine_state("cuda0").gpu_has_display


def test_devices_are_resolved(nvml: FakeNvml) -> None:
    assert detect.resolve_device("auto") == "cuda0"
    assert detect.resolve_device("CUDA1") == "cuda1"
    assert detect.resolve_device(f"GPU-{OLD.upper()}") == "cuda1"
    assert detect.resolve_device("GPU-aaaa") == "cuda1"
    assert detect.resolve_device(f"MIG-{SLICE}") == "cuda2"
    assert detect.resolve_device("sim") == "sim"
    assert detect.resolve_device("none") == "none"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cuda3", "There is no cuda3 here: CUDA shows only cuda0 to cuda2"),
        ("GPU-dddd", "CUDA shows no GPUs with the UUID GPU-dddd"),
        ("GPU-", "CUDA shows several GPUs"),
        ("gpu", "'gpu' is not a device"),
        ("cuda-1", "'cuda-1' is not a device"),
        ("cuda99999999999", "is not a device"),
        ("", "'' is not a device"),
    ],
)
def test_devices_that_are_not_there(nvml: FakeNvml, text: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason) as caught:
        detect.resolve_device(text)
    assert caught.value.remedy


def test_a_plans_device_is_not_trusted() -> None:
    with pytest.raises(DeviceError, match="'nonsense' is not a device"):
        detect.detect_hardware("nonsense")


def test_a_driver_that_fails_is_said(nvml: FakeNvml) -> None:
    nvml.broken = True
    with pytest.raises(DeviceError, match="cannot describe cuda0: Driver/library version mismatch"):
        detect.detect_hardware("cuda0")
    nvml.broken = False
    nvml.gpus.clear()
    with pytest.raises(DeviceError, match="cannot describe cuda0: Not Found"):
        detect.machine_state("cuda0")
    assert nvml.n_open == 0


def test_a_build_without_cuda(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "find_llama", lambda: Llama("0.3.36", Path(), has_cuda=False))
    for text in ("auto", "cuda0"):
        with pytest.raises(DeviceError, match="built without CUDA"):
            detect.resolve_device(text)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "cuda_gpu_uuids", lambda: ())
    assert detect.resolve_device("auto") == "none"
    assert detect.detect_hardware("none").gpu is None
    with pytest.raises(DeviceError, match="There is no cuda0 here: CUDA shows no GPU"):
        detect.detect_hardware("cuda0")
    simulated = detect.detect_hardware("sim").gpu
    assert simulated is not None
    assert (simulated.name, simulated.backend) == ("simulated", "sim")
    assert simulated.memory_bytes % 1024**3 == 0 < simulated.memory_bytes


def test_the_fingerprint_is_stable() -> None:
    assert detect.detect_hardware("sim").fingerprint == detect.detect_hardware("sim").fingerprint
    assert detect.detect_hardware("sim").fingerprint != detect.detect_hardware("none").fingerprint
