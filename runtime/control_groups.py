"""What the control groups around this process, such as a container's, allow. Versions 2 and 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> float:
    """Return how many cores this process may keep busy: those it may run on, or a quota of their time.

    `root` stands in for another machine's in tests.
    """
    return min([float(len(os.sched_getaffinity(0))), *cpu_quotas(root)])


def cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the numbers of cores that the control groups allow, if they limit them."""
    for folder in control_groups(root, "cpu"):
        numbers = read_file(folder / "cpu.max").split()
        if not numbers:  # version 1
            numbers = [read_file(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
            yield int(numbers[0]) / int(numbers[1])  # else "max" or -1: no limit


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it, of versions 2 and 1."""
    mount = root / "sys/fs/cgroup"
    for line in read_file(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controllers if controllers else mount
        folder = base / group.lstrip("/")
        while folder != mount.parent and folder.is_relative_to(base):
            yield folder
            folder = folder.parent


def read_file(path: Path) -> str:
    """Return the text of a file of the system's; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:  # not on this kernel, or hidden by the container
        return ""
