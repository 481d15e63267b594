"""Build the native helper on this machine, once per llama-cpp-python version, source and CUDA, into the user's cache.

ggml's plug-in check does not notice changed structs, so the helper is compiled against the exact headers of the
installed llama-cpp-python. Its wheel lacks the internal ones; pip fetches them with the source of the same version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from planner.cache import cache_folder, locked
from planner.errors import AtsplanError, InvalidFileError, MismatchError

from .nvcc import architecture_flags, find_nvcc, host_compiler_flags, include_flags, nvcc_release

SOURCE_FOLDER = Path(__file__).parent / "native"
HEADER_FOLDERS = ("include", "ggml/include", "ggml/src", "src")  # inside the source's vendor/llama.cpp
CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden")
NVCC_FLAGS = ("-std=c++17", "-O2", "-Xcompiler", "-fPIC,-Wall,-Wextra,-fvisibility=hidden")
LLAMA_LIBRARIES = ("llama", "ggml", "ggml-base", "ggml-cpu")
MAX_PARALLEL_COMPILES = 2

Report = Callable[[str], None]


@dataclass(frozen=True)
class Llama:
    """The installed llama-cpp-python."""

    version: str
    library_folder: Path
    has_cuda: bool


@dataclass(frozen=True)
class Compilers:
    cxx: str
    nvcc: str | None  # None: a helper without CUDA


def find_llama() -> Llama:
    """Return what is installed, without loading it. Raises AtsplanError if nothing is."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise AtsplanError("llama-cpp-python is not installed.", "Install atsplan with its dependencies: pip install .")
    init = Path(spec.origin)
    version = re.search(r'^__version__ = "([^"]+)"', init.read_text(), re.MULTILINE)
    folder = init.parent / "lib"
    if version is None or not (folder / "libllama.so").exists():
        raise AtsplanError(
            f"The llama-cpp-python in {init.parent} has no usable libllama.so.",
            "atsplan works on Linux with llama-cpp-python's own libraries; reinstall llama-cpp-python.",
        )
    return Llama(version[1], folder, has_cuda=(folder / "libggml-cuda.so").exists())


def find_compilers(llama: Llama) -> Compilers:
    """Return the compilers to use: nvcc only where llama.cpp has CUDA too. Raises AtsplanError without g++."""
    cxx = shutil.which(os.environ.get("CXX") or "g++")
    if cxx is None:
        raise AtsplanError(
            "No C++ compiler (g++) was found; atsplan compiles a small native helper on first use.",
            "Install one (Debian and Ubuntu: sudo apt install g++), or name yours in CXX, and try again.",
        )
    return Compilers(cxx, find_nvcc() if llama.has_cuda else None)


def expected_stamp(llama: Llama, source_folder: Path = SOURCE_FOLDER) -> str:
    """Return what `ats_build_stamp()` of a fitting helper says, with or without CUDA."""
    digest = hashlib.sha256(repr((CXX_FLAGS, NVCC_FLAGS)).encode())
    for path in _files(source_folder, ".h", ".cpp", ".cu"):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return f"llama-cpp-python {llama.version}, sources {digest.hexdigest()[:16]}"


def native_helper(report: Report = lambda message: None, source_folder: Path = SOURCE_FOLDER) -> Path:
    """Return the helper's shared library, building it if need be; `report` gets one line per step that takes time.

    ATSPLAN_NATIVE names a library built elsewhere, ATSPLAN_LLAMA_SDIST a downloaded llama_cpp_python-X.tar.gz.
    Raises AtsplanError without a compiler, network or a successful compilation.
    """
    if found := built_helper(source_folder):
        return found
    llama = find_llama()
    stamp = expected_stamp(llama, source_folder)
    library = _library_path(llama, stamp)
    with locked(cache_folder() / "native"):
        if not _is_intact(library):  # else another process has built it meanwhile
            compilers = find_compilers(llama)
            headers = llama_headers(llama, report)
            report("Building the native helper (once for this version) ...")
            library.parent.mkdir(exist_ok=True)
            _compile(compilers, llama, headers, source_folder, stamp, library, report)
    return library


