"""The compiler of schedules and the ring's layout are pure C++: their tests are a small program."""

from __future__ import annotations

from pathlib import Path

from runtime import build
from tests.native.sanitized import run_program


def test_schedule_and_ring(tmp_path: Path, llama_headers: Path) -> None:
    sources = [build.SOURCE_FOLDER / name for name in ("schedule.cpp", "ring.cpp")]
    result = run_program("schedule_test", sources, tmp_path, llama_headers)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
