"""The commands `run` and `bench`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from planner.errors import AtsplanError, MismatchError
from planner.hardware import Hardware, Software
from planner.plan import Plan
from planner.records import read_record, write_record

from . import verify
from .bench import bench, remarks, table
from .bindings import Helper
from .build import native_helper
from .chat import chat
from .engine import PlanEngine
from .library import load
from .nvml import VramMeter
from .report import RunFigures, describe
from .sampling import Sampler
from .session import OnProgress

Detect = Callable[[str], tuple[Hardware, Software]]  # for a device name; the profiler knows how


def register(app: typer.Typer, detect: Detect) -> None:
    """Add the commands to `app`."""

    @app.command()
    def run(
        plan_path: Annotated[Path, typer.Option("--plan", help="The plan to run.")],
        prompt: Annotated[
            str | None, typer.Option("-p", "--prompt", help="Text to continue; without it, chat.")
        ] = None,
        n_tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Generate at most so many.")] = 128,
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        temperature: Annotated[float, typer.Option("--temp", min=0, help="0 always takes the likeliest token.")] = 0.0,
        seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of the draw at --temp above 0.")] = 0,
        statistics: Annotated[bool, typer.Option("--stats", help="Print speed and memory at the end.")] = False,
        anyway: Annotated[bool, typer.Option("--anyway", help="Run a plan made for another machine.")] = False,
    ) -> None:
        """Generate text under a plan; without a prompt, chat."""
        plan = read_record(plan_path, Plan)
        model_path = verify.find_model(plan, plan_path, model)
        with (
            open_plan(plan, model_path, detect, anyway=anyway) as (engine, vram),
            Sampler(temperature, seed) as sampler,
        ):
            if prompt is None:
                chat(engine, sampler, n_tokens, _read_line, _write)
                return
            figures = complete(engine, prompt, n_tokens, sampler, _write)
            if statistics:
                figures = replace(figures, peak_vram_bytes=vram.used_bytes(engine.accounted_vram_bytes(engine.helper)))
                _say("\n".join(describe(figures, plan)))

    @app.command("bench")
    def bench_command(
        plan_path: Annotated[Path, typer.Option("--plan", help="The plan to measure.")],
        against: Annotated[Against | None, typer.Option("--against", help="Measure this too, same budget.")] = None,
        n_prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt tokens.")] = 512,
        n_generate: Annotated[int, typer.Option("--generate", min=1, help="Decoded tokens.")] = 128,
        depths: Annotated[str, typer.Option("--depth", help="Tokens already in the context, e.g. 0,4096.")] = "0",
        n_repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions.")] = 5,
        model: Annotated[Path | None, typer.Option("--model", help="The GGUF file, if it has moved.")] = None,
        json_path: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
        anyway: Annotated[bool, typer.Option("--anyway", help="Measure a plan made for another machine.")] = False,
    ) -> None:
        """Measure a plan's speed and memory beside its prediction, and beside plain llama.cpp."""
        plan = read_record(plan_path, Plan)
        model_path = verify.find_model(plan, plan_path, model)
        machine = check_machine(plan, detect, anyway=anyway)
        native_helper(_say)  # here, where it can say what takes so long
        result = bench(
            plan, plan_path, model_path, machine,
            n_prompt=n_prompt, n_generate=n_generate, depths=parse_depths(depths), n_repeat=n_repeat,
            against_plain=against is not None, report=_say,
        )  # fmt: skip
        if json_path is not None:
            write_record(json_path, result)
        Console().print(table(result))
        _write("\n".join(remarks(result)) + "\n")


class Against(StrEnum):
    LLAMA_CPP = "llama.cpp"


def parse_depths(text: str) -> tuple[int, ...]:
    """Return the numbers in "0,4096". Raises AtsplanError."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise AtsplanError(f"'{text}' is not a list of depths.", "Write it like 0,4096.")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def check_machine(plan: Plan, detect: Detect, *, anyway: bool) -> tuple[Hardware, Software]:
    """Return what runs here. Raises MismatchError if the plan was made for other software, or another machine."""
    hardware, software = detect(plan.device)
    verify.check_software(plan, software)
    differences = verify.hardware_differences(plan, hardware)
    if differences and not anyway:
        raise MismatchError(
            f"The plan was made for another machine ({'; '.join(differences)}).",
            "Profile and solve here, or use --anyway: the text will be right, the speed may not.",
        )
    for difference in differences:
        _say(f"Warning: {difference}")
    return hardware, software


@contextmanager
def open_plan(plan: Plan, model_path: Path, detect: Detect, *, anyway: bool) -> Iterator[tuple[PlanEngine, VramMeter]]:
    """Verify everything the plan relies on, then load it. Raises AtsplanError."""
    check_machine(plan, detect, anyway=anyway)
    vram = VramMeter()
    library = load(plan.device, _say)
    free, total = Helper(library.ats).device_memory()
    verify.check_memory(plan, free if total else None, verify.available_host_bytes())
    with _loading(model_path) as on_progress:
        engine = PlanEngine(library, model_path, plan, on_progress=on_progress)
    with engine:
        vram.watch(engine.pci_bus_id(plan.device))
        yield engine, vram


def complete(
    engine: PlanEngine, prompt: str, n_tokens: int, sampler: Sampler, write: Callable[[str], None]
) -> RunFigures:
    """Stream the prompt's continuation to `write` and return what it took. Ctrl-C leaves the text so far."""
    tokens = engine.tokenize(prompt)
    engine.helper.set_option("statistics", 1)
    engine.statistics(reset=True)
    started = time.perf_counter()
    engine.evaluate_prompt(tokens)
    engine.synchronize()
    prefilled = time.perf_counter()
    write(prompt)
    try:
        for piece in engine.text_pieces(engine.continue_text(n_tokens, sampler)):
            write(piece)
    finally:
        write("\n")
    engine.synchronize()
    finished = time.perf_counter()
    counters = engine.statistics()
    return RunFigures(
        n_prompt_tokens=len(tokens),
        prefill_seconds=prefilled - started,
        n_decoded=engine.n_tokens - len(tokens),
        decode_seconds=finished - prefilled,
        streamed_bytes=counters.streamed_bytes,
        peak_vram_bytes=0,
        cpu_seconds=counters.cpu_ns / 1e9,
        wait_gpu_seconds=counters.wait_gpu_ns / 1e9,
    )


@contextmanager
def _loading(model_path: Path) -> Iterator[OnProgress]:
    """Show on the terminal how much of the model is loaded."""
    columns = (TextColumn("Loading {task.fields[name]}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0, name=model_path.name)
        yield lambda fraction: progress.update(task, completed=fraction)


def _read_line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        _write("\n")
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
