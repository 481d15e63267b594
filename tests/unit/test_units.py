"""Sizes as people write them."""

from __future__ import annotations

import pytest

from planner.errors import UsageError
from planner.units import GIB, MIB, format_count, parse_size


@pytest.mark.parametrize("text", ["6G", "6GB", "6GiB", "6g", " 6 GiB ", "6144M", "6144MiB", "6.0G", "6291456K"])
def test_sizes(text: str) -> None:
    assert parse_size(text) == 6 * GIB


def test_fractions_are_rounded_to_bytes() -> None:
    assert parse_size("0.5M") == MIB // 2
    assert parse_size("1.1T") == round(1.1 * 1024 * GIB)


@pytest.mark.parametrize("text", ["6", "6.5", "0"])
def test_numbers_without_a_unit(text: str) -> None:
    with pytest.raises(UsageError, match=rf"'{text}' has no unit\. Write it like 6G, 6GB, 6GiB or 6144M"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "G", "6Gb", "6X", "-6G", "0G", "6G6", "6,5G", "1e3M", "6 G B", "\u0666G"])
def test_nonsense(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_counts() -> None:
    assert [format_count(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
