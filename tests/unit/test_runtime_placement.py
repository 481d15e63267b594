"""Overrides match exactly the planned names, and weights in the wrong place are named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import MismatchError
from planner.plan import Placement
from runtime.bindings import WeightLocation
from runtime.placement import check_locations, group_names

NAMES = st.lists(
    st.one_of(
        st.builds("blk.{}.{}.weight".format, st.integers(0, 120), st.sampled_from(["ffn_up", "ffn_down", "a+b(c)"])),
        st.text(alphabet="ab.01$^[]{}|()*+?\\-_", min_size=1, max_size=12),
    ),
    unique=True,
    max_size=200,
)


def test_layers_share_a_pattern() -> None:
    names = [f"blk.{layer}.ffn_up.weight" for layer in (0, 2, 11)] + ["output.weight", "blk.2.ffn_down.weight"]
    assert group_names(names) == [
        r"^blk\.(0|2|11)\.ffn_up\.weight$",
        r"^output\.weight$",
        r"^blk\.(2)\.ffn_down\.weight$",
    ]


def test_long_models_split_patterns() -> None:
    assert len(group_names([f"blk.{layer}.up" for layer in range(200)])) == 4


@given(NAMES, NAMES)
def test_patterns_match_the_names_and_no_other(names: list[str], others: list[str]) -> None:
    patterns = [re.compile(pattern) for pattern in group_names(names)]
    for name in {*names, *others}:
        assert any(pattern.search(name) for pattern in patterns) == (name in names)


def placements() -> list[Placement]:
    return [
        Placement("up", 10, "stream", "cpu"),
        Placement("down", 10, "gpu", "gpu"),
        Placement("embedding", 10, "gpu", "gpu"),  # as the output matrix; llama.cpp reads its rows on the host
    ]


def locations(**changes: str) -> list[WeightLocation]:
    where = {"up": "Pinned", "down": "GPU", "embedding": "CPU", "embedding again": "GPU"} | changes
    return [WeightLocation(name.split()[0], kind, kind == "CPU") for name, kind in where.items()]


def test_weights_where_they_belong_pass() -> None:
    check_locations(placements(), locations(), "Pinned")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up": "GPU"}, r"up \(VRAM instead of Pinned\)"),
        ({"down": "CPU"}, r"down \(CPU instead of VRAM\)"),
        ({"up": "CPU"}, r"up \(CPU instead of Pinned\)"),
        ({"other": "GPU"}, "no placement for other"),
        ({"embedding again": "CPU"}, r"embedding \(CPU instead of VRAM\)"),
    ],
)
def test_misplaced_weights_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        check_locations(placements(), locations(**changes), "Pinned")


def test_absent_weights_are_named() -> None:
    with pytest.raises(MismatchError, match="does not use up"):
        check_locations(placements(), [item for item in locations() if item.name != "up"], "Pinned")
