"""An interactive conversation with the model's own chat template."""

from __future__ import annotations

from collections.abc import Callable

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from planner.errors import AtsplanError

from .engine import Engine
from .sampling import Sampler

Message = dict[str, str]  # {"role": "user" | "assistant", "content": text}


def chat(
    engine: Engine, sampler: Sampler, n_max: int, read: Callable[[], str | None], write: Callable[[str], None]
) -> None:
    """Answer what `read` returns until it returns None. Replies, of at most `n_max` tokens, go to `write` in pieces.

    Ctrl-C ends a reply early. When the context fills, the oldest exchanges are forgotten, and the user is told.
    """
    formatter = make_formatter(engine)
    messages: list[Message] = []
    while (text := read()) is not None:
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            n_forgotten, tokens = _fit(engine, formatter, messages, n_max)
        except AtsplanError as error:
            messages.pop()
            write(f"({error})\n")
            continue
        if n_forgotten:
            del messages[:n_forgotten]
            write(f"(The context is full: forgot the oldest {n_forgotten} messages.)\n")
        reply = _reply(engine, sampler, tokens, n_max, write)
        messages.append({"role": "assistant", "content": reply})


def _reply(engine: Engine, sampler: Sampler, tokens: list[int], n_max: int, write: Callable[[str], None]) -> str:
    pieces: list[str] = []
    try:
        for piece in engine.text_pieces(engine.generate(tokens, n_max, sampler)):
            pieces.append(piece)
            write(piece)
    except KeyboardInterrupt:
        write(" (stopped)")
    write("\n")
    return "".join(pieces)


def _fit(engine: Engine, formatter: Jinja2ChatFormatter, messages: list[Message], n_max: int) -> tuple[int, list[int]]:
    """Return how many old messages to forget so that a reply has room, and the tokens of the rest."""
    n_reserved = min(n_max, engine.n_context // 4)
    for n_forgotten in range(0, len(messages), 2):
        tokens = prompt_tokens(engine, formatter, messages[n_forgotten:])
        if len(tokens) + n_reserved <= engine.n_context:
            return n_forgotten, tokens
    raise AtsplanError(
        f"That is too long for the context of {engine.n_context} tokens.", "Shorten it, or solve with a larger --ctx."
    )


def prompt_tokens(engine: Engine, formatter: Jinja2ChatFormatter, messages: list[Message]) -> list[int]:
    """Return the conversation as the model's template writes it. Raises AtsplanError if the template refuses it."""
    try:
        prompt = formatter(messages=messages).prompt  # type: ignore[arg-type]  # a union of typed dicts
    except Exception as error:  # a template is the model's own program: it may raise anything
        raise AtsplanError(f"The model's chat template failed: {error}.", "Use -p for plain text.") from error
    return engine.tokenize(prompt, add_special=False)


def make_formatter(engine: Engine) -> Jinja2ChatFormatter:
    """Return the model's own template. Raises AtsplanError if it has none or a wrong one."""
    template = engine.metadata("tokenizer.chat_template")
    if not template:
        raise AtsplanError("The model has no chat template.", "Give it a text to continue with -p.")
    try:
        return Jinja2ChatFormatter(
            template=template,
            eos_token=engine.special_token_text("eos"),
            bos_token=engine.special_token_text("bos"),
        )
    except Exception as error:
        raise AtsplanError(f"The model's chat template is not valid: {error}.", "Use -p for plain text.") from error
