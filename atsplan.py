"""The command `atsplan`: mounts the packages' commands and turns errors into one message and an exit code."""

from __future__ import annotations

import os
import sys

import typer

from planner import __version__
from planner.cli import register as register_planner
from planner.errors import AtsplanError
from planner.hardware import Hardware, Software
from profiler.cli import register as register_profiler
from runtime.cli import register as register_runtime
from runtime.supervise import supervise


def detect(device: str) -> tuple[Hardware, Software]:
    """Return what is here. The profiler knows, and the runtime, which must not import it, asks through this."""
    from profiler.detect import detect_hardware, detect_software, resolve_device

    return detect_hardware(resolve_device(device) if device == "auto" else device), detect_software()


app = typer.Typer(
    name="atsplan",
    help="Measure a GGUF model on this machine, place its tensors under a VRAM budget, and run it.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
register_profiler(app)
register_planner(app, lambda: detect("auto")[0])
register_runtime(app, detect)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(f"atsplan {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line in a child process, which llama.cpp may end, and exit. ATSPLAN_DEBUG=1: in this one."""
    if os.environ.get("ATSPLAN_DEBUG"):
        sys.exit(app(standalone_mode=False))
    try:
        supervise()
    except AtsplanError as error:
        sys.exit(_fail(error.exit_code, f"Error: {error.message}", error.remedy))
    run_command_line()


def run_command_line() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except AtsplanError as error:
        code = _fail(error.exit_code, f"Error: {error.message}", error.remedy)
    except typer.TyperException as error:
        code = _fail(error.exit_code, f"Error: {error.format_message()}", "Try 'atsplan --help'.")
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent too
        code = 1
    except Exception as error:
        hint = "This is a bug in atsplan. Set ATSPLAN_DEBUG=1 to see where it happened."
        code = _fail(1, f"Error: {type(error).__name__}: {error}", hint)
    sys.exit(code)


def _fail(exit_code: int, *lines: str) -> int:
    for line in filter(None, lines):  # what strangers' files say must not steer the terminal
        print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
