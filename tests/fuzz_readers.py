"""Mutate real files and hand them to their readers: `python -m tests.fuzz_readers 10000` runs so many of each kind.

A reader, and what shows or uses the record it returns, may refuse a file with one clear error. Anything else fails:
another exception, a message of several lines, seconds of work, or memory beyond a small multiple of the file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from planner.borrowed import borrow
from planner.errors import AtsplanError
from planner.explain import plan_view, profile_view
from planner.gguf_model import model_info, read_gguf, read_tensor_bytes
from planner.measurements import Profile
from planner.plan import Plan
from planner.pressure import PressureResult, pressure_view
from planner.records import from_json, to_json
from planner.solve import solve
from planner.trace import Trace
from planner.trace_page import trace_page
from planner.trace_view import trace_view
from planner.units import GIB, MIB
from planner.workload import Workload
from profiler.synthetic_model import write_synthetic_model
from tests.unit.planner_profiles import TINY, Shapes, synthetic_profile
from tests.unit.test_pressure import pressure_result
from tests.unit.traces import slowed_trace

MAX_SECONDS = 5  # for one file; the solver has its own limit
MAX_SOLVE_SECONDS = 60
MAX_MEMORY_BYTES = GIB // 2  # beyond what the process has at the start; the largest header here is 2 MB
SMALL_MODELS = ("llama-tiny", "qwen3moe-tiny", "gemma2-tiny", "mamba-tiny")
NUMBERS = (
    0, 1, 2, 3, -1, 127, 255, 256, 65535, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**53 + 1, 2**63, 2**64, 10**30,
    0.0, 1e-300, 1e-12, 1e-3, 0.5, 1e5, 1e9, 1e300, None, "", True, [], {}, "x" * 1000,
)  # fmt: skip
POSSIBLE = (
    0,
    1,
    2,
    3,
    5,
    64,
    100,
    1000,
    2**20,
    2**33,
    2**40,
    2**53,
    0.0,
    1e-300,
    1e-12,
    1e-9,
    1e-6,
    1e-3,
    1.0,
    1e3,
    1e6,
)
WORDS = (
    "", "f32", "q4_K", "MUL_MAT", "GET_ROWS", "MUL_MAT_ID", "cpu", "gpu", "stream", "h2d", "nul\0", "../../x",
    "\x1b[2J", "blk.99999999999.ffn_up.weight", "blk.0.ffn_up.weight", "[red]", "<script>", "\ud800", "9" * 400,
)  # fmt: skip

EXPERTS = Shapes("Experts", 2, 1024, 1024, 256, 512, 4096, n_experts=16, n_experts_used=4)

Case = Callable[[random.Random], str]  # runs one mutated file and says what became of it


class TooSlow(Exception):
    pass


def run_cases(case: Case, n_cases: int, seed: int) -> Counter[str]:
    """Return how many files were read, refused, and so on. Raises AssertionError with the seed of one that failed."""
    outcomes: Counter[str] = Counter()
    for number in range(n_cases):
        try:
            outcomes[case(random.Random(f"{seed} {number}"))] += 1
        except AtsplanError as error:
            assert "\n" not in str(error), f"seed {seed}, case {number}: {error!r}"
            assert "bug" not in str(error), f"seed {seed}, case {number}: {error!r}"
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {number}: {type(error).__name__}: {error}") from error
    return outcomes


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def gguf_case(headers: Sequence[tuple[bytes, int]], folder: Path, generator: random.Random) -> str:
    """Read a model with a mutated header. `headers` are pairs of a header and its file's size."""
    header, file_bytes = generator.choice(headers)
    path = folder / generator.choice(["mutated.gguf", "mutated-00001-of-00002.gguf"])
    path.write_bytes(mutate_bytes(header, generator))
    if generator.random() < 0.9:
        os.truncate(path, file_bytes)  # sparse weights
    with time_limit(MAX_SECONDS):
        model = read_gguf(path)
        for tensor in model.tensors[:3]:
            assert len(read_tensor_bytes(tensor, 100)) == min(100, tensor.size_bytes)
        to_json(model_info(model))
    return "read"


def mutate_bytes(original: bytes, generator: random.Random) -> bytes:
    content = bytearray(original)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        at = generator.randrange(min(generator.choice([64, 600, len(original)]), len(content) or 1))
        content = content or bytearray(b"\0")
        match generator.randrange(6):
            case 0:
                content[at] ^= 1 << generator.randrange(8)
            case 1:
                number = generator.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64])
                content[at : at + 8] = struct.pack("<Q", number)
            case 2:
                content[at : at + 4] = struct.pack("<I", generator.choice([0, 1, 4, 8, 9, 13, 41, 2**32 - 1]))
            case 3:
                del content[at : at + generator.randint(1, 64)]
            case 4:
                content[at:at] = content[max(0, at - 40) : at]
            case 5:
                del content[at + generator.randint(1, 64) :]
    return bytes(content)


