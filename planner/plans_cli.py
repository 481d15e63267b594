"""The commands `plans list`, `find`, `add` and `check`: plans that people share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import library
from .errors import AtsplanError
from .examples import examples
from .gguf_model import read_model_info
from .hardware import Hardware
from .plan import Plan
from .units import format_count, format_size

Here = Callable[[], Hardware]  # tells what machine this is; the profiler knows how

_WIDEST = 120  # characters of a row: names are not cut, a narrow terminal wraps them
_REMEDY = "Profile and solve again; a plan's profile lies beside it, as profile.json."


def register(app: typer.Typer, here: Here) -> None:
    """Add the group `plans` to `app`."""
    plans = typer.Typer(help="Plans that people share: the shipped ones, and those in your own folder.")
    app.add_typer(plans, name="plans")

    @plans.command("list", epilog=examples("atsplan plans list"))
    def list_command() -> None:
        """List all shared plans."""
        entries = list(library.plans())
        _print(entries, None)
        n_profiles = sum(1 for _ in library.profiles())
        where = " and ".join(map(str, library.folders()))
        counts = f"{format_count(len(entries), 'plan')} and {format_count(n_profiles, 'profile')}"
        typer.echo(f"{counts} in {where}.")

    @plans.command("find", epilog=examples("atsplan plans find model.gguf", "atsplan plans find qwen3"))
    def find_command(
        model: Annotated[str, typer.Argument(help="A GGUF file, or a part of a model's name.", show_default=False)],
    ) -> None:
        """Find plans for a model; those for the machines most similar to this one come first."""
        entries = list(library.plans())
        if Path(model).is_file():
            fingerprint = read_model_info(model).fingerprint
            entries = [entry for entry in entries if entry.record.model.fingerprint == fingerprint]
        else:
            entries = [entry for entry in entries if model.lower() in entry.record.model.name.lower()]
        if not entries:
            raise AtsplanError(
                f"There is no shared plan for {model}.",
                "Make one: atsplan profile MODEL.gguf, then atsplan solve --vram 6G.",
            )
        hardware = here()
        entries = library.nearest(entries, hardware)
        _print(entries, hardware)

    @plans.command("add", epilog=examples("atsplan plans add plan.json", "atsplan plans add plan.json --name 6g-chat"))
    def add_command(
        file: Annotated[Path, typer.Argument(help="A plan or a profile.", show_default=False)],
        name: Annotated[str, typer.Option(help="Name of the file.", show_default="budget and context")] = "",
    ) -> None:
        """Copy a plan with its profile, or a profile, into your own folder, named as in the repository."""
        from .library_check import check_file

        problems = check_file(file)
        if problems:
            raise AtsplanError(f"{file}: {'; '.join(problems)}.", _REMEDY)
        record = library.read_plan_or_profile(file)
        if record.is_simulated:
            raise AtsplanError(f"{file}: its timings are simulated.", "Keep it where it is, and name it with --plan.")
        if isinstance(record, Plan):
            profile = library.find_profile_of(record, file)
            assert profile is not None  # it was checked
            typer.echo(library.add_profile_of(record, profile))
        typer.echo(library.add(record, name))

    @plans.command("check", epilog=examples("atsplan plans check", "atsplan plans check plan.json"))
    def check_command(
        file: Annotated[
            Path | None, typer.Argument(help="A plan or a profile.", show_default="all shared ones")
        ] = None,
    ) -> None:
        """Check that files load, that their parts add up, and that predictions follow from the profiles beside them."""
        from .library_check import check_file

        shared = {path.resolve() for folder in library.folders() for path in library.files(folder)}
        n_bad = 0
        chosen = [file] if file else sorted(path for path in shared if library.kind_of(path))
        for path in chosen:
            problems = check_file(path, is_shared=path.resolve() in shared)
            n_bad += bool(problems)
            typer.echo(f"{path}: {'; '.join(problems) or 'ok'}")
        if n_bad:
            raise AtsplanError(f"{n_bad} of {len(chosen)} cannot be trusted.", _REMEDY)


def _rate(seconds: float) -> str:
    return f"{1 / seconds:.{0 if seconds <= 0.01 else 1}f} t/s" if seconds else "-"


def _print(entries: Sequence[library.Entry[Plan]], here: Hardware | None) -> None:
    """Print a block per folder: where it is, what machine that was, or how it differs from `here`, and its plans."""
    console = Console(width=max(Console().width, _WIDEST))
    by_folder: dict[Path, list[library.Entry[Plan]]] = {}
    for entry in entries:
        by_folder.setdefault(entry.path.parent, []).append(entry)
    for folder, members in by_folder.items():
        hardware = members[0].record.hardware
        machine = f"{hardware.gpu_name}, {hardware.cpu.model}"
        if here is not None:
            different = library.differences(hardware, here)
            machine = f"Another machine: {'; '.join(different)}" if different else "This machine"
        console.print(f"{folder}\n  {members[0].record.model.name}. {machine}.", highlight=False, soft_wrap=True)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for _ in range(4):
            table.add_column(justify="right", no_wrap=True)
        for entry in members:
            plan = entry.record
            seconds = plan.prediction.decode_seconds_per_token
            table.add_row(
                f"  {entry.path.name}", format_size(plan.vram.budget_bytes), f"context {plan.workload.n_context}",
                format_count(plan.workload.n_threads, "thread"), _rate(seconds),
            )  # fmt: skip
        console.print(table, "")
