"""Run a command in a child process: llama.cpp ends the process on some bad input, and the system may end it too.

Whatever happens there, the user gets one clear line and an exit status.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from .native_log import last_problem

if TYPE_CHECKING:
    from planner.errors import DeviceError

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_N_IMPATIENT, _IMPATIENT_SECONDS = 3, 2.0  # so many times Ctrl-C so quickly: native code does not let Python end it
_PR_SET_PDEATHSIG = 1


def supervise() -> None:
    """Go on in a child process. The parent stays here and exits with its status, or 128 + the signal it was sent.

    Raises DeviceError in the parent if the child was ended by anything else.
    """
    said = os.memfd_create("atsplan-native-stderr")  # by native code; Python's own messages go to the terminal
    watched = _FORWARDED | {signal.SIGCHLD}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent()
        if os.getppid() != parent:  # it died before that
            os._exit(128 + signal.SIGTERM)
        _become_child(said)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return
    try:
        status, sent = _wait(child, watched)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)  # everything that is to be done at exit belongs to the child
    if sent is not None:
        os._exit(128 + sent)
    os.lseek(said, 0, os.SEEK_SET)
    with open(said, errors="replace") as file:
        problem = last_problem(file.read().splitlines())
    raise _explain(-code, problem)


def _wait(child: int, watched: set[signal.Signals]) -> tuple[int, int | None]:
    """Pass signals on to the child until it ends. Return its status and the last signal it was sent.

    What the terminal sends reaches the child anyway; only what another process sent to us alone is passed on.
    """
    sent: int | None = None
    interrupts: deque[float] = deque(maxlen=_N_IMPATIENT)
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status, sent
            continue
        sent = received.si_signo
        if received.si_code <= 0:  # from a process, not from the kernel
            os.kill(child, sent)
        if sent == signal.SIGINT:
            interrupts.append(time.monotonic())
            if len(interrupts) == _N_IMPATIENT and interrupts[-1] - interrupts[0] < _IMPATIENT_SECONDS:
                os.kill(child, signal.SIGKILL)


def end_with_parent() -> None:
    """Have the system end this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _become_child(native_stderr: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no dump of gigabytes of pinned weights
    os.environ["GGML_NO_BACKTRACE"] = "1"
    sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(native_stderr, 2)
    os.close(native_stderr)


def _explain(number: int, problem: str) -> DeviceError:
    from planner.errors import DeviceError  # takes long, and no command that ends well needs it here

    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return DeviceError(
            "The system ended atsplan (SIGKILL): it probably ran out of host memory.",
            "Close programs, or solve again with a larger --vram.",
        )
    if re.search(r"out of memory|unable to allocate", problem):
        remedy = "Close what uses the GPU, or solve again with a smaller --vram."
    elif "CUDA" in problem:
        remedy = "Run atsplan doctor; the driver, the card or llama-cpp-python's CUDA build may be at fault."
    else:
        remedy = "The model file may be damaged, or use something that this llama.cpp cannot compute."
    return DeviceError(f"llama.cpp gave up ({name}): {problem or 'it gave no reason'}", remedy)
