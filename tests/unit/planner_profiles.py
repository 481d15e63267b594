"""Profiles as a profiler would measure them, computed from a model's shapes and a machine's rates. No noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.experts import find_blocks
from planner.hardware import Cpu, Gpu, Hardware, MachineState, Software
from planner.measurements import (
    Contention,
    CrossingTiming,
    ExpertTiming,
    GlueTiming,
    HostTiming,
    KernelTiming,
    LinkTiming,
    MemoryCase,
    ModelInfo,
    Profile,
    Series,
    WeightUse,
)
from planner.problem import find_units
from planner.units import GIB, MIB

BYTES_PER_BLOCK = {"q4_K": (144, 256), "q6_K": (210, 256), "f32": (4, 1), "f16": (2, 1)}


@dataclass(frozen=True)
class Shapes:
    """A transformer. Value and down matrices of every other layer are q6_K, as in Q4_K_M files."""

    name: str
    n_layers: int
    n_embd: int
    n_head_dims: int
    n_kv_dims: int
    n_ff: int
    n_vocab: int
    tied: bool = False
    n_experts: int = 0
    n_experts_used: int = 0


@dataclass(frozen=True)
class Machine:
    """Rates in bytes per second, latencies in seconds."""

    cpu_rates: dict[int, float] = field(default_factory=lambda: {4: 27e9, 8: 44e9, 16: 70e9})
    cpu_busy_rates: dict[int, float] = field(default_factory=lambda: {4: 25e9, 8: 40e9, 16: 63e9})
    gpu_rate: float = 2.6e12
    gpu_flops: float = 200e12
    gpu_launch: float = 3e-6
    glue_per_layer: float = 18e-6
    link_rate: float = 54.9e9
    link_busy_rate: float = 54.9e9
    link_latency: float = 4e-6
    crossing: float = 25e-6
    expert_latency: float = 15e-6
    expert_rate: float = 50e9  # of copies by the GPU's own kernels
    overhead_bytes: int = 450 * MIB


QWEN3_14B = Shapes("Qwen3-14B", 40, 5120, 5120, 1024, 17408, 151936)
LLAMA2_70B = Shapes("Llama-2-70B", 80, 8192, 8192, 1024, 28672, 32000)
QWEN3_30B = Shapes("Qwen3-30B-A3B", 48, 2048, 4096, 512, 768, 151936, n_experts=128, n_experts_used=8)
MIXTRAL = Shapes("Mixtral-8x7B", 32, 4096, 4096, 1024, 14336, 32000, n_experts=8, n_experts_used=2)
TINY = Shapes("Tiny", 2, 2048, 2048, 512, 4096, 8192)


def size_of(kind: str, shape: tuple[int, ...]) -> int:
    n_bytes, n_elements = BYTES_PER_BLOCK[kind]
    total = 1
    for extent in shape:
        total *= extent
    return total * n_bytes // n_elements


def dense_weights(shapes: Shapes) -> tuple[WeightUse, ...]:
    """Return the uses as llama.cpp's graph has them: along the residual stream, inputs pile up and are cut at eight."""
    weights: list[WeightUse] = []

    def add(name: str, op: str, kind: str, shape: tuple[int, ...], inputs: Iterable[int], **extra: bool) -> int:
        n_out = shape[1] if op == "MUL_MAT" else shape[0]
        size = size_of(kind, shape)
        nearest = tuple(sorted(inputs)[-8:])
        weights.append(WeightUse(name, op, kind, shape, size, shape[0] * 4, n_out * 4, nearest, **extra))
        return len(weights) - 1

    def add_experts(layer: str, role: str, kind: str, n_in: int, n_out: int, inputs: Iterable[int]) -> int:
        shape, n = (n_in, n_out, shapes.n_experts), shapes.n_experts_used
        n_columns = n if role == "down" else 1
        weights.append(
            WeightUse(
                f"{layer}ffn_{role}_exps.weight", "MUL_MAT_ID", kind, shape, size_of(kind, shape),
                n_in * 4 * n_columns, n_out * 4 * n, tuple(sorted(inputs)[-8:]), n_experts_used=n,
            )
        )  # fmt: skip
        return len(weights) - 1

    s = shapes
    residual = {add("token_embd.weight", "GET_ROWS", "q4_K", (s.n_embd, s.n_vocab), (), is_input=True)}
    for layer in range(s.n_layers):
        p = f"blk.{layer}."
        finer = "q6_K" if layer % 2 == 0 else "q4_K"
        add(p + "attn_norm.weight", "MUL", "f32", (s.n_embd,), residual)
        q = add(p + "attn_q.weight", "MUL_MAT", "q4_K", (s.n_embd, s.n_head_dims), residual)
        k = add(p + "attn_k.weight", "MUL_MAT", "q4_K", (s.n_embd, s.n_kv_dims), residual)
        v = add(p + "attn_v.weight", "MUL_MAT", finer, (s.n_embd, s.n_kv_dims), residual)
        residual = {*residual, add(p + "attn_output.weight", "MUL_MAT", "q4_K", (s.n_head_dims, s.n_embd), (q, k, v))}
        add(p + "ffn_norm.weight", "MUL", "f32", (s.n_embd,), residual)
        if s.n_experts:
            router = add(p + "ffn_gate_inp.weight", "MUL_MAT", "f32", (s.n_embd, s.n_experts), residual)
            gate = add_experts(p, "gate", "q4_K", s.n_embd, s.n_ff, {*residual, router})
            up = add_experts(p, "up", "q4_K", s.n_embd, s.n_ff, {*residual, router})
            residual = {*residual, router, add_experts(p, "down", finer, s.n_ff, s.n_embd, (router, gate, up))}
            continue
        gate = add(p + "ffn_gate.weight", "MUL_MAT", "q4_K", (s.n_embd, s.n_ff), residual)
        up = add(p + "ffn_up.weight", "MUL_MAT", "q4_K", (s.n_embd, s.n_ff), residual)
        residual = {*residual, add(p + "ffn_down.weight", "MUL_MAT", finer, (s.n_ff, s.n_embd), (gate, up))}
    add("output_norm.weight", "MUL", "f32", (s.n_embd,), residual)
    head = "token_embd.weight" if s.tied else "output.weight"
    add(head, "MUL_MAT", "q4_K" if s.tied else "q6_K", (s.n_embd, s.n_vocab), residual)
    return tuple(weights)


