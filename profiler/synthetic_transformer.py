"""Shapes and metadata of the common kind of graph, the transformer, in the variations that llama.cpp knows.

Widths are exact, weights are not trained: a matrix has standard deviation 1 / sqrt(n_in), embeddings are of size
one, and each layer adds about its gain to them: little, so that hidden states stay as diverse as the tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_BIAS_STD = 0.02


@dataclass(frozen=True)
class SyntheticTensor:
    """`shape` is ggml's `ne`, innermost first. Matrices take the model's quantisation; the others are f32."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    is_matrix: bool = True


@dataclass(frozen=True)
class SyntheticModel:
    name: str
    architecture: str
    n_layers: int
    n_vocab: int
    metadata: Mapping[str, object]  # the architecture's prefix left out, except for keys of the tokenizer
    tensors: tuple[SyntheticTensor, ...]
    quantisation: str  # a ggml type or "Q4_K_M"


class Builder:
    """Collects tensors in file order."""

    def __init__(self, layer_gain: float) -> None:
        self.layer_gain = layer_gain
        self.tensors: list[SyntheticTensor] = []

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.tensors.append(SyntheticTensor(f"{name}.weight", shape, gain / math.sqrt(shape[0])))

    def adding(self, name: str, *shape: int) -> None:
        """Add a matrix whose result is added to the hidden state."""
        self.matrix(name, *shape, gain=self.layer_gain)

    def embedding(self, n_embd: int, n_vocab: int, std: float = 1.0, name: str = "token_embd") -> None:
        self.tensors.append(SyntheticTensor(f"{name}.weight", (n_embd, n_vocab), std))

    def plain(self, name: str, *shape: int, mean: float = 0.0, std: float = _BIAS_STD) -> None:
        """Add a small f32 tensor that is never quantised."""
        self.tensors.append(SyntheticTensor(name, shape, std, mean, is_matrix=False))

    def norm(self, name: str, n: int, mean: float = 1.0, *, bias: bool = False) -> None:
        self.plain(f"{name}.weight", n, mean=mean, std=0.1 * mean)
        if bias:
            self.plain(f"{name}.bias", n)

    def router(self, name: str, n_embd: int, n_experts: int) -> None:
        self.plain(f"{name}.weight", n_embd, n_experts, std=1 / math.sqrt(n_embd))


