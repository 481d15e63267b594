"""Requests that queue for one engine, stop strings, and what is refused: with an engine that repeats the prompt."""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.errors import AtsplanError, DeviceError
from runtime.generation import MAX_WAITING, BusyError, GenerationRequest, Generator, Job, RequestError, until_stop
from runtime.openai_api import ApiError, ChatRequest, CompletionRequest, parse_request
from runtime.sampling import Sampler
from runtime.serve import serve_plan


class FakeEngine:
    """One token per letter. Waits until it is allowed to begin."""

    n_context, n_ubatch = 16, 4

    def __init__(self) -> None:
        self.may_begin = threading.Event()
        self.evaluated: list[list[int]] = []

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        self.prompt = tokens
        assert self.may_begin.wait(10)
        return 1

    def evaluate(self, tokens: Sequence[int]) -> None:
        self.evaluated.append(list(tokens))
        if ord("!") in tokens:
            raise DeviceError("The device is gone.")

    def continue_text(self, n: int, sampler: Sampler) -> Iterator[int]:
        yield from self.prompt[:n]

    def text_pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        yield from map(chr, tokens)


def request(prompt: str, n_max: int | None = None, *stops: str) -> GenerationRequest:
    return GenerationRequest(prompt, n_max, stops, temperature=0, top_p=1, seed=0)


async def text_of(job: Job) -> str:
    await job.started()
    return "".join([piece async for piece in job.pieces()])


def answers(engine: Any, *requests: GenerationRequest) -> list[Any]:
    """Submit all requests at once and return what became of each: its job and text, or its error."""

    async def run() -> list[Any]:
        with Generator(engine) as generator:
            jobs = [generator.submit(item) for item in requests]
            engine.may_begin.set()
            texts = await asyncio.gather(*map(text_of, jobs), return_exceptions=True)
            return [(job.outcome, text) for job, text in zip(jobs, texts, strict=True)]

    return asyncio.run(run())


def test_requests_are_answered_one_after_the_other() -> None:
    engine = FakeEngine()
    found = answers(engine, request("abcdef"), request("xyz", 2), request("abcdef", None, "zz", "cd"))
    assert [text for _, text in found] == ["abcdef", "xy", "ab"]
    assert [outcome.reason for outcome, _ in found] == ["stop", "length", "stop"]
    assert [(outcome.n_prompt, outcome.n_cached, outcome.n_generated) for outcome, _ in found] == [
        (6, 1, 6),
        (3, 1, 2),
        (6, 1, 4),
    ]
    assert engine.evaluated == [[*b"bcde"], [*b"f"], [*b"yz"], [*b"bcde"], [*b"f"]]  # in micro-batches


def test_what_goes_wrong_concerns_one_request_only() -> None:
    found = [text for _, text in answers(FakeEngine(), request("x" * 16), request(""), request("!!"), request("fine"))]
    assert isinstance(found[0], RequestError)
    assert "16 tokens do not fit into the context of 16" in found[0].message
    assert isinstance(found[1], RequestError)
    assert isinstance(found[2], DeviceError)
    assert found[3] == "fine"


def test_the_queue_is_short() -> None:
    engine: Any = FakeEngine()

    async def run() -> None:
        with Generator(engine) as generator:
            jobs = [generator.submit(request("ab")) for _ in range(1 + MAX_WAITING)]
            with pytest.raises(BusyError, match=f"{1 + MAX_WAITING} requests"):
                generator.submit(request("ab"))
            jobs[1].cancel()
            engine.may_begin.set()
            assert await text_of(jobs[0]) == "ab"
            assert await text_of(jobs[-1]) == "ab"
            assert len(engine.evaluated) == MAX_WAITING  # not the cancelled one
            await asyncio.sleep(0.01)
            assert await text_of(generator.submit(request("cd"))) == "cd"
            generator.stop()
            with pytest.raises(BusyError):
                generator.submit(request("ab"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "is_found"),
    [
        (["ab", "cd"], [], "abcd", False),
        (["ab", "cd"], ["bc"], "a", True),
        (["ab", "ab", "ac"], ["abac"], "ab", True),
        (["a<", "|e", "nd", "|x"], ["<|end|>"], "a<|end|x", False),
        (["a<", "|e", "nd", "|>x"], ["<|end|>"], "a", True),
        (["xyz"], ["z", "y"], "x", True),
        (["aaa"], ["aaaa"], "aaa", False),
    ],
)
def test_until_stop(pieces: list[str], stops: list[str], text: str, is_found: bool) -> None:
    found = list(until_stop(pieces, stops))
    assert "".join(piece for piece, _ in found) == text
    assert found[-1][1] == is_found


def test_text_is_held_back_only_as_long_as_it_may_be_a_stop() -> None:
    assert [piece for piece, _ in until_stop(["ab", "x", "y"], ["bc"])] == ["a", "bx", "y", ""]


def test_requests_are_read_as_openai_means_them() -> None:
    body = b"""{"messages": [{"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "name": "x"}],
        "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0, "seed": -1, "stop": "END", "n": 1,
        "frequency_penalty": 0.0, "user": "me", "tools": []}"""
    assert parse_request(body, ChatRequest).generation() == GenerationRequest(
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": ""},
        ),
        7, ("END",), 0.0, 0.95, 2**32 - 1,
    )  # fmt: skip
    plain = parse_request(b'{"prompt": ["once"]}', CompletionRequest).generation()
    assert (plain.prompt, plain.n_max, plain.stops, plain.temperature) == ("once", 16, (), 1.0)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "a", "temperature": 3}', "temperature"),
        (b'{"prompt": "a", "top_p": 0}', "top_p"),
        (b'{"prompt": "a", "n": 2}', "n"),
        (b'{"prompt": "a", "echo": true}', "echo"),
        (b'{"prompt": "a", "logprobs": 3}', "logprobs"),
        (b'{"prompt": ["a", "b"]}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [1, 2]}', "prompt"),
        (b"{}", "prompt"),
        (b"[]", None),
    ],
)
def test_what_cannot_be_honoured_is_refused(body: bytes, parameter: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, CompletionRequest).generation()
    assert caught.value.status == 400
    assert caught.value.parameter == parameter


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(AtsplanError) as caught:
        serve_plan(Path("plan.json"), None, builtins.exit, host="", port=0, api_key=None, anyway=False)
    assert str(caught.value) == "serve needs uvicorn. Install with: pip install uvicorn"