def synthetic_profile(
    shapes: Shapes = QWEN3_14B, machine: Machine | None = None, n_context: int = 4096, n_ubatch: int = 512
) -> Profile:
    machine = machine or Machine()
    return profile_of(shapes.name, dense_weights(shapes), shapes, machine, n_context, n_ubatch)


def profile_of(
    name: str, weights: tuple[WeightUse, ...], shapes: Shapes, machine: Machine, n_context: int, n_ubatch: int
) -> Profile:
    kernels = []
    for key in dict.fromkeys((w.op, w.type, w.shape, w.n_experts_used) for w in weights):
        op, kind, shape, n_experts = key
        if op not in ("MUL_MAT", "MUL_MAT_ID"):
            continue
        size = size_of(kind, shape)
        n_elements = shape[0] * shape[1]
        used = size * n_experts // shape[2] if n_experts else size
        for tokens in (1, n_ubatch):
            flops = 2.0 * n_elements * tokens * max(1, n_experts)
            touched = used if tokens == 1 else size
            on_gpu = machine.gpu_launch + max(touched / machine.gpu_rate, flops / machine.gpu_flops)
            kernels.append(KernelTiming(*key, "gpu", tokens, 0, steady(on_gpu)))
            for threads, rate in machine.cpu_rates.items():
                on_cpu = 5e-6 + max(touched / rate, flops / (rate * 20))
                kernels.append(KernelTiming(*key, "cpu", tokens, threads, steady(on_cpu)))
        for n in sorted({1, n_experts // 2} - {n_experts}) if n_experts else ():
            for threads, rate in machine.cpu_rates.items():
                on_cpu = steady(5e-6 + size * n / shape[2] / rate)
                kernels.append(KernelTiming(op, kind, shape, n, "cpu", 1, threads, on_cpu))
    sizes = [1 << shift for shift in range(12, 29, 2)]
    compute = n_ubatch * (shapes.n_vocab + 8 * shapes.n_embd) * 4 // 2
    return Profile(
        model=ModelInfo(name, "dense", f"{name}-fingerprint", f"{name}.gguf", 1, shapes.n_layers, shapes.n_embd, 32768),
        hardware=Hardware(
            Cpu("Test CPU", 16, 16, ("avx2", "avx512f"), 300 * MIB, 128 * GIB),
            Gpu("Test GPU", 24 * GIB, "9.0", 5, 16, "cuda"),
        ),
        software=Software("0.1.0", "0.3.36", "abc", True),
        state=MachineState("2026-01-01T00:00:00Z", "580", "GPU-0", 24 * GIB, 1980, 40, 3000, 0.5),
        n_context=n_context,
        n_ubatch=n_ubatch,
        is_simulated=False,
        weights=weights,
        kernels=tuple(kernels),
        glue=(
            GlueTiming(1, n_context, steady(machine.glue_per_layer * shapes.n_layers)),
            GlueTiming(n_ubatch, n_context, steady(machine.glue_per_layer * shapes.n_layers * 15)),
        ),
        link=tuple(
            LinkTiming(direction, pinned, size, steady(machine.link_latency + size / (machine.link_rate * factor)))
            for direction in ("h2d", "d2h")
            for pinned, factor in ((True, 1.0), (False, 0.13))
            for size in sizes
        ),
        crossings=tuple(
            CrossingTiming(threads, size, steady(machine.crossing + 2 * size / machine.link_rate))
            for threads in machine.cpu_rates
            for size in (4096, 65536, 1 << 20)
        ),
        host=tuple(
            HostTiming(n, launch=Series((5e-6,)), stream=Series((3e-6,)), crossing=Series((5e-6,)))
            for n in machine.cpu_rates
        ),
        contention=tuple(
            Contention(threads, rate, machine.cpu_busy_rates[threads], machine.link_rate, machine.link_busy_rate)
            for threads, rate in machine.cpu_rates.items()
        ),
        memory=tuple(
            MemoryCase(
                context,
                n_ubatch,
                "f16",
                "f16",
                True,
                context * shapes.n_layers * shapes.n_kv_dims * 4,
                compute,
                8 * MIB,
            )
            for context in sorted({512, n_context, 2 * n_context})
        ),
        device_overhead_bytes=machine.overhead_bytes,
        experts=tuple(_expert_timings(weights, machine)),
    )


def _expert_timings(weights: tuple[WeightUse, ...], machine: Machine) -> Iterable[ExpertTiming]:
    blocks = {block.matrix_bytes: block for block in find_blocks(weights, find_units(weights))}
    for sizes, block in blocks.items():
        for n in sorted({1, block.n_used // 2, block.n_used} - {0}):
            seconds = machine.expert_latency + n * sum(sizes) / machine.expert_rate
            yield ExpertTiming(sizes, n, steady(seconds))


def steady(seconds: float) -> Series:
    return Series((seconds, seconds, seconds))
