"""A profile of a real model on the simulated device: everything is measured, plausible, kept and found again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from planner import cache
from planner.errors import DeviceError, InvalidFileError
from planner.measurements import Profile
from planner.records import from_json, to_json
from planner.units import MIB
from profiler import cli, commands, suite
from profiler.suite import Settings, profile_model
from profiler.synthetic_model import write_synthetic_model

N_UBATCH = 16


@pytest.fixture(scope="module")
def progress() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="module")
def profile(native_helper: Path, smollm2: Path, progress: list[tuple[float, str]]) -> Profile:
    settings = Settings("sim", threads=(1,), n_context=256, n_ubatch=N_UBATCH)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(suite, "MAX_COLD_BYTES", 32 * MIB)  # saves time; cold weights have their own test
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
    monkeypatch.setattr(suite, "MAX_COLD_BYTES", 32 * MIB)
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
