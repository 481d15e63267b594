"""A child process that holds the device. ggml aborts on some failures, and memory goes back when a process ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from planner.errors import DeviceError
from runtime.native_log import last_problem
from runtime.supervise import end_with_parent

P = ParamSpec("P")
Result = TypeVar("Result")

TIMEOUT_SECONDS = 1800  # one measurement takes seconds, and minutes for the largest models on a slow CPU


class Worker:
    """Calls functions one after the other in one child process. A context manager; `device` as for runtime.library."""

    def __init__(self, device: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.device = device
        self._timeout_seconds = timeout_seconds
        self._output = tempfile.NamedTemporaryFile(prefix="atsplan-")  # noqa: SIM115
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._output.name), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return what `function`, importable by name, returns in the child.

        Raises what it raises, and DeviceError if the child dies or takes too long.
        """
        try:
            self._connection.send((function, args, kwargs))
            if not self._connection.poll(self._timeout_seconds):
                raise DeviceError(
                    f"Measuring on {self.device} did not end within {self._timeout_seconds:g} s.",
                    "The model file may be damaged. Profile with a smaller --ubatch, or when the machine is idle.",
                )
            is_error, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            text = self._output.read().decode(errors="replace")
            raise DeviceError(
                f"Measuring on {self.device} ended abruptly: {last_problem(text.splitlines()) or 'no reason given'}",
                "Close programs that use the device's memory, or profile with a smaller --ubatch.",
            ) from error
        if is_error:
            raise answer
        result: Result = answer
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()  # it may be in the middle of something long
        self._connection.close()
        self._process.join()
        self._output.close()


def _serve(connection: Connection, output_path: str) -> None:
    """Answer calls until the connection is closed. What ggml prints on its way down goes to a file."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["GGML_NO_BACKTRACE"] = "1"
    descriptor = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = (False, function(*args, **kwargs))
        except Exception as error:
            answer = (True, error)
        connection.send(answer)
