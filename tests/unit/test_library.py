"""Shared plans: added under the right names, found for the right machine, and refused when something is not true."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from planner import __version__, cache, cli, library
from planner.errors import AtsplanError
from planner.hardware import Cpu, Gpu, Hardware
from planner.library_check import check_file
from planner.measurements import Profile
from planner.plan import Plan, WeightCosts
from planner.records import read_record, to_json, write_record
from planner.solve import solve
from planner.units import GIB, MIB
from planner.workload import Workload
from runtime import commands
from tests.unit.planner_commands import run
from tests.unit.planner_profiles import TINY, synthetic_profile


@pytest.fixture(autouse=True)
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATSPLAN_PLANS", str(tmp_path / "library"))
    monkeypatch.setattr(library, "folders", lambda: [library.own_folder()])  # what is shipped changes
    return tmp_path / "library"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile(TINY)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solve(profile, 600 * MIB, Workload(n_threads=8))


@pytest.fixture
def plan_path(profile: Profile, plan: Plan, tmp_path: Path) -> Path:
    """Return a plan in some folder, with its profile beside it."""
    (tmp_path / "mine").mkdir()
    write_record(tmp_path / "mine/profile.json", profile)
    write_record(tmp_path / "mine/plan.json", plan)
    return tmp_path / "mine/plan.json"


@pytest.mark.parametrize(
    ("gpu", "memory_gib", "cpu", "cores", "slug"),
    [
        ("NVIDIA GeForce RTX 4070", 12, "AMD Ryzen 7 7700 8-Core Processor", 8, "rtx-4070-12g-ryzen-7-7700-8c"),
        ("NVIDIA H200", 140, "INTEL(R) XEON(R) PLATINUM 8481C", 16, "h200-140g-xeon-platinum-8481c-16c"),
        (
            "NVIDIA GeForce RTX 3060 Laptop GPU", 6, "11th Gen Intel(R) Core(TM) i7-11800H @ 2.30GHz", 8,
            "rtx-3060-laptop-6g-11th-gen-i7-11800h-8c",
        ),
        (None, 0, "Intel(R) Xeon(R) Processor", 2, "no-gpu-xeon-2c"),
    ],
)  # fmt: skip
def test_folders_are_named_after_hardware(gpu: str | None, memory_gib: int, cpu: str, cores: int, slug: str) -> None:
    card = Gpu(gpu, memory_gib * GIB, "8.9", 4, 16, "cuda") if gpu else None
    assert library.hardware_slug(Hardware(Cpu(cpu, cores, 2 * cores, (), 0, 0), card)) == slug


def test_a_plan_is_added_with_its_profile(plan_path: Path, plan: Plan, own_library: Path) -> None:
    lines = run("plans", "add", str(plan_path)).splitlines()
    folder = own_library / "test-24g-test-16c/tiny"
    assert lines == [str(folder / "profile.json"), str(folder / "600m-4k.json")]
    assert read_record(lines[1], Plan) == plan
    assert read_record(lines[0], Profile).state.gpu_uuid == ""
    assert run("plans", "add", str(plan_path)).splitlines() == lines  # again: nothing changes
    assert run("plans", "check").splitlines() == [f"{folder / '600m-4k.json'}: ok", f"{folder / 'profile.json'}: ok"]
    text = run("plans", "list")
    assert "1 plan and 1 profile in" in text
    assert "Tiny" in text
    write_record(plan_path, replace(plan, notes=("another one",)))
    with pytest.raises(AtsplanError, match="there already, with other content"):
        run("plans", "add", str(plan_path))
    assert run("plans", "add", str(plan_path), "--name", "other").splitlines()[1] == str(folder / "other.json")
    with pytest.raises(AtsplanError, match="A plan cannot be called profile-2"):
        run("plans", "add", str(plan_path), "--name", "profile-2")
    with pytest.raises(AtsplanError, match="A plan cannot be called sub/other"):  # nobody would find it there
        run("plans", "add", str(plan_path), "--name", "sub/other")


def test_a_plan_of_a_newer_profile_is_added_too(plan_path: Path, plan: Plan, profile: Profile) -> None:
    run("plans", "add", str(plan_path))
    newer = replace(profile, state=replace(profile.state, taken_at="2031-01-01T00:00:00+00:00"))
    write_record(plan_path.parent / "profile.json", newer)
    write_record(plan_path, replace(plan, profiled_at=newer.state.taken_at))
    lines = run("plans", "add", str(plan_path), "--name", "newer").splitlines()
    assert [Path(line).name for line in lines] == ["profile-2.json", "newer.json"]
    assert run("plans", "add", str(plan_path), "--name", "newer").splitlines() == lines
    assert run("plans", "check").count(": ok") == 4


def test_a_plan_is_checked_by_its_own_profile(plan_path: Path, plan: Plan, profile: Profile) -> None:
    own = replace(profile, state=replace(profile.state, taken_at="2031-01-01T00:00:00+00:00"))
    cache.store_profile(own)
    cache.store_profile(replace(profile, n_context=profile.n_context * 2))  # measured later, at other settings
    (plan_path.parent / "profile.json").unlink()
    for taken_at, expected in ((own.state.taken_at, own), ("2032-01-01T00:00:00+00:00", None)):
        assert library.find_profile_of(replace(plan, profiled_at=taken_at), plan_path) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vram": {"idle_bytes": 1}}, "the parts of VRAM add up to"),
        ({"prediction": {"peak_vram_bytes": 1}}, "the predicted peak of VRAM is 1 bytes"),
        ({"prediction": {"decode_seconds_per_token": 1.0}}, "1 s for a token predicted"),
        ({"prediction": {"prefill_seconds": 1e-6}}, "1e-06 s for the prompt predicted"),
        ({"software": {"llama_cpp_commit": "def"}}, "other software than its profile"),
        ({"model": {"fingerprint": "another"}}, "the profile that it was made from was not found"),
        ({"workload": {"n_threads": 3}}, "the profile that it was made from was not found"),
        ({"placements": ()}, "its weights are not those of its profile"),
        ({"schema_version": 99}, "schema version 99"),
    ],
)
def test_what_is_wrong_with_a_plan_is_found(
    plan_path: Path, changes: dict[str, dict[str, object]], problem: str
) -> None:
    raw = json.loads(plan_path.read_text())
    for name, change in changes.items():
        raw[name] = raw[name] | change if isinstance(change, dict) else change
    plan_path.write_text(json.dumps(raw))
    assert any(problem in found for found in check_file(plan_path)), check_file(plan_path)
    with pytest.raises(AtsplanError, match="plan.json: "):
        run("plans", "add", str(plan_path))
    with pytest.raises(AtsplanError, match="1 of 1 cannot be trusted"):
        run("plans", "check", str(plan_path))


def test_placements_must_make_sense(plan_path: Path, plan: Plan) -> None:
    raw = json.loads(to_json(plan))["placements"]
    costs = asdict(WeightCosts(1e-3, 1e-4, 1e-3, 1e-5, ring_bytes=0))
    for placements, problem in (
        ([*raw, raw[1]], f"placements: {raw[1]['name']} is placed twice"),
        ([raw[0], raw[1] | {"decode": "gpu", "prefill": "cpu"}, *raw[2:]], "placements.1: decode and prefill must"),
        ([raw[0], raw[1] | {"decode": "cpu", "prefill": "gpu"}, *raw[2:]], "placements.1: decode and prefill must"),
        ([raw[0], raw[1] | {"costs": costs}, *raw[2:]], "placements.1: costs.ring_bytes must hold the weight's"),
        ([raw[0], raw[1] | {"size_bytes": 1}, *raw[2:]], "not those of its profile"),
    ):
        plan_path.write_text(json.dumps(json.loads(to_json(plan)) | {"placements": placements}))
        assert any(problem in found for found in check_file(plan_path)), check_file(plan_path)
    more = sum(p.size_bytes for p in plan.placements) + plan.vram.budget_bytes
    write_record(plan_path, replace(plan, vram=replace(plan.vram, weights_bytes=more, budget_bytes=more)))
    assert any(f"{more} bytes of VRAM for weights, by its profile" in found for found in check_file(plan_path))


@pytest.mark.parametrize("version", ["0.1.0", __version__])
def test_page_tables_may_be_missing_from_old_plans_only(
    plan_path: Path, plan: Plan, profile: Profile, version: str
) -> None:
    needed_bytes = plan.vram.budget_bytes - plan.vram.idle_bytes
    plan = solve(profile, needed_bytes - plan.vram.weights_bytes // 2, plan.workload)
    software = replace(plan.software, atsplan=version)
    profile_path = plan_path.with_name("profile.json")
    write_record(profile_path, replace(profile, software=software))
    measured, accounted = profile.device_overhead_bytes, plan.vram.overhead_bytes
    assert accounted > measured  # by the page tables
    for overhead, is_right in ((accounted, True), (measured, version == "0.1.0"), (measured - 1, False)):
        idle = plan.vram.idle_bytes + accounted - overhead
        other = replace(plan, software=software, vram=replace(plan.vram, overhead_bytes=overhead, idle_bytes=idle))
        peak = plan.prediction.peak_vram_bytes + overhead - accounted
        write_record(plan_path, replace(other, prediction=replace(plan.prediction, peak_vram_bytes=peak)))
        assert (check_file(plan_path) == []) is is_right


def test_simulated_timings_are_not_added(plan_path: Path, plan: Plan, profile: Profile) -> None:
    write_record(plan_path.with_name("profile.json"), replace(profile, is_simulated=True))
    write_record(plan_path, replace(plan, is_simulated=True))
    assert check_file(plan_path) == []
    with pytest.raises(AtsplanError, match="its timings are simulated"):
        run("plans", "add", str(plan_path))


def test_what_is_shared_must_be_measured_and_in_its_place(plan_path: Path, plan: Plan, profile: Profile) -> None:
    assert check_file(plan_path) == []
    assert check_file(plan_path, is_shared=True) == ["it belongs into the folder test-24g-test-16c/tiny"]
    path = plan_path.with_name("profile.json")
    assert "it holds the GPU's UUID, which identifies a machine" in check_file(path, is_shared=True)
    write_record(path, replace(profile, is_simulated=True))
    assert "its timings are simulated" in check_file(path, is_shared=True)
    path.unlink()
    assert "the profile that it was made from is not beside it" in check_file(plan_path, is_shared=True)
    write_record(plan_path.with_name("profile.json"), plan)
    assert (
        "not a profile" in check_file(plan_path.with_name("profile.json"), is_shared=True)[0]
        or "Field required" in (check_file(plan_path.with_name("profile.json"), is_shared=True)[0])
    )


def test_the_nearest_machine(profile: Profile, plan: Plan) -> None:
    here = profile.hardware
    assert here.gpu is not None
    other_ram = replace(here, cpu=replace(here.cpu, memory_bytes=64 * GIB))
    other_cores = replace(here, cpu=replace(here.cpu, physical_cores=8))
    other_gpu = replace(here, gpu=replace(here.gpu, name="Old GPU", memory_bytes=12 * GIB, pcie_generation=3))
    machines = [replace(here, gpu=None), other_gpu, other_cores, other_ram, here]
    entries = [library.Entry(Path(str(n)), replace(plan, hardware=machine)) for n, machine in enumerate(machines)]
    assert [entry.path.name for entry in library.nearest(entries, here)] == ["4", "3", "2", "1", "0"]
    assert library.differences(here, here) == []
    assert library.differences(other_ram, here) == ["64 GiB instead of 128 GiB of RAM"]
    assert library.differences(other_gpu, here) == [
        "Old GPU instead of Test GPU", "12 GiB instead of 24 GiB of VRAM", "PCIe 3.0 x16 instead of 5.0 x16",
    ]  # fmt: skip
    assert library.differences(replace(here, gpu=None), here) == ["no GPU instead of Test GPU"]


def test_find(plan_path: Path, profile: Profile) -> None:
    with pytest.raises(AtsplanError, match="There is no shared plan for tin"):
        run("plans", "find", "tin")
    run("plans", "add", str(plan_path))
    text = run("plans", "find", "tin")
    assert "This machine." in text
    assert "600m-4k.json  600 MiB  context 4096  8 threads" in text
    there = replace(profile.hardware, gpu=None)
    assert "Another machine: Test GPU instead of no GPU." in run("plans", "find", "tin", here=there)


def test_solve_takes_a_shared_profile_of_this_machine(
    plan_path: Path, plan: Plan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "read_model_info", lambda path: profile.model)
    arguments = ("solve", "model.gguf", "--vram", "600M", "--threads", "8", "--out", str(tmp_path / "solved.json"))
    with pytest.raises(AtsplanError, match="Tiny was not profiled yet. Run: atsplan profile model.gguf$"):
        run(*arguments)
    run("plans", "add", str(plan_path))
    assert "Using the shared profile" in run(*arguments)
    assert read_record(tmp_path / "solved.json", Plan).placements == plan.placements
    there = replace(profile.hardware, cpu=replace(profile.hardware.cpu, physical_cores=4))
    with pytest.raises(AtsplanError) as caught:
        run(*arguments, here=there)
    assert "to plan for another machine, 16 instead of 4 cores" in caught.value.remedy
    assert f"atsplan solve --hardware {library.own_folder()}" in caught.value.remedy


def test_run_takes_a_shared_plan_of_this_machine(
    plan_path: Path, plan: Plan, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "read_model_info", lambda path: profile.model)
    find = lambda hardware: commands.find_shared_plan(Path("m.gguf"), lambda _: (hardware, plan.software))  # noqa: E731
    with pytest.raises(AtsplanError, match="nothing to run"):
        commands.find_shared_plan(None, lambda _: (plan.hardware, plan.software))
    with pytest.raises(AtsplanError, match="no shared plan for Tiny on this machine. Make one: atsplan profile"):
        find(plan.hardware)
    library.add(plan)
    larger = library.add(replace(plan, vram=replace(plan.vram, budget_bytes=GIB)))
    assert larger.name == "1g-4k.json"
    assert find(plan.hardware) == larger
    with pytest.raises(
        AtsplanError, match="made for another machine .no GPU|made for another machine .Test GPU instead"
    ):
        find(replace(plan.hardware, gpu=None))
    with pytest.raises(AtsplanError, match="another llama-cpp-python"):
        commands.find_shared_plan(
            Path("m.gguf"), lambda _: (plan.hardware, replace(plan.software, llama_cpp_python="0.4.0"))
        )


def test_a_damaged_file_does_not_hide_the_others(plan_path: Path, own_library: Path) -> None:
    run("plans", "add", str(plan_path))
    (own_library / "test-24g-test-16c/tiny/0-broken.json").write_text("{")
    assert "1 plan and 1 profile in" in run("plans", "list")
    with pytest.raises(AtsplanError, match="1 of 3 cannot be trusted"):
        run("plans", "check")
