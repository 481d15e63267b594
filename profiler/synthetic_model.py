"""Writes GGUF files with the shapes of any model and honest random weights: `python -m profiler.synthetic_model`.

What llama.cpp, a profile or a plan does depends on shapes and types, not on what a model has learned, so that models
of any size can be tried on a machine without a network.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from planner.gguf_model import GGML_TYPES

from .synthetic_architectures import synthetic_model, synthetic_model_names
from .synthetic_transformer import SyntheticModel, SyntheticTensor
from .synthetic_weights import MATRIX_TYPES, TYPE_IDS, WeightPool

_ALIGNMENT = 32
_POOL_BYTES = 64 * 1024**2
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_synthetic_model(
    path: str | os.PathLike[str], spec: SyntheticModel | str, seed: int = 0, n_shards: int = 1
) -> tuple[Path, ...]:
    """Write the model and return its files: `path`, or NAME-00001-of-0000N.gguf and so on for several shards.

    The same spec and seed give the same bytes. Raises KeyError if `spec` names no known model.
    """
    model = synthetic_model(spec) if isinstance(spec, str) else spec
    path = Path(path)
    metadata = _metadata(model)
    paths = tuple(
        path if n_shards == 1 else path.with_name(f"{path.stem}-{number:05d}-of-{n_shards:05d}.gguf")
        for number in range(1, n_shards + 1)
    )
    types = [tensor_type(model, tensor) for tensor in model.tensors]
    pools = _pools(model.tensors, types, seed)
    n_tensors = len(model.tensors)
    for number, shard in enumerate(paths):
        part = slice(n_tensors * number // n_shards, n_tensors * (number + 1) // n_shards)
        extra = _split_metadata(number, n_shards, n_tensors) if n_shards > 1 else {}
        _write_file(shard, (metadata if number == 0 else {}) | extra, model.tensors[part], types[part], pools, seed)
    return paths


def _split_metadata(number: int, n_shards: int, n_tensors: int) -> dict[str, object]:
    return {
        "split.no": np.uint16(number),
        "split.count": np.uint16(n_shards),
        "split.tensors.count": np.int32(n_tensors),
    }


def tensor_type(model: SyntheticModel, tensor: SyntheticTensor) -> str:
    """Return the ggml type: f32 for small tensors, else the model's, or the one that llama-quantize would choose."""
    if not tensor.is_matrix:
        return "f32"
    chosen = _medium_type(model, tensor.name) if model.quantisation == "Q4_K_M" else model.quantisation.lower()
    type_name = {name.lower(): name for name in MATRIX_TYPES}[chosen.lower()]
    smaller_blocks = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
    for candidate in (type_name, smaller_blocks.get(type_name, "q8_0")):
        if tensor.shape[0] % GGML_TYPES[TYPE_IDS[candidate]][1] == 0:
            return candidate
    return "f16"


def _medium_type(model: SyntheticModel, name: str) -> str:
    """Return the type of a matrix in a Q4_K_M file: more bits for what loses most."""
    n_experts = model.metadata.get("expert_count", 0)
    is_tied = all(tensor.name != "output.weight" for tensor in model.tensors)
    if name == "output.weight" or (name == "token_embd.weight" and is_tied):
        return "q6_K"
    if name == "token_embd.weight":
        return "q4_K"
    role = name.split(".")[-2]
    layer = next((int(piece) for piece in name.split(".") if piece.isdigit()), 0)
    eighth = model.n_layers // 8
    is_favoured = layer < eighth or layer >= 7 * model.n_layers // 8 or (layer - eighth) % 3 == 2
    if role in ("attn_v", "attn_qkv", "attn_kv_b"):
        if n_experts == 8:
            return "q8_0"
        # With eight heads sharing it, attn_v of a 70B model is small.
        return "q6_K" if is_favoured else "q5_K" if model.architecture == "llama" and model.n_layers == 80 else "q4_K"
    if n_experts == 8 and role in ("attn_k", "attn_output"):
        return "q8_0" if role == "attn_k" else "q5_K"
    return "q6_K" if role.startswith("ffn_down") and is_favoured else "q4_K"


