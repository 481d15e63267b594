"""A conversation: what the model sees, what is forgotten when the context fills, and how errors end a turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest

from planner.errors import AtsplanError
from runtime.chat import chat
from runtime.engine import Engine
from runtime.sampling import Sampler

TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}[assistant:"


class FakeEngine:
    """One token per character; it answers `ok`, or is interrupted after `o`."""

    def __init__(self, n_context: int, template: str = TEMPLATE, *, interrupted: bool = False) -> None:
        self.n_context = n_context
        self.prompts: list[str] = []
        self._template, self._interrupted = template, interrupted

    def metadata(self, key: str) -> str:
        return self._template if key == "tokenizer.chat_template" else ""

    def special_token_text(self, name: str) -> str:
        return f"<{name}>"

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return [ord(letter) for letter in text]

    def generate(self, tokens: Sequence[int], n: int, sampler: object) -> Iterator[int]:
        self.prompts.append("".join(map(chr, tokens)))
        yield ord("o")
        if self._interrupted:
            raise KeyboardInterrupt
        yield ord("k")

    def text_pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        return map(chr, tokens)


def talk(engine: FakeEngine, *lines: str) -> str:
    written: list[str] = []
    pending: Iterator[str | None] = iter([*lines, None])
    chat(cast(Engine, engine), cast(Sampler, cast(Any, None)), 8, lambda: next(pending), written.append)
    return "".join(written)


def test_the_model_sees_the_conversation() -> None:
    engine = FakeEngine(n_context=1000)
    assert talk(engine, "hi", "  ", "more") == "ok\nok\n"
    assert engine.prompts == ["[user:hi][assistant:", "[user:hi][assistant:ok][user:more][assistant:"]


def test_the_oldest_exchange_is_forgotten() -> None:
    engine = FakeEngine(n_context=50)
    assert talk(engine, "hi", "more") == "ok\n(The context is full: forgot the oldest 2 messages.)\nok\n"
    assert engine.prompts[1] == "[user:more][assistant:"


def test_a_message_that_cannot_fit_is_not_kept() -> None:
    engine = FakeEngine(n_context=50)
    told = talk(engine, "x" * 60, "hi")
    assert told.startswith("(That is too long for the context of 50 tokens.")
    assert engine.prompts == ["[user:hi][assistant:"]


def test_an_interrupt_keeps_the_text_so_far() -> None:
    engine = FakeEngine(n_context=1000, interrupted=True)
    assert talk(engine, "hi", "more") == "o (stopped)\no (stopped)\n"
    assert engine.prompts[1] == "[user:hi][assistant:o][user:more][assistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [("", "has no chat template"), ("{% for %}", "is not valid"), ("{{ raise_exception('no') }}", None)],
)
def test_bad_templates(template: str, message: str | None) -> None:
    engine = FakeEngine(n_context=1000, template=template)
    if message is None:
        assert "The model's chat template failed" in talk(engine, "hi")
    else:
        with pytest.raises(AtsplanError, match=message):
            talk(engine, "hi")
