"""The compiler of schedules and the ring's layout are pure C++: their tests are a small program."""

from __future__ import annotations

from pathlib import Path

from planner.timeline import ring_blockers
from runtime import build
from tests.native.sanitized import run_program

SOURCES = [build.SOURCE_FOLDER / name for name in ("schedule.cpp", "ring.cpp")]


def test_schedule_and_ring(tmp_path: Path, llama_headers: Path) -> None:
    result = run_program("schedule_test", SOURCES, tmp_path, llama_headers)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr


def test_the_planner_knows_the_layout(tmp_path: Path, llama_headers: Path) -> None:
    result = run_program("schedule_test", SOURCES, tmp_path, llama_headers, arguments=["layouts"])
    lines = result.stdout.splitlines()
    assert (result.returncode, len(lines)) == (0, 2000), result.stderr
    for line in lines:
        ring_bytes, *rest = map(int, line.split())
        assert ring_blockers(rest[0::3], rest[1::3], ring_bytes) == rest[2::3], line
