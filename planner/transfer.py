"""The paper's online decision: which host weights run on the GPU this round, given how fast things are right now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NEVER = float("inf")


def choose_transfers(
    cpu_seconds: Sequence[float],
    gpu_seconds: Sequence[float],
    crossing_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    is_resident: Sequence[bool],
) -> tuple[list[bool], float]:
    """Return (runs on the GPU, per unit in execution order; seconds of the round), minimal.

    Resident units run on the GPU. Another one runs on the CPU, or on the GPU after a transfer, which hides behind what
    the GPU does since the last CPU unit (or the start): only max(transfer - that, 0) counts. `crossing_seconds[i]` is
    paid where unit i runs on another device than unit i - 1. Algorithm 2 of the paper, O(n^2).

    For a last CPU unit j, everything after it is on the GPU and has a fixed cost, so the best round up to unit i that
    ends on the GPU is a minimum over j; the best one that ends on the CPU extends either.
    """
    n = len(cpu_seconds)
    # Index 0 stands for the start of the round, index i + 1 for unit i.
    on_cpu = np.full(n + 1, _NEVER)  # [i]: the shortest round so far whose last unit is i, on the CPU
    on_gpu_since = np.full(n + 1, _NEVER)  # [j]: the shortest round so far with everything after j on the GPU
    hidden_by = np.zeros(n + 1)  # [j]: how much of it came after j
    previous = [0] * (n + 1)  # [i]: the CPU unit before i on the shortest round that ends with i
    on_gpu_since[0] = 0.0
    for i in range(n):
        crossing = crossing_seconds[i] if i else 0.0
        before = int(np.argmin(on_gpu_since[: i + 1]))  # index i is not set yet, unless it is the start
        if not is_resident[i]:
            stay, change = (on_cpu[i] if i else 0.0), on_gpu_since[before] + crossing
            previous[i + 1] = i if stay <= change else before
            on_cpu[i + 1] = cpu_seconds[i] + min(stay, change)
        if i:
            on_gpu_since[i] = on_cpu[i]
        open_rounds = slice(0, i + 1)
        if not is_resident[i]:
            on_gpu_since[open_rounds] += np.maximum(transfer_seconds[i] - hidden_by[open_rounds], 0.0)
        on_gpu_since[i] += crossing
        hidden_by[i] += crossing
        on_gpu_since[open_rounds] += gpu_seconds[i]
        hidden_by[open_rounds] += gpu_seconds[i]
    last = int(np.argmin(on_gpu_since[:n])) if n else 0
    total = float(on_gpu_since[last])
    if on_cpu[n] < total:
        last, total = n, float(on_cpu[n])
    runs_on_gpu = [True] * n
    while last > 0:
        runs_on_gpu[last - 1] = False
        last = previous[last]
    return runs_on_gpu, total
