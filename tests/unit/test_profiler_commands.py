"""Thread counts as people write them."""

from __future__ import annotations

import pytest

from planner.errors import AtsplanError
from planner.hardware import Cpu
from planner.units import GIB, MIB
from profiler.commands import parse_threads


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
