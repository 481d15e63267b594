"""Cores that other programs take, and how the number of threads follows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.control_groups import usable_cores
from runtime.host_load import INTERVAL_SECONDS, HostLoad, ThreadCount


def test_counts_what_others_take() -> None:
    now = busy = own = 0.0
    load = HostLoad(lambda: busy, lambda: own, lambda: now)
    n_cores = len(os.sched_getaffinity(0))
    assert load.free_cores() is None  # too soon
    now, busy, own = 1.0, 3.0, 2.5  # half a core is taken by others
    assert load.free_cores() == pytest.approx(n_cores - 0.5)
    now, busy, own = 1.0 + INTERVAL_SECONDS / 2, 9.0, 2.5
    assert load.free_cores() is None
    now, busy, own = 2.0, 1000.0, 2.5
    assert load.free_cores() == 0.0
    now, busy, own = 3.0, 1000.0, 4.0  # rounding: others never give cores
    assert load.free_cores() == n_cores


def test_no_more_cores_are_free_than_the_quota() -> None:
    now = busy = 0.0
    load = HostLoad(lambda: busy, lambda: 0.0, lambda: now, max_cores=0.75)
    now = 1.0
    assert load.free_cores() == 0.75
    now, busy = 2.0, 1000.0
    assert load.free_cores() == 0.0


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
        load.free_cores()
        time.sleep(1.0)
        free = load.free_cores()
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
    assert not threads.update(16.0)  # once is not enough
    assert threads.update(16.0) and threads.n == 8
    assert threads.update(5.0) and threads.n == 5
    assert not threads.update(8.0)
    assert not threads.update(5.0)
    assert not threads.update(8.0)
    assert threads.n == 5


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
