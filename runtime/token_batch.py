"""What llama_decode is given: tokens of the one sequence, with their places in it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from llama_cpp import llama_cpp


class TokenBatch:
    """Room for `n_max` tokens, filled anew for every call. A context manager: leaving it frees the room."""

    def __init__(self, n_max: int) -> None:
        self._batch = llama_cpp.llama_batch_init(n_max, 0, 1)
        for i in range(n_max):
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
        self._tokens, self._positions, self._outputs = (
            np.ctypeslib.as_array(array, (n_max,)) for array in (self._batch.token, self._batch.pos, self._batch.logits)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)

    def fill(self, tokens: Sequence[int], first_position: int, n_outputs: int) -> Any:
        """Return the llama_batch of `tokens`, at least one and at most n_max; logits are made for the last few."""
        n = self._batch.n_tokens = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(first_position, first_position + n)
        self._outputs[: n - n_outputs] = False
        self._outputs[n - n_outputs : n] = True
        return self._batch
