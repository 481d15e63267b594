"""CUDA's compiler: where it is, and the flags with which it builds one helper for every GPU.

One build serves all: a cache that is shared, a machine with several cards, a card that is changed or not visible.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from planner.errors import AtsplanError

FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")  # of packages that do not put them on PATH
MIN_GPU_ARCHITECTURE = 70  # the first with __nanosleep


def find_nvcc() -> str | None:
    """Return nvcc's path, or None. The Makefile looks in the same places; a launcher's PATH is not a shell's."""
    folders = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath), *FOLDERS])
    return shutil.which(os.environ.get("CUDACXX", "")) or shutil.which("nvcc", path=path)


def nvcc_release(nvcc: str) -> str:
    """Return the CUDA release, such as "13.0"; "0" if it does not say. Raises AtsplanError if nvcc does not work."""
    found = re.search(r"release (\d+\.\d+)", _ask(nvcc, "--version"))
    return found[1] if found else "0"


def host_compiler_flags() -> list[str]:
    """Return which C++ compiler nvcc shall use: each release supports some, and no newer ones."""
    host = os.environ.get("CUDAHOSTCXX") or os.environ.get("CXX")
    return ["-ccbin", host] if host else []


def architecture_flags(nvcc: str) -> list[str]:
    """Return code for every GPU that nvcc knows, and PTX, which later ones translate."""
    known = {int(number) for number in re.findall(r"^sm_(\d+)$", _ask(nvcc, "--list-gpu-code"), re.MULTILINE)}
    numbers = sorted(number for number in known if number >= MIN_GPU_ARCHITECTURE)
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return [*code, *(f"-gencode=arch=compute_{number},code=compute_{number}" for number in numbers[-1:])]


def include_flags(nvcc: str) -> list[str]:
    """Return nvcc's own include flags, for the files that the C++ compiler compiles."""
    dry_run = ("--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull)
    found = re.search(r"^#\$ INCLUDES=(.*)$", _ask(nvcc, *host_compiler_flags(), *dry_run), re.MULTILINE)
    return re.findall(r"-I[^\s\"]+", found[1]) if found else []


def _ask(*command: str) -> str:
    """Return what nvcc prints. Raises AtsplanError if it fails."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "output", "") or error).strip().rpartition("\n")[2].rstrip(".")
        raise AtsplanError(
            f"CUDA's compiler {command[0]} does not work: {reason}.",
            "Repair the CUDA toolkit, or name another nvcc in CUDACXX, or another C++ compiler for it in CUDAHOSTCXX.",
        ) from error
