"""Load llama.cpp and the native helper into this process, and refuse a helper that was built for something else."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AtsplanError, DeviceError, MismatchError

from .bindings import Ggml, Helper
from .build import expected_stamp, find_llama, native_helper
from .native_api import API_VERSION
from .native_log import last_problem
from .session import CapturedLog

HYBRID_DEVICE = "ATS0"
HOST_DEVICE = "ATSHOST"  # computes nothing; its buffer type is the pinned host memory

GPU_QUEUES = "32"  # the most that CUDA knows: streams that share one wait for each other


@dataclass(frozen=True)
class Library:
    """The shared libraries of this process. Their function objects are our own, apart from llama_cpp's."""

    device: str  # the inner device: "cuda0", "sim", ...
    ats: ctypes.CDLL
    ggml: ctypes.CDLL

    @property
    def pci_bus_id(self) -> str:
        """The address of the card; "" for a simulated one."""
        return "" if self.device == "sim" else Ggml(self.ggml).pci_bus_id(ggml_name(self.device))


# ggml registers a plug-in once per process and never lets it go, so this mirrors a state that exists anyway.
_loaded: list[Library] = []


def load(device: str) -> Library:
    """Return the process's libraries with `device` inside the hybrid device, building the helper if need be.

    Raises DeviceError for a second device in one process or one that does not exist, MismatchError for a helper
    of another version, AtsplanError if the helper cannot be built.
    """
    if not _loaded:
        _loaded.append(_load(device, native_helper()))
    (library,) = _loaded
    if library.device != device:
        raise DeviceError(
            f"This process already uses the device {library.device} and cannot change to {device}.",
            "Start another process for another device.",
        )
    return library


def _load(device: str, path: Path) -> Library:
    import llama_cpp._ggml

    os.environ["ATSPLAN_DEVICE"] = ggml_name(device)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", GPU_QUEUES)
    os.environ.pop("ATSPLAN_SETTINGS", None)  # for llama.cpp's own programs, of some exported plan: not of this one
    ggml = ctypes.CDLL("libggml.so", handle=llama_cpp._ggml.libggml._handle)
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    with CapturedLog() as log:  # CUDA introduces itself when it is first asked, or says what it lacks
        present = Ggml(ggml).devices()
    if device != "sim" and ggml_name(device) not in present:
        problem = last_problem(log)
        raise DeviceError(
            f"llama.cpp finds no device {device} here, only {', '.join(name.lower() for name in present)}"
            f"{f': {problem}' if problem else ''}.",
            "Use --device sim, or install llama-cpp-python with CUDA. `atsplan doctor` tells what is missing.",
        )
    try:
        ats = ctypes.CDLL(str(path))
    except OSError as error:
        raise AtsplanError(
            f"The native helper cannot be loaded: {error}.",
            f"Delete the folder {path.parent} to have it built again; libraries must be loadable from there.",
        ) from error
    _check_versions(ats, path)
    with CapturedLog() as log:
        registered = ggml.ggml_backend_load(str(path).encode())
    if not registered or HYBRID_DEVICE not in Ggml(ggml).devices():
        raise DeviceError(
            f"llama.cpp does not accept the device {device}: {last_problem(log) or 'it gave no reason'}",
            "Use --device sim where there is no supported GPU.",
        )
    return Library(device, ats, ggml)


def ggml_name(device: str) -> str:
    """Return what ggml calls a device: "CUDA0" for "cuda0". The simulated one, which it does not know, stays "sim"."""
    return device if device == "sim" else device.upper()


def _check_versions(ats: ctypes.CDLL, path: Path) -> None:
    """Raise MismatchError unless the helper was built from these sources for this llama-cpp-python."""
    wanted = expected_stamp(find_llama())
    try:
        helper = Helper(ats)
        found, version = helper.build_stamp, helper.api_version
    except AttributeError as error:
        found, version = f"none ({error})", 0
    if found != wanted or version != API_VERSION:
        raise MismatchError(
            f"The native helper {path} does not fit this atsplan: it is '{found}' and should be '{wanted}'.",
            "Unset ATSPLAN_NATIVE, or build the helper again with `python -m runtime.build`.",
        )
