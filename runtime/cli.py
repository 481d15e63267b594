"""The commands `run`, `serve`, `bench`, `export`. What they do is imported when called: --help loads no llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import UsageError
from planner.examples import examples
from planner.hardware import Hardware, Software
from planner.options import typed

Detect = Callable[[str], tuple[Hardware, Software]]  # for a device name; the profiler knows how


class Against(StrEnum):
    LLAMA_CPP = "llama.cpp"


class Target(StrEnum):
    LLAMA_SERVER = "llama-server"
    LLAMA_BENCH = "llama-bench"
    PYTHON = "python"


def register(app: typer.Typer, detect: Detect) -> None:
    """Add the commands to `app`."""

    @app.command(
        epilog=examples(
            "atsplan run --plan plan.json",
            'atsplan run --plan plan.json -p "Gravity is" -n 200 --stats',
            'atsplan run --model model.gguf -p "Gravity is" --temp 0.8 --seed 1',
            "atsplan run --plan plan.json --trace trace.json",
        )
    )
    def run(
        context: typer.Context,
        plan_path: Annotated[
            Path | None, typer.Option("--plan", help="The plan to run.", show_default="a shared one for this machine")
        ] = None,
        prompt: Annotated[
            str | None, typer.Option("-p", "--prompt", help="Text to continue; without it, chat.")
        ] = None,
        n_tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Generate at most so many.")] = 128,
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        temperature: Annotated[float, typer.Option("--temp", min=0, help="0 always takes the likeliest token.")] = 0.0,
        seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of the draw at --temp above 0.")] = 0,
        context_shift: Annotated[
            bool, typer.Option("--context-shift", help="With -p: forget half of a full context and go on.")
        ] = False,
        statistics: Annotated[
            bool, typer.Option("--stats", help="With -p: print speed, memory, and what was changed.")
        ] = False,
        static: Annotated[bool, typer.Option("--static", help="Keep to the plan, whatever the load.")] = False,
        trace_path: Annotated[
            Path | None, typer.Option("--trace", help="Write what every token took, and what was changed and why.")
        ] = None,
        anyway: Annotated[bool, typer.Option("--anyway", help="Run a plan made for another machine.")] = False,
    ) -> None:
        """Generate text under a plan; without a prompt, chat: Ctrl-C stops an answer, Ctrl-D ends the chat."""
        from .commands import run_plan

        if prompt is None and (useless := typed(context, "--context-shift", "--stats")):
            raise UsageError("Without a prompt, run is a chat.", f"Give a prompt with -p, or leave {useless}.")
        run_plan(
            plan_path, model, detect,
            prompt=prompt, n_tokens=n_tokens, temperature=temperature, seed=seed,
            context_shift=context_shift, wants_statistics=statistics, is_adaptive=not static, trace_path=trace_path,
            anyway=anyway,
        )  # fmt: skip

    @app.command(
        epilog=examples(
            "atsplan serve --plan plan.json",
            "atsplan serve --plan plan.json --host 0.0.0.0 --port 8000 --api-key SECRET",
        )
    )
    def serve(
        plan_path: Annotated[
            Path | None, typer.Option("--plan", help="The plan to serve.", show_default="a shared one for this machine")
        ] = None,
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        host: Annotated[
            str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines too.")
        ] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8080,
        api_key: Annotated[
            str | None, typer.Option(help="Answer only to clients that give this key.", envvar="ATSPLAN_API_KEY")
        ] = None,
        static: Annotated[bool, typer.Option("--static", help="Keep to the plan, whatever the load.")] = False,
        anyway: Annotated[bool, typer.Option("--anyway", help="Serve a plan made for another machine.")] = False,
    ) -> None:
        """Serve a plan over HTTP with OpenAI's API: chat and text completions, also streamed."""
        from .serve import serve_plan

        serve_plan(
            plan_path, model, detect, host=host, port=port, api_key=api_key, is_adaptive=not static, anyway=anyway
        )

    @app.command(
        "bench",
        epilog=examples(
            "atsplan bench --plan plan.json",
            "atsplan bench --plan plan.json --against llama.cpp --depth 0,2048 --json bench.json",
            "atsplan bench --plan plan.json --ablate",
            "atsplan bench --plan plan.json --pressure --json pressure.json --png pressure.png",
        ),
    )
    def bench_command(
        context: typer.Context,
        plan_path: Annotated[Path, typer.Option("--plan", help="The plan to measure.")],
        against: Annotated[Against | None, typer.Option("--against", help="Measure this too, same budget.")] = None,
        ablate: Annotated[bool, typer.Option("--ablate", help="Measure also without each part of the engine.")] = False,
        pressure: Annotated[
            bool, typer.Option("--pressure", help="Measure only this: the plan under load, adaptive and static.")
        ] = False,
        n_prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt tokens.")] = 512,
        n_generate: Annotated[int, typer.Option("--generate", min=1, help="Decoded tokens.")] = 128,
        depths: Annotated[str, typer.Option("--depth", help="Tokens already in the context, e.g. 0,4096.")] = "0",
        n_repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions.")] = 5,
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        json_path: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
        phase_seconds: Annotated[
            float,
            typer.Option(
                min=0.1, max=3600, help="With --pressure: of each run under each load, half as long without one."
            ),
        ] = 20.0,
        png: Annotated[Path | None, typer.Option(help="With --pressure: draw both runs into this PNG file.")] = None,
        static: Annotated[bool, typer.Option("--static", help="Keep to the plan, whatever the load.")] = False,
        anyway: Annotated[bool, typer.Option("--anyway", help="Measure a plan made for another machine.")] = False,
    ) -> None:
        """Measure a plan's speed and memory beside its prediction, and beside plain llama.cpp."""
        from .commands import bench_plan, pressure_plan

        if pressure:
            useless = typed(
                context, "--against", "--ablate", "--static", "--prompt", "--generate", "--depth", "--repeat"
            )
            if useless:
                raise UsageError(
                    "--pressure measures the plan alone, adaptive and static, for --phase-seconds.", f"Leave {useless}."
                )
            pressure_plan(
                plan_path, model, detect,
                phase_seconds=phase_seconds, json_path=json_path, png_path=png, anyway=anyway,
            )  # fmt: skip
            return
        if useless := typed(context, "--phase-seconds", "--png"):
            raise UsageError(f"{useless}: that is for a measurement under load.", "Add --pressure.")
        bench_plan(
            plan_path, model, detect,
            n_prompt=n_prompt, n_generate=n_generate, depths_text=depths, n_repeat=n_repeat,
            against_plain=against is not None, ablate=ablate, is_adaptive=not static,
            json_path=json_path, anyway=anyway,
        )  # fmt: skip

    @app.command(
        epilog=examples(
            "atsplan export --plan plan.json --to llama-server",
            "atsplan export --plan plan.json --to python > generate.py",
            "atsplan export --plan plan.json --to llama-bench --static",
        )
    )
    def export(
        plan_path: Annotated[Path, typer.Option("--plan", help="The plan to export.")],
        target: Annotated[Target, typer.Option("--to", help="What is to run it.")],
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        static: Annotated[
            bool, typer.Option("--static", help="Without atsplan's helper: only where weights live, no streaming.")
        ] = False,
    ) -> None:
        """Print the command line or the code that runs a plan with stock programs of the same llama.cpp."""
        from .export import export_plan

        exported = export_plan(plan_path, target, model, static=static)
        typer.echo(exported.text, nl=False)
        for note in exported.notes:
            typer.echo(f"Note: {note}", err=True)
