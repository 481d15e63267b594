"""The static problem, exactly: which units live in VRAM, at what they gain and what changing devices costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import AtsplanError

FREE, CPU, GPU = -1, 0, 1

_UNREACHABLE = -(2**62)
_MAX_TOTAL = 2**60  # of all gains and costs together, so that sums with _UNREACHABLE never overflow


def solve_placement(
    gains: Sequence[int],
    sizes: Sequence[int],
    switch_costs: Sequence[int],
    capacity: int,
    forced: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """Maximise sum gains[i] x[i] - sum switch[i] |x[i] - x[i-1]| over x in {0, 1} with sum sizes[i] x[i] <= capacity.

    All are integers, one per unit in execution order: gains and switching costs in any one unit of time, sizes and the
    capacity in any one unit of memory; switch[0] does not count. `forced[i]` fixes x[i] to CPU or GPU, or leaves it
    FREE. Returns (x, objective). Dynamic programme over (unit, last device, capacity used):
    O(n M) time and n M / 4 bytes. Of equal solutions always the same one is found.
    Raises AtsplanError for bad input or if the forced units do not fit.
    """
    n_units = len(gains)
    forced = forced if forced is not None else [FREE] * n_units
    _check(gains, sizes, switch_costs, capacity, forced)
    if n_units == 0:
        return [], 0
    n_cells = min(capacity, sum(sizes)) + 1
    # best[m]: the best objective so far with the last unit on that device and at most m of the capacity used
    best_cpu = np.zeros(n_cells, dtype=np.int64)
    best_gpu = np.full(n_cells, _UNREACHABLE, dtype=np.int64)
    came_from_gpu: list[tuple[np.ndarray, np.ndarray]] = []  # per unit: bits for ending on the CPU, on the GPU
    for i in range(n_units):
        switch = switch_costs[i] if i > 0 else 0
        stay, change = best_cpu, best_gpu - switch
        cpu_from_gpu = change > stay
        next_cpu = np.where(cpu_from_gpu, change, stay)
        size = sizes[i]
        next_gpu = np.full(n_cells, _UNREACHABLE, dtype=np.int64)
        gpu_from_gpu = np.zeros(n_cells, dtype=bool)
        if size < n_cells and forced[i] != CPU:
            fits = n_cells - size
            change, stay = best_cpu[:fits] - switch, best_gpu[:fits]
            gpu_from_gpu[size:] = stay >= change
            next_gpu[size:] = np.maximum(stay, change) + gains[i]
        if forced[i] == GPU:
            next_cpu.fill(_UNREACHABLE)
        came_from_gpu.append((np.packbits(cpu_from_gpu), np.packbits(gpu_from_gpu)))
        best_cpu, best_gpu = np.maximum(next_cpu, _UNREACHABLE), np.maximum(next_gpu, _UNREACHABLE)
    on_gpu = bool(best_gpu[-1] > best_cpu[-1])
    objective = int(best_gpu[-1] if on_gpu else best_cpu[-1])
    if objective < -_MAX_TOTAL:
        raise AtsplanError("The units that must be in VRAM do not fit.")
    return _backtrack(came_from_gpu, sizes, on_gpu, n_cells - 1), objective


def solve_with_experts_last(
    gains: Sequence[int],
    sizes: Sequence[int],
    switch_costs: Sequence[int],
    capacity: int,
    is_expert: Sequence[bool],
) -> tuple[list[int], int]:
    """Place the other units first, then experts with what is left; none if the others do not all fit.

    This is the paper's Algorithm 1; without experts it is `solve_placement`. Same arguments and results.
    """
    if not any(is_expert):
        return solve_placement(gains, sizes, switch_costs, capacity)
    forced = [CPU if expert else FREE for expert in is_expert]
    choice, objective = solve_placement(gains, sizes, switch_costs, capacity, forced)
    if sum(size for size, expert in zip(sizes, is_expert, strict=True) if not expert) > capacity:
        return choice, objective
    forced = [FREE if expert else x for x, expert in zip(choice, is_expert, strict=True)]
    return solve_placement(gains, sizes, switch_costs, capacity, forced)


def _backtrack(
    came_from_gpu: list[tuple[np.ndarray, np.ndarray]], sizes: Sequence[int], on_gpu: bool, cell: int
) -> list[int]:
    choice = [0] * len(came_from_gpu)
    for i in range(len(came_from_gpu) - 1, -1, -1):
        choice[i] = int(on_gpu)
        bits = came_from_gpu[i][choice[i]]
        previous_on_gpu = bool(bits[cell >> 3] >> (7 - (cell & 7)) & 1)
        if on_gpu:
            cell -= sizes[i]
        on_gpu = previous_on_gpu
    return choice


def _check(
    gains: Sequence[int],
    sizes: Sequence[int],
    switch_costs: Sequence[int],
    capacity: int,
    forced: Sequence[int],
) -> None:
    if not len(gains) == len(sizes) == len(switch_costs) == len(forced):
        raise AtsplanError("Gains, sizes, switching costs and forced places differ in number.")
    if capacity < 0 or any(size < 0 for size in sizes) or any(cost < 0 for cost in switch_costs):
        raise AtsplanError("Sizes, switching costs and the capacity must not be negative.")
    if sum(abs(gain) for gain in gains) + sum(switch_costs) >= _MAX_TOTAL:
        raise AtsplanError("The measured times are too large to be added up.")
