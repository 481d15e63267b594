"""Memory that a container may not use is not available, whatever the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.units import GIB, MIB
from runtime.host_memory import available_memory_bytes, memory_limits


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups(machine: Path, tmp_path: Path) -> None:
    assert available_memory_bytes(machine) == 32 * GIB
    assert list(memory_limits(machine)) == []
    (machine / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    assert available_memory_bytes(machine) == 0


def test_version_2(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/user/x\n")
    write(machine, "sys/fs/cgroup/user/memory.max", f"{8 * GIB}\n")
    write(machine, "sys/fs/cgroup/user/memory.current", f"{3 * GIB}\n")
    write(machine, "sys/fs/cgroup/user/memory.stat", f"anon 1\ninactive_file {MIB}\n")
    write(machine, "sys/fs/cgroup/user/x/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/user/x/memory.current", f"{GIB}\n")
    assert available_memory_bytes(machine) == 5 * GIB + MIB
    assert list(memory_limits(machine)) == [8 * GIB]
    write(machine, "sys/fs/cgroup/user/memory.current", f"{9 * GIB}\n")
    assert available_memory_bytes(machine) == 0


def test_version_1(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/docker/x\n1:cpu:/\n")
    folder = "sys/fs/cgroup/memory/docker/x"
    write(machine, f"{folder}/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(machine, f"{folder}/memory.usage_in_bytes", f"{GIB}\n")
    write(machine, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {2 * MIB}\n")
    assert available_memory_bytes(machine) == GIB + 2 * MIB
    write(machine, "sys/fs/cgroup/memory/docker/memory.limit_in_bytes", f"{2**63 - 4096}\n")  # no limit
    write(machine, "sys/fs/cgroup/memory/docker/memory.usage_in_bytes", f"{GIB}\n")
    assert available_memory_bytes(machine) == GIB + 2 * MIB