def _pools(tensors: Sequence[SyntheticTensor], types: Sequence[str], seed: int) -> dict[str, WeightPool]:
    """Return a pool for each type of matrix: a small model's matrices are all different, a large one's repeat."""
    n_bytes: dict[str, int] = {}
    for tensor, type_name in zip(tensors, types, strict=True):
        if tensor.is_matrix:
            n_bytes[type_name] = n_bytes.get(type_name, 0) + _n_bytes(tensor, type_name)
    return {
        name: WeightPool(name, min(total, _POOL_BYTES), np.random.default_rng([seed, TYPE_IDS[name]]))
        for name, total in n_bytes.items()
    }


def _n_bytes(tensor: SyntheticTensor, type_name: str) -> int:
    _, block_elements, block_bytes = GGML_TYPES[TYPE_IDS[type_name]]
    return math.prod(tensor.shape) // block_elements * block_bytes


def _write_file(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Sequence[SyntheticTensor],
    types: Sequence[str],
    pools: Mapping[str, WeightPool],
    seed: int,
) -> None:
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    offset = 0
    for tensor, type_name in zip(tensors, types, strict=True):
        header += _text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        header += struct.pack("<IQ", TYPE_IDS[type_name], offset)
        offset += _aligned(_n_bytes(tensor, type_name))
    with open(path, "wb") as file:
        file.write(header + bytes(_aligned(len(header)) - len(header)))
        for tensor, type_name in zip(tensors, types, strict=True):
            n_bytes = _n_bytes(tensor, type_name)
            if tensor.is_matrix:
                for piece in pools[type_name].take(n_bytes, tensor.std):
                    file.write(piece)
            else:
                generator = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
                values = generator.standard_normal(n_bytes // 4, dtype=np.float32)
                file.write((values * np.float32(tensor.std) + np.float32(tensor.mean)).data)
            file.write(bytes(_aligned(n_bytes) - n_bytes))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


_KINDS: tuple[tuple[type, int, str], ...] = (  # Python's type -> GGUF's kind of value, struct code; bool is an int
    (bool, 7, "?"), (int, 4, "I"), (float, 6, "f"), (np.uint16, 2, "H"), (np.int32, 5, "i"),
)  # fmt: skip


def _value(value: object) -> bytes:
    if isinstance(value, list):
        kind = struct.pack("<I", 9)
        if isinstance(value[0], str):
            return kind + struct.pack("<IQ", 8, len(value)) + b"".join(_text(item) for item in value)
        number, code = _kind(value[0])
        return kind + struct.pack(f"<IQ{len(value)}{code}", number, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    number, code = _kind(value)
    return struct.pack(f"<I{code}", number, value)


def _kind(value: object) -> tuple[int, str]:
    return next((number, code) for kind, number, code in _KINDS if isinstance(value, kind))


def _metadata(model: SyntheticModel) -> dict[str, object]:
    metadata: dict[str, object] = {
        "general.architecture": model.architecture,
        "general.type": "model",
        "general.name": f"Synthetic {model.name} {model.quantisation}",
        "general.quantization_version": 2,
    }
    for key, value in model.metadata.items():
        metadata[key if key.startswith("tokenizer.") else f"{model.architecture}.{key}"] = value
    return metadata | _tokenizer(model.n_vocab)


def _tokenizer(n_vocab: int) -> dict[str, object]:
    """Return a byte-level tokenizer: every byte is a token, one merge, and made-up words up to `n_vocab`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    tokens = [*_CONTROL_TOKENS, *letters, "th"]
    tokens += [f"\u0120w{number}" for number in range(n_vocab - len(tokens))]  # U+0120 stands for a space
    kinds = [np.int32(3)] * len(_CONTROL_TOKENS) + [np.int32(1)] * (n_vocab - len(_CONTROL_TOKENS))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiler.synthetic_model", description=__doc__)
    parser.add_argument(
        "spec", metavar="SPEC", choices=synthetic_model_names(), help=", ".join(synthetic_model_names())
    )
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--type", default="", choices=("", "Q4_K_M", *MATRIX_TYPES), help="a ggml type or Q4_K_M")
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    paths = write_synthetic_model(
        options.path, synthetic_model(options.spec, options.type), options.seed, options.shards
    )
    n_bytes = sum(path.stat().st_size for path in paths)
    print(f"{paths[0]}: {n_bytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
