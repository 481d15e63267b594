"""The settings that people use to run plain llama.cpp under a VRAM budget, each taken as far as it fits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from planner.gguf_model import read_gguf, read_model_info
from planner.records import from_json, to_json

from . import child
from .bindings import Ggml, Helper
from .library import ggml_name, load
from .placement import group_names
from .session import ALL_LAYERS, LoadSettings, Override, open_context, open_model

TIMEOUT_SECONDS = 600
_FFN = re.compile(r"ffn_(up|gate|down)(_exps)?\.weight$")


@dataclass(frozen=True)
class Candidate:
    name: str
    settings: LoadSettings


@dataclass(frozen=True)
class Search:
    """`settings` fixes what does not vary: context, batch, threads, cache types. The budget excludes overheads."""

    model_path: str
    device: str
    budget_bytes: int
    settings: LoadSettings


@dataclass(frozen=True)
class Candidates:
    candidates: tuple[Candidate, ...]


def find_candidates(search: Search) -> tuple[Candidate, ...]:
    """Return the settings worth measuring, fitted by llama.cpp's own accounting. Raises AtsplanError."""
    answer = child.call(
        "runtime.plain_settings",
        to_json(search),
        purpose=f"llama.cpp cannot use {search.model_path}",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    return from_json(answer.encode(), Candidates, "the settings").candidates


def largest(limit: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest number in 0..limit that fits, or None; what fits must fit with less."""
    if not fits(0):
        return None
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _find(search: Search) -> Candidates:
    base = search.settings
    if search.device == "sim":
        found = [Candidate(f"CPU only{how}", replace(base, use_repacking=bool(how))) for how in ("", ", repacked")]
    else:
        found = _fitted(search, replace(base, devices=(ggml_name(search.device),)))
    return Candidates(
        tuple(
            Candidate(f"{item.name}, {'mmap' if use_mmap else 'no mmap'}", replace(item.settings, use_mmap=use_mmap))
            for item in found
            for use_mmap in (False, True)
        )
    )


def _fitted(search: Search, base: LoadSettings) -> list[Candidate]:
    library = load(search.device)
    ggml, helper = Ggml(library.ggml), Helper(library.ats)
    device_type = ggml.buffer_type_name(ggml_name(search.device))
    path = Path(search.model_path)
    n_layers = read_model_info(path).n_layers + 1  # the output counts as one
    ffn = [tensor.name for tensor in read_gguf(path).tensors if _FFN.search(tensor.name)]

    def fits(settings: LoadSettings) -> bool:
        accounting = replace(settings, no_alloc=True)
        with open_model(path, accounting, ggml) as model, open_context(model, accounting, ggml) as context:
            rows = helper.memory_breakdown(context)
        held = (row for row in rows if row.buffer_type == device_type)
        return sum(row.model_bytes + row.context_bytes + row.compute_bytes for row in held) <= search.budget_bytes

    def by_layers(n: int) -> LoadSettings:
        return replace(base, n_gpu_layers=n)

    def by_ffn(n: int) -> LoadSettings:
        on_cpu = group_names(ffn[: len(ffn) - n])
        return replace(base, n_gpu_layers=ALL_LAYERS, overrides=tuple(Override(name, "CPU") for name in on_cpu))

    found = []
    n = largest(n_layers, lambda n: fits(by_layers(n)))
    if n is not None:
        found.append(Candidate(f"{n} of {n_layers} layers on the GPU", by_layers(n)))
    if n != n_layers:
        n = largest(len(ffn), lambda n: fits(by_ffn(n)))
        if n is not None:
            found.append(Candidate(f"{len(ffn) - n} of {len(ffn)} FFN tensors on the CPU", by_ffn(n)))
    return found


if __name__ == "__main__":
    sys.exit(child.answer(lambda request: _find(from_json(request.encode(), Search, "the search"))))
