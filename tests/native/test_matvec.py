"""The CPU's own products: a small program compares them with ggml's kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runtime import build


def test_equals_ggml(tmp_path: Path, llama_headers: Path) -> None:
    llama = build.find_llama()
    program = tmp_path / "matvec_test"
    sources = [Path(__file__).with_name("matvec_test.cpp"), *build.SOURCE_FOLDER.glob("matvec*.cpp")]
    includes = [f"-I{build.SOURCE_FOLDER}"]
    for folder in build.HEADER_FOLDERS:
        includes += ["-isystem", str(llama_headers / folder)]
    libraries = [f"-L{llama.library_folder}", f"-Wl,-rpath,{llama.library_folder}", "-lggml-base", "-lggml-cpu"]
    sanitizers = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    cxx = build.find_compilers(llama).cxx
    command = [cxx, *build.CXX_FLAGS, "-Werror", *sanitizers, *includes, *map(str, sources), *libraries]
    subprocess.run([*command, "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    if result.stdout == "not on this CPU\n":
        pytest.skip("this CPU has no AVX2")
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
