"""Processes that load the machine as other programs would: started ahead of time, idle until told to go."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from planner.errors import DeviceError

from . import child
from .load_worker import FAILED, GO, READY, STOP, STOPPED

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Load:
    """One process per kind of load: "cpu", "link" or "gpu". A context manager; the processes end with this one, too."""

    def __init__(self, kinds: Sequence[str], device: str) -> None:
        self._processes = [
            subprocess.Popen(
                child.command("runtime.load_worker", kind, device),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=child.environment() | _ONE_THREAD,
            )
            for kind in kinds
        ]

    def wait_ready(self) -> None:
        """Return when all could begin at once. Raises DeviceError if one cannot."""
        self._expect(READY)

    def go(self) -> None:
        self._tell(GO)

    def stop(self) -> None:
        """Return when all have stopped. Raises DeviceError if one has ended meanwhile."""
        self._tell(STOP)
        self._expect(STOPPED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def _tell(self, word: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{word}\n")
                process.stdin.flush()
            except OSError as error:
                raise DeviceError("A process that loads the machine has ended.") from error

    def _expect(self, word: str) -> None:
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if line != word:
                raise DeviceError(
                    f"A process that loads the machine has ended: {line.removeprefix(FAILED) or 'it gave no reason'}"
                )
