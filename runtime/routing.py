"""Count which experts a text is routed to, with the model itself: on the CPU, from the mapped file.

So it works for models of any size. The work happens in a child process, because llama.cpp may abort.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from llama_cpp import llama_cpp

from planner.errors import AtsplanError, DeviceError
from planner.measurements import LayerRouting, Routing
from planner.records import from_json

from . import child
from .bindings import Context, Ggml, Helper
from .engine import tokenize
from .library import load
from .native_log import last_problem
from .session import CapturedLog, LoadSettings, open_context, open_model
from .token_batch import TokenBatch

TIMEOUT_SECONDS = 7200
MAX_TOKENS = 16384  # of the text; more changes the shares little and takes minutes on a CPU
N_CONTEXT = 4096  # tokens that see each other; longer texts are evaluated in pieces
N_UBATCH = 256  # every token is output, which takes n_ubatch x n_vocab floats


def count_routing(path: Path, text: str, n_threads: int) -> Routing:
    """Return how often each expert was used. Raises AtsplanError without experts in the model or tokens in the text."""
    request = [str(path), text, n_threads]
    purpose = f"Counting the routing of {path} failed"
    answer = child.call("runtime.routing", request, purpose=purpose, timeout_seconds=TIMEOUT_SECONDS)
    return from_json(answer.encode(), Routing, "the routing")


def _count(path: str, text: str, n_threads: int) -> Routing:
    library = load("sim")
    ggml, helper = Ggml(library.ggml), Helper(library.ats)
    settings = LoadSettings(N_CONTEXT, N_UBATCH, n_threads, use_mmap=True)  # no devices: the CPU alone
    with (
        open_model(Path(path), settings, ggml) as model,
        helper.routing_counter() as counter,
        open_context(model, settings, ggml, routing=counter) as context,
    ):
        tokens = tokenize(llama_cpp.llama_model_get_vocab(model), text)[:MAX_TOKENS]
        if not tokens:
            raise AtsplanError("The text holds no tokens.", "Give a text of at least a few pages.")
        for first in range(0, len(tokens), N_CONTEXT):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            _evaluate(context, tokens[first : first + N_CONTEXT])
        layers = tuple(LayerRouting(weight, counts) for weight, counts in counter.counts().items())
    if not layers:
        raise AtsplanError("The model has no experts to count.", "Leave --routing out.")
    return Routing(len(tokens), layers)


def _evaluate(context: Context, tokens: Sequence[int]) -> None:
    with TokenBatch(N_UBATCH) as batch:
        for first in range(0, len(tokens), N_UBATCH):
            part = tokens[first : first + N_UBATCH]
            every = len(part)  # with fewer outputs, the last layer would see only those tokens
            with CapturedLog() as log:
                status = llama_cpp.llama_decode(context, batch.fill(part, first, n_outputs=every))
            if status != 0:
                raise DeviceError(f"llama.cpp cannot evaluate the text: {last_problem(log) or f'status {status}'}")


if __name__ == "__main__":
    sys.exit(child.answer(lambda request: _count(*request)))
