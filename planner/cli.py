"""The commands `solve`, `sweep` and `show`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import cache, library
from .errors import AtsplanError, InfeasibleError, UsageError
from .examples import examples
from .gguf_model import read_model_info
from .measurements import ModelInfo, Profile
from .memory import KV_GRANULE
from .plan import Plan
from .plans_cli import Here
from .plans_cli import register as register_plans
from .pressure import PressureResult
from .records import check_targets, kind_of_file, read_record, to_json, write_record
from .trace import Trace
from .units import parse_size
from .workload import PRESETS, Workload, parse_kv_types

DEFAULT_PRESET = "chat"

Describe = Callable[[Path, int, int], Profile]  # a model's graph and memory for so many tokens of context and batch


class Preset(StrEnum):
    chat = "chat"
    agent = "agent"
    summarise = "summarise"


class ObjectiveChoice(StrEnum):
    joint = "joint"
    paper = "paper"


Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL|PROFILE", help="A GGUF file that was profiled, or a profile.", show_default="the last profile"
    ),
]
HardwareFile = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        help="Plan for the machine of this profile; one of another model gives estimates.",
        show_default="the profile's, here",
    ),
]
NContext = Annotated[
    int | None,
    typer.Option(
        "--ctx", min=1, help="Context in tokens.", show_default="the profile's, or more if --workload needs it"
    ),
]
NThreads = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 takes the best of those measured.")]
_PRESETS_TEXT = ", ".join(f"{name} {prompt} + {answer}" for name, (prompt, answer) in PRESETS.items())
PresetOption = Annotated[
    Preset | None,
    typer.Option(
        "--workload",
        help=f"Tokens of a typical request, prompt + answer: {_PRESETS_TEXT}.",
        show_default=DEFAULT_PRESET,
    ),
]
NPrompt = Annotated[
    int | None, typer.Option("--prompt-tokens", min=0, help="Tokens per prompt, instead of --workload's.")
]
NGenerate = Annotated[
    int | None, typer.Option("--generate-tokens", min=0, help="Tokens per answer, instead of --workload's.")
]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of the KV cache: q8_0, or q8_0/q4_0 for keys and values.")]
Objective = Annotated[ObjectiveChoice, typer.Option(help="joint: CPU, link and GPU together; paper: VRAM or CPU only.")]


def register(
    app: typer.Typer,
    here: Here,
    describe: Describe,
    show_bench_result: Callable[[Path], None],
) -> None:
    """Add the commands to `app`. `here` tells what machine this is, `describe` what a model consists of.

    `show_bench_result` prints what only the layer that measures it can read.
    """
    register_plans(app, here)

    @app.command(
        epilog=examples(
            "atsplan solve --vram 6G",
            "atsplan solve model.gguf --vram 6G --ctx 8192 --workload agent --out plan.json",
            "atsplan solve profile.json --vram 8G --threads 8",
        )
    )
    def solve(
        vram: Annotated[str, typer.Option(help="VRAM budget: 6G, 6GB, 6GiB or 6144M, in units of 1024.")],
        source: Source = None,
        hardware_file: HardwareFile = None,
        n_context: NContext = None,
        n_threads: NThreads = 0,
        preset: PresetOption = None,
        n_prompt: NPrompt = None,
        n_generate: NGenerate = None,
        kv_type: KvType = Workload.type_k,
        objective: Objective = ObjectiveChoice.joint,
        check: Annotated[bool, typer.Option("--check", help="Solve the static problem with CP-SAT too.")] = False,
        out: Annotated[Path, typer.Option(help="Write the plan to this file.")] = Path("plan.json"),
        as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of tables.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Solve even if the plan is cached.")] = False,
    ) -> None:
        """Place every tensor of a profiled model under a VRAM budget."""
        check_targets(out, inputs=[source, hardware_file])
        budget_bytes, kv_types = parse_size(vram), parse_kv_types(kv_type)
        profile = find_source(source, hardware_file, here, describe)
        workload = make_workload(profile, n_context, n_threads, preset, n_prompt, n_generate, kv_types)
        plan, is_cached = solve_cached(profile, budget_bytes, workload, objective, check=check, force=force)
        write_record(out, plan)
        if as_json:
            typer.echo(to_json(plan), nl=False)
            return
        from .explain import plan_view

        console = Console()
        console.print(plan_view(plan))
        console.print(f"Written to {out}{' (from the cache)' if is_cached else ''}.", highlight=False, soft_wrap=True)

    @app.command(
        epilog=examples("atsplan sweep --vram 4G..24G", "atsplan sweep model.gguf --vram 4G..12G --png sweep.png")
    )
    def sweep(
        vram: Annotated[str, typer.Option(help="Range of VRAM budgets: 4G..24G.")],
        source: Source = None,
        hardware_file: HardwareFile = None,
        n_steps: Annotated[int, typer.Option("--steps", min=2, max=200, help="Number of budgets.")] = 11,
        png: Annotated[Path | None, typer.Option(help="Also draw tokens/s against VRAM into this PNG file.")] = None,
        n_context: NContext = None,
        n_threads: NThreads = 0,
        preset: PresetOption = None,
        n_prompt: NPrompt = None,
        n_generate: NGenerate = None,
        kv_type: KvType = Workload.type_k,
        objective: Objective = ObjectiveChoice.joint,
    ) -> None:
        """Predict the speed for a range of VRAM budgets, also beyond the card at hand."""
        from . import sweep as sweeping

        check_targets(png, inputs=[source, hardware_file])
        budgets, kv_types = sweeping.parse_range(vram, n_steps), parse_kv_types(kv_type)
        profile = sweeping.with_memory(find_source(source, hardware_file, here, describe), budgets[-1])
        workload = make_workload(profile, n_context, n_threads, preset, n_prompt, n_generate, kv_types)
        console = Console()
        points = []
        with console.status("Solving ..."):
            for point in sweeping.sweep(budgets, lambda b: solve_cached(profile, b, workload, objective)[0]):
                points.append(point)
        if not any(point.plan for point in points):
            raise InfeasibleError(points[-1].reason, "Sweep over larger budgets.")
        console.print(sweeping.sweep_table(points))
        if profile.is_simulated:
            typer.echo("Made from simulated GPU timings: the speeds say nothing about a real GPU.")
        if png:
            sweeping.write_sweep_png(png, points, f"{profile.model.name} on {profile.hardware.gpu_name}, predicted")

    @app.command(
        epilog=examples(
            "atsplan show plan.json --timeline",
            "atsplan show plan.json --html plan.html",
            "atsplan show profile.json --png densities.png",
            "atsplan show --trace trace.json --html trace.html",
        )
    )
    def show(
        file: Annotated[
            Path | None,
            typer.Argument(help="A plan, a profile, a trace, or what bench wrote.", show_default=False),
        ] = None,
        trace_file: Annotated[Path | None, typer.Option("--trace", help="A trace; naming it as FILE does too.")] = None,
        timeline: Annotated[bool, typer.Option("--timeline", help="Draw the lanes while one token is made.")] = False,
        html: Annotated[Path | None, typer.Option(help="Write everything into this HTML file.")] = None,
        png: Annotated[Path | None, typer.Option(help="Draw everything into this PNG file.")] = None,
        profile_file: Annotated[
            Path | None, typer.Option("--profile", help="The plan's profile.", show_default="from beside it, or cached")
        ] = None,
    ) -> None:
        """Show a plan, a profile, a trace or a measurement in the terminal; most also as a page or as a picture."""
        from .show import show_plan, show_pressure, show_profile, show_trace

        if (file is None) == (trace_file is None):
            raise UsageError("There is one file to show.", "Name a plan, a profile or a trace.")
        kind = kind_of_file(file) if file else "trace"
        path = file or trace_file
        assert path is not None
        check_targets(html, png, inputs=[path, profile_file])
        if (timeline or profile_file) and kind not in ("plan", ""):
            raise UsageError(f"{path} has no timeline and needs no profile.", "Show a plan.")
        match kind:
            case "profile":
                show_profile(read_record(path, Profile), html=html, png=png)
            case "trace":
                show_trace(read_record(path, Trace), html=html, png=png)
            case "pressure result":
                show_pressure(read_record(path, PressureResult), html=html, png=png)
            case "bench result":
                if html or png:
                    raise UsageError(f"{path} can be shown in the terminal only.", "Name a plan to draw.")
                show_bench_result(path)
            case _:
                plan = read_record(path, Plan)
                profile = read_record(profile_file, Profile) if profile_file else None
                if profile is None and (timeline or html or png):
                    profile = library.find_profile_of(plan, path)
                show_plan(plan, profile, timeline=timeline, html=html, png=png)


def find_source(source: Path | None, hardware_file: Path | None, here: Here, describe: Describe) -> Profile:
    """Return the profile that the arguments mean: a file, the last one, or a model's from the cache or the library.

    `hardware_file` is a profile measured on the machine to plan for. Raises AtsplanError.
    """
    if hardware_file is not None:
        profile = read_record(hardware_file, Profile)
        if source is None:
            return profile
        described = None if is_gguf(source) else read_record(source, Profile)
        model = described.model if described else read_model_info(source)
        if model.fingerprint == profile.model.fingerprint:
            return profile
        if described is None:
            described = describe(source, profile.n_context, profile.n_ubatch)
        from .borrowed import borrow

        return borrow(described, profile)
    if source is None:
        last = cache.last_profile()
        if last is None:
            raise AtsplanError("No model was profiled yet.", "Run: atsplan profile MODEL.gguf")
        return last
    if not is_gguf(source):
        return read_record(source, Profile)
    model = read_model_info(source)
    return cache.find_profile(model.fingerprint) or find_shared_profile(model, source, here)


def find_shared_profile(model: ModelInfo, path: Path, here: Here) -> Profile:
    """Return the library's profile of the model on this very machine. Raises AtsplanError that names the nearest."""
    remedy = f"Run: atsplan profile {path}"
    hardware = here()
    found = library.nearest(
        [entry for entry in library.profiles() if entry.record.model.fingerprint == model.fingerprint], hardware
    )
    if found:
        different = library.differences(found[0].record.hardware, hardware)
        if not different:
            typer.echo(f"Using the shared profile {found[0].path}.", err=True)
            return found[0].record
        remedy += (
            f" (or, to plan for another machine, {'; '.join(different)}: "
            f"atsplan solve --hardware {found[0].path} --vram 6G)"
        )
    raise AtsplanError(f"{model.name} was not profiled yet.", remedy)


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
    kv_types: tuple[str, str] = (Workload.type_k, Workload.type_v),
) -> Workload:
    """Return the workload asked for. Only if no tokens were asked for, their counts shrink with a small context.

    The context is the profile's, or, if the tokens that were asked for need more, the smallest that holds them.
    """
    prompt, generate = PRESETS[preset or DEFAULT_PRESET]
    if preset is None and n_prompt is None and n_generate is None:
        n_context = n_context or profile.n_context
        if prompt + generate > n_context:
            generate = n_context // 3
            prompt = n_context - generate
    prompt, generate = prompt if n_prompt is None else n_prompt, generate if n_generate is None else n_generate
    smallest = -(-(prompt + generate) // KV_GRANULE) * KV_GRANULE
    return Workload(
        n_prompt_tokens=prompt,
        n_generated_tokens=generate,
        n_context=n_context or max(profile.n_context, smallest),
        n_ubatch=profile.n_ubatch,
        n_threads=n_threads,
        type_k=kv_types[0],
        type_v=kv_types[1],
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

    key = cache.plan_key(profile, budget_bytes, workload, objective.value)
    known = None if check or force else cache.find_plan(key)
    if known is not None:
        return known, True
    plan = solve(profile, budget_bytes, workload, objective=objective.value, check=check)
    if not check:
        with cache.best_effort():
            cache.store_plan(key, plan)
    return plan, False
