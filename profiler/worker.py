"""A child process that holds the device. ggml aborts on some failures, and memory goes back when a process ends."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from planner.errors import DeviceError
from runtime.native_log import last_problem

P = ParamSpec("P")
Result = TypeVar("Result")


class Worker:
    """Calls functions one after the other in one child process. A context manager; `device` as for runtime.library."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._output = tempfile.NamedTemporaryFile(prefix="atsplan-")  # noqa: SIM115
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),  # CUDA does not survive a fork
            initializer=_start,
            initargs=(self._output.name,),
        )

    def call(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return what `function`, importable by name, returns in the child. Raises DeviceError if the child dies."""
        try:
            return self._pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            text = self._output.read().decode(errors="replace")
            raise DeviceError(
                f"Measuring on {self.device} ended abruptly: {last_problem(text.splitlines()) or 'no reason given'}",
                "Close programs that use the device's memory, or profile with a smaller --ubatch.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._output.close()


def _start(output_path: str) -> None:
    """Send what ggml prints on its way down to a file instead of the user's terminal."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    descriptor = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
