"""Load one part of the machine while told to, as another program would. A process of its own, driven through stdin.

It prints "ready", then obeys the lines "go" and "stop", and prints "stopped" when it has. The end of stdin or of the
parent ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from planner.errors import AtsplanError
from planner.units import MIB

from .supervise import end_with_parent

READY, STOPPED, FAILED = "ready", "stopped", "failed: "
GO, STOP = "go", "stop"

_ARRAY_BYTES = 64 * MIB  # more than one core's share of the caches
_N_ROWS = 512  # of the products that keep the vector units busy about as long as the arrays keep the memory busy
_N_PRODUCTS = 4
_COPY_BYTES = 64 * MIB
_N_COPIES = 128  # per call, which also takes and gives back the memory for them
_GPU_SHAPE = (2048, 2048)
_N_GPU_TOKENS = 128
_GPU_DUTY = 0.3  # of the time: GPUs give processes turns, and a whole one would leave nothing to decode with

Work = Callable[[], None]


def main(kind: str, device: str) -> None:
    end_with_parent()
    try:
        work = {"cpu": _cpu_work, "link": _link_work, "gpu": _gpu_work}[kind](device)
        work()  # whatever takes longer the first time
    except AtsplanError as error:
        print(f"{FAILED}{error}", flush=True)
        return
    going = threading.Event()
    threading.Thread(target=_obey, args=(going,), daemon=True).start()
    print(READY, flush=True)
    while True:
        going.wait()
        while going.is_set():
            work()
        print(STOPPED, flush=True)


def _obey(going: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == GO:
            going.set()
        else:
            going.clear()
    os._exit(0)


def _cpu_work(_device: str) -> Work:
    """Return a round of reading and writing memory, then of products that stay in the cache."""
    source, target = (np.ones(_ARRAY_BYTES // 8) for _ in range(2))
    matrix = np.ones((_N_ROWS, _N_ROWS), np.float32)

    def work() -> None:
        np.multiply(source, 1.0, out=target)
        for _ in range(_N_PRODUCTS):
            np.dot(matrix, matrix)

    return work


def _link_work(device: str) -> Work:
    """Return a round of copies to the GPU, as fast as they go."""
    from .bindings import Helper
    from .library import load

    helper = Helper(load(device).ats)
    n = 1 if device == "sim" else _N_COPIES

    def work() -> None:
        helper.bench_transfer(host_to_device=True, pinned=True, size_bytes=_COPY_BYTES, n_warmup=0, n_samples=n)

    return work


def _gpu_work(device: str) -> Work:
    """Return a round of products on the GPU, and a pause."""
    from .bindings import Ggml, Helper, MatmulSpec
    from .library import load

    library = load(device)
    helper = Helper(library.ats)
    weights = np.full(_GPU_SHAPE, 0.01, np.float16).tobytes()
    spec = MatmulSpec(Ggml(library.ggml).type_number("f16"), _GPU_SHAPE, 0, _N_GPU_TOKENS, weights, 0)

    def work() -> None:
        started = time.perf_counter()
        helper.bench_matmul(device, 1, spec, n_warmup=0, n_samples=2)
        time.sleep((time.perf_counter() - started) * (1 / _GPU_DUTY - 1))

    return work


if __name__ == "__main__":
    main(*sys.argv[1:])
