"""Text for several clients from one engine: they queue, one thread computes, pieces come back to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from planner.errors import AtsplanError

from .chat import Message, make_formatter, prompt_tokens
from .engine import Engine
from .sampling import Sampler

MAX_WAITING = 8  # requests beside the one that is computed


class BusyError(AtsplanError):
    """The queue is full, or the server is about to end."""


class RequestError(AtsplanError):
    """The request cannot be answered by this model."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt (text, or the messages of a conversation) and how to continue it."""

    prompt: str | tuple[Message, ...]
    n_max: int | None  # tokens; None: until the context is full
    stops: tuple[str, ...]  # the text ends before the first of them
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """`n_cached` prompt tokens were in the context already, from the request before. `seconds` without queueing."""

    reason: Literal["stop", "length"]
    n_prompt: int
    n_cached: int
    n_generated: int
    seconds: float


class Job:
    """One queued request, seen from the event loop: await `started`, iterate over `pieces`, read `outcome`."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.outcome: Outcome | None = None  # set when `pieces` has ended
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[str | Outcome | Exception | None] = asyncio.Queue()  # None: it has started

    async def started(self) -> None:
        """Wait until its turn has come and the prompt is known to fit. Raises what is wrong with the request."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it comes. Raises AtsplanError if the device fails or the server ends."""
        while not isinstance(item := await self._items.get(), Outcome):
            if isinstance(item, Exception):
                raise item
            if item:
                yield item
        self.outcome = item

    def cancel(self) -> None:
        """Stop computing as soon as possible; nobody listens any more."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, item: str | Outcome | Exception | None) -> None:
        """Hand `item` over from the computing thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class Generator:
    """Answers jobs one after the other. A context manager: leaving it waits for the computing thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._n_jobs = 0
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._executor.shutdown(cancel_futures=True)

    def submit(self, request: GenerationRequest) -> Job:
        """Queue a request. To be called in the event loop. Raises BusyError if too many wait."""
        if self._n_jobs > MAX_WAITING or self._stopped.is_set():
            raise BusyError(f"{self._n_jobs} requests are being answered or waiting.", "Try again later.")
        job = Job(request)
        self._n_jobs += 1
        done = asyncio.get_running_loop().run_in_executor(self._executor, self._run, job)
        done.add_done_callback(self._forget)
        return job

    def stop(self) -> None:
        """End all jobs with a BusyError and take no more."""
        self._stopped.set()

    def _forget(self, _done: asyncio.Future[None]) -> None:
        self._n_jobs -= 1

    def _run(self, job: Job) -> None:
        try:
            self._check(job)
            job.put(self._answer(job))
        except Exception as error:  # whatever it is, somebody waits for an answer
            job.put(error)

    def _answer(self, job: Job) -> Outcome:
        """Compute one answer. Raises BusyError once nobody waits for it."""
        request, engine = job.request, self._engine
        started = time.perf_counter()
        tokens = self._tokenize(request.prompt)
        n_free = engine.n_context - len(tokens)
        if n_free < 1:
            raise RequestError(
                f"The prompt's {len(tokens)} tokens do not fit into the context of {engine.n_context}.",
                "Shorten it, or serve a plan that was solved with a larger --ctx.",
            )
        job.put(None)
        n_cached = engine.keep_prefix(tokens)
        for first in range(n_cached, len(tokens), engine.n_ubatch):
            self._check(job)
            engine.evaluate(tokens[first : first + engine.n_ubatch])
        n_max = min(request.n_max or n_free, n_free)
        n_generated, is_stopped = 0, False

        def count(tokens: Iterable[int]) -> Iterator[int]:
            nonlocal n_generated
            for token in tokens:
                self._check(job)
                n_generated += 1
                yield token

        with Sampler(request.temperature, request.seed, request.top_p) as sampler:
            pieces = engine.text_pieces(count(engine.continue_text(n_max, sampler)))
            for piece, is_stopped in until_stop(pieces, request.stops):  # noqa: B007  # the last one's is used below
                job.put(piece)
        is_cut = n_generated == n_max and not is_stopped
        seconds = time.perf_counter() - started
        return Outcome("length" if is_cut else "stop", len(tokens), n_cached, n_generated, seconds)

    def _tokenize(self, prompt: str | tuple[Message, ...]) -> list[int]:
        try:
            if isinstance(prompt, str):
                tokens = self._engine.tokenize(prompt)
            else:
                tokens = prompt_tokens(self._engine, make_formatter(self._engine), list(prompt))
        except AtsplanError as error:
            raise RequestError(error.message, error.remedy) from error
        if not tokens:
            raise RequestError("The prompt is empty, and the model has no token to begin with.")
        return tokens

    def _check(self, job: Job) -> None:
        if self._stopped.is_set() or job.is_cancelled:
            raise BusyError("The server is about to end.")


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield text that comes before the first of `stops`, and whether one was found.

    The end of the text that could be the beginning of a stop is held back until it is known.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [held.index(stop) for stop in stops if stop in held]
        if found:
            yield held[: min(found)], True
            return
        n_held = max((_overlap(held, stop) for stop in stops), default=0)
        yield held[: len(held) - n_held], False
        held = held[len(held) - n_held :]
    yield held, False


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
