"""Thread counts as people write them, and what becomes of a profile of a busy machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import cache
from planner.errors import AtsplanError
from planner.hardware import Cpu
from planner.units import GIB, MIB
from profiler.commands import _store, parse_threads
from tests.unit.planner_profiles import TINY, synthetic_profile


def cpu(physical_cores: int, logical_cores: int) -> Cpu:
    return Cpu("Test CPU", physical_cores, logical_cores, (), 32 * MIB, 64 * GIB)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("8,4", (4, 8)), ("1, 16", (1, 16)), ("4,4", (4,)), ("", (4, 8))]
)
def test_thread_counts(text: str, counts: tuple[int, ...]) -> None:
    assert parse_threads(text, cpu(8, 16)) == counts


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 3))])
def test_default_thread_counts_of_small_machines(cores: int, counts: tuple[int, ...]) -> None:
    assert parse_threads("", cpu(cores, 2 * cores)) == counts


@pytest.mark.parametrize("text", ["0", "-1", "17", "4,17", "four", "4,", ",", "1.5", "4;8"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(AtsplanError, match="not a list of thread counts") as caught:
        parse_threads(text, cpu(8, 16))
    assert "from 1 to 16" in caught.value.remedy


@pytest.mark.parametrize(
    ("is_simulated", "is_cached", "said"),
    [(False, False, "Not cached: 40% of the"), (True, True, "Warning: 40% of the")],
)
def test_a_profile_of_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_simulated: bool, is_cached: bool, said: str
) -> None:
    profile = replace(synthetic_profile(TINY), is_simulated=is_simulated)
    _store(profile)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cache, "noisy_fraction", lambda _: 0.4)
    profile = replace(profile, n_context=77)
    _store(profile)
    assert said in capsys.readouterr().err
    assert (cache.find_profile(profile.model.fingerprint, n_context=77) is not None) == is_cached
