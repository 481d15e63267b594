"""Run a model: plain llama.cpp (`Engine`), or the hybrid device under a plan (`PlanEngine`)."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from planner.errors import AtsplanError, DeviceError
from planner.hardware import MAX_PINNED_FRACTION
from planner.plan import Plan

from . import placement
from .bindings import Ggml, Helper, Statistics
from .host_memory import available_memory_bytes
from .library import HOST_DEVICE, Library
from .load_aware import LoadAware
from .native_log import last_problem
from .sampling import Sampler
from .session import (
    CapturedLog,
    LoadSettings,
    OnProgress,
    deferred_interrupt,
    open_context,
    open_model,
)
from .token_batch import TokenBatch

_UNROTATABLE = ("bf16",)  # types of keys; llama.cpp would end the process
_CONTEXT_FULL = 1  # llama_decode's answer when no cell of the KV cache is free


class Engine:
    """One model with one context and one sequence. A context manager: leaving it frees everything."""

    def __init__(
        self, library: Library, model_path: Path, settings: LoadSettings, *, on_progress: OnProgress | None = None
    ) -> None:
        """Load the model. Raises DeviceError, with everything freed, if memory or the file does not allow it."""
        self.library = library
        self.helper = Helper(library.ats)
        self._ggml = Ggml(library.ggml)
        self._device_types = {self._ggml.buffer_type_name(device) for device in settings.devices}
        self._log = CapturedLog()
        self._can_shift = settings.type_k not in _UNROTATABLE
        self._tokens: list[int] = []  # in the context, in order
        self.n_evaluated = 0  # tokens since the model was loaded
        with ExitStack() as stack:
            self._model = stack.enter_context(open_model(model_path, settings, self._ggml, on_progress))
            self._context = stack.enter_context(open_context(self._model, settings, self._ggml))
            self.n_ubatch = int(llama_cpp.llama_n_ubatch(self._context))  # no more than the context holds
            self._batch = stack.enter_context(TokenBatch(self.n_ubatch))
            self._vocab = llama_cpp.llama_model_get_vocab(self._model)
            self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
            self.n_context = int(llama_cpp.llama_n_ctx(self._context))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def n_tokens(self) -> int:
        """Tokens in the context so far."""
        return len(self._tokens)

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the context. Their last one's logits are then available.

        Raises AtsplanError if they do not fit into the context, DeviceError if the device fails.
        """
        if self.n_tokens + len(tokens) > self.n_context:
            raise AtsplanError(
                f"{self.n_tokens + len(tokens)} tokens do not fit into the context of {self.n_context}.",
                "Shorten the text, or solve again with a larger --ctx.",
            )
        for first in range(0, len(tokens), self.n_ubatch):
            part = tokens[first : first + self.n_ubatch]
            self._decode(part, wants_logits=first + len(part) == len(tokens))

    def evaluate_prompt(self, tokens: Sequence[int]) -> int:
        """Make `tokens` the whole context, reusing the prefix that is there. Return how many were evaluated."""
        n_kept = self.keep_prefix(tokens)
        self.evaluate(tokens[n_kept:])
        return len(tokens) - n_kept

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Cut the context to what it has in common with `tokens`, without their last. Return its length in tokens."""
        n_kept = 0
        while n_kept < min(self.n_tokens, len(tokens) - 1) and self._tokens[n_kept] == tokens[n_kept]:
            n_kept += 1
        memory = llama_cpp.llama_get_memory(self._context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, n_kept, -1):
            n_kept = 0  # recurrent states cannot be cut
            llama_cpp.llama_memory_clear(memory, True)
        del self._tokens[n_kept:]
        return n_kept

    def logits(self) -> NDArray[np.float32]:
        """Return a copy of the last token's logits, shape (n_vocab,). Waits for the device."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        if not pointer:
            raise DeviceError("llama.cpp has no logits.", "Evaluate at least one token first.")
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy()

    def synchronize(self) -> None:
        """Wait until everything that was evaluated is computed."""
        llama_cpp.llama_synchronize(self._context)

    def accounted_vram_bytes(self) -> int:
        """Return the VRAM that llama.cpp holds: weights, KV cache and compute buffers."""
        return sum(
            row.model_bytes + row.context_bytes + row.compute_bytes
            for row in self.helper.memory_breakdown(self._context)
            if row.buffer_type in self._device_types
        )

    def choose(self, sampler: Sampler) -> int:
        """Return the token that `sampler` chooses to follow."""
        return sampler.sample(self._context)

    def generate(self, prompt_tokens: Sequence[int], n: int, sampler: Sampler) -> Iterator[int]:
        """Evaluate the prompt and yield up to `n` tokens that continue it; see `continue_text`."""
        self.evaluate_prompt(prompt_tokens)
        yield from self.continue_text(n, sampler)

    def continue_text(self, n: int, sampler: Sampler, *, forgets: bool = False) -> Iterator[int]:
        """Yield up to `n` tokens; ends early at an end token or a full context, unless it `forgets` half of that."""
        for index in range(n):
            token = self.choose(sampler)
            if llama_cpp.llama_vocab_is_eog(self._vocab, token):
                return
            yield token
            if index == n - 1:
                return
            if self.n_tokens == self.n_context:
                if not forgets:
                    return
                self.forget_half()
            self.evaluate([token])

    def forget_half(self) -> None:
        """Forget the older half of the context but its first token. The rest moves up, or is evaluated again."""
        first, last = 1, 1 + self.n_tokens // 2
        memory = llama_cpp.llama_get_memory(self._context)
        can_shift = self._can_shift and llama_cpp.llama_memory_can_shift(memory)
        if can_shift and llama_cpp.llama_memory_seq_rm(memory, 0, first, last):
            llama_cpp.llama_memory_seq_add(memory, 0, last, -1, first - last)
            del self._tokens[first:last]
        else:  # recurrent states, positions in several dimensions, and keys that cannot be rotated
            rest = [*self._tokens[:first], *self._tokens[last:]]
            llama_cpp.llama_memory_clear(memory, True)
            self._tokens.clear()
            self.evaluate(rest)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return tokenize(self._vocab, text, add_special=add_special, parse_special=parse_special)

    def text_pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield text as tokens come. A character spread over tokens is yielded when it is complete."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            piece = decoder.decode(self._piece(token))
            if piece:
                yield piece
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    def detokenize(self, tokens: Iterable[int]) -> str:
        return "".join(self.text_pieces(tokens))

    def metadata(self, key: str) -> str:
        """Return a scalar of the model's metadata as text, or "" if it is not there."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, size)
            if n < size:
                return buffer.value.decode(errors="replace") if n >= 0 else ""
            size = n + 1

    def special_token_text(self, name: str) -> str:
        """Return the text of the token `name`: "bos" or "eos"; "" if the model has none."""
        lookup = {"bos": llama_cpp.llama_vocab_bos, "eos": llama_cpp.llama_vocab_eos}[name]
        token = lookup(self._vocab)
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def _piece(self, token: int, *, special: bool = False) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _decode(self, tokens: Sequence[int], *, wants_logits: bool) -> None:
        batch = self._batch.fill(tokens, self.n_tokens, n_outputs=int(wants_logits))
        self._tokens.extend(tokens)
        status = -1
        try:
            # Single tokens log nothing, and masking the signal takes longer than it should per token.
            with self._log as log, deferred_interrupt() if len(tokens) > 1 else nullcontext():
                status = llama_cpp.llama_decode(self._context, batch)
        finally:
            if status != 0:  # failed, or interrupted by Ctrl-C: only the context knows how far it came
                memory = llama_cpp.llama_get_memory(self._context)
                del self._tokens[llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1 :]
        self.n_evaluated += len(tokens) if status == 0 else 0
        if status == _CONTEXT_FULL:
            raise AtsplanError(f"The context of {self.n_context} tokens is full.", "Solve again with a larger --ctx.")
        if status != 0:
            reason = self._native_error() or last_problem(log) or f"status {status}"
            raise DeviceError(f"The device failed while computing: {reason}")

    def _native_error(self) -> str:
        """Return the device's own words for its last failure, if it has any."""
        return ""


