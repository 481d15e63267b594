"""What is shipped: the wheel's exact contents, the repository's exact top level, the pinned llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from planner import __version__
from runtime import build

ROOT = Path(build.__file__).parents[1]
TOP_LEVEL = {
    "pyproject.toml", "planner", "profiler", "runtime", "plans", "tests", "notebooks", "atsplan.py",
    "Makefile", "README.md", "CONTRIBUTING.md", "LICENSE",
}  # fmt: skip


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    return project


def test_wheel_has_the_packages_and_the_native_sources(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    dist_info = f"atsplan-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        entry_points = content.read(f"{dist_info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"atsplan.py", "planner", "profiler", "runtime", dist_info}
    native = {path.name for path in (ROOT / "runtime/native").iterdir() if path.suffix in (".h", ".cpp", ".cu")}
    assert {"atsplan.h"} < native
    assert {name.rpartition("/")[2] for name in names if name.startswith("runtime/native/")} == native
    modules = {
        str(path.relative_to(ROOT)) for name in ("planner", "profiler", "runtime") for path in ROOT.glob(f"{name}/*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules | {"atsplan.py"}
    plans = {str(path.relative_to(ROOT)) for path in (ROOT / "plans").rglob("*") if path.is_file()}
    assert {name.removeprefix("planner/shipped_") for name in names if "shipped_plans" in name} == plans
    assert "atsplan = atsplan:main" in entry_points
    assert f"{dist_info}/licenses/LICENSE" in names


def test_top_level_of_the_repository() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_llama_cpp_python_is_pinned_to_what_is_installed(project: dict[str, object]) -> None:
    dependencies = project["dependencies"]
    assert isinstance(dependencies, list)
    assert f"llama-cpp-python=={build.find_llama().version}" in dependencies
