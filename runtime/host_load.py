"""How many cores other programs leave: a computing thread that has to share one holds up all the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from .control_groups import usable_cores

INTERVAL_SECONDS = 0.25
_STAT = "/proc/stat"
_NOISE = 0.3  # of a core: what a quiet system uses itself
_TOLERATED = 0.5  # of a core that is missing
_MIN_PATIENCE, _MAX_PATIENCE = 2, 64  # samples
_MAX_FOR_SEVERAL = 4  # samples, to take several threads at once
_CALM = 240  # samples after which giving up threads is no longer for having taken them
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of a CPU's line


class HostLoad:
    """Samples the cores that this process may use, whenever it is asked and enough time has passed."""

    def __init__(
        self,
        busy_seconds: Callable[[], float] | None = None,
        own_seconds: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        max_cores: float | None = None,
    ) -> None:
        """The arguments are for tests; `max_cores` is what the process may keep busy, whatever is free."""
        cores = sorted(os.sched_getaffinity(0))
        self._n_cores = float(len(cores))
        self._max_cores = usable_cores() if max_cores is None else max_cores
        self._busy_seconds = busy_seconds or (lambda: _busy_seconds(cores))
        self._own_seconds, self._clock = own_seconds, clock
        self._before = (clock(), *self._read())

    def free_cores(self) -> float | None:
        """Return the cores that other programs and quotas have left since the last time; None if that was just now."""
        now = self._clock()
        elapsed = now - self._before[0]
        if elapsed < INTERVAL_SECONDS:
            return None
        busy, own = self._read()
        others = max(0.0, (busy - self._before[1]) - (own - self._before[2])) / elapsed
        self._before = (now, busy, own)
        return min(self._max_cores, self._n_cores - min(others, self._n_cores))

    def _read(self) -> tuple[float, float]:
        return self._busy_seconds(), self._own_seconds()


def _busy_seconds(cores: list[int]) -> float:
    """Return the seconds that the cores were busy since the system started; 0 where the system does not tell."""
    names = {f"cpu{core}" for core in cores}
    try:
        with open(_STAT) as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
        ticks = 0
        for name, *columns in rows:
            if name in names:
                counts = [int(column) for column in columns[: _STEAL + 1]]  # guests are counted as users already
                ticks += sum(counts) - counts[_IDLE] - counts[_IOWAIT]
        return float(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class ThreadCount:
    """How many threads to compute with: as planned, or as many as there are free cores.

    Every change makes the run settle anew. So the more often threads have to be given up again, the longer cores have
    to stay free before they are taken; for one more thread, which gains little, longest.
    """

    def __init__(self, n_planned: int) -> None:
        self._n_planned = self.n = n_planned
        self._n_agreeing = 0  # samples in a row that have room for more
        self._room = n_planned  # the least of those
        self._patience = _MIN_PATIENCE
        self._n_since_rise = _CALM

    def update(self, free_cores: float) -> bool:
        """Take up a sample; return whether `n` has changed. Fewer at once, more when several samples agree."""
        self._n_since_rise += 1
        fewer = max(1, int(free_cores + _TOLERATED))
        if fewer < self.n:
            is_calm = self._n_since_rise > _CALM
            self._patience = _MIN_PATIENCE if is_calm else min(2 * self._patience, _MAX_PATIENCE)
            self.n, self._n_agreeing = fewer, 0
            return True
        more = min(self._n_planned, int(free_cores + _NOISE))
        if more <= self.n:
            self._n_agreeing = 0
            return False
        self._room = min(self._room, more) if self._n_agreeing else more
        self._n_agreeing += 1
        if self._n_agreeing < (self._patience if self._room == self.n + 1 else min(self._patience, _MAX_FOR_SEVERAL)):
            return False
        self.n, self._n_agreeing, self._n_since_rise = self._room, 0, 0
        return True
