"""Run a module of this package in a child process: llama.cpp may abort, and a device is given back for certain.

The child reads one JSON request from stdin and prints one JSON answer. An abort becomes one AtsplanError.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError, DeviceError, InfeasibleError, InvalidFileError, MismatchError
from planner.records import to_json

from .native_log import last_problem
from .supervise import end_with_parent

_PARENT = "ATSPLAN_PARENT"  # its process id
_KNOWN_ERROR = 3  # the exit status of a child that prints its error as the answer
_ERRORS = {
    kind.__name__: kind for kind in (AtsplanError, DeviceError, InfeasibleError, InvalidFileError, MismatchError)
}


def call(module: str, request: Any, *, purpose: str, timeout_seconds: float) -> str:
    """Return the JSON that `module` answers to `request`.

    Raises the child's own AtsplanError, or, if the child dies, one that starts with `purpose` ("Cannot do this").
    """
    try:
        child = subprocess.run(
            command(module),
            input=json.dumps(request),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AtsplanError(
            f"{purpose}: no answer within {timeout_seconds:.0f} s.", "Try again when the machine is idle."
        ) from error
    if child.returncode == 0:
        return child.stdout
    if child.returncode == _KNOWN_ERROR:
        kind, message, remedy = json.loads(child.stdout)
        raise _ERRORS[kind](message, remedy)
    if child.returncode == -signal.SIGILL:  # virtual machines claim extensions, such as AMX, that they do not allow
        raise DeviceError(f"{purpose}: not usable on this CPU, which lacks an instruction (SIGILL).")
    how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit status {child.returncode}"
    raise AtsplanError(f"{purpose}: {last_problem(child.stderr.splitlines()) or how}")


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]  # -P: not from the current folder


def environment() -> dict[str, str]:
    """Return the variables for a child that is to find this package."""
    python_path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "GGML_NO_BACKTRACE": "1",
        "PYTHONPATH": python_path,
        "PYTHONIOENCODING": "utf-8",
        _PARENT: str(os.getpid()),
    }


def answer(function: Callable[[Any], object]) -> int:
    """Print what `function` (a record) makes of the request on stdin, and return the exit status."""
    end_with_parent()
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):  # it died before that
        return 128 + signal.SIGTERM
    try:
        print(to_json(function(json.load(sys.stdin))))
    except AtsplanError as error:
        print(json.dumps([type(error).__name__, error.message, error.remedy]))
        return _KNOWN_ERROR
    return 0
