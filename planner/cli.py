"""The commands `solve` and `show`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import cache
from .errors import AtsplanError, InvalidFileError
from .gguf_model import read_model_info
from .measurements import Profile
from .memory import DEFAULT_MARGIN_BYTES
from .plan import Plan
from .records import read_record, to_json, write_record
from .units import parse_size
from .workload import PRESETS, Workload

DEFAULT_PRESET = "chat"


class Preset(StrEnum):
    chat = "chat"
    agent = "agent"
    summarise = "summarise"


class ObjectiveChoice(StrEnum):
    joint = "joint"
    paper = "paper"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""

    @app.command()
    def solve(
        vram: Annotated[str, typer.Option(help="VRAM budget: 6G, 6GiB or 6144M.")],
        source: Annotated[
            Path | None,
            typer.Argument(
                metavar="MODEL|PROFILE",
                help="A GGUF file that was profiled, or a profile.",
                show_default="the last profile",
            ),
        ] = None,
        n_context: Annotated[
            int | None, typer.Option("--ctx", min=1, help="Context in tokens.", show_default="the profile's")
        ] = None,
        n_threads: Annotated[
            int, typer.Option("--threads", min=0, help="CPU threads; 0 takes the best of those measured.")
        ] = 0,
        preset: Annotated[
            Preset | None,
            typer.Option("--workload", help="Typical request to optimise for.", show_default=DEFAULT_PRESET),
        ] = None,
        n_prompt: Annotated[int | None, typer.Option("--prompt-tokens", min=0, help="Tokens per prompt.")] = None,
        n_generate: Annotated[int | None, typer.Option("--generate-tokens", min=0, help="Tokens per answer.")] = None,
        objective: Annotated[
            ObjectiveChoice, typer.Option(help="joint: CPU, link and GPU together; paper: VRAM or CPU only.")
        ] = ObjectiveChoice.joint,
        check: Annotated[bool, typer.Option("--check", help="Solve the static problem with CP-SAT too.")] = False,
        out: Annotated[Path, typer.Option(help="Write the plan to this file.")] = Path("plan.json"),
        as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of tables.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Solve even if the plan is cached.")] = False,
    ) -> None:
        """Place every tensor of a profiled model under a VRAM budget."""
        budget_bytes = parse_size(vram)
        profile = find_source(source)
        workload = make_workload(profile, n_context, n_threads, preset, n_prompt, n_generate)
        plan, is_cached = solve_cached(profile, budget_bytes, workload, objective, check=check, force=force)
        write_record(out, plan)
        if as_json:
            typer.echo(to_json(plan), nl=False)
            return
        from .explain import plan_view

        console = Console()
        console.print(plan_view(plan))
        console.print(f"Written to {out}{' (from the cache)' if is_cached else ''}.", highlight=False, soft_wrap=True)

    @app.command()
    def show(
        file: Annotated[Path, typer.Argument(help="A plan or a profile.", show_default=False)],
        timeline: Annotated[bool, typer.Option("--timeline", help="Draw the lanes while one token is made.")] = False,
        png: Annotated[Path | None, typer.Option(help="Also draw the timeline into this PNG file.")] = None,
        profile_file: Annotated[
            Path | None, typer.Option("--profile", help="The plan's profile.", show_default="from the cache")
        ] = None,
    ) -> None:
        """Show a plan or a profile in the terminal."""
        from . import explain

        console = Console()
        record = read_plan_or_profile(file)
        if isinstance(record, Profile):
            if timeline or png:
                raise AtsplanError("A profile has no timeline.", "Show a plan.")
            console.print(explain.profile_view(record))
            return
        console.print(explain.plan_view(record))
        if timeline or png:
            from .gantt import simulate_plan, write_png

            profile = read_record(profile_file, Profile) if profile_file else find_profile_of(record)
            token = simulate_plan(profile, record)
            names = [weight.name for weight in profile.weights]
            console.print("", explain.timeline_view(token.events, names, token.seconds))
            if png:
                write_png(png, token, f"{record.model.name}: one token")


def find_source(source: Path | None) -> Profile:
    """Return the profile that the argument means: the last one, a file, or the cached one of a model."""
    if source is None:
        profile = cache.last_profile()
        if profile is None:
            raise AtsplanError("No model was profiled yet.", "Run: atsplan profile MODEL.gguf")
        return profile
    if not is_gguf(source):
        return read_record(source, Profile)
    model = read_model_info(source)
    profile = cache.find_profile(model.fingerprint)
    if profile is None:
        raise AtsplanError(f"{model.name} was not profiled yet.", f"Run: atsplan profile {source}")
    return profile


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or (path.is_file() and file.read(4) == b"GGUF")
    except OSError:
        return path.suffix == ".gguf"  # the reader says what is wrong


def make_workload(
    profile: Profile,
    n_context: int | None,
    n_threads: int,
    preset: str | None,
    n_prompt: int | None,
    n_generate: int | None,
) -> Workload:
    """Return the workload asked for. Only if nothing was asked for, its token counts shrink with a small context."""
    n_context = n_context or profile.n_context
    prompt, generate = PRESETS[preset or DEFAULT_PRESET]
    if preset is None and n_prompt is None and n_generate is None and prompt + generate > n_context:
        generate = n_context // 3
        prompt = n_context - generate
    return Workload(
        n_prompt_tokens=prompt if n_prompt is None else n_prompt,
        n_generated_tokens=generate if n_generate is None else n_generate,
        n_context=n_context,
        n_ubatch=profile.n_ubatch,
        n_threads=n_threads,
    )


def solve_cached(
    profile: Profile,
    budget_bytes: int,
    workload: Workload,
    objective: ObjectiveChoice,
    *,
    check: bool = False,
    force: bool = False,
) -> tuple[Plan, bool]:
    """Return the plan and whether it was made before. A check is made, not looked up."""
    from .solve import solve

    key = cache.plan_key(profile, budget_bytes, workload, objective.value, DEFAULT_MARGIN_BYTES)
    known = None if check or force else cache.find_plan(key)
    if known is not None:
        return known, True
    plan = solve(profile, budget_bytes, workload, objective=objective.value, check=check)
    if not check:
        cache.store_plan(key, plan)
    return plan, False


def read_plan_or_profile(path: Path) -> Plan | Profile:
    """Return what the file holds. A broken file is reported as what it most resembles."""
    try:
        return read_record(path, Plan)
    except InvalidFileError as not_a_plan:
        try:
            return read_record(path, Profile)
        except InvalidFileError as not_a_profile:
            looks_like_a_profile = "kernels" in str(not_a_profile) or "placements" in str(not_a_plan)
            raise (not_a_profile if looks_like_a_profile else not_a_plan) from None


def find_profile_of(plan: Plan) -> Profile:
    profile = cache.find_profile(
        plan.model.fingerprint, plan.hardware.fingerprint, n_ubatch=plan.workload.n_ubatch,
        thread_counts=(plan.workload.n_threads,), is_simulated=plan.is_simulated,
    )  # fmt: skip
    if profile is None:
        raise AtsplanError(
            "The timeline needs the profile that the plan was made from.", "Give it with --profile FILE."
        )
    return profile