def built_helper(source_folder: Path = SOURCE_FOLDER) -> Path | None:
    """Return the helper that is there already: the one that ATSPLAN_NATIVE names, or one built before. Else None."""
    if prebuilt := os.environ.get("ATSPLAN_NATIVE"):
        if not Path(prebuilt).is_file():
            raise InvalidFileError(f"ATSPLAN_NATIVE names {prebuilt}, which is not a file.", "Unset it to build anew.")
        return Path(prebuilt).resolve()
    llama = find_llama()
    library = _library_path(llama, expected_stamp(llama, source_folder))
    return library if _is_intact(library) else None


def _library_path(llama: Llama, stamp: str) -> Path:
    nvcc = find_nvcc() if llama.has_cuda else None
    variant = f"cuda {nvcc_release(nvcc)}" if nvcc else "cpu"  # another release has another libcudart
    return cache_folder() / "native" / re.sub(r"\W+", "-", f"{stamp} {variant}") / "libatsplan.so"


def _compile(
    compilers: Compilers, llama: Llama, headers: Path, source_folder: Path, stamp: str, library: Path, report: Report
) -> None:
    log = library.parent / "build.log"
    log.unlink(missing_ok=True)
    includes = [f"-I{source_folder}"]
    for folder in HEADER_FOLDERS:  # as system headers, whose warnings are not ours
        includes += ["-isystem", str(headers / folder)]
    cuda_compile: list[str] = []
    if nvcc := compilers.nvcc:
        includes += [f"-DATS_CUDA={nvcc_release(nvcc)}", *include_flags(nvcc)]  # so every object's key has the release
        cuda_compile = [nvcc, *host_compiler_flags(), *NVCC_FLAGS, *architecture_flags(nvcc)]
    sources = _files(source_folder, ".cpp", *((".cu",) if nvcc else ()))
    header_bytes = b"".join(path.read_bytes() for path in _files(source_folder, ".h"))
    objects = library.parent.parent / "objects"
    objects.mkdir(exist_ok=True)
    one_line_at_a_time = threading.Lock()

    def compile_one(source: Path) -> Path:
        content = source.read_bytes()
        compiler = cuda_compile if source.suffix == ".cu" else [compilers.cxx, *CXX_FLAGS]
        command = [*compiler, *includes]
        if b"ATS_BUILD_STAMP" in content:  # only there, so that the other files need not be compiled again
            command.append(f'-DATS_BUILD_STAMP="{stamp}"')
        key = hashlib.sha256(repr(command).encode() + content + header_bytes).hexdigest()[:16]
        target = objects / f"{source.stem}-{key}.o"
        if not _is_intact(target):
            with one_line_at_a_time:
                report(f"  compiling {source.name}")
            with _replacing(target) as temporary:
                _run([*command, "-c", str(source), "-o", str(temporary)], log, f"Compiling {source.name} failed")
                _checksum_file(target).write_text(_sha256(temporary))
        return target

    with ThreadPoolExecutor(MAX_PARALLEL_COMPILES) as pool:
        compiled = [str(path) for path in pool.map(compile_one, sources)]
    linker = ["-Wl,--no-as-needed", f"-Wl,-rpath,{llama.library_folder}", "-Wl,--no-undefined"]
    command = [compilers.cxx, "-shared", "-pthread", *linker]
    if nvcc:
        linker = [flag.replace("-Wl,", "-Xlinker=", 1) for flag in linker]
        command = [nvcc, *host_compiler_flags(), "-shared", "-cudart=shared", *linker]
    command += [*compiled, f"-L{llama.library_folder}", *(f"-l{name}" for name in LLAMA_LIBRARIES)]
    with _replacing(library) as temporary:
        _run([*command, "-o", str(temporary)], log, "Linking the native helper failed")
        _checksum_file(library).write_text(_sha256(temporary))


