"""Cores that other programs take, and how the number of threads follows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime import host_load
from runtime.control_groups import usable_cores
from runtime.host_load import INTERVAL_SECONDS, HostLoad, ThreadCount

N_CORES, TOKEN_SECONDS = 16, 0.036


def test_counts_what_others_take() -> None:
    now = busy = own = 0.0
    load = HostLoad(lambda: busy, lambda: own, lambda: now)
    n_cores = len(os.sched_getaffinity(0))
    assert load.free_cores(1) is None  # too soon
    now, busy, own = 1.0, 3.0, 2.5  # half a core is taken by others
    assert load.free_cores(1) == pytest.approx(n_cores - 0.5)
    now, busy, own = 1.0 + INTERVAL_SECONDS / 2, 9.0, 2.5
    assert load.free_cores(1) is None
    now, busy, own = 2.0, 1000.0, 2.5
    assert load.free_cores(1) == 0.0
    now, busy, own = 3.0, 1000.0, 4.0  # rounding: others never give cores
    assert load.free_cores(1) == n_cores


def test_no_more_cores_are_free_than_the_quota() -> None:
    now = busy = 0.0
    load = HostLoad(lambda: busy, lambda: 0.0, lambda: now, max_cores=0.75)
    now = 1.0
    assert load.free_cores(1) == 0.75
    now, busy = 2.0, 1000.0
    assert load.free_cores(1) == 0.0


@dataclass
class System:
    """Cores, all this process's; every token takes `TOKEN_SECONDS`. Counts how often own threads are counted."""

    others: int = 0  # tasks that run or wait for a core
    own: int = 1
    now: float = 0.0
    busy_seconds: float = 0.0
    n_counted: int = 0
    n_cores: int = N_CORES

    def host_load(self, monkeypatch: pytest.MonkeyPatch, n_usable: int | None = None) -> HostLoad:
        n_usable = n_usable or self.n_cores
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n_usable)))
        monkeypatch.setattr(os, "cpu_count", lambda: self.n_cores)
        return HostLoad(
            lambda: self.busy_seconds, lambda: 0.0, lambda: self.now, float(n_usable),
            lambda: self.others + self.own, self.count_own,
        )  # fmt: skip

    def count_own(self) -> int:
        self.n_counted += 1
        return self.own

    def token(self, n_threads: int) -> None:
        """Others get the cores that are left."""
        self.now += TOKEN_SECONDS
        self.busy_seconds += min(self.others, self.n_cores - n_threads) * TOKEN_SECONDS


