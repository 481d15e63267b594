"""The generated pages: what the code says about files and commands, as text. `make docs` writes them."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import typer.main
from typer import core

import atsplan
from planner.examples import examples_of
from planner.measurements import Profile
from planner.plan import Plan
from planner.pressure import PressureResult
from planner.records import json_schema
from planner.trace import Trace
from runtime.bench import BenchResult

ROOT = Path(atsplan.__file__).parent
FILES = {
    Plan: "A plan file.",
    Profile: "A profile file.",
    BenchResult: "A file of a bench result.",
    Trace: "A file of a trace.",
    PressureResult: "A file of a measurement under load.",
}
MARK = "<!-- The rest is generated from the code by `make docs`. -->\n"
_TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def pages() -> dict[Path, str]:
    """Return what the generated files should hold."""
    formats, commands = ROOT / "plans/FORMATS.md", ROOT / "notebooks/COMMANDS.md"
    return {
        ROOT / "plans/schema.json": json.dumps(json_schema(*FILES), indent=1, ensure_ascii=False) + "\n",
        formats: _introduction(formats) + "".join(_record_section(cls) for cls in _records()),
        commands: _introduction(commands)
        + "".join(_command_section(*item) for item in commands_of(atsplan.make_app())),
    }


def commands_of(app: typer.Typer) -> Iterator[tuple[str, core.TyperCommand]]:
    """Yield every command with its full name."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, core.TyperCommand]]:
        if isinstance(command, core.TyperGroup):
            for word, inner in command.commands.items():
                yield from walk(f"{name} {word}", inner)
        else:
            yield name, command

    return walk("atsplan", typer.main.get_command(app))


def _introduction(page: Path) -> str:
    """Return the part that people wrote."""
    return page.read_text().partition(MARK)[0] + MARK


def _records() -> list[type[Any]]:
    """Return the dataclasses in files: the kinds of files, each followed by its parts that are new."""
    found: list[type[Any]] = []

    def visit(kind: Any) -> None:
        if is_dataclass(kind) and kind not in found:
            assert isinstance(kind, type)
            found.append(kind)
            for hint in typing.get_type_hints(kind).values():
                visit(hint)
        for part in typing.get_args(kind):
            visit(part)

    for cls in FILES:
        visit(cls)
    return found


def _record_section(cls: type[Any]) -> str:
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    generated = f"{cls.__name__}("  # the docstring that dataclasses have without one
    text = inspect.getdoc(cls) or ""
    about = [FILES[cls]] if cls in FILES else []
    about += [] if text.startswith(generated) else [" ".join(text.split())]
    rows = []
    for field in fields(cls):
        meaning = f"{_default_text(field.default)}{_cell(comments.get(field.name, ''))}".strip()
        rows.append(f"| `{field.name}` | {_type_text(hints[field.name])} | {meaning} |")
    heading = f"\n## {cls.__name__}\n"
    return "\n".join([heading, *([*about, ""] if about else []), "| field | type | |", "|---|---|---|", *rows, ""])


def _type_text(hint: Any) -> str:
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type_text, arguments))
    if origin is tuple and arguments[-1] is ...:
        return f"list of {_type_text(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(map(_type_text, arguments))}"
    return _TYPE_NAMES.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


def _default_text(default: object) -> str:
    return "" if default is MISSING else f"Default `{json.dumps(default)}`. "


def _comments(cls: type[Any]) -> dict[str, str]:
    """Return the comments beside the fields of a dataclass, without their #."""
    source = inspect.getsource(cls)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return {
        node.target.id: by_line[node.end_lineno]
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in by_line
    }


def _command_section(name: str, command: core.TyperCommand) -> str:
    arguments = [item for item in command.params if isinstance(item, core.TyperArgument)]
    usage = " ".join([name, "[OPTIONS]", *(_argument_name(item) for item in arguments)])
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
    lines = [f"\n## {name}\n", f"`{usage}`\n", f"{text}\n", "| | | default |", "|---|---|---|"]
    options = [item for item in command.params if item not in arguments and "--help" not in item.opts]
    lines += [_parameter_row(item) for item in (*arguments, *options)]
    lines += ["", "```", *examples_of(command.epilog), "```", ""]
    return "\n".join(lines)


def _argument_name(item: core.TyperArgument) -> str:
    name = item.metavar or (item.name or "").upper()
    return name if item.required else f"[{name}]"


def _parameter_row(item: Any) -> str:
    names = [_argument_name(item)] if isinstance(item, core.TyperArgument) else item.opts
    text = _cell(item.help or "")
    if choices := _choices(item.type_descriptor.annotation):
        text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if item.envvar:
        text += f" Also from `{item.envvar}`."
    return f"| {', '.join(f'`{_cell(name)}`' for name in names)} | {text} | {_parameter_default(item)} |"


def _parameter_default(item: Any) -> str:
    if item.required:
        return "required"
    if isinstance(item.show_default, str):
        return _cell(item.show_default)
    default = getattr(item.default, "value", item.default)  # of an enumeration
    return "" if default is None or default is False or default == "" else f"`{default}`"


def _choices(annotation: Any) -> list[str]:
    """Return the values of an enumeration, also of an optional one."""
    kinds = [kind for kind in (annotation, *typing.get_args(annotation)) if isinstance(kind, type)]
    return [member.value for kind in kinds if issubclass(kind, Enum) for member in kind]


def _cell(text: str) -> str:
    """Return the text without what Markdown would take for markup in a table."""
    return re.sub(r"([|<*\\])", r"\\\1", text)


if __name__ == "__main__":
    for page, content in pages().items():
        page.write_text(content)
