"""Files come from strangers: exact round trips for good ones, one clear line for bad ones, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import AtsplanError, InvalidFileError, UsageError
from planner.library import read_plan_or_profile
from planner.measurements import ModelInfo, Profile, Series
from planner.plan import Placement, Plan, Prediction, SolverReport, VramBudget
from planner.records import check_targets, from_json, kind_of_file, read_record, to_json, write_record, write_text
from planner.workload import Workload
from tests.unit.planner_profiles import TINY, synthetic_profile


@pytest.fixture
def profile() -> Profile:
    return synthetic_profile(TINY)


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return Plan(
        model=profile.model,
        hardware=profile.hardware,
        software=profile.software,
        workload=Workload(n_threads=8),
        device="cuda0",
        vram=VramBudget(100, 10, 20, 30, 5, 5, 5, 25),
        prefill_min_tokens=32,
        placements=tuple(Placement(w.name, w.size_bytes, "cpu", "stream") for w in profile.weights),
        solver=SolverReport("joint", "feasible", 0.1 + 0.2, 0.3, 1.5),
        prediction=Prediction(0.04, 0.5, 1, 2, 75, 0.01, 0.02, 0.03),
        is_simulated=False,
        notes=("naïve ✓",),
    )


def test_profile_and_plan_round_trip_exactly(profile: Profile, plan: Plan, tmp_path: Path) -> None:
    for record in (profile, plan):
        write_record(tmp_path / "record.json", record)
        again = read_record(tmp_path / "record.json", type(record))
        assert again == record
        assert to_json(again) == to_json(record)


def test_random_floats_survive(tmp_path: Path) -> None:
    generator = random.Random(1)
    series = Series(tuple(generator.random() * 10 ** generator.randint(-12, 5) for _ in range(1000)))
    write_record(tmp_path / "series.json", series)
    assert read_record(tmp_path / "series.json", Series) == series


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda raw: raw["placements"][3].update(decode="gpuu"), "placements.3.decode"),
        (lambda raw: raw["placements"][3].update(colour="red"), "placements.3.colour"),
        (lambda raw: raw["placements"][3].update(size_bytes=-1), "placements.3.size_bytes"),
        (lambda raw: raw["placements"][3].update(size_bytes=2**60), "placements.3.size_bytes"),
        (lambda raw: raw["placements"][3].update(size_bytes="12"), "placements.3.size_bytes"),
        (lambda raw: raw["placements"][3].pop("name"), "placements.3.name"),
        (lambda raw: raw["vram"].update(idle_bytes=1.5), "vram.idle_bytes"),
        (lambda raw: raw["solver"].update(value_seconds=-0.1), "solver.value_seconds"),
        (lambda raw: raw["solver"].update(value_seconds=1e9), "solver.value_seconds"),
        (lambda raw: raw["solver"].update(value_seconds=float("nan")), "solver.value_seconds"),
        (lambda raw: raw["solver"].update(value_seconds=float("inf")), "solver.value_seconds"),
        (lambda raw: raw.update(model=None), "model"),
        (lambda raw: raw.update(extra={}), "extra"),
        (lambda raw: raw["model"].update(name="\x1b[2J"), "model.name"),
        (lambda raw: raw["notes"].append("\x9b31m"), "notes.1"),
    ],
)
def test_bad_field_is_named(plan: Plan, change, path: str) -> None:  # type: ignore[no-untyped-def]
    raw = json.loads(to_json(plan))
    change(raw)
    with pytest.raises(InvalidFileError) as caught:
        from_json(json.dumps(raw).encode(), Plan, "plan.json")
    assert caught.value.message.startswith(f"plan.json: {path}: ")
    assert "\n" not in caught.value.message


def test_empty_series_is_refused(profile: Profile) -> None:
    raw = json.loads(to_json(profile))
    raw["kernels"][2]["seconds"]["samples"] = []
    with pytest.raises(InvalidFileError, match=r"kernels\.2\.seconds: at least one sample"):
        from_json(json.dumps(raw).encode(), Profile, "p.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda raw: raw.update(weights=[]), "weights: there are none"),
        (lambda raw: raw["weights"][3].update(size_bytes=0), r"weights\.3: blk\.0\.attn_k\.weight is empty"),
        (lambda raw: raw["weights"][3].update(shape=[256, 0]), r"weights\.3: blk\.0\.attn_k\.weight is empty"),
        (lambda raw: raw["link"][0]["seconds"].update(samples=[0.0]), r"link\.0: a copy of something takes some time"),
        (
            lambda raw: raw.update(experts=[{"matrix_bytes": [1], "n_experts": 0, "seconds": {"samples": [1.0]}}]),
            r"experts\.0: at least one expert",
        ),
    ],
)
def test_what_no_profile_can_mean_is_refused(profile: Profile, change, problem: str) -> None:  # type: ignore[no-untyped-def]
    raw = json.loads(to_json(profile))
    change(raw)
    with pytest.raises(InvalidFileError, match=problem):
        from_json(json.dumps(raw).encode(), Profile, "p.json")


@pytest.mark.parametrize(
    ("version", "words"),
    [(2, "reads version 1. Upgrade"), (0, "Make the plan again"), ("1", "Make the plan"), (True, "Make the plan"),
     (None, "schema_version is missing")],
)  # fmt: skip
def test_schema_version_is_checked_before_the_fields(version: object, words: str) -> None:
    with pytest.raises(InvalidFileError, match=words) as caught:
        from_json(json.dumps({"schema_version": version, "from_the_future": 1}).encode(), Plan, "p.json")
    assert "from_the_future" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_not_a_record(data: bytes) -> None:
    with pytest.raises(InvalidFileError):
        from_json(data, Plan, "p.json")


def test_another_kind_of_file_is_named(plan: Plan, profile: Profile) -> None:
    with pytest.raises(InvalidFileError, match=r"p\.json: not a profile: it is a plan\. Name a profile"):
        from_json(to_json(plan).encode(), Profile, "p.json")
    with pytest.raises(InvalidFileError, match=r"p\.json: not a plan: it is a profile\. Name a plan"):
        from_json(to_json(profile).encode(), Plan, "p.json")
    with pytest.raises(InvalidFileError, match=r"p\.json: not a plan: \w+ is missing\. Name a plan"):
        from_json(b'{"schema_version": 1, "other": 1}', Plan, "p.json")


def test_a_broken_file_is_reported_as_what_it_is(plan: Plan, profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for record, field, words in ((plan, "placements", "placements.0: "), (profile, "kernels", "kernels.0: ")):
        raw = json.loads(to_json(record))
        raw[field][0] = 1
        path.write_text(json.dumps(raw))
        with pytest.raises(InvalidFileError, match=words):
            read_plan_or_profile(path)


def test_mutated_files_never_escape_as_other_errors(plan: Plan) -> None:
    generator = random.Random(7)
    data = to_json(plan).encode()
    for _ in range(400):
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(mutated))
            kind = generator.randrange(3)
            if kind == 0:
                mutated[at] = generator.randrange(256)
            elif kind == 1:
                del mutated[at : at + generator.randint(1, 50)]
            else:
                mutated[at:at] = bytes(generator.choices(b'0123456789-eE.,:[]{}"', k=generator.randint(1, 30)))
        try:
            from_json(bytes(mutated), Plan, "p.json")
        except InvalidFileError:
            continue


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidFileError, match="not a regular file"):
        kind_of_file(tmp_path / "fifo")
    (tmp_path / "secret").write_text("{}")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "fifo", "nul\0name", "x" * 5000):
        with pytest.raises(InvalidFileError):
            read_record(path, Plan)


def test_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.records.MAX_FILE_BYTES", 100)
    (tmp_path / "p.json").write_text(" " * 101)
    with pytest.raises(InvalidFileError, match="not a plan"):
        read_record(tmp_path / "p.json", Plan)


def test_numbers_that_a_reader_would_refuse_are_not_written(plan: Plan, tmp_path: Path) -> None:
    bad = replace(plan, solver=replace(plan.solver, bound_seconds=float("nan")))
    with pytest.raises(AtsplanError, match=r"solver\.bound_seconds"):
        write_record(tmp_path / "p.json", bad)
    with pytest.raises(AtsplanError):
        write_record(tmp_path / "p.json", ModelInfo("\udc80", "a", "b", "c", 1, 1, 1, 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["os.fsync", "os.replace"])
def test_full_disk_keeps_the_old_file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    target = tmp_path / "p.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage, fail)
    with pytest.raises(AtsplanError, match="No space left on device"):
        write_record(target, plan)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_interrupt_leaves_no_temporary_file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_record(tmp_path / "p.json", plan)
    assert list(tmp_path.iterdir()) == []


def test_links_and_devices_are_written_through(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_record(tmp_path / "link.json", plan)
    assert (tmp_path / "link.json").is_symlink()
    assert read_record(tmp_path / "real.json", Plan) == plan
    write_record("/dev/null", plan)
    assert Path("/dev/null").is_char_device()
    read_end, write_end = os.pipe()
    write_text(f"/dev/fd/{write_end}", "as to /dev/stdout in a pipe")
    os.close(write_end)
    with open(read_end) as pipe:
        assert pipe.read() == "as to /dev/stdout in a pipe"


def test_unwritable_places(plan: Plan, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "such" / "folder.json", "nul\0name"):
        with pytest.raises(AtsplanError, match="Cannot write"):
            write_record(path, plan)


def test_unwritable_places_are_refused_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    check_targets(None, tmp_path / "new.json", tmp_path / "link.json", Path("/dev/null"))
    for path in (tmp_path, Path(""), tmp_path / "no" / "such.json"):
        with pytest.raises(UsageError, match="folder"):
            check_targets(None, path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UsageError, match="cannot be written to"):
        check_targets(tmp_path / "new.json")
