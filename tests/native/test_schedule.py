"""The compiler of schedules and the ring's layout are pure C++: their tests are a small program."""

from __future__ import annotations

import subprocess
from pathlib import Path

from runtime import build


def test_schedule_and_ring(tmp_path: Path, llama_headers: Path) -> None:
    llama = build.find_llama()
    compilers = build.find_compilers(llama)
    program = tmp_path / "schedule_test"
    sources = [Path(__file__).with_name("schedule_test.cpp")]
    sources += [build.SOURCE_FOLDER / name for name in ("schedule.cpp", "ring.cpp")]
    includes = [f"-I{build.SOURCE_FOLDER}"]
    for folder in build.HEADER_FOLDERS:
        includes += ["-isystem", str(llama_headers / folder)]
    sanitizers = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    libraries = [f"-L{llama.library_folder}", f"-Wl,-rpath,{llama.library_folder}", "-lggml-base"]
    command = [compilers.cxx, *build.CXX_FLAGS, "-Werror", *sanitizers, *includes, *map(str, sources), *libraries]
    subprocess.run([*command, "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
