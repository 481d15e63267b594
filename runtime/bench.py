"""Measure a plan, and plain llama.cpp at its best settings under the same budget, beside the prediction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table

from planner.errors import AtsplanError
from planner.hardware import Hardware, Software
from planner.measurements import Series
from planner.plan import Plan, WeightClass
from planner.records import write_record
from planner.units import format_size

from .bench_worker import CUDA_GRAPHS, DepthTimes, Measured, Task, measure
from .plain_settings import Candidate, Search, find_candidates
from .report import describe_experts
from .session import LoadSettings

# History: 1 = first version.
BENCH_SCHEMA_VERSION = 1
_N_TRIAL_TOKENS = 32  # decoded to find out which of llama.cpp's settings are worth measuring well
STATIC = "without following the load"
_SWITCHES = (
    "prefetch",
    "zero_copy",
    "early_launch",
    "fast_products",
    CUDA_GRAPHS,
)  # what only costs time when it is off

Report = Callable[[str], None]


@dataclass(frozen=True)
class PlainResult:
    """Plain llama.cpp with one of its settings. A trial is one short repetition."""

    name: str
    settings: LoadSettings
    trial: Measured
    measured: Measured | None  # the best for decoding and the best for prefill only


@dataclass(frozen=True)
class Ablation:
    """The plan without one of the things that make it fast."""

    name: str
    measured: Measured


@dataclass(frozen=True)
class BenchResult:
    plan: Plan
    hardware: Hardware  # where it was measured; `plan.hardware` is where it was planned for
    software: Software
    n_prompt: int
    n_generate: int
    measured: Measured
    plain: tuple[PlainResult, ...]
    ablations: tuple[Ablation, ...]
    schema_version: int = BENCH_SCHEMA_VERSION


def bench(
    plan: Plan,
    plan_path: Path,
    model_path: Path,
    machine: tuple[Hardware, Software],
    *,
    n_prompt: int,
    n_generate: int,
    depths: tuple[int, ...],
    n_repeat: int,
    against_plain: bool,
    ablate: bool,
    is_adaptive: bool = True,
    report: Report,
) -> BenchResult:
    """Measure everything, each contender in a child process. Raises AtsplanError.

    Half of the plan's repetitions come before those of what it is compared with and half after, so that a drift of the
    machine does not favour either.
    """
    needed = max(depths) + n_prompt + n_generate
    if needed > plan.workload.n_context:
        raise AtsplanError(
            f"{max(depths)} + {n_prompt} + {n_generate} tokens exceed the plan's context of {plan.workload.n_context}.",
            "Measure at smaller depths, or solve with a larger --ctx.",
        )
    n_after = n_repeat // 2 if against_plain or ablate else 0
    task = Task(
        str(model_path), plan.device, str(plan_path), None, n_prompt, n_generate, depths, n_repeat - n_after,
        is_adaptive=is_adaptive,
    )  # fmt: skip
    report(f"Measuring the plan (repetitions: {task.n_repeat}) ...")
    measured = measure(task)
    plain = _bench_plain(plan, replace(task, plan_path=None, n_repeat=n_repeat), report) if against_plain else ()
    ablations = _bench_ablations(plan, replace(task, n_repeat=n_repeat), report) if ablate else ()
    if n_after:
        report(f"Measuring the plan again (repetitions: {n_after}) ...")
        measured = _joined(measured, measure(replace(task, n_repeat=n_after)))
    return BenchResult(plan, *machine, n_prompt, n_generate, measured, plain, ablations)


def best_plain(result: BenchResult, n_depth: int, seconds: Callable[[DepthTimes], Series]) -> tuple[str, Series] | None:
    """Return the name and the times of llama.cpp's fastest settings for one figure; None if it was not measured."""
    times = [
        (plain.name, seconds(depth))
        for plain in result.plain
        if plain.measured is not None
        for depth in plain.measured.depths
        if depth.n_depth == n_depth
    ]
    return min(times, key=lambda item: item[1].median, default=None)


