"""A plan for another model, machine or software, or without the memory it needs, is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner import cache
from planner.errors import DeviceError, InvalidFileError, MismatchError
from planner.gguf_model import read_gguf, read_model_info
from planner.hardware import Software
from planner.plan import Placement, Plan
from profiler.synthetic_model import write_synthetic_model
from runtime.verify import check_memory, check_software, find_model
from tests.native.engine_plans import plan_for

SOFTWARE = Software("1", "0.3.36", "abc", False)


@pytest.fixture
def plan(smollm2: Path) -> Plan:
    sizes = {tensor.name: tensor.size_bytes for tensor in read_gguf(smollm2).tensors}
    names = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight")
    return plan_for(smollm2, [Placement(name, sizes[name], "stream", "cpu") for name in names])


def test_model_is_found_where_it_was_profiled(plan: Plan, smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"was not found\. Name it with --model"):
        find_model(plan, tmp_path / "plan.json", None)
    cache.remember_model_path(plan.model.fingerprint, smollm2)
    assert find_model(plan, tmp_path / "plan.json", None) == smollm2
    beside = tmp_path / smollm2.name
    beside.symlink_to(smollm2)
    assert find_model(plan, tmp_path / "plan.json", None) == beside
    assert find_model(plan, tmp_path / "plan.json", smollm2) == smollm2


def test_any_shard_names_the_model(plan: Plan, tmp_path: Path) -> None:
    first, second = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny", n_shards=2)
    sharded = replace(plan, model=read_model_info(first), placements=())
    assert find_model(sharded, tmp_path / "plan.json", second) == first


def test_another_model_is_refused(plan: Plan, smollm2: Path, tmp_path: Path) -> None:
    other = replace(plan, model=replace(plan.model, name="Other", fingerprint="0123456789abcdef"))
    with pytest.raises(MismatchError, match=r"The plan is for Other .*0123456789abcdef.*is Smollm2"):
        find_model(other, tmp_path / "plan.json", smollm2)


@pytest.mark.parametrize(
    "placement", [Placement("blk.0.other", 8, "gpu", "gpu"), Placement("blk.0.ffn_up.weight", 8, "gpu", "gpu")]
)
def test_weights_that_the_file_does_not_hold_are_refused_before_loading(
    plan: Plan, smollm2: Path, tmp_path: Path, placement: Placement
) -> None:
    with pytest.raises(MismatchError, match=f"places '{placement.name}' of 8 bytes, which .* does not hold"):
        find_model(replace(plan, placements=(placement,)), tmp_path / "plan.json", smollm2)


@pytest.mark.parametrize("file_name", ["", "x" * 5000, "nul\0", ".", "..", "../outside.gguf", "/outside.gguf"])
def test_a_plan_does_not_choose_the_folder_of_its_model(
    plan: Plan, smollm2: Path, tmp_path: Path, file_name: str
) -> None:
    (tmp_path / "outside.gguf").symlink_to(smollm2)
    (tmp_path / "plans").mkdir()
    hostile = replace(plan, model=replace(plan.model, file_name=file_name))
    with pytest.raises(InvalidFileError, match="was not found"):
        find_model(hostile, tmp_path / "plans" / "plan.json", None)


def test_software(plan: Plan) -> None:
    made = replace(plan, software=SOFTWARE)
    check_software(made, replace(SOFTWARE, atsplan="2", cuda_build=True))
    for changes in ({"llama_cpp_python": "0.3.37"}, {"llama_cpp_commit": "def"}):
        with pytest.raises(MismatchError, match=r"made with llama-cpp-python 0\.3\.36 \(llama\.cpp abc\); this is"):
            check_software(made, replace(SOFTWARE, **changes))


@pytest.mark.parametrize("commit", ["", "unknown"])
def test_an_unknown_commit_is_no_difference(plan: Plan, commit: str) -> None:
    made = replace(plan, software=SOFTWARE)
    check_software(made, replace(SOFTWARE, llama_cpp_commit=commit))
    check_software(replace(plan, software=replace(SOFTWARE, llama_cpp_commit=commit)), SOFTWARE)
    with pytest.raises(MismatchError):
        check_software(made, replace(SOFTWARE, llama_cpp_python="0.3.37", llama_cpp_commit=commit))


def test_memory(plan: Plan) -> None:
    placements = (Placement("up", 3 << 20, "stream", "cpu"), Placement("down", 1 << 20, "gpu", "gpu"))
    needy = replace(plan, placements=placements, vram=replace(plan.vram, weights_bytes=1 << 20, ring_bytes=3 << 20))
    edited = replace(plan, placements=placements)  # which says that it needs no VRAM
    for each in (needy, edited):
        check_memory(each, 4 << 20, 4 << 20, 3 << 20)
        check_memory(each, None, None, 3 << 20)
        with pytest.raises(DeviceError, match=r"needs 4\.0 MiB of VRAM, 0\.5 MiB more than is free"):
            check_memory(each, 4 << 20, 7 << 19, 3 << 20)
    with_driver = replace(needy, vram=replace(needy.vram, overhead_bytes=1 << 20))
    check_memory(with_driver, 5 << 20, 4 << 20, 3 << 20)
    with pytest.raises(DeviceError, match=r"needs 5\.0 MiB of VRAM, 1\.0 MiB more than is free"):
        check_memory(with_driver, 4 << 20, 4 << 20, 3 << 20)
    with pytest.raises(DeviceError, match=r"keeps 3\.0 MiB of weights in host memory, 1\.0 MiB more"):
        check_memory(needy, None, None, 2 << 20)
