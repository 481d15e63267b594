"""The web application of `atsplan serve`: routes, who may ask, errors, streams of events, clients that go away."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from types import FrameType
from typing import TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from planner.errors import AtsplanError
from planner.terminal import say

from . import openai_api as api
from .generation import BusyError, Generator, Job, RequestError

MAX_BODY_BYTES = 8 * 1024**2  # several times the text of the longest contexts
_SHUTDOWN_SECONDS = 5  # for answers to say that they end
_CLOSED = 499  # nobody reads this answer; the number that other servers log then

Result = TypeVar("Result")


def run(generator: Generator, model_name: str, listener: socket.socket, api_key: str | None) -> None:
    """Answer requests on a bound socket until Ctrl-C, which ends answers that are under way."""
    app = make_app(generator, model_name, api_key, is_local=is_loopback(listener.getsockname()[0]))
    config = uvicorn.Config(
        app, lifespan="off", ws="none", access_log=False, server_header=False, log_config=None,
        log_level="warning" if os.environ.get("ATSPLAN_DEBUG") else "critical",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )  # fmt: skip
    _Server(config, generator).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, generator: Generator) -> None:
        super().__init__(config)
        self._generator = generator

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._generator.stop()  # or it would wait for long answers
        super().handle_exit(sig, frame)


def make_app(generator: Generator, model_name: str, api_key: str | None, *, is_local: bool) -> Starlette:
    """Return the web application. Without a key, one on a loopback address answers only to its own names."""
    started = int(time.time())

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [api.model_object(model_name, started)]})

    async def model(request: Request) -> Response:
        _check_model(request.path_params["name"], model_name)
        return JSONResponse(api.model_object(model_name, started))

    async def chat(request: Request) -> Response:
        return await _respond(request, generator, model_name, api.ChatRequest)

    async def completion(request: Request) -> Response:
        return await _respond(request, generator, model_name, api.CompletionRequest)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
        ],
        middleware=[Middleware(_Guard, api_key=api_key, is_local=is_local)],
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, AtsplanError, Exception), _error_response),
    )


async def _respond(
    request: Request, generator: Generator, model_name: str, kind: type[api.ChatRequest] | type[api.CompletionRequest]
) -> Response:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Also keeps web pages out: a browser asks before it sends this type to another site.
        raise api.ApiError(415, "Send the request with Content-Type: application/json.")
    wanted = api.parse_request(await _read_body(request), kind)
    _check_model(wanted.model, model_name)
    answer = api.Answer.new(model_name, is_chat=kind is api.ChatRequest)
    job = generator.submit(wanted.generation())
    if wanted.stream:
        try:
            await _while_connected(request, job.started())
        except BaseException:
            job.cancel()
            raise
        return _EventStream(job, _events(job, answer, wants_usage=wanted.wants_usage))
    try:
        text = await _while_connected(request, _whole_text(job))
    finally:
        job.cancel()
    assert job.outcome is not None  # the text is complete
    _log(job)
    return JSONResponse(answer.whole(text, job.outcome))


async def _whole_text(job: Job) -> str:
    await job.started()
    return "".join([piece async for piece in job.pieces()])


async def _events(job: Job, answer: api.Answer, *, wants_usage: bool) -> AsyncIterator[str]:
    """Yield server-sent events. An error after the first of them can only be told as one more."""
    if answer.is_chat:
        yield _event(answer.beginning())
    try:
        async for piece in job.pieces():
            yield _event(answer.piece(piece))
    except Exception as error:
        yield _event(_api_error(error).to_json())
        return
    assert job.outcome is not None
    yield _event(answer.end(job.outcome))
    if wants_usage:
        yield _event(answer.usage(job.outcome))
    yield "data: [DONE]\n\n"
    _log(job)


def _event(content: api.Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _EventStream(StreamingResponse):
    """Cancels the job when the stream ends, however it ends."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class _Guard:
    """Turns requests away before anything is read: without the key, or under a foreign name.

    A web page could have its own name resolved to a loopback address and then read the answers of a server there.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, is_local: bool) -> None:
        self._app = app
        self._api_key = None if api_key is None else f"Bearer {api_key}".encode()
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is not None:
            await JSONResponse(error.to_json(), error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> api.ApiError | None:
        if self._api_key is not None:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._api_key):
                return api.ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        elif self._is_local and not _is_local_name(headers.get("host", "")):
            return api.ApiError(403, "This server answers only to localhost; with --api-key to any name.")
        return None


def _is_local_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or is_loopback(name)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches the address. Raises ValueError if it is none."""
    return ipaddress.ip_address(address).is_loopback


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise api.ApiError(413, f"The request is larger than {MAX_BODY_BYTES // 1024**2} MiB.")
    return bytes(body)


async def _while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Return what `work` returns. Raises ClientDisconnect if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body was read: all that can come is the end
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _check_model(name: str | None, known: str) -> None:
    if name not in (None, known):
        raise api.ApiError(
            404, f"There is no model {name!r:.100} here, only {known!r}.", code="model_not_found", parameter="model"
        )


async def _error_response(_request: Request, error: Exception) -> Response:
    problem = _api_error(error)
    headers = {"Retry-After": "5"} if problem.status == 503 else None
    return JSONResponse(problem.to_json(), problem.status, headers=headers)


def _api_error(error: Exception) -> api.ApiError:
    """Return the error as the client is to see it. What the client did not cause is printed here too."""
    if isinstance(error, api.ApiError):
        return error
    if isinstance(error, HTTPException):
        return api.ApiError(error.status_code, error.detail)
    if isinstance(error, ClientDisconnect):
        return api.ApiError(_CLOSED, "The client is gone.")
    if isinstance(error, RequestError):
        return api.ApiError(400, str(error))
    if isinstance(error, BusyError):
        return api.ApiError(503, str(error), code="busy")
    text = str(error) if isinstance(error, AtsplanError) else f"{type(error).__name__}: {error}"
    say(f"Error: {text}")
    return api.ApiError(500, text)


def _log(job: Job) -> None:
    done = job.outcome
    if done is not None:
        known = f" ({done.n_cached} known)" if done.n_cached else ""
        say(f"{done.n_prompt} prompt tokens{known}, {done.n_generated} generated in {done.seconds:.1f} s")
