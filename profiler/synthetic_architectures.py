"""The synthetic models by name: some at their real size, and a narrow one of each of llama.cpp's kinds of graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from .synthetic_transformer import (
    Builder,
    SyntheticModel,
    Transformer,
    common_metadata,
    expert_ffn,
    gated_ffn,
)

_N_VOCAB = 1024  # of the narrow models
_N_LAYERS = 4
_HEAD_DIM = 64
_LAYER_GAIN = 0.25  # more than in deep models, so that wrong arithmetic in a layer shows in the result
_WINDOW = 32  # of sliding attention: small, so that short texts leave it
_WIDTHS = MappingProxyType({"tiny": 256, "small": 512})  # in f16, matrices of `small` pass 1 MiB

_POST_NORMS = ("post_attention_norm", "post_ffw_norm")


def _narrow(architecture: str, width: int, **variations: object) -> Transformer:
    n_heads = width // _HEAD_DIM
    facts: dict[str, object] = {
        "n_layers": _N_LAYERS, "n_embd": width, "n_heads": n_heads, "n_kv_heads": n_heads // 2,
        "head_dim": _HEAD_DIM, "n_ff": 3 * width, "n_vocab": _N_VOCAB, "layer_gain": _LAYER_GAIN,
    }  # fmt: skip
    return Transformer(architecture, **(facts | variations))  # type: ignore[arg-type]


_MOE = MappingProxyType({"n_experts": 16, "n_experts_used": 4})


def _transformers(width: int) -> dict[str, Transformer]:
    """Return the narrow transformers by name."""
    narrow = partial(_narrow, width=width)
    n_heads = width // _HEAD_DIM
    gemma = {
        "embedding_std": width**-0.5,  # llama.cpp scales it by sqrt(n_embd)
        "pre_norms": ("attn_norm", "ffn_norm"),
        "post_norms": _POST_NORMS,
    }
    return {
        "llama": narrow("llama"),
        "mixtral": narrow("llama", n_experts=8, n_experts_used=2, n_ff=width),
        "qwen2": narrow("qwen2", qkv_bias=True),
        "qwen2vl": narrow("qwen2vl", qkv_bias=True, metadata={"rope.dimension_sections": [16, 8, 8, 0]}),
        "qwen2moe": narrow("qwen2moe", qkv_bias=True, n_ff=width, n_ff_shared=2 * width, **_MOE),
        "qwen3": narrow("qwen3", qk_norm="head"),
        "qwen3moe": narrow("qwen3moe", qk_norm="head", n_ff=width, **_MOE),
        "gemma2": narrow(
            "gemma2",
            **gemma,
            tied=True,
            metadata={
                "attention.sliding_window": _WINDOW,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        "gemma3": narrow("gemma3", **gemma, qk_norm="head", metadata={"attention.sliding_window": _WINDOW}),
        "phi3": narrow("phi3", fused_qkv=True, ffn="fused"),
        "gpt-oss": narrow(
            "gpt-oss",
            pre_norms=("attn_norm", "post_attention_norm"),
            qkv_bias=True,
            out_bias=True,
            sinks=True,
            ffn_bias=True,
            n_ff=width,
            metadata={"attention.sliding_window": _WINDOW},
            **_MOE,
        ),
        "stablelm": narrow(
            "stablelm",
            layer_norm=True,
            norm_bias=True,
            qkv_bias=True,
            metadata={"rope.dimension_count": _HEAD_DIM // 4},
        ),
        "starcoder2": narrow(
            "starcoder2", layer_norm=True, norm_bias=True, qkv_bias=True, out_bias=True, ffn="plain", ffn_bias=True
        ),
        "olmo2": narrow("olmo2", pre_norms=(), post_norms=_POST_NORMS, qk_norm="full"),
        "command-r": narrow(
            "command-r", layer_norm=True, pre_norms=("attn_norm",), tied=True, metadata={"logit_scale": 0.0625}
        ),
        "granite": narrow(
            "granite",
            embedding_std=1 / 12,
            layer_gain=4 * _LAYER_GAIN,
            metadata={
                "embedding_scale": 12.0,
                "residual_scale": 0.25,
                "attention.scale": 1 / _HEAD_DIM,
                "logit_scale": 8.0,
            },
        ),
        "bloom": narrow(
            "bloom",
            n_kv_heads=n_heads,
            layer_norm=True,
            norm_bias=True,
            fused_qkv=True,
            qkv_bias=True,
            out_bias=True,
            ffn="plain",
            ffn_bias=True,
            embedding_norm=True,
        ),
    }


def _attention_metadata(n_heads: int, n_kv_heads: int | list[int], head_dim: int = _HEAD_DIM) -> dict[str, object]:
    return {
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }


def _finish(
    name: str,
    builder: Builder,
    width: int,
    metadata: dict[str, object],
    quantisation: str,
    *,
    n_layers: int = _N_LAYERS,
) -> SyntheticModel:
    architecture = name.rpartition("-")[0]
    return SyntheticModel(
        name,
        architecture,
        n_layers,
        _N_VOCAB,
        common_metadata(n_layers, width, 512) | metadata,
        tuple(builder.tensors),
        quantisation,
    )


def _deepseek2(name: str, width: int, quantisation: str) -> SyntheticModel:
    """Multi-head latent attention, one dense layer, then experts with a shared one."""
    n_heads, n_rope, n_nope, n_value = width // _HEAD_DIM, 64, 64, 64
    q_rank, kv_rank, n_ff_expert, n_experts = width, 512, width, 16
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        builder.norm(f"{block}.attn_norm", width)
        builder.matrix(f"{block}.attn_q_a", width, q_rank)
        builder.norm(f"{block}.attn_q_a_norm", q_rank)
        builder.matrix(f"{block}.attn_q_b", q_rank, n_heads * (n_nope + n_rope))
        builder.matrix(f"{block}.attn_kv_a_mqa", width, kv_rank + n_rope)
        builder.norm(f"{block}.attn_kv_a_norm", kv_rank)
        builder.matrix(f"{block}.attn_k_b", n_nope, kv_rank, n_heads)
        builder.matrix(f"{block}.attn_v_b", kv_rank, n_value, n_heads)
        builder.adding(f"{block}.attn_output", n_heads * n_value, width)
        builder.norm(f"{block}.ffn_norm", width)
        if layer == 0:
            gated_ffn(builder, block, width, 3 * width)
        else:
            expert_ffn(builder, block, width, n_ff_expert, n_experts)
            builder.plain(f"{block}.exp_probs_b.bias", n_experts)
            gated_ffn(builder, block, width, n_ff_expert, suffix="_shexp")
    builder.norm("output_norm", width)
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, 1, kv_rank + n_rope),
        "attention.value_length": kv_rank,
        "attention.key_length_mla": n_nope + n_rope,
        "attention.value_length_mla": n_value,
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": kv_rank,
        "rope.dimension_count": n_rope,
        "feed_forward_length": 3 * width,
        "leading_dense_block_count": 1,
        "expert_count": n_experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": n_ff_expert,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _mamba(name: str, width: int, quantisation: str) -> SyntheticModel:
    """A recurrent model without attention."""
    n_inner, n_state, n_kernel, rank = 2 * width, 16, 4, width // 16
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        builder.norm(f"{block}.attn_norm", width)
        builder.matrix(f"{block}.ssm_in", width, 2 * n_inner)
        builder.plain(f"{block}.ssm_conv1d.weight", n_kernel, n_inner, std=0.5)
        builder.plain(f"{block}.ssm_conv1d.bias", n_inner)
        builder.matrix(f"{block}.ssm_x", n_inner, rank + 2 * n_state)
        builder.plain(f"{block}.ssm_dt.weight", rank, n_inner, std=rank**-0.5)
        builder.plain(f"{block}.ssm_dt.bias", n_inner, mean=-2.0, std=0.5)
        builder.plain(f"{block}.ssm_a", n_state, n_inner, mean=-4.0, std=1.0)
        builder.plain(f"{block}.ssm_d", n_inner, mean=1.0)
        builder.adding(f"{block}.ssm_out", n_inner, width)
    builder.norm("output_norm", width)
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": n_kernel,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": rank,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _falcon_h1(name: str, width: int, quantisation: str) -> SyntheticModel:
    """Attention and a state-space mixer side by side in every layer."""
    n_heads, n_inner, n_state, n_groups, n_kernel = width // _HEAD_DIM, width, 64, 1, 4
    n_ssm_heads, n_conv = n_inner // _HEAD_DIM, n_inner + 2 * n_groups * n_state
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        builder.norm(f"{block}.attn_norm", width)
        builder.matrix(f"{block}.ssm_in", width, n_inner + n_conv + n_ssm_heads)
        builder.plain(f"{block}.ssm_conv1d.weight", n_kernel, n_conv, std=0.5)
        builder.plain(f"{block}.ssm_conv1d.bias", n_conv)
        builder.plain(f"{block}.ssm_dt.bias", n_ssm_heads, mean=-2.0, std=0.5)
        builder.plain(f"{block}.ssm_a", 1, n_ssm_heads, mean=-4.0, std=1.0)
        builder.plain(f"{block}.ssm_d", 1, n_ssm_heads, mean=1.0)
        builder.plain(f"{block}.ssm_norm.weight", n_inner // n_groups, n_groups, mean=1.0)
        builder.adding(f"{block}.ssm_out", n_inner, width)
        _qkv(builder, block, width, n_heads, n_heads // 2)
        builder.adding(f"{block}.attn_output", n_heads * _HEAD_DIM, width)
        builder.plain(f"{block}.ffn_norm", width, mean=1.0, std=0.1)
        gated_ffn(builder, block, width, 3 * width)
    builder.norm("output_norm", width)
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, n_heads // 2),
        "feed_forward_length": 3 * width,
        "ssm.conv_kernel": n_kernel,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_ssm_heads,
        "ssm.group_count": n_groups,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _lfm2(name: str, width: int, quantisation: str) -> SyntheticModel:
    """Short convolutions, with attention in every other layer."""
    n_heads, n_kernel = width // _HEAD_DIM, 3
    kv_heads = [n_heads // 2 if layer % 2 else 0 for layer in range(_N_LAYERS)]
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for layer, n_kv_heads in enumerate(kv_heads):
        block = f"blk.{layer}"
        builder.norm(f"{block}.attn_norm", width)
        if n_kv_heads:
            _qkv(builder, block, width, n_heads, n_kv_heads)
            builder.norm(f"{block}.attn_q_norm", _HEAD_DIM)
            builder.norm(f"{block}.attn_k_norm", _HEAD_DIM)
            builder.adding(f"{block}.attn_output", width, width)
        else:
            builder.plain(f"{block}.shortconv.conv.weight", n_kernel, width, std=0.5)
            builder.matrix(f"{block}.shortconv.in_proj", width, 3 * width)
            builder.adding(f"{block}.shortconv.out_proj", width, width)
        builder.norm(f"{block}.ffn_norm", width)
        gated_ffn(builder, block, width, 3 * width)
    builder.norm("token_embd_norm", width)  # the output norm goes by this name here
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, kv_heads),
        "feed_forward_length": 3 * width,
        "shortconv.l_cache": n_kernel,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _qwen3next(name: str, width: int, quantisation: str) -> SyntheticModel:
    """Gated delta nets, gated attention in every fourth layer, and experts with a shared one."""
    n_heads, n_k_heads, n_v_heads, n_kernel, n_experts = width // _HEAD_DIM, 2, 4, 4, 16
    n_key, n_value = n_k_heads * _HEAD_DIM, n_v_heads * _HEAD_DIM
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        builder.norm(f"{block}.attn_norm", width)
        if layer % 4 == 3:
            builder.matrix(f"{block}.attn_q", width, 2 * n_heads * _HEAD_DIM)
            builder.matrix(f"{block}.attn_k", width, n_heads // 2 * _HEAD_DIM)
            builder.matrix(f"{block}.attn_v", width, n_heads // 2 * _HEAD_DIM)
            builder.norm(f"{block}.attn_q_norm", _HEAD_DIM)
            builder.norm(f"{block}.attn_k_norm", _HEAD_DIM)
            builder.adding(f"{block}.attn_output", n_heads * _HEAD_DIM, width)
        else:
            builder.matrix(f"{block}.attn_qkv", width, 2 * n_key + n_value)
            builder.matrix(f"{block}.attn_gate", width, n_value)
            builder.plain(f"{block}.ssm_conv1d.weight", n_kernel, 2 * n_key + n_value, std=0.5)
            builder.plain(f"{block}.ssm_dt.bias", n_v_heads, mean=-2.0, std=0.5)
            builder.plain(f"{block}.ssm_a", n_v_heads, mean=-4.0, std=1.0)
            builder.matrix(f"{block}.ssm_ba", width, 2 * n_v_heads)
            builder.norm(f"{block}.ssm_norm", _HEAD_DIM)
            builder.adding(f"{block}.ssm_out", n_value, width)
        builder.norm(f"{block}.post_attention_norm", width)
        expert_ffn(builder, block, width, width, n_experts)
        builder.plain(f"{block}.ffn_gate_inp_shexp.weight", width, std=width**-0.5)
        gated_ffn(builder, block, width, width, suffix="_shexp")
    builder.norm("output_norm", width)
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, n_heads // 2),
        "rope.dimension_count": _HEAD_DIM // 4,
        "expert_count": n_experts,
        "expert_used_count": 4,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "ssm.conv_kernel": n_kernel,
        "ssm.inner_size": n_value,
        "ssm.state_size": _HEAD_DIM,
        "ssm.time_step_rank": n_v_heads,
        "ssm.group_count": n_k_heads,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _gemma3n(name: str, width: int, quantisation: str) -> SyntheticModel:
    """Four streams of hidden states, a second embedding that every layer reads its part of, a tied output matrix."""
    n_heads, n_streams, n_rank, n_extra = width // _HEAD_DIM, 4, 64, 256
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB, width**-0.5)
    builder.embedding(n_extra * _N_LAYERS, _N_VOCAB, n_extra**-0.5, name="per_layer_token_embd")
    for projection in ("altup_proj", "altup_unembd_proj"):
        builder.matrix(projection, width, width, n_streams - 1)
    builder.matrix("per_layer_model_proj", width, n_extra * _N_LAYERS)
    builder.norm("per_layer_proj_norm", n_extra)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm", "altup_router_norm"):
            builder.norm(f"{block}.{norm}", width)
        for norm in (*_POST_NORMS, "post_norm", "laurel_post_norm"):
            builder.norm(f"{block}.{norm}", width, mean=_LAYER_GAIN)
        _qkv(builder, block, width, n_heads, n_heads // 2)
        builder.norm(f"{block}.attn_q_norm", _HEAD_DIM)
        builder.norm(f"{block}.attn_k_norm", _HEAD_DIM)
        builder.adding(f"{block}.attn_output", width, width)
        gated_ffn(builder, block, width, 3 * width)
        builder.matrix(f"{block}.inp_gate", width, n_extra)
        builder.matrix(f"{block}.proj", n_extra, width)
        builder.matrix(f"{block}.laurel_l", width, n_rank)
        builder.matrix(f"{block}.laurel_r", n_rank, width)
        builder.plain(f"{block}.altup_router.weight", width, n_streams, std=width**-0.5)
        builder.plain(f"{block}.altup_predict_coef.weight", n_streams, n_streams**2, std=0.1)
        builder.plain(f"{block}.altup_correct_coef.weight", n_streams, n_streams, std=0.1)
        builder.plain(f"{block}.altup_correct_scale.weight", width, mean=1.0)
    builder.norm("output_norm", width)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, n_heads // 2),
        "attention.sliding_window": _WINDOW,
        "feed_forward_length": 3 * width,
        "embedding_length_per_layer_input": n_extra,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _bert(name: str, width: int, quantisation: str) -> SyntheticModel:
    """An encoder that yields embeddings, not logits."""
    n_heads = width // _HEAD_DIM
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    builder.plain("position_embd.weight", width, 512, std=0.3)
    builder.plain("token_types.weight", width, 2, std=0.3)
    builder.norm("token_embd_norm", width, bias=True)
    for layer in range(_N_LAYERS):
        block = f"blk.{layer}"
        _qkv(builder, block, width, n_heads, n_heads)
        builder.adding(f"{block}.attn_output", width, width)
        builder.norm(f"{block}.attn_output_norm", width, bias=True)
        builder.matrix(f"{block}.ffn_up", width, 3 * width)
        builder.adding(f"{block}.ffn_down", 3 * width, width)
        builder.norm(f"{block}.layer_output_norm", width, bias=True)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, n_heads),
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "feed_forward_length": 3 * width,
        "pooling_type": 1,
        "tokenizer.ggml.token_type_count": 2,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _t5(name: str, width: int, quantisation: str) -> SyntheticModel:
    """An encoder and a decoder that attends to it, with relative position buckets."""
    n_heads, n_buckets = width // _HEAD_DIM, 32
    builder = Builder(_LAYER_GAIN)
    builder.embedding(width, _N_VOCAB)
    for side in ("enc", "dec"):
        for layer in range(_N_LAYERS):
            block = f"{side}.blk.{layer}"
            for attention in ("attn", "cross_attn") if side == "dec" else ("attn",):
                builder.norm(f"{block}.{attention}_norm", width)
                builder.matrix(f"{block}.{attention}_q", width, width, gain=_HEAD_DIM**-0.5)  # scores are not scaled
                builder.matrix(f"{block}.{attention}_k", width, width)
                builder.matrix(f"{block}.{attention}_v", width, width)
                builder.adding(f"{block}.{attention}_o", width, width)
            builder.plain(f"{block}.attn_rel_b.weight", n_heads, n_buckets, std=0.5)
            builder.norm(f"{block}.ffn_norm", width)
            gated_ffn(builder, block, width, 3 * width)
        builder.norm(f"{side}.output_norm", width)
    builder.matrix("output", width, _N_VOCAB)
    metadata: dict[str, object] = {
        **_attention_metadata(n_heads, n_heads),
        "attention.relative_buckets_count": n_buckets,
        "feed_forward_length": 3 * width,
        "decoder_start_token_id": 0,
    }
    return _finish(name, builder, width, metadata, quantisation)


def _qkv(builder: Builder, block: str, width: int, n_heads: int, n_kv_heads: int) -> None:
    builder.matrix(f"{block}.attn_q", width, n_heads * _HEAD_DIM)
    builder.matrix(f"{block}.attn_k", width, n_kv_heads * _HEAD_DIM)
    builder.matrix(f"{block}.attn_v", width, n_kv_heads * _HEAD_DIM)


_OTHER_GRAPHS: Mapping[str, Callable[[str, int, str], SyntheticModel]] = MappingProxyType({
    "deepseek2": _deepseek2, "gemma3n": _gemma3n, "mamba": _mamba, "falcon-h1": _falcon_h1, "lfm2": _lfm2,
    "qwen3next": _qwen3next, "bert": _bert, "t5": _t5,
})  # fmt: skip

_REAL_SIZES = MappingProxyType({
    "smollm2-135m": Transformer("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
    "smollm2-1.7b": Transformer("llama", 24, 2048, 32, 32, 64, 8192, 49152, 8192, tied=True),
    "qwen3-14b": Transformer("qwen3", 40, 5120, 40, 8, 128, 17408, 151936, 40960, qk_norm="head"),
    "llama2-70b": Transformer("llama", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "qwen3-30b-a3b": Transformer(
        "qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, 40960, qk_norm="head", n_experts=128, n_experts_used=8
    ),
    "mixtral-8x7b": Transformer("llama", 32, 4096, 32, 8, 128, 14336, 32000, 32768, n_experts=8, n_experts_used=2),
})  # fmt: skip


def synthetic_model_names() -> tuple[str, ...]:
    narrow = [*_transformers(_WIDTHS["tiny"]), *_OTHER_GRAPHS]
    return (*_REAL_SIZES, *(f"{name}-{size}" for size in _WIDTHS for name in narrow))


def synthetic_model(name: str, quantisation: str = "") -> SyntheticModel:
    """Return the model called `name`, in `quantisation` (a ggml type or "Q4_K_M"; f16, or Q4_K_M at real size).

    Raises KeyError for an unknown name.
    """
    if name in _REAL_SIZES:
        return _REAL_SIZES[name].build(name, quantisation or "Q4_K_M")
    architecture, _, size = name.rpartition("-")
    if architecture in _OTHER_GRAPHS:
        return _OTHER_GRAPHS[architecture](name, _WIDTHS[size], quantisation or "f16")
    return _transformers(_WIDTHS[size])[architecture].build(name, quantisation or "f16")
