"""The native helper's build, on a tiny plug-in and a made-up llama.cpp source archive: no network, real compiler.

What depends on the CUDA release or on a GPU that is not here is tested with scripts in place of nvcc and nvidia-smi.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from planner.errors import AtsplanError, InvalidFileError, MismatchError
from runtime import build, nvcc

ROOT = Path(build.__file__).parents[1]
VERSION = build.find_llama().version
HEADERS = {
    "include/llama.h": "int llama_answer_from_header(void);\n",
    "ggml/include/ggml.h": "#define GGML_ANSWER 40\n",
    "ggml/src/ggml-backend-impl.h": '#include "ggml.h"\n',
    "src/llama-ext.h": '#include "llama.h"\n#define LLAMA_ANSWER 2\nstatic int unused_function() { return 0; }\n',
}
STAMP_SOURCE = """
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char * ats_build_stamp(void) { return ATS_BUILD_STAMP; }
"""
ANSWER_SOURCE = """
#include "answer.h"
#include "ggml-backend-impl.h"
#include "llama-ext.h"
extern "C" __attribute__((visibility("default"))) int answer(void) { return GGML_ANSWER + LLAMA_ANSWER + OURS; }
"""


KERNEL_SOURCE = """
__global__ void kernel() {}
extern "C" __attribute__((visibility("default"))) void launch() { kernel<<<1, 1>>>(); }
"""
FAKE_NVCC = """#!/bin/sh
echo "$*" >> "$0.log"
case "$*" in
*--version*) echo "Cuda compilation tools, release RELEASE, VRELEASE.131" ;;
*--list-gpu-code*) printf 'sm_%s\\n' CODES ;;
*--dryrun*) echo '#$ INCLUDES="-I/headers/of/RELEASE" ' ;;
*) for last in "$@"; do :; done; : > "$last" ;;
esac
"""


def write_archive(path: Path, version: str = VERSION, extra: dict[str, str] | None = None) -> Path:
    files = {f"llama_cpp_python-{version}/vendor/llama.cpp/{name}": text for name, text in HEADERS.items()}
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (files | (extra or {})).items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_archive(tmp_path / f"llama_cpp_python-{VERSION}.tar.gz")
    monkeypatch.setenv("ATSPLAN_LLAMA_SDIST", str(path))
    monkeypatch.delenv("ATSPLAN_NATIVE", raising=False)
    return path


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "stamp.cpp").write_text(STAMP_SOURCE)
    (folder / "answer.cpp").write_text(ANSWER_SOURCE)
    (folder / "answer.h").write_text("#define OURS 0\n")
    return folder


@pytest.fixture
def reports() -> list[str]:
    return []


def answer(path: Path) -> int:
    """Return what the helper computes, in a child: dlopen keeps an overwritten library's old pages."""
    code = f"import llama_cpp, ctypes; print(ctypes.CDLL({str(path)!r}).answer())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def test_stamp_depends_on_version_and_every_source_byte(sources: Path) -> None:
    llama = build.find_llama()
    stamp = build.expected_stamp(llama, sources)
    assert stamp.startswith(f"llama-cpp-python {VERSION}, sources ")
    os.utime(sources / "answer.cpp", (0, 0))
    assert build.expected_stamp(llama, sources) == stamp
    assert build.expected_stamp(build.Llama("0.0.1", llama.library_folder, False), sources) != stamp
    (sources / "answer.h").write_text("#define OURS 1\n")
    assert build.expected_stamp(llama, sources) != stamp


@pytest.mark.usefixtures("archive")
def test_builds_against_the_archive_and_links_llama(sources: Path, cache_folder: Path) -> None:
    path = build.native_helper(source_folder=sources)
    assert path.is_relative_to(cache_folder)
    assert answer(path) == 42
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    for name in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
        assert f"[{name}.so" in dynamic
    assert f"[{build.find_llama().library_folder}]" in dynamic
    loaded = ctypes.CDLL(str(path))
    loaded.ats_build_stamp.restype = ctypes.c_char_p
    assert loaded.ats_build_stamp().decode() == build.expected_stamp(build.find_llama(), sources)
    assert "warning" not in (path.parent / "build.log").read_text()


