"""The command's root: what each kind of failure prints and which exit code it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import atsplan
from planner import __version__
from planner.errors import AtsplanError

ROOT = Path(atsplan.__file__).parent


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atsplan", *arguments]
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "100"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def run_failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Return a function that runs the command with an app that raises, and returns the exit code."""
    monkeypatch.delenv("ATSPLAN_DEBUG", raising=False)

    def run(error: BaseException) -> int:
        app = typer.Typer()

        @app.command()
        def fail() -> None:
            raise error

        monkeypatch.setattr(atsplan, "make_app", lambda: app)
        monkeypatch.setattr(sys, "argv", ["atsplan"])
        return atsplan.run_command_line()

    return run


def test_version_and_help() -> None:
    result = command_line("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"atsplan {__version__}\n", "")
    for arguments in ([], ["--help"]):
        result = command_line(*arguments)
        assert result.returncode == 0
        assert result.stderr == ""
        for name in ("profile", "solve", "run"):
            assert f" {name} " in result.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['atsplan', '--help']; import atsplan\n"
        "atsplan.run_command_line()\n"
        "heavy = {'pandas', 'ortools', 'llama_cpp', 'pynvml', 'gguf'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr == "[]\n"


def test_wrong_usage_is_two_plain_lines() -> None:
    for arguments, words, command in (
        (["no-such-command"], "No such command", "atsplan"),
        (["solve", "--no-such-option"], "No such option", "atsplan solve"),
        (["plans", "add"], "Missing argument 'file'", "atsplan plans add"),
        (["solve", "--ctx", "0"], "Invalid value for '--ctx': it should be greater than", "atsplan solve"),
        (["solve", "--objective", "best"], "Invalid value for '--objective': 'best' is not one of", "atsplan solve"),
    ):
        result = command_line(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        first, second = result.stderr.splitlines()
        assert first.startswith(f"Error: {words}")
        assert second == f"Try '{command} --help'."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve", "--vram", "6"], "'6' has no unit."),
        (["solve", "--vram", "6Gb"], "'6Gb' is not a size."),
        (["solve", "--vram", "6G", "--threads", "x"], "Invalid value for '--threads'"),
        (["sweep", "--vram", "6G"], "'6G' is not a range of VRAM."),
        (["solve", "model.json", "--vram", "6G", "--kv-type", "q9"], "'q9' is no type of a KV cache."),
        (["profile", "model.gguf", "--threads", "0"], "'0' is not a list of thread counts for this machine."),
        (["profile", "model.gguf", "--kv-type", "q9"], "'q9' is no type of a KV cache."),
        (["bench", "--plan", "plan.json", "--depth", "1k"], "'1k' is not a list of depths."),
        (["run"], "There is nothing to run."),
    ],
)
def test_values_without_a_meaning_are_wrong_usage(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ATSPLAN_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["atsplan", *arguments])
    assert atsplan.run_command_line() == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"Error: {message}")
    assert len(errors.splitlines()) == 2


def test_known_error(run_failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_failing(AtsplanError("The file is empty.", "Download it again.")) == 1
    assert capsys.readouterr() == ("", "Error: The file is empty.\nDownload it again.\n")
    assert run_failing(AtsplanError("The file is empty.")) == 1
    assert capsys.readouterr() == ("", "Error: The file is empty.\n")


def test_unexpected_error_is_one_line_and_a_hint(
    run_failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(ZeroDivisionError("division by zero")) == 1
    hint = "This is a bug in atsplan. Set ATSPLAN_DEBUG=1 to see where it happened."
    assert capsys.readouterr() == ("", f"Error: ZeroDivisionError: division by zero\n{hint}\n")


def test_debug_shows_the_traceback(
    run_failing: Callable[[BaseException], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATSPLAN_DEBUG", "1")
    monkeypatch.setattr(atsplan, "run_command_line", lambda: atsplan.main())
    with pytest.raises(ZeroDivisionError):
        run_failing(ZeroDivisionError())


def test_interrupt(run_failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_broken_pipe_is_silent() -> None:
    code = (
        "import sys, typer, atsplan\n"
        "app = typer.Typer()\n"
        "atsplan.make_app = lambda: app\n"
        "@app.command()\n"
        "def chatter():\n"
        "    for _ in range(100_000): print('x' * 100)\n"
        "sys.argv = ['atsplan']; atsplan.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() != 0


def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "atsplan", "--help"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    message, remedy = result.stderr.splitlines()
    assert (result.returncode, message) == (1, "Error: Cannot write the output: No space left on device.")
    assert remedy.startswith("Make room")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_streams_that_the_caller_has_closed(closed: int) -> None:
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" -m atsplan --version {closed}>&-', sys.executable],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ("" if closed == 1 else f"atsplan {__version__}\n")


def test_show_prints_a_bench_result() -> None:
    path = next((ROOT / "plans").glob("*/*/*-ablate.bench.json"))
    result = command_line("show", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "decode tokens/s" in result.stdout
    assert "without prefetch: prefill" in result.stdout
    refused = command_line("show", str(path), "--png", "/tmp/never.png")
    assert refused.returncode == 2
    assert "can be shown in the terminal only" in refused.stderr
