"""The CPU's own products: a small program compares them with ggml's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import build
from tests.native.sanitized import run_program


def test_equals_ggml(tmp_path: Path, llama_headers: Path) -> None:
    result = run_program("matvec_test", build.SOURCE_FOLDER.glob("matvec*.cpp"), tmp_path, llama_headers)
    if result.stdout == "not on this CPU\n":
        pytest.skip("this CPU has no AVX2")
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