@pytest.mark.usefixtures("archive")
def test_second_call_builds_nothing_and_a_change_builds_one_file(sources: Path, reports: list[str]) -> None:
    path = build.native_helper(source_folder=sources)
    assert build.native_helper(reports.append, sources) == path
    assert reports == []
    (sources / "answer.cpp").write_text(ANSWER_SOURCE.replace("OURS;", "OURS + 100;"))
    changed = build.native_helper(reports.append, sources)
    assert changed != path
    assert answer(changed) == 142
    assert [line for line in reports if "answer" in line] == ["  compiling answer.cpp"]
    assert build.native_helper(reports.append, sources) == changed


@pytest.mark.usefixtures("archive")
def test_damaged_cache_is_rebuilt(sources: Path, cache_folder: Path) -> None:
    path = build.native_helper(source_folder=sources)
    path.write_bytes(path.read_bytes()[:1000])
    assert answer(build.native_helper(source_folder=sources)) == 42
    header = cache_folder / "native" / f"headers-{VERSION}" / "src" / "llama-ext.h"
    header.write_text("damaged")
    path.unlink()
    (sources / "answer.h").write_text("#define OURS 8\n")
    assert answer(build.native_helper(source_folder=sources)) == 50
    assert "LLAMA_ANSWER" in header.read_text()


@pytest.mark.usefixtures("archive")
def test_damaged_checksums_and_objects_are_replaced(sources: Path, cache_folder: Path, reports: list[str]) -> None:
    path = build.native_helper(source_folder=sources)
    path.with_suffix(".sha256").write_bytes(os.urandom(100))
    (cache_folder / "native" / f"headers-{VERSION}" / "sha256").write_bytes(os.urandom(100))
    (damaged,) = (cache_folder / "native/objects").glob("answer-*.o")
    damaged.write_bytes(b"")
    assert answer(build.native_helper(reports.append, source_folder=sources)) == 42
    assert [line for line in reports if "compiling" in line] == ["  compiling answer.cpp"]


@pytest.mark.usefixtures("archive")
def test_failed_compilation_names_the_error_and_the_log(sources: Path, cache_folder: Path) -> None:
    (sources / "answer.cpp").write_text("int answer() { return undeclared_name; }")
    with pytest.raises(AtsplanError, match=r"Compiling answer\.cpp failed: .*undeclared_name") as caught:
        build.native_helper(source_folder=sources)
    assert "\n" not in str(caught.value)
    (log,) = (cache_folder / "native").glob("*/build.log")
    assert str(log) in caught.value.remedy
    assert "undeclared_name" in log.read_text()
    assert not list((cache_folder / "native").rglob("*.so"))


@pytest.mark.usefixtures("archive")
def test_unresolved_symbol_fails_at_link_time(sources: Path) -> None:
    (sources / "answer.cpp").write_text("int missing(); int answer() { return missing(); }")
    with pytest.raises(AtsplanError, match="Linking the native helper failed: .*missing"):
        build.native_helper(source_folder=sources)


@pytest.mark.usefixtures("archive")
def test_missing_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AtsplanError, match=r"No C\+\+ compiler") as caught:
        build.native_helper(source_folder=sources)
    assert "apt install g++" in caught.value.remedy


def test_missing_network(sources: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATSPLAN_NATIVE", raising=False)
    monkeypatch.delenv("ATSPLAN_LLAMA_SDIST", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache_folder))
    with pytest.raises(AtsplanError, match=f"{VERSION} could not be downloaded") as caught:
        build.native_helper(source_folder=sources)
    assert "ATSPLAN_LLAMA_SDIST" in caught.value.remedy
    assert (cache_folder / "native" / "download.log").exists()


