"""Small C++ programs that test the helper's sources under a sanitizer.

Objects are shared by the programs, and kept in the user's cache, because compiling them takes longer than running them.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime import build

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
_FLAGS = (*build.CXX_FLAGS, "-Werror", "-O1", "-g1")


def run_program(
    name: str,
    sources: Iterable[Path],
    folder: Path,
    headers: Path,
    sanitizers: tuple[str, ...] = ADDRESS,
    arguments: Iterable[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Link tests/native/`name`.cpp with `sources` and llama.cpp's libraries into `folder`, and run it there."""
    llama = build.find_llama()
    cxx = build.find_compilers(llama).cxx
    includes = [f"-I{build.SOURCE_FOLDER}"]
    for each in build.HEADER_FOLDERS:
        includes += ["-isystem", str(headers / each)]
    own_headers = b"".join(path.read_bytes() for path in sorted(build.SOURCE_FOLDER.glob("*.h")))
    variant = hashlib.sha256(repr((cxx, _FLAGS, sanitizers)).encode() + own_headers).hexdigest()[:16]
    objects = headers.parent / "sanitized" / f"{sanitizers[0].partition('=')[2]}"
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target = objects / f"{source.stem}-{variant}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.o"
        if not target.exists():
            for old in objects.glob(f"{source.stem}-*"):
                old.unlink()
            temporary = target.with_suffix(".tmp")
            subprocess.run([cxx, *_FLAGS, *sanitizers, *includes, "-c", str(source), "-o", str(temporary)], check=True)
            temporary.replace(target)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        linked = list(pool.map(compiled, [Path(__file__).with_name(f"{name}.cpp"), *sources]))
    libraries = [f"-L{llama.library_folder}", f"-Wl,-rpath,{llama.library_folder}"]
    libraries += [f"-l{library}" for library in build.LLAMA_LIBRARIES]
    subprocess.run([cxx, *sanitizers, "-pthread", *linked, *libraries, "-o", str(folder / name)], check=True)
    return subprocess.run([folder / name, *arguments], cwd=folder, capture_output=True, text=True, check=False)
