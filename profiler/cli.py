"""The command `profile`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from planner import cache
from planner.errors import AtsplanError
from planner.gguf_model import read_model_info
from planner.measurements import ModelInfo, Profile
from planner.records import to_json, write_record, write_text
from planner.workload import Workload
from runtime.build import native_helper

from .detect import detect_hardware, detect_software, resolve_device
from .report import role_table
from .suite import OnProgress, Settings, profile_model

MAX_NOTES_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command()
    def profile(
        model: Annotated[Path, typer.Argument(help="A GGUF file, or the first of its shards.", show_default=False)],
        device: Annotated[str, typer.Option(help="auto, cuda0, cuda1, ..., sim, or none for the CPU alone.")] = "auto",
        threads: Annotated[
            str, typer.Option(help="Thread counts to measure, such as 4,8.", show_default="all cores and half of them")
        ] = "",
        n_context: Annotated[
            int | None,
            typer.Option("--ctx", min=1, help=f"The context to measure at; {Workload.n_context} or the model's."),
        ] = None,
        n_ubatch: Annotated[
            int, typer.Option("--ubatch", min=1, help="The micro-batch of prompts.")
        ] = Workload.n_ubatch,
        out: Annotated[Path | None, typer.Option(help="Also write the profile to this file.")] = None,
        csv: Annotated[Path | None, typer.Option(help="Also write a table of all weights to this file.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Measure even if a fitting profile is cached.")] = False,
    ) -> None:
        """Measure every tensor of a model on this machine's CPU and GPU."""
        info = read_model_info(model)
        n_context = n_context or min(Workload.n_context, info.n_context_train)
        settings = Settings(resolve_device(device), parse_threads(threads), n_context, min(n_ubatch, n_context))
        measured = None if force else find_cached(info, settings)
        if measured is None:
            native_helper(_say)  # before the progress bar: compiling it takes a while and says so
            with _progress_bar() as on_progress:
                measured = profile_model(model, settings, on_progress)
            _store(measured)
        elif not as_json:
            _say("Measured earlier; --force measures anew.")
        cache.remember_model_path(info.fingerprint, model)
        if out is not None:
            write_record(out, measured)
        if csv is not None:
            write_text(csv, measured.to_frame().to_csv(index=False))
        if as_json:
            typer.echo(to_json(measured))
        else:
            Console().print(role_table(measured))
            _show_notes(measured)


def parse_threads(text: str) -> tuple[int, ...]:
    """Return the thread counts in `text`, ascending; the physical cores and half of them if it is empty."""
    logical_cores = detect_hardware("none").cpu.logical_cores
    if not text:
        n = detect_hardware("none").cpu.physical_cores
        return tuple(sorted({n, max(1, n // 2)}))
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > logical_cores:
        raise AtsplanError(
            f"'{text}' are not thread counts for this machine.", f"Write them like 4,8, each from 1 to {logical_cores}."
        )
    return counts


def find_cached(info: ModelInfo, settings: Settings) -> Profile | None:
    """Return the cached profile of this model on this machine with these settings, or None."""
    return cache.find_profile(
        info.fingerprint,
        detect_hardware(settings.device).fingerprint,
        detect_software(),
        n_context=settings.n_context,
        n_ubatch=settings.n_ubatch,
        thread_counts=settings.threads,
        is_simulated=settings.device == "sim",
    )


def _store(profile: Profile) -> None:
    """Cache the profile, unless the machine was too busy for it to be true. What is simulated is never true anyway."""
    if cache.is_too_noisy(profile) and not profile.is_simulated:
        _say(
            f"Not cached: {cache.noisy_fraction(profile):.0%} of the series are unsteady. "
            "Close other programs and profile again, or keep this one with --out."
        )
    else:
        cache.store_profile(profile)


def _show_notes(profile: Profile) -> None:
    if profile.is_simulated:
        _say("The GPU was simulated by the CPU: its times say nothing about a real one.")
    for note in profile.notes[:MAX_NOTES_SHOWN]:
        _say(f"Note: {note}")
    if len(profile.notes) > MAX_NOTES_SHOWN:
        _say(f"... and {len(profile.notes) - MAX_NOTES_SHOWN} more notes, see --json.")


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda fraction, label: progress.update(task, completed=fraction, description=label)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
