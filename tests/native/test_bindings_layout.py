"""The ctypes structures mirror the headers' exactly: a compiler says where every field is."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from runtime import build, native_api

HEADER = build.SOURCE_FOLDER / "atsplan.h"
STRUCTURES = {
    "ats_statistics": native_api.StatisticsStruct,
    "ats_weight_use": native_api.WeightUseStruct,
    "ats_memory": native_api.MemoryStruct,
    "ats_matmul_spec": native_api.MatmulSpecStruct,
    "ats_contention": native_api.ContentionStruct,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return for every structure its size and, by field, offset and size."""
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu", sizeof({name}));')
        for field, *_ in structure._fields_:
            lines.append(f'printf(" %zu %zu", offsetof({name}, {field}), sizeof(((({name} *) nullptr)->{field})));')
        lines.append(r'printf("\n");')
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.cpp"
    source.write_text(
        f'#include "{HEADER}"\n#include <cstddef>\n#include <cstdio>\nint main() {{ {" ".join(lines)} }}\n'
    )
    compiler = build.find_compilers(build.find_llama()).cxx
    subprocess.run([compiler, str(source), "-o", str(folder / "layout")], check=True)
    printed = subprocess.run([str(folder / "layout")], check=True, capture_output=True, text=True).stdout
    return {name: [int(number) for number in rest] for name, *rest in map(str.split, printed.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(compiled: dict[str, list[int]], name: str) -> None:
    structure = STRUCTURES[name]
    layout = [ctypes.sizeof(structure)]
    for field, *_ in structure._fields_:
        layout += [getattr(structure, field).offset, getattr(structure, field).size]
    assert layout == compiled[name]


def test_every_function_and_structure_of_the_header_is_bound() -> None:
    text = HEADER.read_text()
    assert set(re.findall(r"\b(ats_\w+)\(", text)) == set(native_api.HELPER_PROTOTYPES)
    assert set(re.findall(r"^struct (ats_\w+) \{", text, re.MULTILINE)) == set(STRUCTURES)
    assert int(re.search(r"ATS_API_VERSION (\d+)", text)[1]) == native_api.API_VERSION  # type: ignore[index]


def test_every_function_is_exported(native_helper: Path) -> None:
    library = ctypes.CDLL(str(native_helper))
    for name in native_api.HELPER_PROTOTYPES:
        assert hasattr(library, name)