def _bench_plain(plan: Plan, task: Task, report: Report) -> tuple[PlainResult, ...]:
    workload = plan.workload
    fixed = LoadSettings(
        workload.n_context, workload.n_ubatch, workload.n_threads,
        workload.type_k, workload.type_v, workload.flash_attention,
    )  # fmt: skip
    report("Fitting llama.cpp's settings to the budget ...")
    budget_bytes = max(0, plan.vram.budget_bytes - plan.vram.overhead_bytes)
    candidates = find_candidates(Search(task.model_path, task.device, budget_bytes, fixed))
    if not candidates:
        raise AtsplanError(
            "llama.cpp cannot run the model within the plan's budget at all.", "Measure without --against."
        )
    trials: list[tuple[Candidate, Measured]] = []
    for candidate in candidates:
        report(f"Trying llama.cpp with {candidate.name} ...")
        trial = replace(task, settings=candidate.settings, n_repeat=1, n_generate=min(_N_TRIAL_TOKENS, task.n_generate))
        try:
            trials.append((candidate, measure(trial)))
        except AtsplanError as error:  # for example repacked kernels that this CPU lacks
            report(f"  {error}")
    if not trials:
        raise AtsplanError("llama.cpp ran with none of the settings.", "Their errors are above.")
    best = {
        min(trials, key=lambda item: item[1].depths[0].decode_seconds.median)[0],
        min(trials, key=lambda item: item[1].depths[0].prefill_seconds.median)[0],
    }
    results = []
    for candidate, trial_result in trials:
        full = None
        if candidate in best:
            report(f"Measuring llama.cpp with {candidate.name} (repetitions: {task.n_repeat}) ...")
            full = measure(replace(task, settings=candidate.settings))
        results.append(PlainResult(candidate.name, candidate.settings, trial_result, full))
    return tuple(results)


