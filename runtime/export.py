"""A plan as the command line of a stock llama.cpp program, or as code for stock llama-cpp-python.

With the native helper the whole plan runs there: the program loads it as a plug-in (GGML_BACKEND_PATH), and the helper
reads the classes from a settings file (runtime/native/settings.h). Without it, only where weights live can be said.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AtsplanError
from planner.gguf_model import LargeArray, read_gguf
from planner.plan import Plan
from planner.records import write_text
from planner.units import format_size

from . import placement, verify
from .build import native_helper
from .cli import Target
from .export_script import python_script
from .library import GPU_QUEUES, HOST_DEVICE, HYBRID_DEVICE, ggml_name
from .session import ALL_LAYERS

HOST_BUFFER_TYPE = "ATS_Host"  # the default buffer type of HOST_DEVICE, as -ot knows it
MAX_COMMAND_BYTES = 100_000  # Linux takes 128 KiB per argument


@dataclass(frozen=True)
class Export:
    text: str  # a command line for a shell, or a Python script
    notes: tuple[str, ...]


def export_plan(plan_path: Path, target: Target, model: Path | None, *, static: bool) -> Export:
    """Return the command line or the code, and write the settings file that it names beside the plan.

    `static` does without the helper: plain llama.cpp, no streaming. Raises AtsplanError.
    """
    settings_path = plan_path.with_suffix(".settings").resolve()
    plan, model_path = verify.read_plan(plan_path, model, None if static else settings_path)
    model_path = model_path.resolve()
    if static:
        return Export(
            _render(plan, target, model_path, {}, "CPU"), tuple(_notes(plan, target, model_path, static=True))
        )
    write_text(settings_path, settings_text(plan))
    environment = {
        "GGML_BACKEND_PATH": str(native_helper()),
        "ATSPLAN_DEVICE": ggml_name(plan.device),
        "ATSPLAN_SETTINGS": str(settings_path),
    }
    if plan.device != "sim":
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = GPU_QUEUES
    text = _render(plan, target, model_path, environment, HOST_BUFFER_TYPE)
    return Export(text, tuple(_notes(plan, target, model_path, static=False)))


def settings_text(plan: Plan) -> str:
    """Return the plan as the helper's settings file. Raises AtsplanError for a name that it cannot hold."""
    lines = [f"option {name} {value}" for name, value in placement.device_options(plan).items()]
    for item in plan.host_placements:
        if len(item.name.split()) != 1:
            raise AtsplanError(f"The weight '{item.name}' has a space in its name; it cannot be exported.")
        lines.append(f"weight {item.name} {item.decode} {item.prefill}")
    return "\n".join(lines) + "\n"


def _render(plan: Plan, target: Target, model: Path, environment: dict[str, str], buffer_type: str) -> str:
    inner = "" if plan.device == "sim" else ggml_name(plan.device)
    device = HYBRID_DEVICE if environment else inner
    patterns = [override.pattern for override in placement.load_settings(plan).overrides]
    if target is Target.PYTHON:
        return python_script(plan, model, patterns, environment, device, HOST_DEVICE if environment else "")
    arguments = [target.value, *_arguments(plan, target, model, device or "none")]
    if patterns:
        arguments += ["-ot", _overrides(patterns, target, buffer_type)]
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " \\\n  ".join([*assignments, *_lines(arguments)]) + "\n"


def _notes(plan: Plan, target: Target, model: Path, *, static: bool) -> Iterator[str]:
    if target is Target.PYTHON:
        return
    software = plan.software
    commit = f"commit {software.llama_cpp_commit}, " if software.llama_cpp_commit else ""
    package = f"llama-cpp-python {software.llama_cpp_python}"
    if static:
        yield f"Any {target} that knows these options will do; they are those of {package}'s llama.cpp."
    else:
        yield f"{target} must be of the same llama.cpp ({commit}that of {package}), built with shared libraries."
    tokens = read_gguf(model).metadata.get("tokenizer.ggml.tokens")
    n_vocab = tokens.length if isinstance(tokens, LargeArray) else 0
    if target is Target.LLAMA_BENCH and n_vocab:
        extra = 4 * n_vocab * plan.workload.n_ubatch
        yield f"llama-bench makes room for every token's logits: up to {format_size(extra)} more VRAM than planned."


def _arguments(plan: Plan, target: Target, model: Path, device: str) -> list[str]:
    workload = plan.workload
    threads, batch = str(workload.n_threads), str(workload.n_ubatch)
    arguments = [
        "-m", str(model), "-dev", device, "-ngl", str(ALL_LAYERS), "-t", threads, "-b", batch, "-ub", batch,
        "-ctk", workload.type_k, "-ctv", workload.type_v, "-fa", "on" if workload.flash_attention else "off",
        "-lm", "none",  # with mmap, llama.cpp replaces pinned memory by pageable
    ]  # fmt: skip
    if target is Target.LLAMA_BENCH:
        return [*arguments, "-p", str(workload.n_prompt_tokens), "-n", str(workload.n_generated_tokens)]
    # One slot, which has the whole context; --fit would move weights by its own rules.
    return [*arguments, "-tb", threads, "-c", str(workload.n_context), "-np", "1", "--fit", "off"]


def _overrides(patterns: Sequence[str], target: Target, buffer_type: str) -> str:
    """Return the value of -ot. llama-bench takes commas for several values to be measured one after another."""
    unusable = next((pattern for pattern in patterns if set(pattern) & set(",;=")), None)
    if unusable:
        raise AtsplanError(
            f"The pattern {unusable} cannot be given to {target}: it holds a separator.", "Use --to python."
        )
    text = (";" if target is Target.LLAMA_BENCH else ",").join(f"{pattern}={buffer_type}" for pattern in patterns)
    if len(text.encode()) > MAX_COMMAND_BYTES:
        raise AtsplanError("The plan is too long for a command line.", "Use --to python.")
    return text


def _lines(arguments: Sequence[str]) -> list[str]:
    """Return the program, and then each option with its value, quoted for a shell."""
    lines = [shlex.quote(arguments[0])]
    for argument in arguments[1:]:
        if argument.startswith("-"):
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return lines
