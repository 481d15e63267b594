"""`atsplan serve` on the simulated device, asked by the official client."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from planner.errors import AtsplanError
from planner.records import write_record
from profiler.detect import detect_software
from runtime import build
from runtime.generation import MAX_WAITING
from runtime.serve import serve_plan
from tests.native.engine_plans import plan_for, random_placements, weights_of

KEY = "a secret"
MODEL = "SmolLM2-135M-Instruct.Q4_1"
PROMPT = "The capital of France is"
ROOT = Path(build.__file__).parents[1]


@pytest.fixture(scope="module")
def arguments(native_helper: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options that `run` and `serve` have in common."""
    weights = weights_of(smollm2, 512, 64)
    plan = plan_for(smollm2, random_placements(weights, 1), n_context=512, n_ubatch=64, software=detect_software())
    path = tmp_path_factory.mktemp("serve") / "plan.json"
    write_record(path, plan)
    return ["--plan", str(path), "--model", str(smollm2), "--anyway"]


@pytest.fixture(scope="module")
def url(arguments: list[str]) -> Iterator[str]:
    """Start a server, return its address, and expect it to end quietly on Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "atsplan", "serve", *arguments, "--port", "0", "--api-key", KEY],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        address = next((line.split(" at ")[1].split()[0] for line in process.stderr if " at http" in line), "")
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert address
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert KEY not in errors


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_completion_is_the_text_of_run(client: openai.OpenAI, arguments: list[str]) -> None:
    run = [sys.executable, "-m", "atsplan", "run", *arguments, "-p", PROMPT, "-n", "12"]
    expected = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert f"{PROMPT}{answer.choices[0].text}\n" == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    pieces = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
    texts = [piece.choices[0].text for piece in pieces]
    assert "".join(texts) == answer.choices[0].text
    assert len(texts) > 6


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is two plus two?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    text = answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert "two plus two" in text.lower()
    assert "<|im_" not in text
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is two plus two?"}]}]
    stream = client.chat.completions.create(
        model=MODEL, messages=parts, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1  # the same prompt as before


def test_stop_and_seed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stop=["ris"])
    assert answer.choices[0].text == " Pa"
    assert answer.choices[0].finish_reason == "stop"

    def draw(seed: int) -> str:
        settings = {"max_tokens": 12, "temperature": 1.5, "top_p": 0.99, "seed": seed}
        return client.completions.create(model=MODEL, prompt=PROMPT, **settings).choices[0].text

    drawn = [draw(seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    narrow = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=2, top_p=1e-6)
    assert narrow.choices[0].text == " Paris.\n\n"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5' here"):
        client.completions.create(model="gpt-5", prompt=PROMPT)


def test_refused_requests(client: openai.OpenAI, url: str) -> None:
    for key in ("wrong", KEY[:-1], f"{KEY}!"):
        with (
            openai.OpenAI(base_url=url, api_key="x", max_retries=0) as stranger,
            pytest.raises(openai.APIStatusError) as error,
        ):
            stranger.models.list(extra_headers={"Authorization": f"Bearer {key}"})
        assert error.value.status_code == 401
    with pytest.raises(openai.BadRequestError, match="600 tokens do not fit into the context of 512"):
        client.completions.create(model=MODEL, prompt=" word" * 600)
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        tools = [{"type": "function", "function": {"name": "f"}}]
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], tools=tools)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=MODEL, prompt="a" * (9 * 1024**2))
    assert large.value.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/v1/completions", {}, b'{"prompt": ', 400),
        ("POST", "/v1/completions", {}, b"[" * 100_000, 400),
        ("POST", "/v1/completions", {}, b'{"prompt": "\\ud800"}', 400),
        ("POST", "/v1/completions", {}, b'{"prompt": "x", "temperature": -1}', 400),
        ("POST", "/v1/chat/completions", {}, b'{"messages": []}', 400),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, b'{"prompt": "x"}', 415),
        ("GET", "/v1/completions", {}, b"", 405),
        ("GET", "/", {}, b"", 404),
    ],
)
def test_malformed_requests(
    url: str, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)
    standard = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request(method, path, body, standard | headers)
    response = connection.getresponse()
    assert response.status == status
    assert json.load(response)["error"]["message"]
    connection.close()


def test_a_client_that_goes_away_stops_the_generation(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=500, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model=MODEL, prompt="Once", max_tokens=500, temperature=0)
    started = time.perf_counter()
    client.completions.create(model=MODEL, prompt="Once", max_tokens=1)
    assert time.perf_counter() - started < 3  # 500 tokens take many times longer


def test_the_server_is_busy_beyond_its_queue(client: openai.OpenAI) -> None:
    def ask(number: int) -> int:
        try:
            client.completions.create(model=MODEL, prompt=f"{number}", max_tokens=10)
        except openai.InternalServerError as error:
            assert error.response.headers["Retry-After"]
            return error.status_code
        return 200

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(ask, range(16)))
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 1 + MAX_WAITING


def test_an_address_in_use(url: str, arguments: list[str]) -> None:
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(AtsplanError, match=f"Cannot listen on 127.0.0.1 port {port}: Address already in use"):
        serve_plan(
            Path(arguments[1]), Path(arguments[3]), lambda _: pytest.fail("not reached"),
            host="127.0.0.1", port=port, api_key=None, anyway=True,
        )  # fmt: skip
