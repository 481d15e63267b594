"""Measure this machine with a model: kernels, the link, crossings between CPU and GPU.

From Python: `profile = profile_model("model.gguf")`. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .suite import Settings, profile_model

__all__ = ["Settings", "profile_model"]


def __getattr__(name: str) -> Any:
    """Import on first use: llama.cpp is not loaded for --help."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".suite", __name__), name)
