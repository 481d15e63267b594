"""The doctor on other people's machines: every finding says the right thing, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from planner.errors import AtsplanError, InvalidFileError
from planner.units import GIB, MIB
from profiler import cli, detect, doctor, doctor_gpu
from profiler.doctor import Diagnosis, examine, view
from profiler.doctor_gpu import examine_gpu
from profiler.doctor_host import examine_host, examine_memory, fast_cores
from profiler.findings import Finding
from runtime.build import Compilers, Llama
from tests.unit.planner_profiles import TINY, synthetic_profile

BIG, SMALL = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "ab")
MODEL = replace(synthetic_profile(TINY).model, name="Large", file_bytes=30 * GIB)


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """pynvml for two cards. `answers` maps a function's name without `nvml` to what it returns, or to what it raises.

    What has no answer is not supported by the driver. Answers that depend on the card are dictionaries by UUID.
    """

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        gib = lambda total, free: SimpleNamespace(total=total * GIB, free=free * GIB)  # noqa: E731
        self.answers: dict[str, Any] = {
            "Init": None, "Shutdown": None, "SystemGetDriverVersion": "580.1", "SystemGetCudaDriverVersion": 13000,
            "DeviceGetCount": 2, "DeviceGetHandleByUUID": lambda uuid: uuid[4:],
            "DeviceGetHandleByIndex": lambda index: (SMALL, BIG)[index], "DeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "DeviceGetName": {BIG: "RTX 4090", SMALL: "GTX 1650"},
            "DeviceGetMemoryInfo": {BIG: gib(24, 23), SMALL: gib(4, 4)},
            "DeviceGetCudaComputeCapability": {BIG: (8, 9), SMALL: (7, 5)},
            "DeviceGetComputeRunningProcesses": [], "DeviceGetGraphicsRunningProcesses": [],
            "DeviceGetMaxPcieLinkGeneration": 4, "DeviceGetMaxPcieLinkWidth": 16,
            "DeviceGetCurrPcieLinkGeneration": 1, "DeviceGetCurrPcieLinkWidth": 16, "DeviceGetPerformanceState": 8,
            "DeviceGetEccMode": [0, 0], "DeviceGetTotalEccErrors": 0, "DeviceGetDisplayActive": 0,
            "DeviceGetTemperature": 41, "DeviceGetCurrentClocksEventReasons": 1,
            "DeviceGetEnforcedPowerLimit": 450_000, "DeviceGetPowerManagementDefaultLimit": 450_000,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            answer = self.answers.get(name.removeprefix("nvml"), FakeNvmlError("Not Supported"))
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, dict):
                return answer[arguments[0]]
            return answer(*arguments) if callable(answer) else answer

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for module in (detect, doctor_gpu):
        monkeypatch.setattr(module, "cuda_gpu_uuids", lambda: (BIG, SMALL))
    return fake


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_llama", lambda: Llama("0.3.36", Path(), has_cuda=True))
    monkeypatch.setattr(doctor, "built_helper", lambda: None)
    monkeypatch.setattr(doctor, "find_compilers", lambda llama: Compilers("/usr/bin/g++", "/usr/bin/nvcc"))
    monkeypatch.setattr(doctor, "find_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setattr(doctor, "nvcc_release", lambda nvcc: "13.0")
    monkeypatch.setattr(doctor, "_pinned_version", lambda: "0.3.36")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the root of a machine with four processors on four alike cores and 32 GiB, 28 of them available."""
    write(tmp_path, "proc/cpuinfo", "model name\t: Test CPU\nflags\t: avx2\n")
    write(tmp_path, "proc/meminfo", f"MemTotal: {32 * 1024**2} kB\nMemAvailable: {28 * 1024**2} kB\n")
    write(tmp_path, "proc/version", "Linux version 6.8.0-generic")
    for cpu in range(4):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(cpu))
    return tmp_path


def gpu_finding(root: Path, topic: str) -> Finding:
    return next(finding for finding in examine_gpu(root).findings if finding.topic == topic)


