"""How much memory a process may take: the machine's, and what its control groups leave of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from planner.units import KIB

from .control_groups import control_groups, read_file

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return what Linux can give to this process without swapping; 0 if it does not tell.

    `root` stands in for another machine's in tests.
    """
    free = re.search(r"^MemAvailable:\s+(\d+) kB$", read_file(root / "proc/meminfo"), re.MULTILINE)
    return min([int(free[1]) * KIB, *_left_in_control_groups(root)]) if free else 0


def memory_limits(root: Path = _ROOT) -> Iterator[int]:
    """Yield the limits in bytes of the control groups that have one."""
    for folder in control_groups(root, "memory"):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None:
            yield limit


def _left_in_control_groups(root: Path) -> Iterator[int]:
    for folder in control_groups(root, "memory"):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            counters = dict(line.split(" ", 1) for line in read_file(folder / "memory.stat").splitlines())
            cached = counters.get("total_inactive_file") or counters.get("inactive_file") or "0"
            yield max(0, limit - used + int(cached))  # the page cache makes room


def _first_number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of the files that holds one: "max" is none."""
    texts = (read_file(folder / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)
