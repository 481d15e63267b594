"""Header-only reader of GGUF files that trusts nothing in them.

llama.cpp aborts the process on some bad files, so a file is read here first. Time and memory are bounded by
the header, which is refused above `_MAX_HEADER_BYTES`; weights are read only by `read_tensor_bytes`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from .errors import InvalidFileError
from .measurements import ModelInfo

# ggml's type id -> ggml's name, elements per block, bytes per block.
GGML_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType({
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_K", 256, 84), 11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144), 13: ("q5_K", 256, 176), 14: ("q6_K", 256, 210), 15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18), 42: ("q2_0", 64, 18),
})  # fmt: skip

_MAX_HEADER_BYTES = 128 * 1024**2  # real ones reach about 20 MB, nearly all of it the tokenizer
_MAX_METADATA_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_KEY_BYTES = 65535
_MAX_ARRAY_STRINGS = 1 << 22  # per file; they are walked one by one
_MAX_KEPT_ELEMENTS = 4096  # longer arrays are kept as length and hash
_MAX_TENSOR_NAME_BYTES = 63
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 2**63 - 1

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_NOT_GRAPH_SHAPING = ("general.", "tokenizer.", "split.", "quantize.")
# Where these are 0, llama.cpp loops forever or divides by it; what it refuses itself is left to it.
_NEVER_ZERO = ("rope.dimension_count", "rope.dimension_count_swa", "full_attention_interval")
_REMEDY = "Download or copy the file again."

Scalar = bool | int | float | str


@dataclass(frozen=True)
class LargeArray:
    """Stands for an array too long to keep, such as the tokenizer's tables."""

    length: int
    sha256: str  # of the array as stored


MetadataValue = Scalar | tuple[Scalar, ...] | LargeArray


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is ggml's `ne`, innermost first; the offset is the file's."""

    name: str
    type_name: str
    ggml_type: int
    shape: tuple[int, ...]
    size_bytes: int
    path: Path
    offset_bytes: int


@dataclass(frozen=True)
class GgufModel:
    """All shards of one model; the metadata is the first shard's."""

    metadata: Mapping[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    paths: tuple[Path, ...]
    file_bytes: int


def read_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Read the header of a GGUF v2 or v3 file and of its sibling shards, whichever shard `path` names.

    Raises InvalidFileError for anything that llama.cpp would not load, or not safely.
    """
    given = Path(path)
    shard = _read_file(given)
    count = shard.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return shard
    name = _SHARD_NAME.match(given.name)
    if not name or int(name["count"]) != count:
        raise InvalidFileError(
            f"{given} is a shard of {count}, but its name does not say which.",
            f"Name the shards NAME-00001-of-{count:05d}.gguf and so on.",
        )
    paths = [given.with_name(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for number, sibling in enumerate(paths, start=1):
        if not sibling.exists():
            raise InvalidFileError(
                f"Shard {number} of {count} is missing: {sibling}.", "Put all shards of the model into one folder."
            )
    shards = [shard if sibling == given else _read_file(sibling) for sibling in paths]
    for number, (sibling, part) in enumerate(zip(paths, shards, strict=True)):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise _corrupt(sibling, f"it does not call itself shard {number + 1} of {count}")
    tensors = tuple(tensor for part in shards for tensor in part.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise _corrupt(paths[0], "two shards hold a tensor of the same name")
    expected = shards[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise _corrupt(paths[0], f"its shards hold {len(tensors)} tensors instead of {expected}")
    return GgufModel(shards[0].metadata, tensors, tuple(paths), sum(part.file_bytes for part in shards))


def read_model_info(path: str | os.PathLike[str]) -> ModelInfo:
    """Describe the model at `path`. Raises InvalidFileError if it is not a GGUF of a language model."""
    return model_info(read_gguf(path))


def model_info(model: GgufModel) -> ModelInfo:
    """Describe `model`. Raises InvalidFileError if it is an adapter or projector, or lacks facts llama.cpp requires."""
    path = model.paths[0]
    kind = model.metadata.get("general.type", "model")
    architecture = model.metadata.get("general.architecture")
    if kind != "model" or architecture == "clip":
        raise InvalidFileError(f"{path} is not a language model.", "Name the GGUF file of the model itself.")
    if not isinstance(architecture, str) or not re.fullmatch(r"[\w.-]{1,64}", architecture):
        raise _corrupt(path, "general.architecture is missing or not a name")

    def positive(key: str) -> int:
        value = model.metadata.get(f"{architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise _corrupt(path, f"{architecture}.{key} is missing or not a positive number")
        return value

    for key in _NEVER_ZERO:
        if model.metadata.get(f"{architecture}.{key}") == 0:
            raise _corrupt(path, f"{architecture}.{key} is 0")

    name = str(model.metadata.get("general.name", "")) or path.stem
    return ModelInfo(
        name="".join(letter for letter in name if letter.isprintable())[:200],
        architecture=architecture,
        fingerprint=_fingerprint(model),
        file_name=path.name,
        file_bytes=model.file_bytes,
        n_layers=positive("block_count"),
        n_embd=positive("embedding_length"),
        n_context_train=positive("context_length"),
    )


def read_tensor_bytes(tensor: GgufTensor, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of the tensor's data, or all of it if that is less."""
    wanted = min(max_bytes, tensor.size_bytes)
    try:
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset_bytes)
            data = file.read(wanted)
    except OSError as error:
        raise _unreadable(tensor.path, error) from error
    if len(data) < wanted:
        raise _truncated(tensor.path, wanted - len(data))
    return data


