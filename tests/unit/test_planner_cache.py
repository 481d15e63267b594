"""The cache finds exactly what still applies, survives damage, and is shared by processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner import cache
from planner.errors import AtsplanError
from planner.measurements import Profile, Series
from planner.workload import Workload
from tests.unit.planner_profiles import TINY, synthetic_profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATSPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def profile() -> Profile:
    return synthetic_profile(TINY)


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSPLAN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache.cache_folder() == Path("/a")
    monkeypatch.delenv("ATSPLAN_CACHE")
    assert cache.cache_folder() == Path("/b/atsplan")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache.cache_folder() == Path("/c/.cache/atsplan")


def test_finds_what_was_stored(profile: Profile) -> None:
    assert cache.last_profile() is None
    assert cache.find_profile(profile.model.fingerprint) is None
    cache.store_profile(profile)
    found = cache.find_profile(
        profile.model.fingerprint, profile.hardware.fingerprint, profile.software,
        n_context=4096, n_ubatch=512, thread_counts=(4, 8), is_simulated=False,
    )  # fmt: skip
    assert found == profile
    assert cache.find_profile(profile.model.fingerprint) == profile
    assert cache.last_profile() == profile


def test_any_difference_is_a_miss(profile: Profile) -> None:
    cache.store_profile(profile)
    model, hardware = profile.model.fingerprint, profile.hardware.fingerprint
    assert cache.find_profile("other", hardware) is None
    assert cache.find_profile(model, "other") is None
    assert cache.find_profile(model, hardware, replace(profile.software, llama_cpp_commit="new")) is None
    assert cache.find_profile(model, hardware, n_context=8192) is None
    assert cache.find_profile(model, hardware, n_ubatch=256) is None
    assert cache.find_profile(model, hardware, thread_counts=(4, 12)) is None
    assert cache.find_profile(model, hardware, is_simulated=True) is None
    assert cache.find_profile(model, hardware, device="cuda1") == profile  # which does not tell


def test_two_gpus_of_one_kind_are_told_apart(profile: Profile) -> None:
    both = [replace(profile, state=replace(profile.state, device=name)) for name in ("cuda0", "cuda1")]
    for each in both:
        cache.store_profile(each)
    for each in both:
        assert cache.find_profile(profile.model.fingerprint, device=each.state.device) == each


def test_last_profile_is_the_one_stored_or_found_last(profile: Profile) -> None:
    other = replace(profile, n_context=512)
    first, second = cache.store_profile(profile), cache.store_profile(other)
    assert first != second
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert cache.last_profile() == other
    cache.find_profile(profile.model.fingerprint, n_context=4096)
    assert cache.last_profile() == profile


def test_hostile_fingerprints_stay_inside_the_folder(profile: Profile, folder: Path) -> None:
    hostile = replace(profile, model=replace(profile.model, fingerprint="../../../x/*"))
    path = cache.store_profile(hostile)
    assert path.parent == folder / "profiles"
    assert cache.find_profile("../../../x/*") == hostile
    assert cache.find_plan("../../etc/passwd") is None


def test_damaged_entry_is_discarded_with_a_warning(profile: Profile, caplog: pytest.LogCaptureFixture) -> None:
    path = cache.store_profile(profile)
    path.write_bytes(path.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING):
        assert cache.find_profile(profile.model.fingerprint) is None
    assert "damaged cache entry" in caplog.text
    assert not path.exists()


def test_plan_key_depends_on_every_input(profile: Profile) -> None:
    workload = Workload()
    base = cache.plan_key(profile, 1, workload, "joint")
    assert base == cache.plan_key(profile, 1, Workload(), "joint")
    others = [
        cache.plan_key(replace(profile, n_context=1), 1, workload, "joint"),
        cache.plan_key(profile, 2, workload, "joint"),
        cache.plan_key(profile, 1, replace(workload, n_threads=4), "joint"),
        cache.plan_key(profile, 1, workload, "paper"),
    ]
    assert len({base, *others}) == 5


def test_noise(profile: Profile) -> None:
    assert cache.noisy_fraction(profile) == 0
    assert not cache.is_too_noisy(profile)
    jumpy = Series((1.0, 2.0, 3.0, 9.0))
    kernels = tuple(replace(timing, seconds=jumpy) for timing in profile.kernels)
    assert cache.is_too_noisy(replace(profile, kernels=kernels))


def test_unusable_folder_is_a_clear_error(profile: Profile, folder: Path) -> None:
    folder.write_text("a file in the way")
    with pytest.raises(AtsplanError, match="ATSPLAN_CACHE"):
        cache.store_profile(profile)


def test_what_cannot_be_cached_is_not_lost(
    profile: Profile, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.store_profile(profile)
    path.write_text("{")
    monkeypatch.setattr(cache, "locked", lambda folder: (_ for _ in ()).throw(AtsplanError("a read-only disk")))
    with caplog.at_level(logging.WARNING):
        assert cache.find_profile(profile.model.fingerprint) is None
        with cache.best_effort():
            cache.store_profile(profile)
    assert caplog.text.count("a read-only disk") == 2


def _hold(folder: Path, seconds: float) -> None:
    with cache.locked(folder):
        (folder / "held").touch()
        time.sleep(seconds)


def _store_forever(profile: Profile) -> None:
    while True:
        cache.store_profile(profile)


def test_lock_excludes_another_process(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(folder, 0.3))
    process.start()
    while not (folder / "held").exists():
        time.sleep(0.01)
    started = time.monotonic()
    with cache.locked(folder):
        waited = time.monotonic() - started
    process.join()
    assert waited > 0.1


@pytest.mark.parametrize(("held_seconds", "is_said"), [(0.2, False), (1.2, True)])
def test_a_long_wait_for_the_lock_is_said(
    folder: Path, held_seconds: float, is_said: bool, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    profiles = folder / "profiles"
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(profiles, held_seconds))
    process.start()
    while not (profiles / "held").exists():
        time.sleep(0.01)
    cache.store_profile(profile)
    process.join()
    expected = [f"Waiting for process {process.pid}, which is using {profiles} ..."] if is_said else []
    assert [record.getMessage() for record in caplog.records] == expected
    assert cache.find_profile(profile.model.fingerprint) == profile


def test_kill_while_storing_leaves_a_whole_entry(profile: Profile) -> None:
    path = cache.store_profile(profile)
    context = multiprocessing.get_context("spawn")
    for delay in (0.0, 0.003, 0.007, 0.011):
        process = context.Process(target=_store_forever, args=(profile,))
        before = path.stat().st_mtime_ns
        process.start()
        while path.stat().st_mtime_ns == before:
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        assert cache.find_profile(profile.model.fingerprint) == profile
