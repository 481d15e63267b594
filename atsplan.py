"""The command `atsplan`: mounts the packages' commands and turns errors into one message and an exit code.

Everything heavy is imported where an interrupt is expected, so that Ctrl-C never prints a traceback.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.supervise import supervise

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from planner.hardware import Hardware, Software
    from planner.measurements import Profile

INTERRUPTED = 130  # 128 + SIGINT, as shells do


def main() -> None:
    """Run the command line in a child process, which llama.cpp may end, and exit. ATSPLAN_DEBUG=1: in this one."""
    _open_streams()
    if os.environ.get("ATSPLAN_DEBUG"):
        sys.exit(make_app()(prog_name="atsplan", standalone_mode=False))
    code = run_command_line(supervise)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    sys.exit(code)


def run_command_line(prepare: Callable[[], None] = lambda: None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        prepare()
        code: int = make_app()(prog_name="atsplan", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error)
    return code


def make_app() -> "typer.Typer":
    """Return the command with all packages' commands."""
    import typer

    from planner import __version__
    from planner.cli import register as register_planner
    from profiler.cli import register as register_profiler
    from runtime.cli import register as register_runtime

    app = typer.Typer(
        name="atsplan",
        help="Measure a GGUF model on this machine, place its tensors under a VRAM budget, and run it.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    register_profiler(app)
    register_planner(app, lambda: detect("auto")[0], describe, show_bench_result)
    register_runtime(app, detect)

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")
    ) -> None:
        if version:
            typer.echo(f"atsplan {__version__}")
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def detect(device: str) -> tuple["Hardware", "Software"]:
    """Return what is here. The profiler knows, and the runtime, which must not import it, asks through this."""
    from profiler.detect import detect_hardware, detect_software, resolve_device

    return detect_hardware(resolve_device(device) if device == "auto" else device), detect_software()


def describe(model: "Path", n_context: int, n_ubatch: int) -> "Profile":
    """Return a model's graph and memory. Only llama.cpp knows, and the planner, which must not load it, asks so."""
    from profiler.suite import describe_model

    return describe_model(model, n_context, n_ubatch)


def show_bench_result(path: "Path") -> None:
    """Print what `bench --json` wrote, which only the runtime can read."""
    from runtime.commands import show_bench_result

    show_bench_result(path)


def _report(error: Exception) -> int:
    """Print the error and return the exit code."""
    import typer

    from planner.errors import AtsplanError

    match error:
        case AtsplanError():
            return _fail(error.exit_code, f"Error: {error.message}", error.remedy)
        case typer.TyperException():
            message = " ".join(error.format_message().split())
            message = message.replace(": Value error, ", ": ").replace(": Input should", ": it should")
            context = getattr(error, "ctx", None)  # of the command at fault
            command = context.command_path if context else "atsplan"
            return _fail(error.exit_code, f"Error: {message}", f"Try '{command} --help'.")
        case typer.Abort():
            return INTERRUPTED
        case BrokenPipeError():
            _silence_stdout()
            return 1
        case OSError(strerror=str(reason)):
            _silence_stdout()
            is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            remedy = "Make room, or name another folder in ATSPLAN_CACHE." if is_full else ""
            return _fail(1, f"Error: {error.filename or 'Cannot write the output'}: {reason}.", remedy)
        case _:
            hint = "This is a bug in atsplan. Set ATSPLAN_DEBUG=1 to see where it happened."
            return _fail(1, f"Error: {type(error).__name__}: {error}", hint)


def _open_streams() -> None:
    """Open what the caller has closed: Python has no object for it, and another file could take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _silence_stdout() -> None:
    """Let the flush at exit succeed: what could not be written has been reported."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(exit_code: int, *lines: str) -> int:
    for line in filter(None, lines):  # what strangers' files say must not steer the terminal
        print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
