"""Facts about a model from llama.cpp itself: its graph's weights in order of use, and its memory accounting.

No weights are read and no memory is taken. The work happens in a child process, because llama.cpp aborts the
process on some bad files; an abort becomes one AtsplanError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from planner.measurements import MemoryCase, WeightUse
from planner.records import from_json

from . import child
from .bindings import Ggml, Helper, TracedWeight
from .library import HYBRID_DEVICE, load
from .session import LoadSettings, open_context, open_model

TIMEOUT_SECONDS = 300
_MIN_DIMENSIONS = {"MUL_MAT": 2, "MUL_MAT_ID": 3}  # a matrix with one row, or one expert, keeps its ones


@dataclass(frozen=True)
class Inspection:
    """One model on one device. `weights_prefill` is the graph for a batch of n_ubatch tokens.

    A tied output matrix appears twice in the weights: as an input, and as the operand of the output's MUL_MAT.
    """

    weights_decode: tuple[WeightUse, ...]
    weights_prefill: tuple[WeightUse, ...]
    memory: tuple[MemoryCase, ...]  # for every n_context
    device_weights_bytes: int  # with every layer offloaded
    unsupported_ops: tuple[str, ...] = ()  # but for products with weights; the GPU leaves them to the CPU


def inspect_model(
    path: str | os.PathLike[str],
    device: str,
    n_contexts: Sequence[int],
    n_ubatch: int,
    type_k: str = "f16",
    type_v: str = "f16",
) -> Inspection:
    """Ask llama.cpp, with every layer on `device` ("sim", "cuda0", ...). Raises AtsplanError."""
    request = [os.fspath(path), device, list(n_contexts), n_ubatch, type_k, type_v, True]
    purpose = f"llama.cpp cannot use {path}"
    answer = child.call("runtime.inspect_model", request, purpose=purpose, timeout_seconds=TIMEOUT_SECONDS)
    return from_json(answer.encode(), Inspection, f"llama.cpp's description of {path}")


def _inspect(
    path: str,
    device: str,
    n_contexts: Sequence[int],
    n_ubatch: int,
    type_k: str,
    type_v: str,
    flash_attention: bool,
) -> Inspection:
    library = load(device)
    ggml, helper = Ggml(library.ggml), Helper(library.ats)
    device_type = ggml.buffer_type_name(HYBRID_DEVICE)

    def settings(n_context: int) -> LoadSettings:
        return LoadSettings(
            n_context, n_ubatch, n_threads=1, type_k=type_k, type_v=type_v, flash_attention=flash_attention,
            devices=(HYBRID_DEVICE,), no_alloc=True,
        )  # fmt: skip

    with ExitStack() as stack:
        model = stack.enter_context(open_model(Path(path), settings(n_contexts[0]), ggml))
        cases = []
        for n_context in n_contexts:
            with open_context(model, settings(n_context), ggml) as context:
                rows = helper.memory_breakdown(context)
            on_device = [row for row in rows if row.buffer_type == device_type]
            cases.append(
                MemoryCase(
                    n_context, n_ubatch, type_k, type_v, flash_attention,
                    context_bytes=sum(row.context_bytes for row in on_device),
                    compute_bytes=sum(row.compute_bytes for row in on_device),
                    host_compute_bytes=sum(row.compute_bytes for row in rows if row.buffer_type != device_type),
                )
            )  # fmt: skip
        largest = settings(max(n_contexts))
        context = stack.enter_context(open_context(model, largest, ggml))
        n_prefill_tokens = min(largest.n_ubatch, largest.n_context)
        on_device = [row for row in helper.memory_breakdown(context) if row.buffer_type == device_type]
        return Inspection(
            weights_decode=_weight_uses(helper.trace_weights(context, 1), 1),
            weights_prefill=_weight_uses(helper.trace_weights(context, n_prefill_tokens), n_prefill_tokens),
            memory=tuple(cases),
            device_weights_bytes=sum(row.model_bytes for row in on_device),
            unsupported_ops=tuple(
                sorted({op for n in (1, n_prefill_tokens) for op in helper.unsupported_ops(context, n)})
            ),
        )


def _weight_uses(traced: Sequence[TracedWeight], n_tokens: int) -> tuple[WeightUse, ...]:
    return tuple(
        WeightUse(
            name=weight.name,
            op=weight.op,
            type=weight.type,
            shape=_without_trailing_ones(weight.shape, _MIN_DIMENSIONS.get(weight.op, 1)),
            size_bytes=weight.size_bytes,
            input_bytes=weight.input_bytes // n_tokens,
            output_bytes=weight.output_bytes // n_tokens,
            inputs=weight.inputs,
            n_experts_used=weight.n_experts_used,
            is_input=weight.is_input,
        )
        for weight in traced
    )


def _without_trailing_ones(shape: tuple[int, ...], n_min: int) -> tuple[int, ...]:
    n = len(shape)
    while n > n_min and shape[n - 1] == 1:
        n -= 1
    return shape[:n]


if __name__ == "__main__":
    sys.exit(child.answer(lambda request: _inspect(*request)))
