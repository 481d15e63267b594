"""Where nvcc is looked for; that make looks there too and builds for the GPU it finds. Scripts stand in for both."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime import nvcc

ROOT = Path(nvcc.__file__).parents[1]
SYSTEM_FOLDERS = ("/usr/bin", "/bin")
TWO_GPUS = "echo 'GPU 0: NVIDIA RTX (UUID: GPU-1)'; echo 'GPU 1: NVIDIA RTX (UUID: GPU-2)'"
NO_GPU = "echo 'No devices were found'; exit 6"


def write_script(path: Path, command: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return path


def make(*arguments: str) -> str:
    """Return what make prints, as one that no other make has started."""
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--silent", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_nvcc_is_found_in_the_same_places_by_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = [write_script(tmp_path / name / "bin/nvcc", "") for name in ("compiler", "my CUDA", "path", "PATH")]
    monkeypatch.setenv("CUDACXX", str(compilers[0]))
    monkeypatch.setenv("CUDA_HOME", str(compilers[1].parents[1]))
    monkeypatch.setenv("CUDA_PATH", str(compilers[2].parents[1]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(compilers[3].parent), *SYSTEM_FOLDERS]))

    def found() -> tuple[str, str]:
        return nvcc.find_nvcc() or "", make("--eval", "nvcc: ; @echo '$(NVCC)'", "nvcc").strip()

    for compiler in compilers:
        assert found() == (str(compiler), str(compiler))
        compiler.unlink()
    installed = [f"{folder}/nvcc" for folder in (*SYSTEM_FOLDERS, *nvcc.FOLDERS)]
    elsewhere = next(filter(os.path.exists, installed), "")
    assert found() == (elsewhere, elsewhere)


def test_make_builds_with_cuda_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = write_script(tmp_path / "cuda/bin/nvcc", "")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), *SYSTEM_FOLDERS]))
    demo = ("--dry-run", f"VENV={tmp_path / 'venv'}", "demo")

    write_script(tmp_path / "nvidia-smi", TWO_GPUS)
    with_cuda = make(*demo)
    assert f'CUDACXX="{compiler}" CMAKE_ARGS=-DGGML_CUDA=on' in with_cuda
    assert "--device cuda0" in with_cuda
    assert "no CUDA compiler" not in with_cuda

    without_nvcc = make(*demo, "NVCC=")
    assert "There is an NVIDIA GPU but no CUDA compiler (nvcc)" in without_nvcc
    assert "--device sim" in without_nvcc
    assert "GGML_CUDA" not in without_nvcc

    write_script(tmp_path / "nvidia-smi", NO_GPU)
    without_gpu = make(*demo, "NVCC=")
    assert "--device sim" in without_gpu
    assert "no CUDA compiler" not in without_gpu
