"""The commands `profile` and `doctor`. What they do is imported when called: --help must not load llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.examples import examples
from planner.workload import Workload


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""

    @app.command(
        epilog=examples(
            "atsplan profile model.gguf",
            "atsplan profile model.gguf --threads 4,8,16 --out profile.json",
            "atsplan profile mixture.gguf --routing text.txt",
            "atsplan profile model.gguf --device sim",
        )
    )
    def profile(
        model: Annotated[Path, typer.Argument(help="A GGUF file, or any of its shards.", show_default=False)],
        device: Annotated[
            str, typer.Option(help="auto, cuda0, cuda1, ..., a GPU's UUID, sim, or none for the CPU alone.")
        ] = "auto",
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
        routing_text: Annotated[
            Path | None,
            typer.Option("--routing", help="Count which experts this text is routed to; the profile keeps it."),
        ] = None,
        kv_type: Annotated[
            str, typer.Option(help="Account for a KV cache of this type too, such as q5_1 or q8_0/q4_0 (keys/values).")
        ] = Workload.type_k,
        as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Measure even if a fitting profile is cached.")] = False,
    ) -> None:
        """Measure every tensor of a model on this machine's CPU and GPU."""
        from .commands import profile_command

        profile_command(
            model, device, threads, n_context, n_ubatch,
            out=out, csv=csv, routing_text=routing_text, kv_type=kv_type, as_json=as_json, force=force,
        )  # fmt: skip

    @app.command(epilog=examples("atsplan doctor", "atsplan doctor model.gguf"))
    def doctor(
        model: Annotated[Path | None, typer.Argument(help="A GGUF file that should fit.", show_default=False)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    ) -> None:
        """Say what keeps plans from running here, or from running fast, and what to do about it.

        Exit code: 0 all is well, 1 there are warnings, 2 no plan can run on a GPU here.
        """
        from .doctor import doctor_command

        raise typer.Exit(doctor_command(model, as_json=as_json))