def _bench_ablations(plan: Plan, task: Task, report: Report) -> tuple[Ablation, ...]:
    """Measure the plan with one option off, and with all host weights in one class."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        variants: list[tuple[str, Plan, str | None]] = [
            *((f"without {option.replace('_', ' ')}", plan, option) for option in _SWITCHES),
            (STATIC, plan, None),
            ("all host weights on the CPU", in_one_class(plan, "cpu"), None),
            ("all host weights streamed", in_one_class(plan, "stream"), None),
        ]
        if plan.experts is not None:
            variants.append(("a layer's experts together", replace(plan, experts=None), None))
        for name, variant, option in variants:
            path = Path(folder) / "plan.json"
            write_record(path, variant)
            report(f"Measuring the plan: {name} (repetitions: {task.n_repeat}) ...")
            is_adaptive = task.is_adaptive and variant is plan and name != STATIC
            changed = replace(task, plan_path=str(path), switched_off=option, is_adaptive=is_adaptive)
            results.append(Ablation(name, measure(changed)))
    return tuple(results)


def in_one_class(plan: Plan, host_class: WeightClass) -> Plan:
    """Return the plan with all its host weights in one class while decoding; inputs are only ever read by rows."""
    placements = tuple(
        placement if placement.is_resident else replace(placement, decode=host_class) for placement in plan.placements
    )
    return replace(plan, placements=placements, experts=None)


def _joined(first: Measured, second: Measured) -> Measured:
    return replace(
        second,
        depths=tuple(
            DepthTimes(
                one.n_depth,
                _chained(one.prefill_seconds, two.prefill_seconds),
                _chained(one.first_token_seconds, two.first_token_seconds),
                _chained(one.decode_seconds, two.decode_seconds),
            )
            for one, two in zip(first.depths, second.depths, strict=True)
        ),
        peak_vram_bytes=max(first.peak_vram_bytes, second.peak_vram_bytes),
    )


def _chained(first: Series, second: Series) -> Series:
    return Series((*first.samples, *second.samples))


def table(result: BenchResult) -> Table:
    """Return the figures for the terminal: tokens per second, median and spread, and time to the first token."""
    view = Table(
        title=f"{result.plan.model.name}, {format_size(result.plan.vram.budget_bytes)}",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    against = ("llama.cpp", "ratio") if result.plain else ()
    for heading in ("depth", "", "plan", *against, "predicted", "error"):
        view.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    predicted = result.plan.prediction
    same_prompt = result.n_prompt == result.plan.workload.n_prompt_tokens
    for depth in result.measured.depths:
        for label, n_tokens, seconds, predicted_seconds in (
            ("prefill tokens/s", result.n_prompt, _prefill, predicted.prefill_seconds if same_prompt else 0.0),
            ("first token s", 0, _first_token, 0.0),
            ("decode tokens/s", 1, _decode, predicted.decode_seconds_per_token),
        ):
            series = seconds(depth)
            plain = best_plain(result, depth.n_depth, seconds)
            view.add_row(
                str(depth.n_depth),
                label,
                _figure(series, n_tokens),
                *(
                    (_figure(plain[1], n_tokens), f"{plain[1].median / series.median:.2f}")
                    if plain
                    else ("",) * len(against)
                ),
                _rate(predicted_seconds, n_tokens) if predicted_seconds else "",
                f"{predicted_seconds / series.median - 1:+.1%}" if predicted_seconds else "",
            )
    return view


def remarks(result: BenchResult) -> list[str]:
    """Return the lines below the table: memory, link, utilisation, and which settings of llama.cpp were best."""
    plan, measured = result.plan, result.measured
    lines = [
        f"peak VRAM: plan {format_size(measured.peak_vram_bytes)} of {format_size(plan.vram.budget_bytes)}, "
        f"predicted {format_size(plan.prediction.peak_vram_bytes)}"
    ]
    lines += [
        f"  llama.cpp with {plain.name}: {format_size(plain.measured.peak_vram_bytes)}"
        for plain in result.plain
        if plain.measured is not None
    ]
    if measured.statistics is not None:
        per_token = measured.statistics.streamed_bytes / measured.n_statistics_tokens
        lines.append(
            f"link: {format_size(per_token)} per decoded token, "
            f"predicted {format_size(plan.prediction.decode_link_bytes_per_token)}"
        )
        experts = (
            measured.statistics.n_experts_resident,
            measured.statistics.n_experts_streamed,
            measured.statistics.n_experts_cpu,
        )
        if any(experts):
            predicted = ", ".join(f"{n:.1f}" for n in plan.prediction.decode_experts)
            lines.append(f"experts: {describe_experts(*experts, measured.n_statistics_tokens)}; predicted {predicted}")
        if measured.statistics.unpinned_bytes:
            lines.append(f"not pinned: {format_size(measured.statistics.unpinned_bytes)} of host memory, which is slow")
    if measured.gpu_busy_fraction is not None:
        lines.append(f"some kernel ran on the GPU for {measured.gpu_busy_fraction:.0%} of the time (NVML)")
    for label, seconds in (("prefill", _prefill), ("decode", _decode)):
        best = best_plain(result, measured.depths[0].n_depth, seconds)
        if best is not None:
            lines.append(f"llama.cpp's best {label}: {best[0]}")
    for ablation in result.ablations:
        rates = [
            _rate(seconds(ablation.measured.depths[0]).median, n)
            for seconds, n in ((_prefill, result.n_prompt), (_decode, 1))
        ]
        lines.append(f"{ablation.name}: prefill {rates[0]}, decode {rates[1]} tokens/s")
    if plan.is_simulated:
        lines.append("The device is simulated: these figures say nothing about a GPU.")
    return lines


def _prefill(depth: DepthTimes) -> Series:
    return depth.prefill_seconds


def _first_token(depth: DepthTimes) -> Series:
    return depth.first_token_seconds


def _decode(depth: DepthTimes) -> Series:
    return depth.decode_seconds


def _figure(series: Series, n_tokens: int) -> str:
    spread = f" ± {series.mad / series.median:.1%}" if len(series.samples) > 1 else ""
    return f"{_rate(series.median, n_tokens)}{spread}"


def _rate(seconds: float, n_tokens: int) -> str:
    if not n_tokens:
        return f"{seconds:.3f}"
    rate = n_tokens / seconds
    return f"{rate:.0f}" if rate >= 999.95 else f"{rate:.1f}"
