"""The planner's commands as a test calls them: on a machine that the test describes."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from planner import cli
from planner.hardware import Hardware
from planner.measurements import Profile
from tests.unit.planner_profiles import TINY, synthetic_profile


def run(*arguments: str, here: Hardware | None = None, describe: cli.Describe | None = None, columns: int = 80) -> str:
    """Run a command that must succeed and return what it prints; errors come through as they do to the root."""
    app = typer.Typer()
    cli.register(app, lambda: here or synthetic_profile(TINY).hardware, describe or _describe, _show_bench_result)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


def _describe(model: Path, n_context: int, n_ubatch: int) -> Profile:
    raise AssertionError("nothing should ask llama.cpp here")


def _show_bench_result(path: Path) -> None:
    raise AssertionError("nothing should be a bench result here")
