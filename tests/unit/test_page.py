"""Plans and profiles as pages and pictures: complete, self-contained, and safe against hostile names."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from planner.densities import densities
from planner.errors import AtsplanError
from planner.explain import profile_view
from planner.measurements import Profile
from planner.page import plan_page, profile_page
from planner.picture import write_png
from planner.plan import Plan
from planner.records import write_record
from planner.replay import simulate_plan
from planner.solve import solve
from planner.units import MIB, format_size
from planner.workload import Workload
from tests.unit.planner_commands import run
from tests.unit.planner_profiles import Shapes, synthetic_profile

HOSTILE = '"><script>alert(1)</script>&'


class Page(HTMLParser):
    """Collects what is on a page and checks that elements are properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile(Shapes("Small", 12, 2048, 2048, 512, 8192, 16000))


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solve(profile, 800 * MIB, Workload(n_threads=8))


def page_of(plan: Plan, profile: Profile) -> str:
    token = simulate_plan(profile, plan)
    return plan_page(plan, densities(profile, 8), token, [weight.name for weight in profile.weights])


def test_densities(profile: Profile) -> None:
    items = {(item.role, item.type): item for item in densities(profile, 8)}
    down = items["ffn_down", "q6_K"]
    assert down.n_weights == 6
    weight = next(weight for weight in profile.weights if weight.name == "blk.0.ffn_down.weight")
    assert down.size_bytes == 6 * weight.size_bytes
    expected = profile.kernel_seconds(weight, "cpu", 1, 8) / (weight.size_bytes / MIB)
    assert down.cpu_seconds_per_mib == pytest.approx(expected)
    assert down.gpu_seconds_per_mib == pytest.approx(profile.kernel_seconds(weight, "gpu", 1) * MIB / weight.size_bytes)
    gains = [item.gain_seconds_per_mib for item in densities(profile, 8)]
    assert gains == sorted(gains, reverse=True)
    assert ("token_embd", "q4_K") not in items
    cpu_only = replace(profile, kernels=tuple(kernel for kernel in profile.kernels if kernel.device == "cpu"))
    assert {item.gpu_seconds_per_mib for item in densities(cpu_only, 8)} == {None}


def test_slow_weights_are_shown_without_exponents(profile: Profile) -> None:
    item = replace(densities(profile, 8)[0], size_bytes=MIB, cpu_seconds=0.26, gpu_seconds=440e-6)
    text = profile_page(profile, [item], 1)
    assert "<td>260000</td><td>440</td><td>259560</td>" in text
    assert "(1 CPU thread)" in text


def test_a_tied_embedding_is_counted_once(profile: Profile) -> None:
    (output,) = (weight for weight in profile.weights if weight.name == "output.weight")
    others = [weight for weight in profile.weights if weight.name not in {"output.weight", "token_embd.weight"}]
    tied = replace(output, name="token_embd.weight")
    twice = replace(profile, weights=(replace(tied, op="GET_ROWS"), *others, tied))
    size = format_size(sum(weight.size_bytes for weight in others) + output.size_bytes)
    counted = f"{len(others) + 1} weights, {size}"
    assert counted in profile_page(twice, [], 8)
    shown = StringIO()
    Console(width=140, file=shown).print(profile_view(twice))
    assert counted in shown.getvalue()


def test_a_simulated_gpu_is_called_so_once(profile: Profile) -> None:
    assert profile.hardware.gpu is not None
    gpu = replace(profile.hardware.gpu, name="simulated", backend="sim")
    simulated = replace(profile, hardware=replace(profile.hardware, gpu=gpu), is_simulated=True)
    assert "cores; simulated GPU; " in profile_page(simulated, [], 8)


def test_a_page_is_complete(plan: Plan, profile: Profile) -> None:
    page = Page(page_of(plan, profile))
    text = " ".join(page.text)
    for words in ("Small in 800 MiB of VRAM", "tokens/s", "KV cache", "ffn_gate", "One token: ", "8 CPU threads"):
        assert words in text
    tips = [tip for tip in page.text if ": " in tip and tip.startswith("blk.3.ffn_up")]
    assert any(tip.startswith("blk.3.ffn_up.weight, 9.0 MiB: ") for tip in tips)
    widths = [attrs["style"] for tag, attrs in page.elements if tag == "div" and "width:" in (attrs.get("style") or "")]
    shares = [float(found[1]) for style in widths if (found := re.match(r"width:([\d.]+)%", style or ""))]
    assert sum(shares) == pytest.approx(100, abs=0.01)
    assert sum(tip.startswith("output.weight, ") for tip in page.text) == 1
    n_cells = sum("blk." in tip and "MiB: " in tip for tip in page.text)
    assert n_cells == 12 * 7  # products of every layer


def test_a_page_needs_nothing_else(plan: Plan, profile: Profile) -> None:
    for text in (page_of(plan, profile), profile_page(profile, densities(profile, 8), 8)):
        page = Page(text)
        assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
        assert not re.search(r"https?:|url\(|@import|\bon\w+=", text)
        assert not any({"src", "href"} & attrs.keys() for _, attrs in page.elements)
        assert "prefers-color-scheme: dark" in text


def test_hostile_names_are_only_text(plan: Plan, profile: Profile) -> None:
    weights = tuple(replace(weight, name=weight.name.replace("ffn_up", f"ffn{HOSTILE}")) for weight in profile.weights)
    model = replace(profile.model, name=f"Model{HOSTILE}", file_name=f"file{HOSTILE}")
    cpu = replace(profile.hardware.cpu, model=f"CPU{HOSTILE}")
    bad = replace(
        profile, model=model, weights=weights, hardware=replace(profile.hardware, cpu=cpu), notes=(f"note{HOSTILE}",)
    )
    bad_plan = solve(bad, 800 * MIB, Workload(n_threads=8))
    bad_plan = replace(bad_plan, notes=(f"note{HOSTILE}",), workload=replace(bad_plan.workload, type_k=HOSTILE))
    for text in (page_of(bad_plan, bad), profile_page(bad, densities(bad, 8), 8)):
        page = Page(text)
        assert "script" not in {tag for tag, _ in page.elements}
        assert "<script" not in text
        assert any(HOSTILE in part for part in page.text)


def test_without_the_profile_the_rest_is_shown(plan: Plan) -> None:
    text = plan_page(plan, [], None, [])
    Page(text)
    assert "need the profile" in text
    assert "One token: " not in text


def test_the_command(plan: Plan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_record("plan.json", plan)

    def show(*arguments: str) -> str:
        return run("show", *arguments)

    show("plan.json", "--html", "bare.html", "--png", "bare.png")
    assert "need the profile" in Path("bare.html").read_text()
    write_record("profile.json", profile)
    show("plan.json", "--html", "plan.html", "--png", "plan.png")
    assert "One token: " in Path("plan.html").read_text()
    assert "Milliseconds on the CPU (16 threads) and the GPU" in show(
        "profile.json", "--html", "p.html", "--png", "p.png"
    )
    for name in ("bare.png", "plan.png", "p.png"):
        assert Path(name).read_bytes().startswith(b"\x89PNG")
    assert Path("plan.png").stat().st_size > Path("bare.png").stat().st_size
    with pytest.raises(AtsplanError, match="There is no folder .*no/such"):
        show("plan.json", "--png", "no/such/folder.png")
    with pytest.raises(AtsplanError, match="There is no folder .*no/such"):
        show("plan.json", "--html", "no/such/folder.html")


def test_png_without_matplotlib_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AtsplanError, match="pip install matplotlib"):
        write_png(tmp_path / "plan.png", "title", plan, [], None)
