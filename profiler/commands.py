"""What the command `profile` does: settings, cache, progress and the printed result around `profile_model`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from planner import cache
from planner.densities import best_thread_count, density_table
from planner.errors import AtsplanError, UsageError
from planner.gguf_model import read_model_info
from planner.hardware import Cpu
from planner.measurements import ModelInfo, Profile
from planner.records import check_targets, to_json, write_record, write_text
from planner.terminal import say
from planner.units import format_count
from planner.workload import parse_kv_types
from runtime.build import native_helper

from .detect import detect_cpu, detect_hardware, detect_software
from .routing import describe, with_routing
from .suite import OnProgress, Settings, default_threads, profile_model, with_kv_types

MAX_NOTES_SHOWN = 5


def profile_command(
    model: Path, device: str, threads: str, n_context: int | None, n_ubatch: int, *, out: Path | None,
    csv: Path | None, routing_text: Path | None, kv_type: str, as_json: bool, force: bool,
) -> None:  # fmt: skip
    """Measure `model`, or find it measured, and print and write what was asked for. Raises AtsplanError."""
    check_targets(out, csv, inputs=[model, routing_text])
    kv_types = parse_kv_types(kv_type)
    thread_counts = parse_threads(threads, detect_cpu())
    info = read_model_info(model)
    settings = Settings.for_model(info, device, thread_counts, n_context, n_ubatch)
    profile = None if force else find_cached(info, settings)
    if profile is None:
        native_helper(say)  # before the progress bar: compiling it takes a while and says so
        with _progress_bar() as on_progress:
            profile = profile_model(model, settings, on_progress)
        earlier = cache.find_profile(info.fingerprint)
        profile = replace(profile, routing=earlier.routing if earlier else None)  # it depends on the model alone
        _store(profile)
    elif not as_json:
        say("Measured earlier; --force measures anew.")
    if kv_types not in {(case.type_k, case.type_v) for case in profile.memory}:
        profile = with_kv_types(profile, model, settings.device, *kv_types)
        _store(profile)
    if routing_text is not None:
        if not any(weight.op == "MUL_MAT_ID" for weight in profile.weights):
            raise AtsplanError("The model has no experts to count.", "Leave --routing out.")
        say("Counting which experts the text is routed to, on the CPU ...")
        profile = with_routing(profile, model, routing_text)
        _store(profile)
    with cache.best_effort():
        cache.remember_model_path(info.fingerprint, model)
    if out is not None:
        write_record(out, profile)
    if csv is not None:
        write_text(csv, profile.to_frame().to_csv(index=False))
    if as_json:
        print(to_json(profile))
    else:
        Console().print(density_table(profile, best_thread_count(profile)))
        if settings.device == "none" and device == "auto":
            say("There is no GPU here: only the CPU was measured. With --device sim, plans can be tried nevertheless.")
        if profile.routing is not None:
            say(describe(profile.routing))
        _show_notes(profile)


def parse_threads(text: str, cpu: Cpu) -> tuple[int, ...]:
    """Return the thread counts in `text`, ascending; the physical cores and half of them if it is empty."""
    if not text:
        return default_threads(cpu)
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > cpu.logical_cores:
        raise UsageError(
            f"'{text}' is not a list of thread counts for this machine.",
            f"Write it like 4,8, with numbers from 1 to {cpu.logical_cores}.",
        )
    return tuple(counts)


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
        device=settings.device,
    )


def _store(profile: Profile) -> None:
    """Cache the profile, unless the machine was too busy for it to be true.

    A simulated one, which only serves to try things out, is cached even so: then the machine needs not be idle.
    """
    if cache.is_too_noisy(profile):
        unsteady = f"{cache.noisy_fraction(profile):.0%} of the series are unsteady"
        if not profile.is_simulated:
            say(f"Not cached: {unsteady}. Close other programs and profile again, or keep this one with --out.")
            return
        say(f"Warning: {unsteady}, so plans will be arbitrary. For better ones, profile again with --force when idle.")
    with cache.best_effort():
        cache.store_profile(profile)


def _show_notes(profile: Profile) -> None:
    if profile.is_simulated:
        say("The GPU was simulated by the CPU: its times say nothing about a real one.")
    for note in profile.notes[:MAX_NOTES_SHOWN]:
        say(f"Note: {note}")
    if len(profile.notes) > MAX_NOTES_SHOWN:
        say(f"... and {format_count(len(profile.notes) - MAX_NOTES_SHOWN, 'more note')}, see --json.")


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    columns = (
        BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn(), TextColumn("{task.description}")
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda fraction, label: progress.update(task, completed=fraction, description=label)
