"""Traces in the terminal, as pages and as pictures: the right figures, and nothing a hostile file can steer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from planner.errors import InvalidFileError, UsageError
from planner.plan import Plan
from planner.records import read_record, write_record
from planner.solve import solve
from planner.trace import Trace
from planner.trace_figures import binned, card_lines, end_of, rows
from planner.trace_page import trace_page
from planner.trace_picture import write_trace_png
from planner.trace_view import trace_view
from planner.units import MIB
from planner.workload import Workload
from tests.unit.planner_commands import run
from tests.unit.planner_profiles import TINY, synthetic_profile
from tests.unit.test_page import HOSTILE, Page
from tests.unit.test_pressure import pressure_result
from tests.unit.traces import slowed_trace

PROFILE = synthetic_profile(TINY)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROFILE, 700 * MIB, Workload(n_threads=8))


@pytest.fixture(scope="module")
def trace(plan: Plan) -> Trace:
    return slowed_trace(plan)


def text_of(trace: Trace, width: int) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(trace_view(trace))
    return console.export_text()


def without(trace: Trace, *names: str) -> Trace:
    return replace(trace, **dict.fromkeys(names, ()))


def test_a_value_is_drawn_for_as_long_as_it_held(trace: Trace) -> None:
    by_name = {row.name: row for row in rows(trace)}
    assert end_of(trace) == 7.0  # the last sample of the card
    tokens = binned(by_name["token"], 7.0, 70)
    assert tokens[:20] == [None] * 20  # the prompt
    assert tokens[21:30] == [0.05] * 9
    assert tokens[31:49] == [0.1] * 18
    assert tokens[51:66] == [0.08] * 15
    assert tokens[66:] == [None] * 4
    assert binned(by_name["GPU clock"], 7.0, 7) == pytest.approx([1980 - 50 - 100 * second for second in range(7)], 0.1)
    assert by_name["other"].values == pytest.approx([0.2] * 60)


def test_estimates_beyond_a_token_are_cut(trace: Trace) -> None:
    busy = replace(trace, tokens=tuple(replace(token, link_seconds=9.0) for token in trace.tokens))
    assert {row.name: row.values[0] for row in rows(busy)}["link busy"] == 1.0


@pytest.mark.parametrize("width", [80, 140])
def test_the_view_fits_the_terminal(trace: Trace, width: int) -> None:
    text = text_of(trace, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    lines = {line[:16].strip(): line[16:] for line in text.splitlines()}
    token = lines["token"]
    assert re.search(r"▅+▇?█+▇+", token)  # 50, 100 and 80 of 100 ms
    assert token.split()[-4:] == ["80.0", "ms", "100.0", "ms"]
    assert lines["CPU computing"].split()[-2:] == ["50%", "50%"]
    marks = {place for place, letter in enumerate(lines["changes"]) if letter in "12"}
    columns = width - 16 - 2 * 11
    assert marks == {int(change.at_seconds / 7.0 * columns) for change in trace.changes}
    assert "200 MiB -> 300 MiB" in text
    assert "still 300 MiB, ring 96 MiB" in text
    assert "The CPU is slower than planned." in text
    assert "1280 to 1980 MHz, 40 to 47 °C" in text
    assert "power limit (25% of the time)" in text


def test_parts_may_be_missing(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for names in (["tokens"], ["card"], ["changes"], ["tokens", "card", "changes", "prompts"]):
        part = without(trace, *names)
        text_of(part, 80)
        Page(trace_page(part))
        write_trace_png(tmp_path / "part.png", part)
    assert "Nothing was changed." in text_of(without(trace, "changes"), 80)
    assert "Changes were switched off." in text_of(slowed_trace(trace.plan, is_adaptive=False), 80)
    cool = tuple(replace(sample, throttle_reasons=()) for sample in trace.card)
    assert "Nothing held the card's clock down." in list(card_lines(cool))


def test_a_page_is_complete_and_needs_nothing_else(trace: Trace) -> None:
    text = trace_page(trace)
    page = Page(text)
    words = " ".join(page.text)
    for part in ("adaptive", "80.0 ms", "200 MiB -> 300 MiB", "5.0 s", "power limit", "60 decoded tokens"):
        assert part in words
    assert sum(tag == "polyline" for tag, _ in page.elements) == len(rows(trace))
    assert sum(attrs.get("stroke-dasharray") == "4 3" for _, attrs in page.elements) == len(trace.changes)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not re.search(r"https?:|url\(|@import|\bon\w+=", text)


def test_numbers_of_changes_do_not_cover_each_other(trace: Trace) -> None:
    change = trace.changes[0]
    changes = tuple(replace(change, at_seconds=at) for at in (1.0, 1.01, 1.02, 3.0, 3.01, 5.0))
    text = trace_page(replace(trace, changes=changes))
    assert re.findall(r'y="10">(\d+)</text>', text) == ["1", "4", "6"]
    assert text.count('stroke-dasharray="4 3"') == len(changes)  # each still has its line


def test_hostile_texts_are_only_text(trace: Trace) -> None:
    plan = replace(trace.plan, model=replace(trace.plan.model, name=f"Model{HOSTILE}", file_name=HOSTILE))
    bad = replace(slowed_trace(plan, reason=f"[red]{HOSTILE}[/red]"), plan=plan)
    bad = replace(bad, card=tuple(replace(sample, throttle_reasons=(HOSTILE,)) for sample in bad.card))
    page = Page(trace_page(bad))
    assert "script" not in {tag for tag, _ in page.elements}
    assert any(HOSTILE in part for part in page.text)
    assert "[red]" in text_of(bad, 140)  # not markup


def test_the_command(plan: Plan, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_record("trace.json", trace)
    assert read_record("trace.json", Trace) == trace

    def show(*arguments: str) -> str:
        return run("show", *arguments)

    named = show("trace.json", "--html", "trace.html", "--png", "trace.png")
    assert "power limit" in named
    assert named.startswith(show("--trace", "trace.json"))
    assert "power limit" in Path("trace.html").read_text()
    assert Path("trace.png").read_bytes().startswith(b"\x89PNG")
    write_record("plan.json", plan)
    with pytest.raises(UsageError, match="has no timeline"):
        show("trace.json", "--timeline")
    write_record("pressure.json", pressure_result(plan))
    assert "cut: the part" in show("pressure.json", "--png", "pressure.png")
    assert Path("pressure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="has no page"):
        show("pressure.json", "--html", "pressure.html")
    with pytest.raises(InvalidFileError, match=r"plan\.json: not a trace"):
        show("--trace", "plan.json")
    for arguments in ((), ("plan.json", "--trace", "trace.json")):
        with pytest.raises(UsageError, match="one file to show"):
            show(*arguments)
    Path("trace.json").write_text(Path("trace.json").read_text().replace('"seconds": 0.05', '"seconds": -1.0', 1))
    with pytest.raises(InvalidFileError, match=r"trace\.json: tokens\.0\.seconds"):
        show("trace.json")