def llama_headers(llama: Llama, report: Report = lambda message: None) -> Path:
    """Return the folder with llama.cpp's headers of exactly this version, fetched if it is absent or damaged."""
    folder = cache_folder() / "native" / f"headers-{llama.version}"
    manifest = folder / "sha256"
    if manifest.exists() and manifest.read_bytes() == _tree_sha256(folder).encode():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".headers-") as temporary:
        archive = os.environ.get("ATSPLAN_LLAMA_SDIST")
        if archive is None:
            report(f"Downloading the source of llama-cpp-python {llama.version} for its headers (77 MB, once) ...")
            archive = str(_download_sdist(llama.version, Path(temporary)))
        extracted = Path(temporary) / "headers"
        _extract_headers(Path(archive), llama.version, extracted)
        (extracted / manifest.name).write_text(_tree_sha256(extracted))
        shutil.rmtree(folder, ignore_errors=True)
        extracted.rename(folder)
    return folder


def _download_sdist(version: str, folder: Path) -> Path:
    log = folder.parent / "download.log"
    log.unlink(missing_ok=True)
    package = "llama-cpp-python"
    _run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", package,
         "--dest", str(folder), f"{package}=={version}"],
        log,
        f"The source of llama-cpp-python {version} could not be downloaded; its headers are needed once",
        "Connect to the network, or name a downloaded llama_cpp_python-*.tar.gz of this version in "
        "ATSPLAN_LLAMA_SDIST, and try again. ",
    )  # fmt: skip
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def _extract_headers(archive: Path, version: str, target: Path) -> None:
    """Write the headers in `archive` under `target`. Nothing but regular files of the wanted folders is touched."""
    root = PurePosixPath(f"llama_cpp_python-{version}/vendor/llama.cpp")
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                wanted = str(path.parent) in {str(root / folder) for folder in HEADER_FOLDERS}
                if wanted and path.suffix == ".h" and (stream := tar.extractfile(member)) is not None:
                    destination = target / path.relative_to(root)
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    destination.write_bytes(stream.read())
    except (OSError, EOFError, tarfile.TarError) as error:
        raise InvalidFileError(f"{archive} cannot be read: {error}.", "Download it again.") from error
    if not (target / "src/llama-ext.h").exists() or not (target / "ggml/src/ggml-backend-impl.h").exists():
        raise MismatchError(
            f"{archive} is not the source of llama-cpp-python {version}.",
            "Point ATSPLAN_LLAMA_SDIST at the archive of exactly that version, or unset it.",
        )


def _run(command: list[str], log: Path, failure: str, remedy: str = "") -> None:
    """Run `command`, appending it and what it prints to `log`. Raises AtsplanError that quotes the first error."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    with log.open("a") as stream:
        stream.write(f"{' '.join(command)}\n{result.stdout}\n")
    if result.returncode != 0:
        if re.search("unsupported (GNU|clang) version", result.stdout):
            remedy = "Install an older C++ compiler and name it in CUDAHOSTCXX, for example CUDAHOSTCXX=g++-12. "
        errors = [line.strip() for line in result.stdout.splitlines() if re.search("error|undefined", line)]
        raise AtsplanError(f"{failure}: {(errors or ['no message'])[0]}.", f"{remedy}The whole output is in {log}.")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file that replaces `path` at once when all went well, and vanishes when not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tree_sha256(folder: Path) -> str:
    headers = sorted(folder.rglob("*.h"))
    return hashlib.sha256(
        "".join(f"{path.relative_to(folder)} {_sha256(path)}\n" for path in headers).encode()
    ).hexdigest()


def _checksum_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _is_intact(file: Path) -> bool:
    """Tell whether the object or library is as it was when it was built."""
    checksum = _checksum_file(file)
    return file.exists() and checksum.exists() and checksum.read_bytes() == _sha256(file).encode()


if __name__ == "__main__":
    try:
        print(f"Native helper: {native_helper(report=print)}")
    except AtsplanError as error:
        sys.exit(f"Error: {error}")
