"""The helper under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, on the simulated device.

The sanitized objects are kept in the user's cache, because compiling them takes longer than running them.
"""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime import build

PROGRAM = Path(__file__).with_name("executor_test.cpp")
NEED_LLAMA = ("inspect", "microbench", "routing")  # of no use without a model


def build_program(folder: Path, headers: Path, sanitizers: tuple[str, ...]) -> Path:
    """Return the test program, linked with everything that the hybrid device consists of."""
    llama = build.find_llama()
    cxx = build.find_compilers(llama).cxx
    sources = [path for path in sorted(build.SOURCE_FOLDER.glob("*.cpp")) if not path.stem.startswith(NEED_LLAMA)]
    includes = [f"-I{build.SOURCE_FOLDER}"]
    for name in build.HEADER_FOLDERS:
        includes += ["-isystem", str(headers / name)]
    command = [cxx, *build.CXX_FLAGS, "-Werror", "-O1", "-g1", *sanitizers, *includes]
    header_bytes = b"".join(path.read_bytes() for path in sorted(build.SOURCE_FOLDER.glob("*.h")))

    def compiled(source: Path) -> str:
        key = hashlib.sha256(repr(command).encode() + source.read_bytes() + header_bytes).hexdigest()[:16]
        target = folder / f"{source.stem}-{key}.o"
        if not target.exists():
            temporary = target.with_suffix(".tmp")
            subprocess.run([*command, "-c", str(source), "-o", str(temporary)], check=True)
            temporary.replace(target)
        return str(target)

    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [PROGRAM, *sources]))
    for old in set(map(str, folder.glob("*.o"))) - set(objects):
        Path(old).unlink()
    program = folder / "executor_test"
    libraries = [f"-L{llama.library_folder}", f"-Wl,-rpath,{llama.library_folder}"]
    libraries += [f"-l{name}" for name in build.LLAMA_LIBRARIES]
    subprocess.run([cxx, *sanitizers, "-pthread", *objects, *libraries, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("name", "sanitizers", "arguments"),
    [
        ("address", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"), []),
        ("thread", ("-fsanitize=thread",), ["threads"]),
    ],
)
def test_random_graphs(
    tmp_path: Path, llama_headers: Path, name: str, sanitizers: tuple[str, ...], arguments: list[str]
) -> None:
    program = build_program(llama_headers.parent / f"sanitized-{name}", llama_headers, sanitizers)
    result = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "all passed\n"), result.stdout + result.stderr
