"""`atsplan doctor`: what keeps a plan from running here, or from running fast, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.errors import AtsplanError
from planner.gguf_model import read_model_info
from planner.measurements import ModelInfo
from runtime.build import Llama, built_helper, find_compilers, find_llama
from runtime.nvcc import find_nvcc, nvcc_release

from .doctor_gpu import examine_gpu
from .doctor_host import examine_host, examine_memory
from .findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: all is well, 1: there are warnings, 2: no plan can run on a GPU here."""
        levels = {finding.level for finding in self.findings}
        return 2 if "error" in levels else 1 if "warning" in levels else 0

    def to_dict(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code, "findings": [asdict(finding) for finding in self.findings]}


def examine(model_path: Path | None = None, root: Path = Path("/")) -> Diagnosis:
    """Look at everything, and at whether the model fits. Raises AtsplanError only for an unusable model file."""
    model: ModelInfo | None = read_model_info(model_path) if model_path else None
    gpu = examine_gpu(root)
    return Diagnosis((
        *_software(gpu.driver_cuda_major),
        *gpu.findings,
        *examine_memory(root, model, gpu.free_bytes),
        *examine_host(root, frozenset(os.sched_getaffinity(0)), os.getloadavg()[0]),
    ))  # fmt: skip


def doctor_command(model_path: Path | None, *, as_json: bool) -> int:
    """Print the diagnosis and return its exit code."""
    diagnosis = examine(model_path)
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=1))
    else:
        Console().print(view(diagnosis), highlight=False)
    return diagnosis.exit_code


def view(diagnosis: Diagnosis) -> RenderableType:
    """Return a line per finding, its remedy below it, and the verdict."""
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style="dim" if finding.level == "ok" else "bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.topic, text)
    n_warnings = sum(finding.level == "warning" for finding in diagnosis.findings)
    warnings = f"{n_warnings} warning{'s' if n_warnings > 1 else ''}"
    verdict = {0: "All is well.", 1: f"Plans can run here, with {warnings}.", 2: "No plan can run on a GPU here."}
    return Group(table, Text(f"\n{verdict[diagnosis.exit_code]}", style="bold"))


def _software(driver_cuda_major: int) -> list[Finding]:
    try:
        llama = find_llama()
    except AtsplanError as error:
        return [Finding("llama.cpp", "error", error.message, error.remedy)]
    return [_llama(llama), *_compilers(llama, driver_cuda_major)]


def _llama(llama: Llama) -> Finding:
    package = f"llama-cpp-python {llama.version}"
    wanted = _pinned_version()
    install = f"pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python=={wanted or llama.version}"
    if wanted and wanted != llama.version:
        return Finding("llama.cpp", "error", f"{package} is installed; atsplan needs {wanted}.", install)
    if not llama.has_cuda:
        text = f"{package} was built without CUDA: only --device sim works."
        return Finding("llama.cpp", "error", text, f"CMAKE_ARGS=-DGGML_CUDA=on {install}")
    return Finding("llama.cpp", "ok", f"{package}, built with CUDA.")


def _compilers(llama: Llama, driver_cuda_major: int) -> list[Finding]:
    """The native helper is compiled here, with nvcc where llama.cpp has CUDA."""
    findings = []
    try:
        built = built_helper()
        cxx = find_compilers(llama).cxx if built is None else ""
        text = f"The native helper is built ({built})." if built else f"{cxx} will build the native helper."
        findings.append(Finding("helper", "ok", text))
    except AtsplanError as error:
        findings.append(Finding("helper", "error", error.message, error.remedy))
    nvcc = find_nvcc()
    if nvcc is not None:
        findings.append(_nvcc(nvcc, driver_cuda_major))
    elif llama.has_cuda:
        text = "Without nvcc the helper lacks its own kernels: every change between CPU and GPU takes longer."
        findings.append(Finding("nvcc", "warning", text, "Install the CUDA toolkit."))
    return findings


def _nvcc(nvcc: str, driver_cuda_major: int) -> Finding:
    try:
        release = nvcc_release(nvcc)
    except AtsplanError as error:
        return Finding("nvcc", "error", error.message, error.remedy)
    if 0 < driver_cuda_major < int(release.partition(".")[0]):
        text = f"nvcc is of CUDA {release}; the driver runs CUDA {driver_cuda_major} and older."
        remedy = f"Update the driver, or build with the CUDA toolkit {driver_cuda_major}."
        return Finding("nvcc", "warning", text, remedy)
    return Finding("nvcc", "ok", f"CUDA {release} ({nvcc}).")


def _pinned_version() -> str:
    """Return the llama-cpp-python that the installed atsplan asks for, or "" if it is not installed as a package."""
    try:
        required = importlib.metadata.requires("atsplan") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((item.partition("==")[2] for item in required if item.startswith("llama-cpp-python==")), "")
