"""What is written about files and commands is what the code does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer import core

import atsplan
from planner.examples import examples_of
from tests.documentation import ROOT, commands_of, pages

COMMANDS = dict(commands_of(atsplan.make_app()))
PAGES = pages()
WRITTEN = [*ROOT.glob("*.md"), *(page for folder in ("plans", "notebooks") for page in ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_generated_page(page: Path) -> None:
    assert page.read_text() == PAGES[page], f"{page.name} is out of date: run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for item in command.params:
        assert getattr(item, "help", ""), item.name
    assert f"`{' '.join(name.split()[1:2])}`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_typed(name: str) -> None:
    examples = examples_of(COMMANDS[name].epilog)
    assert examples
    for example in examples:
        assert example.startswith(name)
        words = shlex.split(example.partition(">")[0])[len(name.split()) :]
        COMMANDS[name].make_context(name, words)  # raises for what the command would refuse


def test_command_lines_in_the_pages_can_be_typed() -> None:
    """Every line in a code block that begins with `atsplan` names a command and options that it has."""
    found = 0
    for page in WRITTEN:
        blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
        for line in re.findall(r"^atsplan [^#\n]*", blocks, re.MULTILINE):
            name = next((name for name in COMMANDS if f"{line.strip()} ".startswith(f"{name} ")), None)
            assert name is not None, f"{page.name}: {line}"
            assert _options_in(line) <= _options_of(COMMANDS[name]), f"{page.name}: {line}"
            found += 1
    assert found > 40


def test_links_between_pages_lead_somewhere() -> None:
    for page in WRITTEN:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def _options_in(line: str) -> set[str]:
    return {word for word in line.split() if re.fullmatch(r"--?[a-z][a-z-]*", word)}


def _options_of(command: core.TyperCommand) -> set[str]:
    return {"--help", *(option for item in command.params for option in item.opts)}
