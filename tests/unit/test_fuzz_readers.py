"""Mutated files of each kind are read or refused, by the thousand in `python -m tests.fuzz_readers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz_readers import Case, make_cases, run_cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return make_cases(tmp_path_factory.mktemp("fuzz"), [])


@pytest.mark.parametrize(
    ("kind", "n_cases"), [("gguf", 400), ("plan", 250), ("profile", 150), ("trace", 200), ("pressure", 200)]
)
def test_mutated_files(cases: dict[str, Case], kind: str, n_cases: int) -> None:
    outcomes = run_cases(cases[kind], n_cases, seed=1)
    assert outcomes["refused"] > n_cases / 4
    assert outcomes["read"] + outcomes["solved"] > n_cases / 50  # else the mutations are too wild to reach far


def test_the_fuzzer_notices(tmp_path: Path) -> None:
    def fail(_: object) -> str:
        raise KeyError("x")

    with pytest.raises(AssertionError, match="seed 0, case 0: KeyError"):
        run_cases(fail, 1, 0)
