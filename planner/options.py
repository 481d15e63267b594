"""Options that mean nothing without others, or beside them."""

from __future__ import annotations

import typer


def typed(context: typer.Context, *options: str) -> str:
    """Return those of `options` that are on the command line, joined by commas."""
    sources = {
        option: context.get_parameter_source(parameter.name or "")
        for parameter in context.command.params
        for option in parameter.opts
    }
    return ", ".join(option for option in options if getattr(sources[option], "name", "") == "COMMANDLINE")
