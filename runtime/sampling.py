"""Choose the next token: llama.cpp's sampler chain behind three numbers."""

from __future__ import annotations

import ctypes
from types import TracebackType

from llama_cpp import llama_cpp

from .bindings import Context

TOP_K = 40
TOP_P = 0.95


class Sampler:
    """Greedy at temperature 0; else top-k, top-p and temperature with a seeded draw. Close it, or use `with`."""

    def __init__(self, temperature: float = 0.0, seed: int = 0, top_p: float = TOP_P) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if temperature <= 0:
            parts = [llama_cpp.llama_sampler_init_greedy()]
        else:
            parts = [
                llama_cpp.llama_sampler_init_top_k(TOP_K),
                llama_cpp.llama_sampler_init_top_p(top_p, 1),
                llama_cpp.llama_sampler_init_temp(temperature),
                llama_cpp.llama_sampler_init_dist(ctypes.c_uint32(seed)),
            ]
        for part in parts:
            llama_cpp.llama_sampler_chain_add(self._chain, part)  # the chain owns its parts

    def sample(self, context: Context) -> int:
        """Return a token for the last evaluated position."""
        return int(llama_cpp.llama_sampler_sample(self._chain, context, -1))

    def close(self) -> None:
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()