def host_finding(root: Path, topic: str, load: float = 0.1) -> Finding:
    return next(item for item in examine_host(root, frozenset(range(4)), load) if item.topic == topic)


def test_a_good_gpu(nvml: FakeNvml, machine: Path) -> None:
    report = examine_gpu(machine)
    assert {finding.level for finding in report.findings} == {"ok"}
    assert (report.free_bytes, report.driver_cuda_major) == (23 * GIB, 13)
    texts = {finding.topic: finding.text for finding in report.findings}
    assert texts["driver"] == "580.1, runs CUDA up to 13.0."
    assert texts["GPU"] == f"cuda0 is RTX 4090 (GPU-{BIG}); CUDA shows 2 of 2 GPUs."
    assert texts["compute"] == "Compute capability 8.9."
    assert texts["VRAM"] == "23.00 GiB of 24.00 GiB free."
    assert "Generation 1 x16 now, 4 x16 at most: up to 32 GB/s. It is idle" in texts["PCIe"]
    assert texts["power limit"] == "Power limit 450 W, by default 450 W."


@pytest.mark.parametrize(
    ("topic", "level", "changed", "words"),
    [
        ("compute", "error", {"DeviceGetCudaComputeCapability": {BIG: (6, 1)}}, "6.1; 7.0 or newer is needed"),
        ("PCIe", "warning", {"DeviceGetCurrPcieLinkWidth": 4}, "x4 now, 4 x16 at most: up to 8 GB/s. Not all lanes"),
        ("PCIe", "warning", {"DeviceGetPerformanceState": 0}, "slow although the GPU is active"),
        ("ECC", "ok", {"DeviceGetEccMode": [1, 1]}, "On."),
        ("ECC", "ok", {"DeviceGetEccMode": FakeNvmlError("Not Supported")}, "none that can be switched"),
        ("ECC", "warning", {"DeviceGetEccMode": [1, 1], "DeviceGetTotalEccErrors": 3}, "3 memory errors"),
        ("clocks", "warning", {"DeviceGetCurrentClocksEventReasons": 0x44}, "its power limit and its temperature"),
        ("power limit", "warning", {"DeviceGetEnforcedPowerLimit": 80_000}, "80 W, by default 450 W"),
        ("GPU", "error", {"DeviceGetCount": 0}, "The driver finds no GPU"),
        ("GPU", "error", {"DeviceGetHandleByUUID": FakeNvmlError("Lost")}, "cannot describe cuda0: Lost"),
        ("driver", "error", {"Init": FakeNvmlError("Driver/library version mismatch")}, "updated while"),
        ("driver", "error", {"Init": FakeNvmlError("NVML Shared Library Not Found")}, "No NVIDIA driver answers"),
        ("driver", "error", {"DeviceGetCount": FakeNvmlError("GPU is lost")}, "fails: GPU is lost"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_gpu(
    nvml: FakeNvml, machine: Path, topic: str, level: str, changed: dict[str, Any], words: str
) -> None:
    nvml.answers |= changed
    finding = gpu_finding(machine, topic)
    assert (finding.level, words in finding.text) == (level, True), finding
    assert finding.remedy or level == "ok"


def test_what_the_driver_does_not_tell_is_left_out(nvml: FakeNvml, machine: Path) -> None:
    for name in list(nvml.answers):
        if any(word in name for word in ("Pcie", "Power", "Clocks", "Temperature", "Processes", "Display", "CudaDri")):
            del nvml.answers[name]
    findings = examine_gpu(machine).findings
    assert {finding.level for finding in findings} == {"ok"}
    assert not {"PCIe", "power limit"} & {finding.topic for finding in findings}


def test_who_holds_the_memory(nvml: FakeNvml, machine: Path) -> None:
    write(machine, "proc/77/comm", "firefox\n")
    nvml.answers["DeviceGetMemoryInfo"][BIG].free = 20 * GIB
    nvml.answers["DeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=88, usedGpuMemory=None)]
    nvml.answers["DeviceGetGraphicsRunningProcesses"] = [SimpleNamespace(pid=77, usedGpuMemory=512 * MIB)]
    finding = gpu_finding(machine, "VRAM")
    assert finding.level == "warning"
    assert finding.text.endswith("held by firefox (77) 512 MiB, a process elsewhere (88).")
    assert "--vram 20224M" in finding.remedy


def test_the_wrong_gpu_is_chosen(nvml: FakeNvml, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for module in (detect, doctor_gpu):
        monkeypatch.setattr(module, "cuda_gpu_uuids", lambda: (SMALL,))
    finding = gpu_finding(machine, "GPU")
    assert finding.level == "warning"
    assert f"cuda0 is GTX 1650 (GPU-{SMALL}), by CUDA_VISIBLE_DEVICES=1; CUDA shows 1 of 2 GPUs." in finding.text
    assert finding.remedy.endswith(f"CUDA_VISIBLE_DEVICES=GPU-{BIG}")
    monkeypatch.setattr(doctor_gpu, "cuda_gpu_uuids", lambda: ())
    assert gpu_finding(machine, "GPU").text == "CUDA_VISIBLE_DEVICES=1 hides every GPU."
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_finding(machine, "GPU").text == "The driver knows 2 GPUs, but CUDA shows none."


def test_a_desktop_on_the_gpu(nvml: FakeNvml, machine: Path) -> None:
    write(machine, "sys/class/drm/card0/device/vendor", "0x10de\n")
    nvml.answers["DeviceGetDisplayActive"] = 1
    assert gpu_finding(machine, "display").level == "ok"
    write(machine, "sys/class/drm/card1/device/vendor", "0x8086\n")
    finding = gpu_finding(machine, "display")
    assert (finding.level, "Intel graphics too" in finding.text) == ("warning", True)
    nvml.answers["DeviceGetDisplayActive"] = 0
    assert gpu_finding(machine, "display").text == "No desktop on this GPU: there is Intel graphics."


def test_a_good_host(machine: Path) -> None:
    findings = [*examine_host(machine, frozenset(range(4)), 0.3), *examine_memory(machine, None, 0)]
    assert {finding.level for finding in findings} == {"ok"}
    texts = {finding.topic: finding.text for finding in findings}
    assert texts["CPU"] == "Test CPU: 4 cores, all alike; AVX2."
    assert texts["RAM"].startswith("28.00 GiB of 32.00 GiB available. Up to 28.80 GiB can be pinned")


def test_fast_and_slow_cores(machine: Path) -> None:
    write(machine, "sys/devices/cpu_core/cpus", "0-2\n")
    write(machine, "sys/devices/cpu_atom/cpus", "3\n")
    assert fast_cores(machine, frozenset(range(4))) == (3, 1)
    assert "--threads 3" in host_finding(machine, "CPU").remedy
    assert fast_cores(machine, frozenset({3})) == (1, 0)


def test_fast_and_slow_cores_of_arm(machine: Path) -> None:
    for cpu, capacity in enumerate((1024, 900, 400, 400)):
        write(machine, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert fast_cores(machine, frozenset(range(4))) == (2, 2)


@pytest.mark.parametrize(
    ("topic", "files", "words"),
    [
        ("system", {"proc/version": "Linux version 5.15.1-Microsoft-standard-WSL2"}, "Windows moves it"),
        ("power", {"sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": "0"}, "on battery"),
        ("power", {"sys/firmware/acpi/platform_profile": "quiet\n"}, "profile is quiet"),
        (
            "power",
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
            },
            "lowest clock",
        ),
    ],
)
def test_what_is_wrong_with_a_host(machine: Path, topic: str, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        write(machine, name, text)
    finding = host_finding(machine, topic)
    assert (finding.level, words in finding.text) == ("warning", True), finding
    assert finding.remedy


def test_a_busy_machine(machine: Path) -> None:
    assert host_finding(machine, "load", 2.5).level == "warning"
    write(machine, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    write(machine, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate")
    assert host_finding(machine, "power").level == "ok"  # that driver's powersave is its normal mode


@pytest.mark.parametrize(
    ("free_vram", "level", "words"),
    [
        (8 * GIB, "ok", "fits into RAM and free VRAM"),
        (GIB * 3 // 2, "warning", "512 MiB more RAM than is available"),
        (0, "error", "together hold 28.80 GiB"),
    ],
)
def test_a_model(machine: Path, free_vram: int, level: str, words: str) -> None:
    finding = examine_memory(machine, MODEL, free_vram)[-1]
    assert (finding.level, words in finding.text) == (level, True), finding
    assert "Large is 30.00 GiB" in finding.text


def test_software(nvml: FakeNvml, software: None, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {finding.topic: finding.level for finding in examine(None, machine).findings}
    assert (levels["llama.cpp"], levels["helper"], levels["nvcc"]) == ("ok", "ok", "ok")

    def software_finding(topic: str) -> Finding:
        return next(finding for finding in examine(None, machine).findings if finding.topic == topic)

    monkeypatch.setattr(doctor, "nvcc_release", lambda nvcc: "14.1")
    assert software_finding("nvcc").text == "nvcc is of CUDA 14.1; the driver runs CUDA 13 and older."
    broken = AtsplanError("CUDA's compiler nvcc does not work: no.", "Repair it.")
    monkeypatch.setattr(doctor, "nvcc_release", Mock(side_effect=broken))
    assert software_finding("nvcc") == Finding("nvcc", "error", broken.message, broken.remedy)
    monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
    assert software_finding("nvcc").level == "warning"
    monkeypatch.setattr(doctor, "_pinned_version", lambda: "0.3.99")
    assert software_finding("llama.cpp").text.endswith("atsplan needs 0.3.99.")
    monkeypatch.setattr(doctor, "_pinned_version", lambda: "")
    monkeypatch.setattr(doctor, "find_llama", lambda: Llama("0.3.36", Path(), has_cuda=False))
    assert "without CUDA" in software_finding("llama.cpp").text
    assert "CMAKE_ARGS=-DGGML_CUDA=on" in software_finding("llama.cpp").remedy

    def fail(*_: object) -> Llama:
        raise AtsplanError("Nothing is here.", "Install it.")

    monkeypatch.setattr(doctor, "find_compilers", fail)
    assert software_finding("helper") == Finding("helper", "error", "Nothing is here.", "Install it.")
    monkeypatch.setattr(doctor, "find_llama", fail)
    assert software_finding("llama.cpp").level == "error"


def test_exit_codes() -> None:
    ok, warning, error = Finding("a", "ok", "."), Finding("b", "warning", ".", "!"), Finding("c", "error", ".", "!")
    assert [Diagnosis(items).exit_code for items in ((ok,), (ok, warning), (error, warning, ok))] == [0, 1, 2]


def test_every_problem_has_a_remedy_and_fits_the_terminal(nvml: FakeNvml, software: None, machine: Path) -> None:
    nvml.answers |= {"DeviceGetCurrPcieLinkWidth": 8, "DeviceGetEnforcedPowerLimit": 1, "DeviceGetDisplayActive": 1}
    diagnosis = examine(None, machine)
    assert all(finding.remedy for finding in diagnosis.findings if finding.level != "ok")
    for width in (60, 80, 140):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            console.print(view(diagnosis))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_the_command(nvml: FakeNvml, software: None, smollm2: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    cli.register(app)
    result = CliRunner().invoke(app, ["doctor", str(smollm2), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == answer["exit_code"] < 2
    assert {"topic", "level", "text", "remedy"} == set(answer["findings"][0])
    assert any("Smollm2" in finding["text"] for finding in answer["findings"])
    assert "Plans can run here" in CliRunner().invoke(app, ["doctor"]).stdout or answer["exit_code"] == 0
    (tmp_path / "not.gguf").write_text("hello")
    with pytest.raises(InvalidFileError):
        CliRunner().invoke(app, ["doctor", str(tmp_path / "not.gguf")], catch_exceptions=False)
