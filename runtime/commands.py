"""What the commands `run` and `bench` do."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from planner import library
from planner.errors import AtsplanError, MismatchError, UsageError
from planner.gguf_model import read_model_info
from planner.hardware import Hardware, Software
from planner.plan import Plan
from planner.pressure import pressure_view
from planner.pressure_picture import write_pressure_png
from planner.records import read_record, write_record
from planner.terminal import say
from planner.units import format_size

from . import verify
from .bench import BenchResult, bench, remarks, table
from .bindings import Helper
from .build import native_helper
from .card_watch import CardWatch
from .chat import chat
from .cli import Detect
from .engine import PlanEngine
from .host_memory import available_memory_bytes
from .library import load
from .nvml import VramMeter
from .pressure import measure_pressure
from .report import RunFigures, describe, describe_changes
from .sampling import Sampler
from .session import OnProgress, orderly_end


def run_plan(
    plan_path: Path | None,
    model: Path | None,
    detect: Detect,
    *,
    prompt: str | None,
    n_tokens: int,
    temperature: float,
    seed: int,
    context_shift: bool,
    wants_statistics: bool,
    is_adaptive: bool,
    trace_path: Path | None,
    anyway: bool,
) -> None:
    """Continue `prompt` on stdout, or chat if it is None. Raises AtsplanError; Ctrl-C leaves the text so far.

    With a `trace_path`, a trace is written there, also after Ctrl-C, SIGTERM or an error.
    """
    plan_path = plan_path or find_shared_plan(model, detect)
    plan, model_path = verify.read_plan(plan_path, model, trace_path)
    with (
        open_plan(
            plan, model_path, detect, anyway=anyway, is_adaptive=is_adaptive, keeps_trace=trace_path is not None
        ) as (engine, vram, hardware),
        Sampler(temperature, seed) as sampler,
        _traced(engine, plan, hardware, trace_path),
    ):
        if prompt is None:
            chat(engine, sampler, n_tokens, _read_line, _write)
            return
        figures = complete(engine, prompt, n_tokens, sampler, _write, context_shift=context_shift)
        if engine.n_tokens == engine.n_context and not context_shift:
            say(
                f"The context of {engine.n_context} tokens is full. --context-shift goes on and forgets its older half."
            )
        if wants_statistics:
            figures = replace(figures, peak_vram_bytes=vram.used_bytes(engine.accounted_vram_bytes()))
            say("\n".join([*describe(figures, plan), *describe_changes(engine.load.changes, is_adaptive=is_adaptive)]))


def bench_plan(
    plan_path: Path,
    model: Path | None,
    detect: Detect,
    *,
    n_prompt: int,
    n_generate: int,
    depths_text: str,
    n_repeat: int,
    against_plain: bool,
    ablate: bool,
    is_adaptive: bool,
    json_path: Path | None,
    anyway: bool,
) -> None:
    """Print a table of what was measured, and write every sample to `json_path`. Raises AtsplanError."""
    depths = parse_depths(depths_text)
    plan, model_path = verify.read_plan(plan_path, model, json_path)
    machine = check_machine(plan, detect, anyway=anyway)
    native_helper(say)  # here, where it can say what takes so long
    result = bench(
        plan, plan_path, model_path, machine,
        n_prompt=n_prompt, n_generate=n_generate, depths=depths, n_repeat=n_repeat,
        against_plain=against_plain, ablate=ablate, is_adaptive=is_adaptive, report=say,
    )  # fmt: skip
    if json_path is not None:
        write_record(json_path, result)
    _show_bench(result)


def show_bench_result(path: Path) -> None:
    """Print what `bench --json` wrote. Raises InvalidFileError."""
    _show_bench(read_record(path, BenchResult))


def _show_bench(result: BenchResult) -> None:
    Console().print(table(result))
    _write("\n".join(remarks(result)) + "\n")


def pressure_plan(
    plan_path: Path,
    model: Path | None,
    detect: Detect,
    *,
    phase_seconds: float,
    json_path: Path | None,
    png_path: Path | None,
    anyway: bool,
) -> None:
    """Print what following the load was worth, and write the measurement and its picture. Raises AtsplanError."""
    plan, model_path = verify.read_plan(plan_path, model, json_path, png_path)
    machine = check_machine(plan, detect, anyway=anyway)
    native_helper(say)
    result = measure_pressure(plan_path, model_path, machine, phase_seconds=phase_seconds, report=say)
    Console().print(pressure_view(result))
    if json_path is not None:
        write_record(json_path, result)
    if png_path is not None:
        write_pressure_png(png_path, result)


def find_shared_plan(model: Path | None, detect: Detect) -> Path:
    """Return the shared plan with the most VRAM for `model` on this very machine. Raises AtsplanError."""
    if model is None:
        raise UsageError("There is nothing to run.", "Name a plan with --plan, or a model with --model.")
    info = read_model_info(model)
    hardware, software = detect("auto")
    entries = [entry for entry in library.plans() if entry.record.model.fingerprint == info.fingerprint]
    fitting = [
        entry
        for entry in entries
        if entry.record.hardware.fingerprint == hardware.fingerprint
        and entry.record.software.llama_cpp_python == software.llama_cpp_python
    ]
    if fitting:
        best = max(fitting, key=lambda entry: entry.record.vram.budget_bytes)
        say(f"Using the shared plan {best.path}.")
        return best.path
    remedy = f"Make one: atsplan profile {model}, then atsplan solve --vram 6G."
    if entries:
        closest = library.nearest(entries, hardware)[0]
        different = library.differences(closest.record.hardware, hardware) or ["another llama-cpp-python"]
        remedy += f" The nearest one is {closest.path}, made for another machine ({'; '.join(different)})."
    raise AtsplanError(f"There is no shared plan for {info.name} on this machine.", remedy)


def parse_depths(text: str) -> tuple[int, ...]:
    """Return the numbers in "0,4096". Raises UsageError."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"'{text}' is not a list of depths.", "Write it like 0,4096.")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def check_machine(plan: Plan, detect: Detect, *, anyway: bool) -> tuple[Hardware, Software]:
    """Return what runs here. Raises MismatchError if the plan was made for other software, or another machine."""
    hardware, software = detect(plan.device)
    verify.check_software(plan, software)
    differences = library.differences(plan.hardware, hardware)
    if differences and not anyway:
        raise MismatchError(
            f"The plan was made for another machine ({'; '.join(differences)}).",
            "Profile and solve here, or use --anyway: the text will be right, the speed may not.",
        )
    for difference in differences:
        say(f"Warning: the plan is for {difference}.")
    return hardware, software


