"""What notebooks and scripts import: there, documented, typed, and cheap until it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import planner
import profiler
import runtime
from planner.gguf_model import read_model_info
from profiler import Settings
from profiler.synthetic_model import write_synthetic_model


@pytest.mark.parametrize("package", [planner, profiler, runtime])
def test_every_public_name_is_documented_and_typed(package: ModuleType) -> None:
    for name in package.__all__:
        value = getattr(package, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            annotations = inspect.get_annotations(value)
            assert set(inspect.signature(value).parameters) | {"return"} == set(annotations), name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, planner, profiler, runtime\n"
        "print(sorted({'pandas', 'ortools', 'llama_cpp', 'pynvml', 'matplotlib', 'starlette'} & set(sys.modules)))\n"
        "from profiler import profile_model; from planner import solve; from runtime import Engine, PlanEngine\n"
        "print('llama_cpp' in sys.modules)"
    )
    root = Path(planner.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\nTrue\n"


def test_settings_suit_the_model(tmp_path: Path) -> None:
    info = read_model_info(write_synthetic_model(tmp_path / "tiny.gguf", "llama-tiny")[0])
    settings = Settings.for_model(info, "sim")
    assert settings.device == "sim"
    assert settings.n_context == min(4096, info.n_context_train)
    assert settings.n_ubatch == min(512, settings.n_context)
    assert settings.threads[-1] >= 1
    assert Settings.for_model(info, "none", (1,), 64) == Settings("none", (1,), 64, 64)
