"""What the command `show` does with each kind of file: terminal, page, picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from . import explain
from .densities import best_thread_count, densities, density_table
from .errors import AtsplanError, UsageError
from .measurements import Profile
from .page import plan_page, profile_page
from .picture import write_png
from .plan import Plan
from .pressure import PressureResult, pressure_view
from .pressure_picture import write_pressure_png
from .records import write_text
from .replay import simulate_plan
from .terminal import say
from .trace import Trace
from .trace_page import trace_page
from .trace_picture import write_trace_png
from .trace_view import trace_view
from .units import format_size


def show_plan(plan: Plan, profile: Profile | None, *, timeline: bool, html: Path | None, png: Path | None) -> None:
    """Print the plan, and draw it where asked. Only the timeline needs the profile; drawings show what there is."""
    if timeline and profile is None:
        raise AtsplanError(
            "The timeline needs the profile that the plan was made from.",
            "Give it with --profile FILE, or solve again if the model was measured anew since.",
        )
    token = simulate_plan(profile, plan) if profile else None
    names = [weight.name for weight in profile.weights] if profile else []
    items = densities(profile, plan.workload.n_threads) if profile else []
    console = Console()
    console.print(explain.plan_view(plan))
    if timeline and token:
        console.print("", explain.timeline_view(token.events, names, token.seconds))
    if html:
        write_text(html, plan_page(plan, items, token, names))
        say(f"Written to {html}.")
    if png:
        seconds = plan.prediction.decode_seconds_per_token
        title = f"{plan.model.name} in {format_size(plan.vram.budget_bytes)} of VRAM"
        speed = f": {1 / seconds:.1f} tokens/s predicted" if seconds else ""
        write_png(png, title + speed, plan, items, token)
        say(f"Written to {png}.")


def show_profile(profile: Profile, *, html: Path | None, png: Path | None) -> None:
    n_threads = best_thread_count(profile)
    items = densities(profile, n_threads)
    console = Console()
    console.print(explain.profile_view(profile))
    if items:
        console.print("", density_table(profile, n_threads))
    if html:
        write_text(html, profile_page(profile, items, n_threads))
        say(f"Written to {html}.")
    if png:
        write_png(png, profile.model.name, None, items, None)
        say(f"Written to {png}.")


def show_trace(trace: Trace, *, html: Path | None, png: Path | None) -> None:
    Console().print(trace_view(trace))
    if html:
        write_text(html, trace_page(trace))
        say(f"Written to {html}.")
    if png:
        write_trace_png(png, trace)
        say(f"Written to {png}.")


def show_pressure(result: PressureResult, *, html: Path | None, png: Path | None) -> None:
    """Raises UsageError for a page: there is none."""
    if html:
        raise UsageError("A measurement under load has no page.", "Draw it with --png.")
    Console().print(pressure_view(result))
    if png:
        write_pressure_png(png, result)
        say(f"Written to {png}.")
