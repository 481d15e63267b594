"""What must hold before a plan runs: the model, the machine, the software and the memory it was made for."""

from __future__ import annotations

import os
from pathlib import Path

from planner.cache import model_path
from planner.errors import DeviceError, InvalidFileError, MismatchError
from planner.gguf_model import model_info, read_gguf
from planner.hardware import Software
from planner.plan import Plan
from planner.records import check_targets, read_record
from planner.units import format_size


def read_plan(path: Path, model: Path | None, *targets: Path | None) -> tuple[Plan, Path]:
    """Return the plan and its model's file, as `find_model` does; both before a target could overwrite either.

    Raises InvalidFileError, MismatchError, and UsageError for a target that cannot be written.
    """
    plan = read_record(path, Plan)
    model_path = find_model(plan, path, model)
    check_targets(*targets, inputs=[path, model_path])
    return plan, model_path


def find_model(plan: Plan, plan_path: Path, given: Path | None) -> Path:
    """Return the plan's model file: `given`, or next to the plan, here, or where it was profiled.

    Raises MismatchError if the file is another model or lacks weights of the plan, InvalidFileError if there is none.
    """
    name = os.path.basename(plan.model.file_name)  # a stranger's plan does not choose the folder
    candidates = [plan_path.parent / name, Path(name), *filter(None, [model_path(plan.model.fingerprint)])]
    path = given or next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    if path is None:
        raise InvalidFileError(f"The plan's model {name} was not found.", "Name it with --model.")
    model = read_gguf(path)
    found = model_info(model)
    if found.fingerprint != plan.model.fingerprint:
        raise MismatchError(
            f"The plan is for {plan.model.name} ({plan.model.file_name}, fingerprint {plan.model.fingerprint}); "
            f"{path} is {found.name} with fingerprint {found.fingerprint}.",
            "Profile and solve this model, or name the plan's with --model.",
        )
    sizes = {tensor.name: tensor.size_bytes for tensor in model.tensors}
    wrong = next((item for item in plan.placements if sizes.get(item.name) != item.size_bytes), None)
    if wrong is not None:
        raise MismatchError(
            f"The plan places {wrong.name!r:.80} of {wrong.size_bytes} bytes, which {path} does not hold.",
            "Profile and solve again.",
        )
    return model.paths[0]  # llama.cpp takes only the first shard


def check_software(plan: Plan, software: Software) -> None:
    """Raise MismatchError unless llama.cpp is the one that the plan was made with."""
    if not plan.software.has_same_llama(software):
        raise MismatchError(
            f"The plan was made with {_llama(plan.software)}; this is {_llama(software)}.",
            "Profile and solve again: other versions build other graphs.",
        )


def check_memory(
    plan: Plan, free_before_bytes: int | None, free_now_bytes: int | None, available_host_bytes: int | None
) -> None:
    """Raise DeviceError, naming the missing bytes, if the plan does not fit now. None: unknown.

    VRAM must hold everything counted from before CUDA took its part, and llama.cpp's and the ring's from now on.
    """
    vram = plan.vram  # a plan that people have edited may place more than it says
    ring_bytes = max(vram.ring_bytes, plan.largest_streamed_bytes)
    weights_bytes = max(vram.weights_bytes, sum(item.size_bytes for item in plan.placements if item.is_resident))
    needed = weights_bytes + vram.context_bytes + vram.compute_bytes + ring_bytes + vram.experts_bytes
    for needed_bytes, free_bytes in ((needed + vram.overhead_bytes, free_before_bytes), (needed, free_now_bytes)):
        if free_bytes is not None and needed_bytes > free_bytes:
            raise DeviceError(
                f"The plan needs {format_size(needed_bytes)} of VRAM, "
                f"{format_size(needed_bytes - free_bytes)} more than is free.",
                "Close what uses the GPU, or solve again with a smaller --vram.",
            )
    needed = sum(placement.size_bytes for placement in plan.host_placements)
    if available_host_bytes is not None and needed > available_host_bytes:
        raise DeviceError(
            f"The plan keeps {format_size(needed)} of weights in host memory, "
            f"{format_size(needed - available_host_bytes)} more than is available.",
            "Close programs, or solve again with a larger --vram.",
        )


def _llama(software: Software) -> str:
    commit = f" (llama.cpp {software.llama_cpp_commit})" if software.llama_cpp_commit else ""
    return f"llama-cpp-python {software.llama_cpp_python}{commit}"
