"""The helper under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import build
from tests.native.sanitized import ADDRESS, THREAD, run_program

NEED_LLAMA = ("inspect", "microbench", "routing")  # of no use without a model


@pytest.mark.parametrize(("sanitizers", "arguments"), [(ADDRESS, []), (THREAD, ["threads"])], ids=["address", "thread"])
def test_random_graphs(tmp_path: Path, llama_headers: Path, sanitizers: tuple[str, ...], arguments: list[str]) -> None:
    """With everything that the hybrid device consists of."""
    sources = [path for path in sorted(build.SOURCE_FOLDER.glob("*.cpp")) if not path.stem.startswith(NEED_LLAMA)]
    result = run_program("executor_test", sources, tmp_path, llama_headers, sanitizers, arguments)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
