"""How many cores other programs leave: a computing thread that has to share one holds up all the others."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable

from .control_groups import usable_cores

INTERVAL_SECONDS = 0.1
N_INTERVALS = 3  # that have to lack cores, on average: what bursts take is not missed
LOOK_SECONDS = 0.03
N_LOOKS, N_LOOKS_FOR_ONE = 3, 8  # in a row that find too few cores, or one: tasks that end sooner cost no thread
_CALM_SECONDS = 0.1  # until the next look, after one at all own threads that found cores enough
_STAT, _LOADAVG, _OWN_TASKS = "/proc/stat", "/proc/loadavg", "/proc/self/task"
_NOISE = 0.3  # of a core: what a quiet system uses itself
_TOLERATED = 0.5  # of a core that is missing
_MIN_PATIENCE, _MAX_PATIENCE = 1, 160  # samples
_MAX_FOR_SEVERAL = 15  # samples, to take several threads at once
_MIN_FOR_ONE = 3  # samples, to take just one
_CALM = 600  # samples after which giving up threads is no longer for having taken them
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of a CPU's line


class HostLoad:
    """Samples the cores that this process may use, whenever it is asked and enough time has passed.

    Cores that are busy do not tell what others want: once all of them are, others get less than that. So it looks at
    the tasks that run or wait for a core, too.
    """

    def __init__(
        self,
        busy_seconds: Callable[[], float] | None = None,
        own_seconds: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        max_cores: float | None = None,
        runnable: Callable[[], int | None] | None = None,
        own_runnable: Callable[[], int | None] | None = None,
    ) -> None:
        """The arguments are for tests; `max_cores` is what the process may keep busy, whatever is free.

        `runnable` counts the system's tasks that run or wait for a core, `own_runnable` this process's.
        """
        cores = sorted(os.sched_getaffinity(0))
        self._n_cores = float(len(cores))
        self._max_cores = usable_cores() if max_cores is None else max_cores
        self._busy_seconds = busy_seconds or (lambda: _busy_seconds(cores))
        self._own_seconds, self._clock = own_seconds, clock
        self._runnable, self._own_runnable = runnable or _runnable, own_runnable or _own_runnable
        self._has_all_cores = self._max_cores == os.cpu_count()  # else others' tasks may have cores of their own
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=N_INTERVALS + 1)
        self._lacks: deque[float] = deque(maxlen=N_LOOKS_FOR_ONE)  # the cores that others left, too few in every look
        self._n_threads: int | None = None
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: others got fewer cores than they wanted where more own threads took them."""
        self._restart_samples()
        self._look_at = self._samples[0][0]
        self._lacks.clear()

    def _restart_samples(self) -> None:
        self._samples.clear()
        self._samples.append((self._clock(), *self._read()))

    def free_cores(self, n_threads: int) -> float | None:
        """Return the cores that other programs and quotas leave; None if nothing new is known.

        New is, at any time, that they do not suffice for `n_threads`; else what was free since the last sample, if too
        little, only where the mean of several samples is, too.
        """
        if self._n_threads not in (None, n_threads):
            self._restart_samples()  # what others want does not change with own threads, what they get does
        self._n_threads = n_threads
        if n_threads == 1:
            self._lacks.clear()  # nobody looks any more
        now = self._clock()
        if self._has_all_cores and n_threads > 1 and now >= self._look_at:
            self._look(now, n_threads)
        unwanted = self._unwanted_cores(n_threads)
        if now - self._samples[-1][0] < INTERVAL_SECONDS:
            return min(self._max_cores, unwanted) if unwanted < n_threads else None
        self._samples.append((now, *self._read()))
        free = self._free_since(self._samples[-2])
        if free < n_threads <= self._free_since(self._samples[0]) + _TOLERATED:
            free = n_threads
        return min(self._max_cores, free, unwanted)

    def _free_since(self, sample: tuple[float, float, float]) -> float:
        """Return how many cores other programs left from that sample to the last, on average."""
        elapsed, busy, own = (now - before for now, before in zip(self._samples[-1], sample, strict=True))
        return self._n_cores - min(max(0.0, busy - own) / elapsed, self._n_cores)

    def _look(self, now: float, n_threads: int) -> None:
        """Note how many cores others leave, if too few. Own threads take longer to count: only where it matters."""
        self._look_at = now + LOOK_SECONDS
        runnable = self._runnable()
        if runnable is None or runnable - 1 <= self._n_cores - n_threads:  # 1 is the thread that asks
            self._lacks.clear()
            return
        own = self._own_runnable()  # before all: one that falls asleep meanwhile is not taken for another program's
        runnable = self._runnable()
        if own is None or runnable is None or runnable - own <= self._n_cores - n_threads:
            self._lacks.clear()
            self._look_at = now + _CALM_SECONDS
        else:
            self._lacks.append(max(0.0, self._n_cores - (runnable - own)))

    def _unwanted_cores(self, n_threads: int) -> float:
        """Return the cores that others have not wanted lately, if that is too few for sure; else infinity."""
        recent = list(self._lacks)[-N_LOOKS:]
        if len(recent) == N_LOOKS and max(recent) < n_threads - 1:
            return max(recent)
        return max(self._lacks) if len(self._lacks) == N_LOOKS_FOR_ONE else math.inf

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


def _runnable() -> int | None:
    """Return the number of the system's tasks that run or wait for a core; None where it does not tell."""
    try:
        return int(_file_start(_LOADAVG).split()[3].split(b"/")[0])
    except (OSError, ValueError, IndexError):
        return None


def _own_runnable() -> int | None:
    """Return the number of this process's threads that run or wait for a core; None where the system does not tell."""
    try:
        threads = os.listdir(_OWN_TASKS)
    except OSError:
        return None
    return sum(_is_runnable(thread) for thread in threads)


def _is_runnable(thread: str) -> bool:
    try:
        return _file_start(f"{_OWN_TASKS}/{thread}/stat").rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):  # it has ended
        return False


def _file_start(path: str) -> bytes:
    """Return the first bytes of a file of the system's, in a few microseconds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1024)
    finally:
        os.close(descriptor)


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
        takes_one = self._room == self.n + 1
        if self._n_agreeing < (
            max(self._patience, _MIN_FOR_ONE) if takes_one else min(self._patience, _MAX_FOR_SEVERAL)
        ):
            return False
        self.n, self._n_agreeing, self._n_since_rise = self._room, 0, 0
        return True
