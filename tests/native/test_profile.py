"""A profile of a real model on the simulated device: everything is measured, plausible, kept and found again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from planner import cache
from planner.borrowed import borrow
from planner.cli import make_workload
from planner.errors import AtsplanError, DeviceError, InvalidFileError
from planner.measurements import Profile
from planner.records import from_json, read_record, to_json
from planner.solve import solve
from planner.units import KIB, MIB
from planner.workload import Workload, parse_kv_types
from profiler import cli, commands, jobs, suite
from profiler.measure import Effort
from profiler.suite import Settings, describe_model, profile_model, with_kv_types
from profiler.synthetic_model import write_synthetic_model
from runtime.bindings import Helper
from runtime.engine import Engine, PlanEngine
from runtime.inspect_model import Inspection, _inspect
from runtime.library import load
from runtime.routing import count_routing
from runtime.session import LoadSettings
from tests.native.test_engine_logits import logits_of

N_UBATCH = 16


def measure_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MAX_COLD_BYTES", 32 * MIB)  # cold weights have their own test
    monkeypatch.setattr(jobs, "KERNELS_BUDGET_SECONDS", 2.0)
    monkeypatch.setattr(jobs, "OTHER_EFFORT", Effort(0.02))
    monkeypatch.setattr(jobs, "CONTENTION_PHASE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "LINK_SIZES_BYTES", (16 * KIB, MIB, 4 * MIB))
    monkeypatch.setattr(jobs, "CROSSING_SIZES_BYTES", (4 * KIB, MIB))


def inspect_here(path: Path, device: str, contexts: list[int], n_ubatch: int, *kv_types: str) -> Inspection:
    """Inspect in this process: the profile's own inspection has a child, as for everybody."""
    return _inspect(str(path), device, contexts, n_ubatch, *(kv_types or ("f16", "f16")), True)


@pytest.fixture(scope="module")
def progress() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="module")
def profile(native_helper: Path, smollm2: Path, progress: list[tuple[float, str]]) -> Profile:
    settings = Settings("sim", threads=(1,), n_context=256, n_ubatch=N_UBATCH)
    with pytest.MonkeyPatch.context() as monkeypatch:
        measure_quickly(monkeypatch)
        return profile_model(smollm2, settings, lambda *step: progress.append(step))


@pytest.fixture
def app() -> Iterator[typer.Typer]:
    app = typer.Typer()
    app.callback()(lambda: None)  # a group, so that `profile` stays a word of the command line
    cli.register(app)
    yield app


def test_every_product_is_timed_on_both_devices(profile: Profile) -> None:
    products = [weight for weight in profile.weights if weight.op == "MUL_MAT"]
    assert len(products) == 30 * 7 + 1
    for weight in products:
        for n_tokens in (1, N_UBATCH):
            assert 1e-7 < profile.kernel_seconds(weight, "cpu", n_tokens, 1) < 10
            assert 1e-7 < profile.kernel_seconds(weight, "gpu", n_tokens) < 10
    assert profile.thread_counts == (1,)


def test_larger_weights_take_longer(profile: Profile) -> None:
    weights = {weight.name: weight for weight in profile.weights if weight.op == "MUL_MAT"}
    output, key = weights["token_embd.weight"], weights["blk.0.attn_k.weight"]
    assert output.size_bytes > 100 * key.size_bytes
    assert profile.kernel_seconds(output, "cpu", 1, 1) > 20 * profile.kernel_seconds(key, "cpu", 1, 1)


def test_the_rest_is_measured_too(profile: Profile) -> None:
    assert [timing.n_tokens for timing in profile.glue] == [1, N_UBATCH]
    assert profile.queue is not None
    assert all(0 <= seconds < 1e-2 for seconds in profile.queue.launch.samples + profile.queue.handshake.samples)
    assert all(one and one.median > 0 for h in profile.host for one in (h.warm_launch, h.warm_stream, h.warm_crossing))
    assert {(timing.direction, timing.pinned) for timing in profile.link} == {
        (direction, pinned) for direction in ("h2d", "d2h") for pinned in (True, False)
    }
    assert [timing.n_threads for timing in profile.contention] == [1]
    assert all(timing.seconds.median > 0 for timing in profile.crossings)
    cases = {(case.n_context, case.type_k) for case in profile.memory}
    assert {(256, "f16"), (256, "q8_0"), (8192, "f16")} <= cases
    assert profile.device_overhead_bytes == 0
    assert profile.is_simulated
    assert profile.hardware.gpu is not None


