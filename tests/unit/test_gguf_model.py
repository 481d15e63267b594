"""The GGUF reader: right values from good files, one clear error from everything else, quickly and in little memory."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidFileError
from planner.gguf_model import GGML_TYPES, LargeArray, read_gguf, read_model_info, read_tensor_bytes


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def tensor(name: str | bytes, shape: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    shape_bytes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + shape_bytes + struct.pack("<IQ", ggml_type, offset)


def gguf_bytes(metadata: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + b"".join(metadata + tensors)
    return header + bytes(-len(header) % 32) + data


BASICS = [
    entry("general.architecture", 8, text("llama")),
    u32("llama.block_count", 2),
    u32("llama.embedding_length", 32),
    u32("llama.context_length", 128),
]
WEIGHT = tensor("w.weight", (32, 2), 8, 0)  # q8_0: two blocks of 34 bytes


@pytest.fixture
def write(tmp_path: Path):
    def write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="module")
def written_by_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file written by the gguf package, with every kind of metadata value."""
    path = tmp_path_factory.mktemp("gguf") / "real.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A model")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_context_length(128)
    writer.add_array("llama.attention.head_count_kv", [1, 2])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("llama.flag", True)
    writer.add_uint64("llama.large", 2**40)
    writer.add_token_list([f"token{i}" for i in range(5000)])
    writer.add_token_scores([0.0] * 5000)
    writer.add_tensor("token_embd.weight", np.arange(320, dtype=np.float32).reshape(5, 64))
    writer.add_tensor("blk.0.w", np.zeros((2, 72), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.1.w", np.ones(7, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_package_wrote(written_by_gguf: Path) -> None:
    model = read_gguf(written_by_gguf)
    assert model.metadata["llama.attention.head_count_kv"] == (1, 2)
    assert model.metadata["llama.rope.freq_base"] == 10000.0
    assert model.metadata["llama.flag"] is True
    assert model.metadata["llama.large"] == 2**40
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, LargeArray) and tokens.length == 5000
    facts = [(t.name, t.type_name, t.ggml_type, t.shape, t.size_bytes) for t in model.tensors]
    assert facts == [
        ("token_embd.weight", "f32", 0, (64, 5), 1280),
        ("blk.0.w", "q4_0", 2, (128, 2), 144),
        ("blk.1.w", "f16", 1, (7,), 14),
    ]
    assert model.file_bytes == written_by_gguf.stat().st_size
    assert read_tensor_bytes(model.tensors[0], 10**9) == np.arange(320, dtype=np.float32).tobytes()
    assert read_tensor_bytes(model.tensors[2], 4) == np.ones(2, dtype=np.float16).tobytes()


def test_model_info(written_by_gguf: Path) -> None:
    info = read_model_info(written_by_gguf)
    assert (info.name, info.architecture, info.file_name) == ("A model", "llama", "real.gguf")
    assert (info.n_layers, info.n_embd, info.n_context_train) == (2, 64, 128)


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.gguf")
    path.write_bytes(gguf_bytes(BASICS, [WEIGHT], bytes(68)))
    with pytest.raises(InvalidFileError, match=r"m\\udcff\.gguf' is not a path. Give the file a name in UTF-8"):
        read_gguf(path)


def test_version_2_is_read(write) -> None:
    assert read_gguf(write(gguf_bytes(BASICS, [WEIGHT], bytes(68), version=2))).tensors[0].size_bytes == 68


def test_ggml_types_are_those_of_ggml() -> None:
    folder = Path(pytest.importorskip("llama_cpp").__file__).parent / "lib"
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    theirs = {
        number: (
            library.ggml_type_name(number).decode(),
            library.ggml_blck_size(number),
            library.ggml_type_size(number),
        )
        for number in range(43)
    }
    assert dict(GGML_TYPES) == {i: facts for i, facts in theirs.items() if facts[2]}


def test_the_fingerprint_is_of_the_graph_not_of_the_text(write) -> None:
    def fingerprint(metadata: list[bytes], tensors: list[bytes], data: bytes = bytes(96)) -> str:
        return read_model_info(write(gguf_bytes(metadata, tensors, data))).fingerprint

    plain = fingerprint(BASICS, [WEIGHT])
    named = [entry("general.name", 8, text("x")), entry("tokenizer.ggml.model", 8, text("gpt2"))]
    assert fingerprint(BASICS + named, [WEIGHT]) == plain
    assert fingerprint(BASICS, [WEIGHT], b"\1" * 96) == plain
    assert fingerprint([*BASICS, u32("llama.attention.head_count", 4)], [WEIGHT]) != plain
    assert fingerprint(BASICS, [tensor("w.weight", (32, 2), 8, 0), tensor("b", (1,), 0, 96)], bytes(128)) != plain
    assert fingerprint(BASICS, [tensor("w.weight", (64,), 8, 0)]) != plain
    assert fingerprint(BASICS, [tensor("w.weight", (32, 2), 6, 0)]) != plain


def split(number: int, count: int, n_tensors: int) -> list[bytes]:
    return [
        entry("split.no", 2, struct.pack("<H", number)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", n_tensors)),
    ]


@pytest.fixture
def shards(write) -> list[Path]:
    parts = [
        gguf_bytes(BASICS + split(0, 2, 2), [tensor("a", (32, 2), 8, 0)], b"a" * 68),
        gguf_bytes(split(1, 2, 2), [tensor("b", (2,), 0, 0)], b"b" * 8),
    ]
    return [write(part, f"m-{number:05d}-of-00002.gguf") for number, part in enumerate(parts, start=1)]


def test_any_shard_names_the_whole_model(shards: list[Path]) -> None:
    first, second = (read_gguf(shard) for shard in shards)
    assert first == second
    assert first.paths == tuple(shards)
    assert first.file_bytes == sum(shard.stat().st_size for shard in shards)
    assert read_tensor_bytes(second.tensors[1], 100) == b"b" * 8
    assert read_model_info(shards[1]).file_name == "m-00001-of-00002.gguf"


def test_the_fingerprint_ignores_sharding(shards: list[Path], write) -> None:
    whole = write(gguf_bytes(BASICS, [tensor("b", (2,), 0, 0), tensor("a", (32, 2), 8, 32)], bytes(100)))
    assert read_model_info(whole).fingerprint == read_model_info(shards[0]).fingerprint


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(InvalidFileError, match=r"Shard 2 of 2 is missing: .*m-00002-of-00002\.gguf"):
        read_gguf(shards[0])


def test_a_shard_of_another_place_is_refused(shards: list[Path]) -> None:
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(InvalidFileError, match="does not call itself shard 2 of 2"):
        read_gguf(shards[0])


def test_a_renamed_shard_is_refused(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("model.gguf"))
    with pytest.raises(InvalidFileError, match="its name does not say which"):
        read_gguf(renamed)


def test_how_much_is_missing_is_said(write) -> None:
    whole = gguf_bytes(BASICS, [WEIGHT], bytes(68))
    assert read_gguf(write(whole)).tensors
    with pytest.raises(InvalidFileError, match="is truncated: 5 bytes are missing"):
        read_gguf(write(whole[:-5]))
    with pytest.raises(InvalidFileError, match="is truncated: at least 4 bytes are missing"):
        read_gguf(write(whole[:20]))


HUGE = 2**63
BAD_FILES = {
    "empty": (b"", "not a GGUF file"),
    "text": (b"hello, world", "not a GGUF file"),
    "version 1": (gguf_bytes([], [], version=1), "unknown GGUF version 1"),
    "version 4": (gguf_bytes([], [], version=4), "unknown GGUF version 4"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"claims to hold {HUGE} tensors"),
    "much metadata": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"claims to hold {HUGE} metadata"),
    "long key": (gguf_bytes([struct.pack("<Q", HUGE)], []), f"claims to be {HUGE} bytes long"),
    "long string": (gguf_bytes([text("k") + struct.pack("<IQ", 8, 2**40)], []), "claims to be"),
    "string past the end": (gguf_bytes([text("k") + struct.pack("<IQ", 8, 2**20)], []), "truncated"),
    "long array": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 12, HUGE)], []), "does not end within"),
    "many strings": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 8, HUGE)], []), "claims to hold"),
    "nested array": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 9, 1)], []), "unknown kind 9"),
    "unknown kind": (gguf_bytes([entry("k", 13, bytes(8))], []), "unknown kind 13"),
    "same key twice": (gguf_bytes([u32("k", 1), u32("k", 2)], []), "the key k occurs twice"),
    "key is not text": (gguf_bytes([entry(b"\xff\xfe", 4, bytes(4))], []), "not printable text"),
    "empty name": (gguf_bytes([], [tensor("", (32,), 0, 0)], bytes(128)), "not printable text"),
    "escape in a name": (gguf_bytes([], [tensor("\x1b[2J", (32,), 0, 0)], bytes(128)), "not printable text"),
    "long name": (gguf_bytes([], [tensor("n" * 64, (32,), 0, 0)], bytes(128)), "claims to be 64 bytes long"),
    "same tensor twice": (gguf_bytes([], [tensor("a", (8,), 0, 0)] * 2, bytes(64)), "a occurs twice"),
    "five dimensions": (gguf_bytes([], [tensor("a", (1,) * 5, 0, 0)], bytes(64)), "claims to have 5 dimensions"),
    "overflow": (gguf_bytes([], [tensor("a", (2**32, 2**32), 0, 0)]), "impossible shape"),
    "overflow to zero": (gguf_bytes([], [tensor("a", (2**63, 0), 0, 0)]), "impossible shape"),
    "partial block": (gguf_bytes([], [tensor("a", (33,), 8, 0)], bytes(64)), "not a multiple of q8_0's 32"),
    "removed type": (gguf_bytes([], [tensor("a", (32,), 4, 0)], bytes(64)), "a has the unknown type 4"),
    "unknown type": (gguf_bytes([], [tensor("a", (32,), 9999, 0)], bytes(64)), "a has the unknown type 9999"),
    "overlap": (gguf_bytes([], [tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)], bytes(64)), "instead of 32"),
    "gap": (gguf_bytes([], [tensor("a", (8,), 0, 64)], bytes(99)), "offset 64 instead of 0"),
    "unaligned": (gguf_bytes([], [tensor("a", (4,), 0, 0), tensor("b", (4,), 0, 16)], bytes(64)), "instead of 32"),
    "huge offset": (gguf_bytes([], [tensor("a", (8,), 0, 2**64 - 32)], bytes(64)), "instead of 0"),
    "alignment 0": (gguf_bytes([u32("general.alignment", 0)], []), "not a power of two"),
    "alignment 48": (gguf_bytes([u32("general.alignment", 48)], []), "not a power of two"),
    "alignment is text": (gguf_bytes([entry("general.alignment", 8, text("32"))], []), "not a power of two"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_with_the_reason(name: str, write) -> None:
    content, reason = BAD_FILES[name]
    with pytest.raises(InvalidFileError, match=reason) as caught:
        read_gguf(write(content))
    assert caught.value.remedy and "\n" not in str(caught.value)


BAD_MODELS = {
    "no architecture": (BASICS[1:], "general.architecture is missing"),
    "architecture is a number": ([u32("general.architecture", 1), *BASICS[1:]], "general.architecture is missing"),
    "no layers": (BASICS[:1] + BASICS[2:], "llama.block_count is missing"),
    "layers are text": ([BASICS[0], entry("llama.block_count", 8, text("2")), *BASICS[2:]], "llama.block_count"),
    "no rotation": ([*BASICS, u32("llama.rope.dimension_count", 0)], r"llama.rope.dimension_count is 0\."),
    "no rotation in windows": ([*BASICS, u32("llama.rope.dimension_count_swa", 0)], "dimension_count_swa is 0"),
    "no interval": ([*BASICS, u32("llama.full_attention_interval", 0)], "full_attention_interval is 0"),
    "adapter": ([*BASICS, entry("general.type", 8, text("adapter"))], "not a language model"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_files_that_are_no_language_model(name: str, write) -> None:
    metadata, reason = BAD_MODELS[name]
    with pytest.raises(InvalidFileError, match=reason):
        read_model_info(write(gguf_bytes(metadata, [])))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent.gguf", tmp_path / "pipe", Path("/dev/zero"), tmp_path / "nul\0"):
        with pytest.raises(InvalidFileError):
            read_gguf(path)


def test_a_file_cut_after_reading_its_header(write) -> None:
    path = write(gguf_bytes(BASICS, [WEIGHT], bytes(68)))
    weight = read_gguf(path).tensors[0]
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(InvalidFileError, match="8 bytes are missing"):
        read_tensor_bytes(weight, 68)


def test_names_with_control_characters_are_cleaned(write) -> None:
    name = entry("general.name", 8, text("red\x1b[31m\nalert"))
    assert read_model_info(write(gguf_bytes([*BASICS, name], []))).name == "red[31malert"


def reads_or_refuses(path: Path) -> None:
    start = time.monotonic()
    try:
        read_model_info(path)
    except InvalidFileError as error:
        assert "\n" not in error.message and error.remedy
    assert time.monotonic() - start < 5


def mutate(content: bytearray, header_bytes: int, generator: random.Random) -> bytes:
    """Flip bits, plant extreme numbers, cut, or duplicate a piece, within the header."""
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(header_bytes)
        match generator.randrange(5):
            case 0:
                content[at] ^= 1 << generator.randrange(8)
            case 1:
                value = generator.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(content)])
                content[at : at + 8] = struct.pack("<Q", value)
            case 2:
                del content[at : at + generator.randint(1, 64)]
            case 3:
                content[at:at] = content[max(0, at - 40) : at]
            case 4:
                content[at : at + 4] = struct.pack("<I", generator.choice([0, 4, 8, 9, 13, 2**32 - 1]))
    return bytes(content[: generator.randrange(len(content))] if generator.random() < 0.1 else content)


def test_mutated_files_are_read_or_refused(written_by_gguf: Path, tmp_path: Path) -> None:
    original = written_by_gguf.read_bytes()
    generator = random.Random(0)
    path = tmp_path / "mutated.gguf"
    for _ in range(400):
        header_bytes = generator.choice([400, len(original)])  # half of them before the long token table
        path.write_bytes(mutate(bytearray(original), header_bytes, generator))
        reads_or_refuses(path)


def test_mutated_real_model(smollm2: Path, tmp_path: Path) -> None:
    model = read_gguf(smollm2)
    header_bytes = min(tensor.offset_bytes for tensor in model.tensors)
    with open(smollm2, "rb") as file:
        header = file.read(header_bytes)
    generator = random.Random(1)
    path = tmp_path / "mutated.gguf"
    for _ in range(25):
        path.write_bytes(mutate(bytearray(header), header_bytes, generator))
        os.truncate(path, smollm2.stat().st_size)  # sparse weights
        reads_or_refuses(path)


def test_memory_is_bounded_by_the_header(tmp_path: Path) -> None:
    header_bytes = 8 * 2**18
    path = tmp_path / "sparse.gguf"
    strings = text("k") + struct.pack("<IIQ", 9, 8, header_bytes // 8)
    path.write_bytes(gguf_bytes([strings, b""], []))
    os.truncate(path, 2**40)  # empty strings, then a second entry whose key is empty, then a terabyte of zeros
    tracemalloc.start()
    with pytest.raises(InvalidFileError, match="the key of metadata entry 1 is not printable"):
        read_gguf(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * header_bytes


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + content)
    reads_or_refuses(path)


def test_tensors_are_values(written_by_gguf: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_gguf(written_by_gguf).tensors[0].name = "x"  # type: ignore[misc]