@dataclass(frozen=True)
class Transformer:
    """The common kind of graph, with the variations that llama.cpp's architectures have."""

    architecture: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_context: int = 4096
    layer_norm: bool = False  # with mean subtraction, instead of RMS
    norm_bias: bool = False
    pre_norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    post_norms: tuple[str, ...] = ()
    qk_norm: str = ""  # "head" | "full"
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    sinks: bool = False
    ffn: str = "gated"  # "gated" | "fused" (gate and up in one) | "plain"
    ffn_bias: bool = False
    embedding_norm: bool = False
    embedding_std: float = 1.0
    tied: bool = False
    layer_gain: float = 0.02
    n_experts: int = 0
    n_experts_used: int = 0
    n_ff_shared: int = 0
    metadata: Mapping[str, object] = field(default_factory=dict)

    def build(self, name: str, quantisation: str) -> SyntheticModel:
        builder = Builder(self.layer_gain)
        builder.embedding(self.n_embd, self.n_vocab, self.embedding_std)
        if self.embedding_norm:
            builder.norm("token_embd_norm", self.n_embd, bias=True)
        for layer in range(self.n_layers):
            self._attention(builder, f"blk.{layer}")
            self._feed_forward(builder, f"blk.{layer}")
        builder.norm("output_norm", self.n_embd, bias=self.norm_bias)
        if not self.tied:
            builder.matrix("output", self.n_embd, self.n_vocab)
        return SyntheticModel(
            name, self.architecture, self.n_layers, self.n_vocab, self._metadata(), tuple(builder.tensors), quantisation
        )

    def _attention(self, builder: Builder, block: str) -> None:
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        for norm in self.pre_norms:
            builder.norm(f"{block}.{norm}", self.n_embd, bias=self.norm_bias)
        for norm in self.post_norms:  # these set how much a layer adds
            builder.norm(f"{block}.{norm}", self.n_embd, mean=self.layer_gain)
        widths = {"attn_qkv": n_q + 2 * n_kv} if self.fused_qkv else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
        for name, width in widths.items():
            builder.matrix(f"{block}.{name}", self.n_embd, width)
            if self.qkv_bias:
                builder.plain(f"{block}.{name}.bias", width)
        if self.qk_norm:
            builder.norm(f"{block}.attn_q_norm", n_q if self.qk_norm == "full" else self.head_dim)
            builder.norm(f"{block}.attn_k_norm", n_kv if self.qk_norm == "full" else self.head_dim)
        if self.sinks:
            builder.plain(f"{block}.attn_sinks.weight", self.n_heads, std=1.0)
        builder.adding(f"{block}.attn_output", n_q, self.n_embd)
        if self.out_bias:
            builder.plain(f"{block}.attn_output.bias", self.n_embd, std=_BIAS_STD / 10)

    def _feed_forward(self, builder: Builder, block: str) -> None:
        if self.n_experts:
            expert_ffn(builder, block, self.n_embd, self.n_ff, self.n_experts, bias=self.ffn_bias)
            if self.n_ff_shared:
                builder.plain(f"{block}.ffn_gate_inp_shexp.weight", self.n_embd, std=1 / math.sqrt(self.n_embd))
                gated_ffn(builder, block, self.n_embd, self.n_ff_shared, suffix="_shexp")
        elif self.ffn == "gated":
            gated_ffn(builder, block, self.n_embd, self.n_ff)
        else:
            n_up = 2 * self.n_ff if self.ffn == "fused" else self.n_ff
            builder.matrix(f"{block}.ffn_up", self.n_embd, n_up)
            builder.adding(f"{block}.ffn_down", self.n_ff, self.n_embd)
            if self.ffn_bias:
                builder.plain(f"{block}.ffn_up.bias", n_up)
                builder.plain(f"{block}.ffn_down.bias", self.n_embd, std=_BIAS_STD / 10)

    def _metadata(self) -> dict[str, object]:
        metadata: dict[str, object] = {
            **common_metadata(self.n_layers, self.n_embd, self.n_context, layer_norm=self.layer_norm),
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": 10000.0,
        }
        if self.n_experts:
            metadata |= {"expert_count": self.n_experts, "expert_used_count": self.n_experts_used}
            metadata |= {"expert_feed_forward_length": self.n_ff}
        if self.n_ff_shared:
            metadata |= {"expert_shared_feed_forward_length": self.n_ff_shared}
        return metadata | dict(self.metadata)


def common_metadata(n_layers: int, n_embd: int, n_context: int, *, layer_norm: bool = False) -> dict[str, object]:
    epsilon = "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"
    return {"block_count": n_layers, "embedding_length": n_embd, "context_length": n_context, epsilon: 1e-5}


def gated_ffn(builder: Builder, block: str, n_embd: int, n_ff: int, suffix: str = "") -> None:
    builder.matrix(f"{block}.ffn_gate{suffix}", n_embd, n_ff)
    builder.matrix(f"{block}.ffn_up{suffix}", n_embd, n_ff)
    builder.adding(f"{block}.ffn_down{suffix}", n_ff, n_embd)


def expert_ffn(builder: Builder, block: str, n_embd: int, n_ff: int, n_experts: int, *, bias: bool = False) -> None:
    builder.router(f"{block}.ffn_gate_inp", n_embd, n_experts)
    builder.matrix(f"{block}.ffn_gate_exps", n_embd, n_ff, n_experts)
    builder.matrix(f"{block}.ffn_up_exps", n_embd, n_ff, n_experts)
    builder.adding(f"{block}.ffn_down_exps", n_ff, n_embd, n_experts)
    if bias:
        builder.plain(f"{block}.ffn_gate_inp.bias", n_experts)
        builder.plain(f"{block}.ffn_gate_exps.bias", n_ff, n_experts)
        builder.plain(f"{block}.ffn_up_exps.bias", n_ff, n_experts)
        builder.plain(f"{block}.ffn_down_exps.bias", n_embd, n_experts, std=_BIAS_STD / 10)
