"""Synthetic models: right shapes and types, honest weights, and llama.cpp loads and decodes every one of them."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from planner.gguf_model import read_gguf, read_model_info
from profiler.synthetic_architectures import synthetic_model, synthetic_model_names
from profiler.synthetic_model import main, tensor_type, write_synthetic_model
from profiler.synthetic_weights import MATRIX_TYPES, TYPE_IDS, WeightPool

TINY = [name for name in synthetic_model_names() if name.endswith("-tiny")]
N_VOCAB = 1024


class Decoder:
    """llama.cpp on the CPU, with the plain buffer types: those for AMX abort on latent attention."""

    def __init__(self, path: Path, *, n_ubatch: int = 64, callback: object = None, embeddings: bool = False) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2 * n_ubatch, n_ubatch, n_ubatch
        params.n_threads = params.n_threads_batch = 1  # more would spin while they wait
        params.embeddings = embeddings
        if callback is not None:
            params.cb_eval = callback
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.n_decoded = 0

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def decode(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits (n_tokens, n_vocab); an encoder reads the first call's tokens."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        self._fill(batch, tokens)
        if self.n_decoded == 0 and llama_cpp.llama_model_has_encoder(self.model):
            assert llama_cpp.llama_encode(self.context, batch) == 0
            tokens = [llama_cpp.llama_model_decoder_start_token(self.model)]
            self._fill(batch, tokens)
        assert llama_cpp.llama_decode(self.context, batch) == 0
        self.n_decoded += len(tokens)
        llama_cpp.llama_batch_free(batch)
        rows = [llama_cpp.llama_get_logits_ith(self.context, index) for index in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, shape=(N_VOCAB,)).copy() for row in rows])

    def embed(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        self._fill(batch, tokens)
        assert llama_cpp.llama_encode(self.context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        n_embd = llama_cpp.llama_model_n_embd(self.model)
        return np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(self.context, 0), shape=(n_embd,)).copy()

    def _fill(self, batch: llama_cpp.llama_batch, tokens: list[int]) -> None:
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, self.n_decoded + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1


def random_tokens(n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(6, N_VOCAB, n)]


@pytest.mark.parametrize("quantisation", ["f16", "Q4_K_M"])
@pytest.mark.parametrize("name", [name for name in TINY if name != "bert-tiny"])
def test_llama_cpp_decodes_every_architecture(name: str, quantisation: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_model(path, synthetic_model(name, quantisation))
    decoder = Decoder(path)
    logits = [decoder.decode(random_tokens(48))]  # past the sliding windows
    for _ in range(4):
        logits.append(decoder.decode([int(logits[-1][-1].argmax())]))
    decoder.close()
    rows = np.concatenate(logits)
    assert np.isfinite(rows).all()
    assert rows.std() > 0.05
    between_tokens = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert between_tokens.mean() < 0.2  # hidden states have not collapsed to one direction


def test_an_encoder_embeds(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_model(path, "bert-tiny")
    decoder = Decoder(path, embeddings=True)
    one, other = decoder.embed(random_tokens(40)[:20]), decoder.embed(random_tokens(40)[20:])
    decoder.close()
    assert np.isfinite(one).all()
    assert np.corrcoef(one, other)[0, 1] < 0.8


class RoutedExperts:
    """Collects the routed experts of every layer: arrays (n_tokens, n_experts_used) by name of the node."""

    def __init__(self) -> None:
        self.chosen: dict[str, list[npt.NDArray[np.int32]]] = {}
        library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
        self._name = library.ggml_get_name
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._get = library.ggml_backend_tensor_get
        self._get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._n_bytes = library.ggml_nbytes
        self._n_bytes.restype, self._n_bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._evaluated)

    def _evaluated(self, tensor: int, ask: bool, _: object) -> bool:
        name = self._name(tensor).decode()
        if not name.startswith("ffn_moe_topk"):
            return not ask
        if not ask:
            n_used, n_tokens = (ctypes.c_int64 * 2).from_address(tensor + 16)  # ggml_tensor.ne
            row_bytes = (ctypes.c_size_t * 2).from_address(tensor + 48)[1]  # ggml_tensor.nb
            data = np.zeros(row_bytes * n_tokens, np.uint8)
            self._get(tensor, data.ctypes.data, 0, self._n_bytes(tensor))
            rows = data.view(np.int32).reshape(n_tokens, -1)[:, :n_used]
            self.chosen.setdefault(name, []).append(rows.copy())
        return True


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RoutedExperts, int]]:
    """Return the experts chosen for 512 random tokens at once, then for 32 decoded ones."""
    path = tmp_path_factory.mktemp("routing") / "model.gguf"
    write_synthetic_model(path, synthetic_model("qwen3moe-tiny", "Q4_K_M"))
    experts = RoutedExperts()
    decoder = Decoder(path, n_ubatch=512, callback=experts.callback)
    token = int(decoder.decode(random_tokens(512))[-1].argmax())
    for _ in range(32):
        token = int(decoder.decode([token])[-1].argmax())
    decoder.close()
    yield experts, 16


def test_routing_entropy(routing: tuple[RoutedExperts, int]) -> None:
    experts, n_experts = routing
    assert len(experts.chosen) == 4
    for prefill, *_ in experts.chosen.values():
        assert prefill.shape == (512, 4)
        counts = np.bincount(prefill.ravel(), minlength=n_experts)
        shares = counts[counts > 0] / counts.sum()
        assert -(shares * np.log(shares)).sum() >= 0.9 * math.log(n_experts)


def test_decoding_touches_other_experts_each_time(routing: tuple[RoutedExperts, int]) -> None:
    experts, n_experts = routing
    for _, *decoded in experts.chosen.values():
        assert len(decoded) == 32
        sets = [set(rows[0].tolist()) for rows in decoded]
        n_shared = [len(one & next_one) for one, next_one in pairwise(sets)]
        assert np.mean(n_shared) < 2  # of four; one, if they were independent
        assert len(set().union(*sets)) > n_experts / 2


@pytest.mark.parametrize("type_name", [name for name in MATRIX_TYPES if name not in ("q1_0", "q2_0")])
def test_weights_have_mean_zero_and_the_wanted_deviation(type_name: str) -> None:
    pool = WeightPool(type_name, 1 << 20, np.random.default_rng(0))
    for std in (1.0, 0.01) if type_name == "nvfp4" else (1.0, 0.01, 0.0003):  # whose smallest scale is 2**-10
        (piece,) = pool.take(pool.block_bytes * (pool.n_blocks - pool.n_taken), std)
        blocks = np.frombuffer(piece, np.uint8).reshape(-1, pool.block_bytes)
        weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name.upper()]).astype(np.float64)
        assert abs(weights.mean()) < 0.02 * weights.std()
        tolerance = 0.45 if type_name in ("mxfp4", "nvfp4") else 0.05  # those two have coarse scales
        assert weights.std() == pytest.approx(std, rel=tolerance)


def test_pools_go_on_where_they_ended_and_start_again() -> None:
    pool = WeightPool("q8_0", 34 * 97, np.random.default_rng(0))
    assert pool.n_blocks == 97
    whole = b"".join(pool.take(34 * 97, 1.0))
    assert b"".join(pool.take(34 * 60, 1.0)) == whole[: 34 * 60]
    assert b"".join(pool.take(34 * 60, 1.0)) == whole[34 * 60 :] + whole[: 34 * 23]


REAL_SIZES_GIB = {"qwen3-14b": 8.38, "qwen3-30b-a3b": 17.28, "llama2-70b": 38.58, "mixtral-8x7b": 26.49}


@pytest.mark.parametrize("name", REAL_SIZES_GIB)
def test_real_sizes(name: str) -> None:
    model = synthetic_model(name)
    n_bytes = 0
    for tensor in model.tensors:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[TYPE_IDS[tensor_type(model, tensor)]]
        n_bytes += math.prod(tensor.shape) // block_elements * block_bytes
    assert n_bytes / 2**30 == pytest.approx(REAL_SIZES_GIB[name], abs=0.01)


def types_of(name: str, role: str) -> Counter[str]:
    model = synthetic_model(name)
    return Counter(tensor_type(model, tensor) for tensor in model.tensors if f"{role}.weight" in tensor.name)


def test_the_medium_mix_is_that_of_llama_quantize() -> None:
    assert types_of("qwen3-14b", "token_embd") == {"q4_K": 1}
    assert types_of("qwen3-14b", ".ffn_gate") == {"q4_K": 40}
    assert types_of("qwen3-14b", ".ffn_down") == {"q6_K": 20, "q4_K": 20}
    assert types_of("qwen3-14b", ".attn_v") == {"q6_K": 20, "q4_K": 20}
    assert types_of("qwen3-14b", ".attn_output") == {"q4_K": 40}
    assert types_of("llama2-70b", ".attn_v") == {"q6_K": 40, "q5_K": 40}
    assert types_of("mixtral-8x7b", ".attn_k") == {"q8_0": 32}
    assert types_of("mixtral-8x7b", ".attn_output") == {"q5_K": 32}
    assert types_of("mixtral-8x7b", ".ffn_down_exps") == {"q6_K": 16, "q4_K": 16}
    model = synthetic_model("qwen3-14b")
    favoured = [
        int(tensor.name.split(".")[1])
        for tensor in model.tensors
        if "ffn_down" in tensor.name and tensor_type(model, tensor) == "q6_K"
    ]
    assert favoured == [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39]


def test_the_file_is_what_the_specification_says(tmp_path: Path) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", "qwen3moe-tiny")
    model, spec = read_gguf(path), synthetic_model("qwen3moe-tiny")
    assert [(tensor.name, tensor.shape) for tensor in model.tensors] == [(t.name, t.shape) for t in spec.tensors]
    assert {tensor.type_name for tensor in model.tensors} == {"f16", "f32"}
    assert model.metadata["qwen3moe.expert_count"] == 16
    last = model.tensors[-1]
    assert model.file_bytes == last.offset_bytes + last.size_bytes + -last.size_bytes % 32
    info = read_model_info(path)
    assert (info.architecture, info.n_layers, info.n_embd) == ("qwen3moe", 4, 256)
    (same,) = write_synthetic_model(tmp_path / "same.gguf", "qwen3moe-tiny")
    (other,) = write_synthetic_model(tmp_path / "other.gguf", "qwen3moe-tiny", seed=1)
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in (path, same, other)]
    assert digests[0] == digests[1] != digests[2]


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    (whole,) = write_synthetic_model(tmp_path / "whole.gguf", "llama-tiny")
    shards = write_synthetic_model(tmp_path / "split.gguf", "llama-tiny", n_shards=3)
    assert [shard.name for shard in shards] == [f"split-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert read_model_info(shards[2]).fingerprint == read_model_info(whole).fingerprint
    tokens = random_tokens(8)
    decoders = [Decoder(whole), Decoder(shards[0])]
    logits = [decoder.decode(tokens) for decoder in decoders]
    for decoder in decoders:
        decoder.close()
    np.testing.assert_array_equal(*logits)


def test_every_text_is_tokenised_and_back(tmp_path: Path) -> None:
    (path,) = write_synthetic_model(tmp_path / "model.gguf", "llama-tiny")
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    text = "Hello, the w17 world!\n\té中🙂".encode()
    assert llama.detokenize(llama.tokenize(text, add_bos=False)) == text
    assert llama.n_vocab() == N_VOCAB
    for token in range(N_VOCAB):
        llama.detokenize([token])
    llama.close()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    assert main(["llama-tiny", str(path), "--type", "q8_0", "--seed", "3"]) == 0
    assert str(path) in capsys.readouterr().out
    assert {tensor.type_name for tensor in read_gguf(path).tensors} == {"q8_0", "f32"}
    with pytest.raises(SystemExit):
        main(["no-such-model", str(path)])
    assert "invalid choice" in capsys.readouterr().err