def _fingerprint(model: GgufModel) -> str:
    """Return 16 hex digits over what shapes the graph. File order and sharding do not matter."""
    digest = hashlib.sha256()
    for key in sorted(model.metadata):
        if key == "general.architecture" or not key.startswith(_NOT_GRAPH_SHAPING):
            digest.update(f"{key}={model.metadata[key]!r}\n".encode())
    for tensor in sorted(model.tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.type_name} {tensor.shape} {tensor.size_bytes}\n".encode())
    return digest.hexdigest()[:16]


def _corrupt(path: Path, what: str) -> InvalidFileError:
    return InvalidFileError(f"{path} is corrupt: {what}.", _REMEDY)


def _truncated(path: Path, n_missing_bytes: int, *, at_least: bool = False) -> InvalidFileError:
    quantity = f"{'at least ' if at_least else ''}{n_missing_bytes} byte{'s are' if n_missing_bytes != 1 else ' is'}"
    return InvalidFileError(f"{path} is truncated: {quantity} missing.", _REMEDY)


def _unreadable(path: Path, error: OSError) -> InvalidFileError:
    return InvalidFileError(f"{path} cannot be read: {error.strerror or error}.", "Check the path and its permissions.")


class _Header:
    """Reads the header front to back; every length is checked against the file's size before it is used."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._file_bytes = file_bytes
        self._buffer = bytearray()
        self._n_array_strings = 0

    def need(self, n_bytes: int) -> None:
        """Make `n_bytes` from the position on available, or raise."""
        end = self.position + n_bytes
        if end > _MAX_HEADER_BYTES:
            raise _corrupt(self.path, f"its header does not end within {_MAX_HEADER_BYTES // 1024**2} MiB")
        if end > self._file_bytes:
            raise _truncated(self.path, end - self._file_bytes, at_least=True)
        while len(self._buffer) < end:
            chunk = self._file.read(max(end - len(self._buffer), 1 << 18))
            if not chunk:
                raise _truncated(self.path, end - len(self._buffer), at_least=True)
            self._buffer += chunk

    def take(self, n_bytes: int) -> bytes:
        self.need(n_bytes)
        self.position += n_bytes
        return bytes(self._buffer[self.position - n_bytes : self.position])

    def number(self, code: str) -> int:
        value = self.scalar(code)
        assert isinstance(value, int)
        return value

    def scalar(self, code: str) -> bool | int | float:
        layout = struct.Struct("<" + code)
        value: bool | int | float = layout.unpack(self.take(layout.size))[0]
        return value

    def string(self, what: str, max_bytes: int = _MAX_HEADER_BYTES) -> bytes:
        length = self.number("Q")
        if length > max_bytes:
            raise _corrupt(self.path, f"{what} claims to be {length} bytes long")
        return self.take(length)

    def name(self, what: str, max_bytes: int) -> str:
        """Return a key or a tensor's name: not empty, and safe to print."""
        try:
            name = self.string(what, max_bytes).decode()
        except UnicodeDecodeError:
            name = ""
        if not name or not name.isprintable():
            raise _corrupt(self.path, f"{what} is not printable text")
        return name

    def value(self, key: str) -> MetadataValue:
        kind = self.number("I")
        if kind == _STRING:
            return self.string(key).decode(errors="replace")
        if kind != _ARRAY:
            return self.scalar(self._code(key, kind))
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self._strings(key, length)
        layout = struct.Struct("<" + self._code(key, kind))
        self.need(length * layout.size)
        data = self.take(length * layout.size)
        if length > _MAX_KEPT_ELEMENTS:
            return LargeArray(length, hashlib.sha256(data).hexdigest())
        return tuple(value for (value,) in layout.iter_unpack(data))

    def _code(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise _corrupt(self.path, f"{key} has a value of unknown kind {kind}")
        return _SCALARS[kind]

    def _strings(self, key: str, length: int) -> MetadataValue:
        self._n_array_strings += length
        if self._n_array_strings > _MAX_ARRAY_STRINGS:
            raise _corrupt(self.path, f"{key} claims to hold {length} strings")
        self.need(length * 8)
        if length <= _MAX_KEPT_ELEMENTS:
            return tuple(self.string(key).decode(errors="replace") for _ in range(length))
        start = self.position
        for _ in range(length):
            end = self.position + 8
            if end > len(self._buffer):
                self.need(8)
            end += _U64.unpack_from(self._buffer, self.position)[0]
            if end > len(self._buffer):
                self.need(end - self.position)
            self.position = end
        return LargeArray(length, hashlib.sha256(memoryview(self._buffer)[start : self.position]).hexdigest())


def _read_file(path: Path) -> GgufModel:
    """Read one file, shard or not."""
    try:
        os.fspath(path).encode()  # what is not UTF-8 can be written neither to plans nor to the terminal
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device never end
            raise InvalidFileError(f"{path} is not a file.", "Name a .gguf file.")
        with open(path, "rb") as file:
            header = _Header(path, file, status.st_size)
            n_tensors, n_metadata = _read_counts(header)
            metadata = _read_metadata(header, n_metadata)
            tensors = _read_tensor_table(header, n_tensors, metadata, status.st_size)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # a NUL in the path, or bytes that are not UTF-8
        raise InvalidFileError(f"{str(path)!a} is not a path.", "Give the file a name in UTF-8.") from error
    return GgufModel(MappingProxyType(metadata), tensors, (path,), status.st_size)


def _read_counts(header: _Header) -> tuple[int, int]:
    """Check the fixed part and return the number of tensors and of metadata entries."""
    path = header.path
    try:
        magic = header.take(4)
    except InvalidFileError:
        magic = b""
    if magic != b"GGUF":
        raise InvalidFileError(f"{path} is not a GGUF file.", "Name a .gguf file, for example one from Hugging Face.")
    version = header.number("I")
    if version and version & 0xFFFF == 0:
        raise InvalidFileError(f"{path} is a big-endian GGUF file.", "Convert it to little-endian first.")
    if version not in (2, 3):
        raise InvalidFileError(
            f"{path} has the unknown GGUF version {version}.", "Convert the model to GGUF version 3."
        )
    n_tensors, n_metadata = header.number("Q"), header.number("Q")
    if n_tensors > _MAX_TENSORS:
        raise _corrupt(path, f"it claims to hold {n_tensors} tensors")
    if n_metadata > _MAX_METADATA_ENTRIES:
        raise _corrupt(path, f"it claims to hold {n_metadata} metadata entries")
    return n_tensors, n_metadata


def _read_metadata(header: _Header, n_entries: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(n_entries):
        key = header.name(f"the key of metadata entry {index}", _MAX_KEY_BYTES)
        if key in metadata:
            raise _corrupt(header.path, f"the key {key} occurs twice")
        metadata[key] = header.value(key)
    return metadata


def _read_tensor_table(
    header: _Header, n_tensors: int, metadata: Mapping[str, MetadataValue], file_bytes: int
) -> tuple[GgufTensor, ...]:
    """Read the table and check that the data it describes is packed as llama.cpp demands and lies within the file."""
    path = header.path
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _corrupt(path, "general.alignment is not a power of two")
    entries: dict[str, tuple[int, tuple[int, ...], int, int]] = {}  # type, shape, bytes, offset in the data
    next_offset = 0
    for index in range(n_tensors):
        name = header.name(f"the name of tensor {index}", _MAX_TENSOR_NAME_BYTES)
        if name in entries:
            raise _corrupt(path, f"the tensor {name} occurs twice")
        n_dimensions = header.number("I")
        if n_dimensions > _MAX_DIMENSIONS:
            raise _corrupt(path, f"{name} claims to have {n_dimensions} dimensions")
        shape = tuple(header.number("Q") for _ in range(n_dimensions)) or (1,)
        ggml_type, offset = header.number("I"), header.number("Q")
        if offset != next_offset:
            raise _corrupt(path, f"the data of {name} starts at offset {offset} instead of {next_offset}")
        size_bytes = _tensor_size_bytes(path, name, ggml_type, shape)
        next_offset += _aligned(size_bytes, alignment)
        entries[name] = (ggml_type, shape, size_bytes, offset)
    data_start = _aligned(header.position, alignment)
    tensors = tuple(
        GgufTensor(name, GGML_TYPES[ggml_type][0], ggml_type, shape, size_bytes, path, data_start + offset)
        for name, (ggml_type, shape, size_bytes, offset) in entries.items()
    )
    end = max((tensor.offset_bytes + tensor.size_bytes for tensor in tensors), default=0)
    if end > file_bytes:
        raise _truncated(path, end - file_bytes)
    return tensors


def _tensor_size_bytes(path: Path, name: str, ggml_type: int, shape: tuple[int, ...]) -> int:
    if ggml_type not in GGML_TYPES:
        raise InvalidFileError(
            f"{path}: {name} has the unknown type {ggml_type}.",
            "The file is corrupt, or of a format that this version does not support.",
        )
    type_name, block_elements, block_bytes = GGML_TYPES[ggml_type]
    n_elements = math.prod(shape)
    if max(*shape, n_elements) > _MAX_ELEMENTS // block_bytes:
        raise _corrupt(path, f"{name} claims the impossible shape {shape}")
    if shape[0] % block_elements:
        raise _corrupt(
            path, f"rows of {name} have {shape[0]} elements, not a multiple of {type_name}'s {block_elements}"
        )
    return n_elements // block_elements * block_bytes


def _aligned(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