def tokenize(vocab: Any, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
    """Return the text's tokens. `vocab` is a llama_vocab *."""
    data = text.encode(errors="surrogatepass")
    n_max = len(data) + 8
    tokens = (llama_cpp.llama_token * n_max)()
    n = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, n_max, add_special, parse_special)
    if n < 0:
        raise AtsplanError("llama.cpp cannot tokenize the text.")
    return list(tokens[:n])


class PlanEngine(Engine):
    """A model under a plan, on the hybrid device. One per process: the device's classes belong to the process."""

    def __init__(
        self,
        library: Library,
        model_path: Path,
        plan: Plan,
        *,
        is_adaptive: bool = True,
        keeps_trace: bool = False,
        max_pinned_bytes: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Load the model as planned. Raises MismatchError if a weight did not land where the plan says.

        If `is_adaptive`, weights move between link and CPU as their speeds change; see `load`. Host weights beyond
        `max_pinned_bytes` are pageable; None keeps a tenth of the available memory free to swap.
        """
        helper = Helper(library.ats)
        helper.set_classes((item.name, item.decode, item.prefill) for item in plan.host_placements)
        for name, value in placement.device_options(plan).items():
            helper.set_option(name, value)
        if max_pinned_bytes is None:
            max_pinned_bytes = round(MAX_PINNED_FRACTION * available_memory_bytes())
        helper.set_option("max_pinned_bytes", max_pinned_bytes)
        super().__init__(library, model_path, placement.load_settings(plan), on_progress=on_progress)
        try:
            pinned_type = self._ggml.buffer_type_name(HOST_DEVICE)
            with CapturedLog(), deferred_interrupt():
                locations = self.helper.weight_locations(self._context)
                self.unsupported_ops = self.helper.unsupported_ops(self._context, 1)
            placement.check_locations(plan.placements, locations, pinned_type)
            self.load = LoadAware(self.helper, plan, self._set_n_threads, adapts=is_adaptive, keeps_trace=keeps_trace)
            self._n_batch_threads = plan.workload.n_threads
        except BaseException:
            self.close()
            raise

    def _set_n_threads(self, n_threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._context, n_threads, self._n_batch_threads)

    def logits(self) -> NDArray[np.float32]:
        logits = super().logits()
        self.load.after()
        return logits

    def synchronize(self) -> None:
        super().synchronize()
        self.load.after()

    def choose(self, sampler: Sampler) -> int:
        token = super().choose(sampler)
        self.load.after()
        return token

    def _decode(self, tokens: Sequence[int], *, wants_logits: bool) -> None:
        self.load.before(len(tokens))
        try:
            super()._decode(tokens, wants_logits=wants_logits)
        except BaseException:
            self.load.abandon()
            raise

    def statistics(self, *, reset: bool = False) -> Statistics:
        return self.helper.statistics(reset=reset)

    def accounted_vram_bytes(self) -> int:
        """Return the VRAM that llama.cpp, the ring and cached experts hold."""
        counters = self.statistics()
        return super().accounted_vram_bytes() + counters.ring_bytes + counters.expert_bytes

    def _native_error(self) -> str:
        return self.helper.last_error
