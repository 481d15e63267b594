"""Open a GGUF file with llama.cpp: everything that is passed to it, and its errors turned into ours."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from llama_cpp import llama_cpp

from planner.errors import AtsplanError, DeviceError, InvalidFileError
from planner.workload import KV_TYPES

from .bindings import Context, Ggml, RoutingCounter
from .native_log import last_problem

Model = Any  # llama_model *, opaque
OnProgress = Callable[[float], None]  # receives the loaded fraction

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

ALL_LAYERS = 9999  # more than any model has; llama.cpp takes what there is

_LOG_LEVEL_ERROR = 4  # ggml's

# llama.cpp takes 32-bit numbers as they come: it crashes on larger ones, and takes 0 for "as you like".
_LIMITS = {"n_context": 2**31 - 1, "n_ubatch": 2**20, "n_threads": 512}


@dataclass(frozen=True)
class Override:
    """Weights whose name matches `pattern` go to the default buffer type of the ggml device `device`."""

    pattern: str
    device: str


@dataclass(frozen=True)
class LoadSettings:
    """What llama.cpp is told. `devices` are ggml device names; without any, everything runs on the CPU."""

    n_context: int
    n_ubatch: int
    n_threads: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    devices: tuple[str, ...] = ()
    n_gpu_layers: int = ALL_LAYERS
    overrides: tuple[Override, ...] = ()
    use_mmap: bool = False  # with mmap, llama.cpp replaces pinned host buffers by pageable ones
    use_repacking: bool = False  # llama.cpp's own layouts for CPU weights: other kernels, other rounding
    no_alloc: bool = False  # account for memory without taking any, and read no weights

    def __post_init__(self) -> None:
        """Raise AtsplanError for what llama.cpp would not refuse but crash on."""
        for name, limit in _LIMITS.items():
            if not 1 <= getattr(self, name) <= limit:
                raise AtsplanError(f"{name} is {getattr(self, name)}; llama.cpp takes 1 to {limit}.", "Solve again.")
        for name in (self.type_k, self.type_v):
            if name not in KV_TYPES:
                known = ", ".join(KV_TYPES)
                raise AtsplanError(f"llama.cpp has no KV cache of the type '{name}'.", f"Use one of {known}.")


class _BufferTypeOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _discard(level: int, text: bytes, _user: Any) -> None:
    """Swallow llama.cpp's messages outside of `CapturedLog`."""
    _leave_behind(level, text)


def _leave_behind(level: int, text: bytes) -> None:
    """Write an error where it outlives this process, which ggml may end next, giving no other reason.

    Only where nobody reads native code's standard error, but whoever explains how the process ended.
    """
    if level == _LOG_LEVEL_ERROR and "GGML_NO_BACKTRACE" in os.environ:
        os.write(2, text)


class CapturedLog:
    """A `with` block that collects llama.cpp's and ggml's last messages instead of printing them. Reusable."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=200)

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def collect(level: int, text: bytes, _user: Any) -> None:
            _leave_behind(level, text)
            self._lines.append(text.decode(errors="replace"))

        self._collect = collect

    def __enter__(self) -> deque[str]:
        self._lines.clear()
        llama_cpp.llama_log_set(self._collect, None)
        return self._lines

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        llama_cpp.llama_log_set(_discard, None)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until the end of the block, because ctypes swallows exceptions raised in callbacks.

    So are other signals that raise an exception. Yields a function that tells whether one has come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    raising = [number for number in (signal.SIGINT, *ENDING_SIGNALS) if callable(signal.getsignal(number))]
    previous = {number: signal.signal(number, lambda number, _frame: received.append(number)) for number in raising}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[-1])


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the block, once, instead of ending the process on the spot."""

    def end(number: int, _frame: object) -> None:
        for other in replaced:
            signal.signal(other, signal.SIG_IGN)  # a process group is told twice
        raise SystemExit(128 + number)

    replaced = [number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def open_model(
    path: Path, settings: LoadSettings, ggml: Ggml, on_progress: OnProgress | None = None
) -> Iterator[Model]:
    """Load the model and free it on exit. Raises DeviceError without memory, else InvalidFileError, also for encoders.

    KeyboardInterrupt while loading frees everything.
    """
    parameters = llama_cpp.llama_model_default_params()
    devices = (ctypes.c_void_p * (len(settings.devices) + 1))(*map(ggml.device, settings.devices), None)
    overrides = (_BufferTypeOverride * (len(settings.overrides) + 1))(
        *(_BufferTypeOverride(item.pattern.encode(), ggml.buffer_type(item.device)) for item in settings.overrides)
    )
    parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
    if settings.overrides:
        parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    parameters.n_gpu_layers = settings.n_gpu_layers
    parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
    parameters.use_extra_bufts = settings.use_repacking
    parameters.no_alloc = settings.no_alloc
    with CapturedLog() as log, deferred_interrupt() as is_interrupted:

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _user: Any) -> bool:
            if on_progress is not None:
                on_progress(fraction)
            return not is_interrupted()  # False makes llama.cpp stop and free

        parameters.progress_callback = report
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if model and is_interrupted():
            llama_cpp.llama_model_free(model)
    if not model:
        raise _failure(f"llama.cpp cannot load {path}", log)
    try:
        if llama_cpp.llama_model_has_encoder(model):
            raise InvalidFileError(
                f"{path} is an encoder, or an encoder and a decoder.", "atsplan runs models that only continue text."
            )
        yield model
    finally:
        llama_cpp.llama_model_free(model)


@contextmanager
def open_context(
    model: Model, settings: LoadSettings, ggml: Ggml, *, routing: RoutingCounter | None = None
) -> Iterator[Context]:
    """Create a context for one sequence, which outputs the logits of one token per batch. Raises as `open_model`.

    With `routing`, every token can be output: llama.cpp computes only those in the last layer.
    """
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = settings.n_context
    parameters.n_batch = parameters.n_ubatch = settings.n_ubatch
    parameters.n_seq_max = 1
    parameters.n_outputs_max = 1  # saves n_vocab x n_ubatch floats of VRAM
    if routing is not None:
        parameters.n_outputs_max = settings.n_ubatch
        parameters.cb_eval = ctypes.cast(routing.library.ats_routing_eval, type(parameters.cb_eval))
        parameters.cb_eval_user_data = routing.pointer
    parameters.n_threads = parameters.n_threads_batch = settings.n_threads
    parameters.type_k = ggml.type_number(settings.type_k)
    parameters.type_v = ggml.type_number(settings.type_v)
    parameters.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if settings.flash_attention
        else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    parameters.no_perf = True
    with CapturedLog() as log, deferred_interrupt() as is_interrupted:
        context = llama_cpp.llama_init_from_model(model, parameters)
        if context and is_interrupted():
            llama_cpp.llama_free(context)
    if not context:
        raise _failure("llama.cpp cannot create a context", log)
    try:
        if not llama_cpp.llama_get_memory(context):
            raise InvalidFileError(
                "The model keeps no context: it embeds text or fills it in.",
                "atsplan runs models that continue text.",
            )
        yield context
    finally:
        with CapturedLog(), deferred_interrupt():
            llama_cpp.llama_free(context)


def _failure(what: str, log: Sequence[str]) -> AtsplanError:
    message = f"{what}: {last_problem(log) or 'it gave no reason'}"
    if re.search(r"out of memory|unable to allocate|failed to allocate|bad_alloc", "".join(log)):
        return DeviceError(message, "Free memory on the device, or solve again with a smaller --vram or --ctx.")
    return InvalidFileError(message)