def test_wrong_and_truncated_archives(sources: Path, archive: Path) -> None:
    content = archive.read_bytes()
    write_archive(archive, version="0.0.1")
    with pytest.raises(MismatchError, match=f"not the source of llama-cpp-python {VERSION}"):
        build.native_helper(source_folder=sources)
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidFileError, match="cannot be read"):
        build.native_helper(source_folder=sources)
    archive.unlink()
    with pytest.raises(InvalidFileError, match="cannot be read"):
        build.native_helper(source_folder=sources)


def test_archive_writes_nothing_outside(sources: Path, archive: Path, cache_folder: Path) -> None:
    outside = {
        f"llama_cpp_python-{VERSION}/vendor/llama.cpp/src/../../../../../../evil.h": "",
        str(cache_folder / "absolute.h"): "",
        f"llama_cpp_python-{VERSION}/vendor/llama.cpp/src/llama.cpp": "not a header",
    }
    write_archive(archive, extra=outside)
    build.native_helper(source_folder=sources)
    headers = {
        str(path.relative_to(cache_folder / "native" / f"headers-{VERSION}"))
        for path in cache_folder.parent.rglob("*")
        if path.suffix in (".h", ".cpp") and path.is_relative_to(cache_folder)
    }
    assert headers == set(HEADERS)
    assert not list(archive.parents[1].rglob("evil.h"))


