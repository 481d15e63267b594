"""Execute a plan: native code, its build, its bindings, and llama.cpp underneath.

From Python, with a plan that `planner.solve` returned or `planner.read_record` read:

    with PlanEngine(load(plan.device), Path("model.gguf"), plan) as engine, Sampler() as sampler:
        for piece in engine.text_pieces(engine.generate(engine.tokenize("Gravity is"), 64, sampler)):
            print(piece, end="", flush=True)

`Engine` is the same for plain llama.cpp. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, PlanEngine
    from .library import load
    from .sampling import Sampler
    from .session import LoadSettings

_MODULES = {
    "Engine": "engine", "PlanEngine": "engine", "load": "library", "LoadSettings": "session", "Sampler": "sampling",
}  # fmt: skip

__all__ = ["Engine", "LoadSettings", "PlanEngine", "Sampler", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: llama.cpp is not loaded for --help."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
