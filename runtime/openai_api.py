"""The part of OpenAI's HTTP API that one local model can answer: what requests say, and how answers look."""

from __future__ import annotations

import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.errors import AtsplanError

from .chat import Message
from .generation import GenerationRequest, Outcome
from .sampling import TOP_P

Json = dict[str, Any]
Body = TypeVar("Body", bound="Request")

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API; a chat's reply is as long as it wants to be
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {  # what changes answers -> the values that do not
    "audio": (None,), "best_of": (None, 1), "echo": (None, False), "frequency_penalty": (None, 0),
    "functions": (None, []), "logit_bias": (None, {}), "logprobs": (None, False), "n": (None, 1),
    "presence_penalty": (None, 0), "response_format": (None, {"type": "text"}), "suffix": (None, ""),
    "tools": (None, []),
}  # fmt: skip


class ApiError(AtsplanError):
    """A refused request: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    def to_json(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: str = Field(max_length=32)
    content: str | list[TextPart] | None = None

    def as_message(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Request(BaseModel):
    """What both kinds of request have in common. Fields that do not change the answer are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @abstractmethod
    def generation(self) -> GenerationRequest:
        """Return what to compute."""

    def _generation(self, prompt: str | tuple[Message, ...], n_max: int | None) -> GenerationRequest:
        return GenerationRequest(
            prompt,
            n_max,
            self.stops,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=TOP_P if self.top_p is None else self.top_p,
            seed=secrets.randbits(32) if self.seed is None else self.seed & 0xFFFFFFFF,
        )


class ChatRequest(Request):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def generation(self) -> GenerationRequest:
        messages = tuple(message.as_message() for message in self.messages)
        return self._generation(messages, self.max_completion_tokens or self.max_tokens)


class CompletionRequest(Request):
    prompt: str | list[str] = Field(min_length=1)

    def generation(self) -> GenerationRequest:
        if not isinstance(self.prompt, str) and len(self.prompt) > 1:
            raise ApiError(400, "This server continues one prompt per request.", parameter="prompt")
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        return self._generation(prompt, self.max_tokens or _DEFAULT_COMPLETION_TOKENS)


def parse_request(body: bytes, kind: type[Body]) -> Body:
    """Return the request. Raises ApiError that names the field which is wrong or cannot be honoured."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = re.sub(r"\.(str|list\[\w+\])", "", ".".join(map(str, first["loc"])))  # without the union's members
        raise ApiError(400, f"{path or 'The body'}: {first['msg']}.", parameter=path or None) from error
    given = request.model_extra or {}
    for name, harmless in _UNSUPPORTED.items():
        if given.get(name) not in harmless:
            raise ApiError(400, f"This server does not support {name}.", parameter=name, code="unsupported_parameter")
    return request


@dataclass(frozen=True)
class Answer:
    """The JSON objects of one answer: a whole one, or the chunks of a stream."""

    model: str
    is_chat: bool
    id: str
    created: int  # seconds since 1970

    @classmethod
    def new(cls, model: str, *, is_chat: bool) -> Answer:
        prefix = "chatcmpl" if is_chat else "cmpl"
        return cls(model, is_chat, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, text: str, outcome: Outcome) -> Json:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return self._object("", [self._choice(content, outcome.reason)]) | {"usage": _usage(outcome)}

    def beginning(self) -> Json:
        """Return the first chunk of a chat's stream, which tells who speaks."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def piece(self, text: str) -> Json:
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text})

    def end(self, outcome: Outcome) -> Json:
        return self._chunk({"delta": {}} if self.is_chat else {"text": ""}, outcome.reason)

    def usage(self, outcome: Outcome) -> Json:
        return self._object(".chunk", []) | {"usage": _usage(outcome)}

    def _chunk(self, content: Json, reason: str | None = None) -> Json:
        return self._object(".chunk", [self._choice(content, reason)])

    def _choice(self, content: Json, reason: str | None) -> Json:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _object(self, suffix: str, choices: list[Json]) -> Json:
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def model_object(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "atsplan"}


def _usage(outcome: Outcome) -> Json:
    return {
        "prompt_tokens": outcome.n_prompt,
        "completion_tokens": outcome.n_generated,
        "total_tokens": outcome.n_prompt + outcome.n_generated,
        "prompt_tokens_details": {"cached_tokens": outcome.n_cached},
    }
