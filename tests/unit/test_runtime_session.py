"""Which of llama.cpp's many lines is the one to show, and Ctrl-C inside native calls."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from planner.errors import AtsplanError
from runtime.native_log import last_problem
from runtime.session import LoadSettings, deferred_interrupt, orderly_end


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["llama_model_load: error loading model: unknown model architecture: 'foo'\n", "x: failed to load model\n"],
            "unknown model architecture: 'foo'",
        ),
        (
            ["alloc: cudaMalloc failed: out of memory", "llama: error loading model: unable to allocate CUDA0 buffer"],
            "unable to allocate CUDA0 buffer",
        ),
        (
            ["gguf_init: invalid magic characters: 'root', expected 'GGUF'", "a: failed to load model from /x"],
            "invalid magic characters: 'root', expected 'GGUF'",
        ),
        (["/src/model.cpp:12: GGML_ASSERT(n > 0) failed", "noise"], "GGML_ASSERT(n > 0) failed"),
        (["just a line", ""], "just a line"),
        ([], ""),
    ],
)
def test_last_problem(lines: list[str], expected: str) -> None:
    assert last_problem(lines) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_context": 0}, {"n_context": 2**32}, {"n_ubatch": 0}, {"n_ubatch": 2**31}, {"n_threads": 0},
        {"n_threads": 2**16}, {"type_k": "i8"}, {"type_v": "q8_1"},
    ],
)  # fmt: skip
def test_what_llama_cpp_would_crash_on_is_refused(wrong: dict[str, Any]) -> None:
    (value,) = wrong.values()
    with pytest.raises(AtsplanError, match=str(value)):
        LoadSettings(**{"n_context": 512, "n_ubatch": 64, "n_threads": 1} | wrong)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        reached = is_interrupted()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_orderly_end_waits_too_and_comes_once(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(SystemExit) as ended, orderly_end():
        try:
            with deferred_interrupt() as is_interrupted:
                signal.raise_signal(number)
                steps.append(is_interrupted())
            steps.append("not reached")
        finally:
            signal.raise_signal(number)
            steps.append("trace written")
    assert steps == [True, "trace written"]
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_an_orderly_end_leaves_hang_ups_ignored() -> None:
    """Under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with orderly_end():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_an_error_is_not_hidden_by_an_interrupt() -> None:
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