@pytest.mark.parametrize(
    ("text", "type_k", "type_v", "row_bytes"),
    [("q8_0", "q8_0", "q8_0", 2 * 6 * 34), ("q8_0/q4_0", "q8_0", "q4_0", 6 * (34 + 18)), ("f16", "f16", "f16", 768)],
)
def test_a_plan_with_another_kv_cache(
    smollm2: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch,
    text: str, type_k: str, type_v: str, row_bytes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(suite, "inspect_model", inspect_here)
    profile = with_kv_types(profile, smollm2, "sim", type_k, type_v)
    workload = make_workload(profile, None, 1, None, 100, 100, parse_kv_types(text))
    plan = solve(profile, 100 * MIB, workload)
    assert plan.vram.context_bytes == 256 * 30 * row_bytes  # 3 heads of 64, 6 blocks of 32
    assert ("Attention was timed with a KV cache of f16." in plan.notes) == (text != "f16")
    library = load("sim")
    expected = logits_of(Engine(library, smollm2, LoadSettings(256, N_UBATCH, 1, type_k, type_v)))
    with PlanEngine(library, smollm2, plan) as engine:
        np.testing.assert_array_equal(logits_of(engine), expected)


def test_a_model_is_described_as_a_profile_describes_it(
    smollm2: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "inspect_model", inspect_here)
    described = describe_model(smollm2, 256, N_UBATCH)
    assert (described.model, described.weights, described.memory) == (profile.model, profile.weights, profile.memory)
    assert described.kernels == described.glue == ()
    plan = solve(borrow(described, profile), 100 * MIB, Workload(100, 100, 256, N_UBATCH))
    assert plan.notes[1].startswith("Speeds are estimated")


def test_what_the_gpu_leaves_to_the_cpu_is_asked_for_a_token_and_for_a_batch(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {1: ("ROPE",), N_UBATCH: ("ROPE", "ARGSORT")}
    monkeypatch.setattr(Helper, "unsupported_ops", lambda self, context, n_tokens: left[n_tokens])
    assert inspect_here(smollm2, "sim", [256], N_UBATCH).unsupported_ops == ("ARGSORT", "ROPE")


def test_a_kv_cache_that_the_profile_does_not_know(profile: Profile) -> None:
    workload = make_workload(profile, None, 1, None, 100, 100, ("q5_1", "f16"))
    with pytest.raises(AtsplanError, match=r"Run: atsplan profile MODEL --ubatch 16 --kv-type q5_1/f16$"):
        solve(profile, 100 * MIB, workload)


def test_progress_only_grows(profile: Profile, progress: list[tuple[float, str]]) -> None:
    fractions = [fraction for fraction, _ in progress]
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)


def test_a_profile_survives_its_file(profile: Profile) -> None:
    assert from_json(to_json(profile).encode(), Profile, "test") == profile


def test_the_table_has_a_row_per_weight(profile: Profile) -> None:
    frame = profile.to_frame()
    assert len(frame) == len(profile.weights)
    assert {"name", "size_bytes", "cpu_1_tokens_1_threads_seconds", "gpu_16_tokens_seconds"} <= set(frame.columns)


def test_the_command_measures_once(
    native_helper: Path, tmp_path: Path, app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_quickly(monkeypatch)
    monkeypatch.setattr(suite, "inspect_model", inspect_here)
    model = write_synthetic_model(tmp_path / "moe.gguf", "qwen3moe-tiny")[0]
    arguments = ["profile", str(model), "--device", "none", "--threads", "1", "--ctx", "64", "--ubatch", "8"]
    csv, out = tmp_path / "weights.csv", tmp_path / "profile.json"
    first = CliRunner().invoke(app, [*arguments, "--json", "--csv", str(csv), "--out", str(out)])
    assert first.exit_code == 0, first.output
    measured = from_json(first.stdout.encode(), Profile, "stdout")
    assert json.loads(out.read_text()) == json.loads(first.stdout)
    assert csv.read_text().startswith("name,op,type,size_bytes")
    assert {timing.op for timing in measured.kernels} == {"MUL_MAT", "MUL_MAT_ID"}
    assert {timing.device for timing in measured.kernels} == {"cpu"}
    assert measured.hardware.gpu is None
    assert measured.link == measured.glue == ()
    assert cache.model_path(measured.model.fingerprint) == model

    cache.store_profile(measured)  # as if the machine had been quiet
    monkeypatch.setattr(commands, "profile_model", lambda *_: 1 / 0)  # measuring again would be an error
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    assert "ffn_gate_exps" in second.stdout
    assert "Measured earlier" in second.stderr
    for other in ([*arguments, "--force"], [*arguments[:-1], "4"]):  # another micro-batch is another profile
        assert isinstance(CliRunner().invoke(app, other).exception, ZeroDivisionError)


def test_bad_requests_are_errors(native_helper: Path, tmp_path: Path, app: typer.Typer) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "text.gguf")])
    assert isinstance(result.exception, InvalidFileError)
    model = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")[0]
    result = CliRunner().invoke(app, ["profile", str(model), "--device", "cuda99"])
    assert isinstance(result.exception, DeviceError)