def test_sees_what_others_want_when_all_cores_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten processes beside eight threads on 16 cores: they get 8 cores, and want 10."""
    system = System()
    load, threads = system.host_load(monkeypatch), ThreadCount(8)
    n_threads = []
    for i in range(40):
        system.token(threads.n)
        if i == 20:
            system.others = 10
        system.own = i % 3 * 4 + 1  # threads spin for a while after a token, or sleep
        free = load.free_cores(threads.n)
        if free is not None:
            threads.update(free)
        n_threads.append(threads.n)
    assert n_threads == [8] * 22 + [6] * 18  # three tokens


@pytest.mark.parametrize("n_threads", [8, 16])
def test_own_threads_and_short_tasks_cost_no_threads(monkeypatch: pytest.MonkeyPatch, n_threads: int) -> None:
    system, generator = System(), random.Random(0)
    load = system.host_load(monkeypatch)
    n_tokens = 1000
    for i in range(n_tokens):
        system.now += TOKEN_SECONDS
        system.own = generator.choice([1, n_threads, n_threads + 1])  # they spin between tokens
        system.others = 10 if i % 5 < 2 else 0  # for two tokens
        assert load.free_cores(n_threads) in (None, N_CORES)
    assert system.n_counted <= 0.6 * n_tokens


def test_one_core_that_is_wanting_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(others=1)
    load = system.host_load(monkeypatch)
    free = []
    for _ in range(10):
        system.now += TOKEN_SECONDS
        free.append(load.free_cores(16))
    assert [i for i, cores in enumerate(free) if cores == 15] == [7, 8, 9]


def test_a_single_thread_gets_the_second_core_back(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(n_cores=2)
    load, threads = system.host_load(monkeypatch), ThreadCount(2)
    n_threads = []
    for system.others in [1] * 30 + [0] * 30:
        system.own = threads.n
        system.token(threads.n)
        free = load.free_cores(threads.n)
        if free is not None:
            threads.update(free)
        n_threads.append(threads.n)
    assert (n_threads[29], n_threads[-1]) == (1, 2)


@pytest.mark.parametrize("token_seconds", [TOKEN_SECONDS, 0.15, 0.4])
@pytest.mark.parametrize(("n_cores", "n_planned", "n_others"), [(16, 16, 10), (16, 12, 10), (8, 8, 5)])
def test_what_others_got_while_they_were_held_up_is_not_what_they_want(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, n_planned: int, n_others: int, token_seconds: float
) -> None:
    """Others share the cores with the threads: the more of these there are, the fewer cores others get."""
    system = System(own=n_planned, n_cores=n_cores)
    load, threads, n_threads = system.host_load(monkeypatch), ThreadCount(n_planned), []

    def token(own: int) -> None:
        share = min(1.0, n_cores / (own + system.others))
        system.own, system.now = own, system.now + token_seconds
        system.busy_seconds += share * system.others * token_seconds

    for i in range(300):
        system.others = n_others if i >= 50 else 0
        if i == 150:
            for _ in range(60):  # held
                token(n_planned)
            load.restart()
        token(threads.n)
        free = load.free_cores(threads.n)
        if free is not None:
            threads.update(free)
        n_threads.append(threads.n)
    assert n_threads[49] == n_planned and set(n_threads[54:]) == {n_cores - n_others}


def test_tasks_of_others_with_cores_of_their_own_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(others=40)
    load = system.host_load(monkeypatch, n_usable=4)  # the other twelve are for others
    for _ in range(20):
        system.now += TOKEN_SECONDS
        assert load.free_cores(4) in (None, 4.0)


@pytest.mark.parametrize(
    ("loadavg", "expected"),
    [
        ("0.82 0.94 1.03 13/87 11840\n", 13),
        ("0.00 0.00 0.00 0/0 0\n", 0),  # systems that do not count
        ("0.00 0.00 0.00\n", None),
        ("nonsense of another system's", None),
        (None, None),
    ],
)
def test_runnable_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loadavg: str | None, expected: int | None
) -> None:
    if loadavg is not None:
        (tmp_path / "loadavg").write_text(loadavg)
    monkeypatch.setattr(host_load, "_LOADAVG", str(tmp_path / "loadavg"))
    assert host_load._runnable() == expected


def test_own_runnable_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (host_load._own_runnable() or 0) >= 1  # the one that asks
    monkeypatch.setattr(host_load, "_OWN_TASKS", str(tmp_path / "task"))
    assert host_load._own_runnable() is None
    for thread, text in {"1": "1 (a) R 0", "2": "2 (R ) S) S 0", "3": "3 (b) R) R 0", "4": "", "5": "odd"}.items():
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "stat").write_text(text)
    (tmp_path / "task" / "6").mkdir()  # has ended
    assert host_load._own_runnable() == 2


def test_looking_is_cheap() -> None:
    started = time.process_time()
    for _ in range(200):
        host_load._runnable()
    assert (time.process_time() - started) / 200 < 1e-4


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/box", {"box/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/box/inner", {"box/cpu.max": "50000 100000\n", "box/inner/cpu.max": "max 100000\n"}, 0.5),
        ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "25000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.25),
        ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
        ("0::/box", {"box/cpu.max": "max 100000\n"}, None),
        ("0::/box", {"box/cpu.max": "nonsense"}, None),
        ("0::/box", {}, None),
        ("", {}, None),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, group: str, files: dict[str, str], expected: float | None) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_sees_a_busy_process() -> None:
    load = HostLoad()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        load.free_cores(1)
        time.sleep(1.0)
        free = load.free_cores(1)
        assert free is not None
        assert free <= len(os.sched_getaffinity(0)) - 0.5
    finally:
        process.kill()
        process.wait()


def test_threads_follow() -> None:
    threads = ThreadCount(8)
    assert not threads.update(15.8)
    assert threads.update(6.2) and threads.n == 6
    assert not threads.update(6.6) and not threads.update(5.6)  # noise
    assert threads.update(0.3) and threads.n == 1
    assert threads.update(16.0) and threads.n == 8  # at once: a load comes to an end
    assert threads.update(5.0) and threads.n == 5
    assert not threads.update(8.0)  # but it comes and goes
    assert not threads.update(5.0)
    assert not threads.update(8.0)
    assert threads.update(8.0) and threads.n == 8
    assert threads.update(7.2) and threads.n == 7
    assert [threads.update(8.0) for _ in range(4)] == [False, False, False, True]  # third time
    calm = ThreadCount(8)
    assert calm.update(7.2) and calm.n == 7
    assert [calm.update(8.0) for _ in range(3)] == [False, False, True]  # just one gains little


def test_threads_do_not_flap() -> None:
    """A desktop takes a fifth of a core, now and then a half: one thread is not worth settling anew every second."""
    generator = random.Random(1)
    threads = ThreadCount(16)
    n_changes = sum(threads.update(16 - abs(generator.gauss(0.2, 0.2))) for _ in range(2400))
    assert n_changes <= 20
    assert threads.n >= 15
    assert threads.update(7.0) and threads.n == 7  # a load comes, and goes again
    assert sum(threads.update(16.0) for _ in range(8)) == 1
    assert threads.n == 16


def test_a_burst_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something takes a core for most of one sample; what takes it for longer is noticed within two."""
    system = System()
    load = system.host_load(monkeypatch)
    free = []
    for i in range(20):
        system.now += 1.01 * INTERVAL_SECONDS
        system.busy_seconds += {5: 0.8, 12: 1.0, 13: 1.0, 14: 1.0, 15: 1.0}.get(i, 0.0) * 1.01 * INTERVAL_SECONDS
        free.append(load.free_cores(16))
    assert free[4:8] == pytest.approx([16, 16, 16, 16])
    assert free[12:17] == pytest.approx([16, 15, 15, 15, 16])


@pytest.mark.parametrize("seconds", [0.5, 0.7, 1.0, 3.0])
def test_loads_that_come_and_go_cost_threads_for_longer(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every time that eight threads settle anew costs more than a second with eight of them gains."""
    system = System()
    load, threads = system.host_load(monkeypatch), ThreadCount(8)
    n_changes = 0
    for _ in range(int(60 / TOKEN_SECONDS)):
        system.others = 12 if system.now % (2 * seconds) < seconds else 0
        system.token(threads.n)
        free = load.free_cores(threads.n)
        n_changes += free is not None and threads.update(free)
    assert n_changes <= 60 / seconds
    assert n_changes <= 50