def plan_case(plans: Sequence[str], generator: random.Random) -> str:
    data = mutate_json(generator.choice(plans), generator)
    with time_limit(MAX_SECONDS):
        plan = from_json(data, Plan, "plan.json")
        assert from_json(to_json(plan).encode(), Plan, "again") == plan
        show(plan_view(plan))
    return "read"


def trace_case(traces: Sequence[str], generator: random.Random) -> str:
    data = mutate_json(generator.choice(traces), generator)
    with time_limit(MAX_SECONDS):
        trace = from_json(data, Trace, "trace.json")
        show(trace_view(trace))
        trace_page(trace)
    return "read"


def pressure_case(results: Sequence[str], generator: random.Random) -> str:
    data = mutate_json(generator.choice(results), generator)
    with time_limit(MAX_SECONDS):
        show(pressure_view(from_json(data, PressureResult, "pressure.json")))
    return "read"


def profile_case(profiles: Sequence[str], generator: random.Random) -> str:
    data = mutate_json(generator.choice(profiles), generator)
    with time_limit(MAX_SECONDS):
        profile = from_json(data, Profile, "profile.json")
        show(profile_view(profile))
        if generator.random() < 0.5:
            other = from_json(generator.choice(profiles).encode(), Profile, "other.json")
            profile = borrow(*generator.choice([(profile, other), (other, profile)]))
    if generator.random() < 0.75:  # solving takes most of the time
        return "read"
    budget_bytes = generator.choice([1, 64, 600, 2000, 10**6]) * MIB
    with time_limit(MAX_SOLVE_SECONDS):
        plan = solve(profile, budget_bytes, Workload(64, 32, profile.n_context, profile.n_ubatch, 0))
        show(plan_view(plan))
        to_json(plan)
    return "solved"


def mutate_json(text: str, generator: random.Random) -> bytes:
    """Return the text with bytes changed, or with a few values replaced by others."""
    if generator.random() < 0.2:
        return mutate_bytes(text.encode(), generator)
    record = json.loads(text)
    for _ in range(generator.choice([1, 1, 2, 4])):
        mutate_value(record, generator)
    return json.dumps(record).encode()


def mutate_value(node: Any, generator: random.Random) -> None:
    """Replace one value somewhere below `node`, a list or an object that is not empty."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = generator.choice(keys)
        value = node[key]
        if not isinstance(value, (dict, list)) or not value or generator.random() < 0.05:
            break
        node = value
    if isinstance(value, list) and generator.random() < 0.8:
        node[key] = generator.choice([[], value[: len(value) // 2], value + value, value[::-1], value * 20])
    elif isinstance(value, str):
        node[key] = generator.choice(WORDS)
    elif isinstance(value, (int, float)) and generator.random() < 0.7:  # possible, and wrong
        node[key] = type(value)(generator.choice([number for number in POSSIBLE if type(number) is type(value)] or [0]))
    elif generator.random() < 0.1:
        del node[key]
    else:
        node[key] = generator.choice(NUMBERS)


def show(view: Any) -> None:
    Console(file=io.StringIO(), width=100).print(view)


def make_cases(folder: Path, models: Sequence[Path]) -> dict[str, Case]:
    """Return one case for each kind of file. `models` are GGUF files besides the small synthetic ones."""
    models = [*models, *(write_synthetic_model(folder / f"{name}.gguf", name)[0] for name in SMALL_MODELS)]
    headers = []
    for model in models:
        with open(model, "rb") as file:
            headers.append((file.read(min(t.offset_bytes for t in read_gguf(model).tensors)), model.stat().st_size))
    profiles = [synthetic_profile(TINY), synthetic_profile(EXPERTS, n_context=256, n_ubatch=32)]
    plans = [
        solve(profile, 600 * MIB, Workload(64, 32, profile.n_context, profile.n_ubatch, 0)) for profile in profiles
    ]
    return {
        "gguf": partial(gguf_case, headers, folder),
        "plan": partial(plan_case, [to_json(plan) for plan in plans]),
        "profile": partial(profile_case, [to_json(profile) for profile in profiles]),
        "trace": partial(trace_case, [to_json(slowed_trace(plan)) for plan in plans]),
        "pressure": partial(pressure_case, [to_json(pressure_result(plans[0]))]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n_cases", type=int)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files to mutate besides small synthetic ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("gguf", "plan", "profile", "trace", "pressure"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, case in make_cases(Path(folder), options.models).items():
            if options.kind in (None, kind):
                started = time.monotonic()
                with memory_limit(MAX_MEMORY_BYTES):
                    outcomes = run_cases(case, options.n_cases, options.seed)
                print(f"{kind}: {dict(outcomes)} in {time.monotonic() - started:.0f} s", flush=True)
    return 0


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Let the process take so much more memory than it has, and no more: MemoryError tells who wants it."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