def test_experts_and_their_routing(
    native_helper: Path, tmp_path: Path, app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_quickly(monkeypatch)
    monkeypatch.setattr(suite, "inspect_model", inspect_here)
    monkeypatch.setattr(cache, "MAX_NOISY_FRACTION", 1.0)
    model = write_synthetic_model(tmp_path / "moe.gguf", "qwen3moe-tiny")[0]
    text, out = tmp_path / "text.txt", tmp_path / "profile.json"
    generator = random.Random(0)
    text.write_text("".join(chr(generator.randrange(32, 127)) for _ in range(600)))
    arguments = ["profile", str(model), "--device", "sim", "--threads", "1", "--ctx", "64", "--ubatch", "8"]
    measured = CliRunner().invoke(app, [*arguments, "--routing", str(text), "--out", str(out)])
    assert measured.exit_code == 0, measured.output
    assert "Routing of 600 tokens: entropy 9" in measured.stderr
    profile = read_record(out, Profile)

    (matrix_bytes,) = {timing.matrix_bytes for timing in profile.experts}
    assert matrix_bytes == (256 * 256 * 2,) * 3
    assert [timing.n_experts for timing in profile.experts] == [1, 2, 4]
    one, two, four = (timing.seconds.median for timing in profile.experts)
    assert 2 * one < four
    assert one < two < four
    on_cpu = {k.n_experts_used for k in profile.kernels if k.op == "MUL_MAT_ID" and k.device == "cpu"}
    assert on_cpu == {1, 2, 4}

    assert profile.routing is not None
    assert [layer.weight for layer in profile.routing.layers] == [f"blk.{i}.ffn_gate_exps.weight" for i in range(4)]
    assert all(sum(layer.counts) == 4 * 600 for layer in profile.routing.layers)
    assert 0.9 < profile.routing.entropy_fraction < 1.0
    assert 0.1 < profile.routing.top_tenth_fraction < 0.3

    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert from_json(again.stdout.encode(), Profile, "stdout").routing == profile.routing
    plan = solve(profile, 16 * MIB, Workload(8, 8, 64, 8), margin_bytes=0)
    assert plan.prediction.peak_vram_bytes <= 16 * MIB


def test_routing_needs_experts_and_a_text(native_helper: Path, tmp_path: Path, smollm2: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words")
    with pytest.raises(AtsplanError, match="The model has no experts to count"):
        count_routing(smollm2, "some words", 1)
    model = write_synthetic_model(tmp_path / "moe.gguf", "mixtral-tiny")[0]
    with pytest.raises(AtsplanError, match="The text holds no tokens"):
        count_routing(model, "", 1)
    (layer, *_) = count_routing(model, "ab", 1).layers
    assert sum(layer.counts) == 2 * 2
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:5000])
    with pytest.raises(AtsplanError, match="broken.gguf"):
        count_routing(broken, "ab", 1)
