"""Examples at the end of a command's --help. Tests parse each of them."""

from __future__ import annotations

_HEADING = "Examples:"


def examples(*command_lines: str) -> str:
    """Return them as a typer epilog, which shows lines as they are."""
    return "\n".join((_HEADING, *command_lines))


def examples_of(epilog: str | None) -> list[str]:
    """Return the command lines that `examples` put there."""
    heading, *command_lines = (epilog or "").splitlines() or [""]
    return command_lines if heading == _HEADING else []