@contextmanager
def open_plan(
    plan: Plan, model_path: Path, detect: Detect, *, anyway: bool, is_adaptive: bool = True, keeps_trace: bool = False
) -> Iterator[tuple[PlanEngine, VramMeter, Hardware]]:
    """Verify everything the plan relies on, then load it. Raises AtsplanError."""
    hardware, _ = check_machine(plan, detect, anyway=anyway)
    native_helper(say)  # which may take a while, before what is free is read
    vram = VramMeter()
    library = load(plan.device)
    vram.watch(library.pci_bus_id)
    free_now_bytes, _ = Helper(library.ats).device_memory()  # of a MIG instance too, whose board NVML tells of
    verify.check_memory(plan, vram.free_before_bytes, free_now_bytes or None, available_memory_bytes() or None)
    with _loading(model_path) as on_progress:
        engine = PlanEngine(
            library, model_path, plan, is_adaptive=is_adaptive, keeps_trace=keeps_trace, on_progress=on_progress
        )
    with engine:
        unpinned_bytes = engine.statistics().unpinned_bytes
        if unpinned_bytes:
            say(
                f"Warning: {format_size(unpinned_bytes)} of weights in host memory could not be pinned; they are slow. "
                "Close programs, or solve again with a larger --vram."
            )
        if engine.unsupported_ops:
            say(f"Warning: the GPU leaves to the CPU what it cannot compute: {', '.join(engine.unsupported_ops)}.")
        yield engine, vram, hardware


@contextmanager
def _traced(engine: PlanEngine, plan: Plan, hardware: Hardware, path: Path | None) -> Iterator[None]:
    """Write a trace of the block to `path`, if there is one, however the block ends."""
    if path is None:
        yield
        return
    with orderly_end(), CardWatch(engine.library.pci_bus_id) as card:
        try:
            yield
        finally:
            write_record(path, engine.load.trace(hardware, card.samples))
            say(f"The trace is in {path}. See it with: atsplan show {path}")


def complete(
    engine: PlanEngine,
    prompt: str,
    n_tokens: int,
    sampler: Sampler,
    write: Callable[[str], None],
    *,
    context_shift: bool = False,
) -> RunFigures:
    """Stream the prompt's continuation to `write` and return what it took. Ctrl-C leaves the text so far."""
    tokens = engine.tokenize(prompt)
    if not tokens:
        raise AtsplanError("The prompt is empty, and the model has no token to begin with.", "Give a text with -p.")
    engine.helper.set_option("statistics", 1)
    engine.statistics(reset=True)
    started = time.perf_counter()
    engine.evaluate_prompt(tokens)
    engine.synchronize()
    prefilled, n_prefilled = time.perf_counter(), engine.n_evaluated
    engine.statistics(reset=True)
    try:
        write(prompt)
        for piece in engine.text_pieces(engine.continue_text(n_tokens, sampler, forgets=context_shift)):
            write(piece)
    finally:
        write("\n")
    engine.synchronize()
    finished = time.perf_counter()
    counters = engine.statistics()
    return RunFigures(
        n_prompt_tokens=len(tokens),
        prefill_seconds=prefilled - started,
        n_decoded=engine.n_evaluated - n_prefilled,
        decode_seconds=finished - prefilled,
        decode_streamed_bytes=counters.streamed_bytes,
        peak_vram_bytes=0,
        decode_cpu_seconds=counters.cpu_ns / 1e9,
        decode_wait_gpu_seconds=counters.wait_gpu_ns / 1e9,
        decode_experts=(counters.n_experts_resident, counters.n_experts_streamed, counters.n_experts_cpu),
    )


@contextmanager
def _loading(model_path: Path) -> Iterator[OnProgress]:
    """Show on the terminal how much of the model is loaded."""
    columns = (TextColumn("Loading {task.fields[name]}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0, name=model_path.name)
        yield lambda fraction: progress.update(task, completed=fraction)


def _read_line() -> str | None:
    _write("> ")  # input() would print it on the standard error of native code, which nobody sees
    try:
        return input()
    except (EOFError, KeyboardInterrupt):
        _write("\n")
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