@pytest.mark.usefixtures("archive")
def test_two_processes_compile_once(sources: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runtime import build;"
        "build.native_helper(lambda line: print(line, flush=True), Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(sources)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = sorted(line for process in processes for line in process.communicate()[0].splitlines())
    assert [process.returncode for process in processes] == [0, 0]
    assert lines.count("  compiling answer.cpp") == 1


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_nvcc(folder: Path, release: str = "12.4", codes: str = "50 61 70 75 80 86 89 90 90a") -> Path:
    """Write a compiler that notes its arguments and makes empty files."""
    return write_script(folder / "nvcc", FAKE_NVCC.replace("RELEASE", release).replace("CODES", codes))


def commands(nvcc: Path, word: str) -> list[list[str]]:
    """Return the arguments of the calls so far that contain `word`."""
    calls = [line.split() for line in Path(f"{nvcc}.log").read_text().splitlines()]
    return [call for call in calls if word in call]


@pytest.fixture
def cuda_sources(sources: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return sources with a kernel, for a llama.cpp with CUDA."""
    (sources / "kernel.cu").write_text(KERNEL_SOURCE)
    with_cuda = dataclasses.replace(build.find_llama(), has_cuda=True)
    monkeypatch.setattr(build, "find_llama", lambda: with_cuda)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAHOSTCXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return sources


@pytest.mark.usefixtures("archive")
@pytest.mark.skipif(nvcc.find_nvcc() is None, reason="needs nvcc")
def test_cuda_sources_are_compiled_where_llama_has_cuda(cuda_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda = build.find_llama()
    monkeypatch.setattr(build, "find_llama", lambda: dataclasses.replace(with_cuda, has_cuda=False))
    plain = build.native_helper(source_folder=cuda_sources)
    monkeypatch.setattr(build, "find_llama", lambda: with_cuda)
    guarded = "#include <cuda_runtime.h>\n#ifdef ATS_CUDA\n" + ANSWER_SOURCE + "\n#endif\n"
    (cuda_sources / "answer.cpp").write_text(guarded)
    cuda = build.native_helper(source_folder=cuda_sources)
    symbols = [
        subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout for path in (plain, cuda)
    ]
    assert [" T launch" in text for text in symbols] == [False, True]
    assert " T answer" in symbols[1]


def test_one_build_has_code_for_every_gpu(cuda_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = write_nvcc(tmp_path / "bin")
    monkeypatch.setenv("CUDACXX", str(compiler))
    build.native_helper(source_folder=cuda_sources)
    (command,) = commands(compiler, "-c")[1:]  # after the dry run
    architectures = [argument for argument in command if "arch" in argument]
    assert architectures == [
        *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in (70, 75, 80, 86, 89, 90)),
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_each_cuda_release_has_its_own_build(
    cuda_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    write_nvcc(tmp_path / "bin", "12.4")
    old = build.native_helper(source_folder=cuda_sources)
    write_nvcc(tmp_path / "bin", "13.0")
    new = build.native_helper(reports.append, cuda_sources)
    assert new != old
    assert {line for line in reports if "compiling" in line} == {
        "  compiling answer.cpp", "  compiling kernel.cu", "  compiling stamp.cpp",
    }  # fmt: skip
    write_nvcc(tmp_path / "bin", "12.4")
    assert build.built_helper(cuda_sources) == old


def test_helper_does_not_depend_on_path(cuda_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvcc(tmp_path / "bin")
    monkeypatch.setattr(nvcc, "FOLDERS", (str(tmp_path / "bin"),))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    path = build.native_helper(source_folder=cuda_sources)
    monkeypatch.setenv("PATH", "/bin")
    assert build.built_helper(cuda_sources) == path


def test_nvcc_uses_the_named_cxx_compiler(
    cuda_sources: Path, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = write_nvcc(tmp_path / "bin")
    monkeypatch.setenv("CUDACXX", str(compiler))
    for name, text, expected in (("", "", None), ("CXX", "g++", "g++"), ("CUDAHOSTCXX", "g++-12", "g++-12")):
        if name:
            monkeypatch.setenv(name, text)
        shutil.rmtree(cache_folder / "native" / "objects", ignore_errors=True)
        shutil.rmtree(build.native_helper(source_folder=cuda_sources).parent)  # for the next
        for word in ("-c", "-shared"):
            command = commands(compiler, word)[-1]
            assert (command[command.index("-ccbin") + 1] if "-ccbin" in command else None) == expected


GCC_ERROR = "host_config.h:143: error: #error -- unsupported GNU version! gcc versions later than 13 are not supported!"


@pytest.mark.parametrize(
    ("failure", "message", "remedy"),
    [
        (f"*' -c '*) echo '{GCC_ERROR}'", r"Compiling kernel\.cu failed: .* unsupported GNU", r"CUDAHOSTCXX=g\+\+-12"),
        ("*--list*) echo; echo 'nvcc fatal : no'", r"/nvcc does not work: nvcc fatal : no\. Repair", "CUDACXX"),
        ("*--version*) :", r"/nvcc does not work: .* status 1\. Repair", "CUDACXX"),
    ],
)
def test_nvcc_that_fails(
    cuda_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, message: str, remedy: str
) -> None:
    compiler = write_nvcc(tmp_path / "bin")
    case = 'case "$*" in\n'
    dry_run = "*--dryrun*) exit ;;\n"
    write_script(compiler, compiler.read_text().replace(case, f"{case}{dry_run}{failure}; exit 1 ;;\n"))
    monkeypatch.setenv("CUDACXX", str(compiler))
    with pytest.raises(AtsplanError, match=message) as caught:
        build.native_helper(source_folder=cuda_sources)
    assert "\n" not in str(caught.value)
    assert re.search(remedy, caught.value.remedy)


def test_prebuilt_helper_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSPLAN_NATIVE", str(tmp_path / "absent.so"))
    with pytest.raises(InvalidFileError, match=r"absent\.so, which is not a file"):
        build.native_helper()
    (tmp_path / "absent.so").touch()
    assert build.native_helper() == tmp_path / "absent.so"


def test_a_helper_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSPLAN_NATIVE", str(tmp_path / "damaged.so"))
    (tmp_path / "damaged.so").write_text("not a library")
    code = "from runtime import library; library.load('sim')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "The native helper cannot be loaded: " in result.stderr


@pytest.mark.usefixtures("archive")
def test_helper_of_other_sources_is_refused(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSPLAN_NATIVE", str(build.native_helper(source_folder=sources)))
    code = "from runtime import library; library.load('sim')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"MismatchError: The native helper {os.environ['ATSPLAN_NATIVE']} does not fit" in result.stderr
