"""Profiles, plans and other records as JSON files: strict reading, exact round trips, atomic writing."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional, TypeVar

import pydantic
import pydantic_core
from pydantic.json_schema import GenerateJsonSchema

from .errors import AtsplanError, InvalidFileError, UsageError

Record = TypeVar("Record")

MAX_FILE_BYTES = 64 * 1024**2  # a 70B model's profile takes about 2 MB; more is no profile
MAX_INTEGER = 2**53  # larger ones do not survive other programs' JSON, and overflow the solvers
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a stranger's file must not steer the terminal
MAX_NUMBER = 1e18  # larger rates than of any machine; quotients of larger ones overflow
_TELLING = {  # fields that the others lack; of a damaged file, some may be there
    "plan": ("placements", "prediction"),
    "profile": ("kernels", "weights"),
    "bench result": ("measured", "ablations"),
    "trace": ("tokens", "changes"),
    "pressure result": ("adaptive", "static"),
}
_DAMAGED = "Make it again, or get another copy."
MAX_SECONDS = 1e6  # a longer measurement is a wrong unit; a sum of them in nanoseconds would overflow


@lru_cache
def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    # Optional, because pydantic takes no configuration for a bare dataclass. It is passed on to nested ones.
    config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return pydantic.TypeAdapter(Optional[cls], config=config)  # noqa: UP045


def to_json(record: object) -> str:
    """Return `record` (a dataclass instance) as JSON text. Raises AtsplanError if a reader would refuse it."""
    problem = _find_bad_value(record, "")
    if problem:
        raise AtsplanError(f"Cannot write {type(record).__name__}: {problem}.")
    try:
        kind: Any = type(record)
        return _adapter(kind).dump_json(record, indent=1).decode() + "\n"
    except pydantic_core.PydanticSerializationError as error:
        raise AtsplanError(f"Cannot write {type(record).__name__}: {error}.") from error


def json_schema(*classes: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema of files that hold a record of one of `classes`. The reader is stricter about numbers."""
    definitions: dict[str, Any] = {}
    for kind in classes:
        cls: Any = kind
        definitions |= _adapter(cls).json_schema(schema_generator=_SchemaWithoutTitles)["$defs"]
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "anyOf": [{"$ref": f"#/$defs/{cls.__name__}"} for cls in classes],
        "$defs": dict(sorted(definitions.items())),
    }


class _SchemaWithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would only repeat the name


def from_json(data: bytes, cls: type[Record], source: str) -> Record:
    """Return the record in `data`. Raises InvalidFileError that starts with `source` and names the bad field."""
    try:
        raw = pydantic_core.from_json(data)
    except ValueError as error:
        raise InvalidFileError(f"{source}: not JSON: {error}.", _DAMAGED) from error
    if not isinstance(raw, dict):
        raise InvalidFileError(f"{source}: not a {_kind_name(cls)}: the file holds no JSON object.", _DAMAGED)
    _check_schema_version(raw, cls, source)
    try:
        kind: Any = cls
        record: Record = _adapter(kind).validate_json(data)
    except pydantic.ValidationError as error:
        _check_kind(raw, cls, source)
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        problem = first["msg"].removeprefix("Value error, ")  # of our own
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InvalidFileError(f"{source}: {_path(first['loc'])}: {problem}.{more}", _DAMAGED) from error
    problem = _find_bad_value(record, "")
    if problem:
        raise InvalidFileError(f"{source}: {problem}.", _DAMAGED)
    return record


def read_record(path: str | os.PathLike[str], cls: type[Record]) -> Record:
    """Return the record in the file. Raises InvalidFileError if it is missing, too large, or not a valid `cls`."""
    return from_json(_read(Path(path), _kind_name(cls)), cls, str(path))


def kind_of_file(path: str | os.PathLike[str]) -> str:
    """Return what the file seems to hold: "plan", "profile", "trace", "bench result", "pressure result", or "".

    Raises InvalidFileError if it cannot be read.
    """
    try:
        raw = pydantic_core.from_json(_read(Path(path), "plan"))
    except ValueError:
        return ""
    return _telling_kind(raw) if isinstance(raw, dict) else ""


def _read(path: Path, kind: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a FIFO must not block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidFileError(f"{path}: not a regular file.", f"Name a {kind}.")
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidFileError(f"{path}: cannot be read: {reason}.", "Check the path and its permissions.") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidFileError(f"{path}: over {MAX_FILE_BYTES // 1024**2} MiB: not a {kind}.", f"Name a {kind}.")
    return data


def _kind_name(cls: type[Any]) -> str:
    """Return "bench result" for BenchResult."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()


def _telling_kind(raw: dict[str, Any]) -> str:
    return next((kind for kind, fields in _TELLING.items() if raw.keys() & fields), "")


def write_record(path: str | os.PathLike[str], record: object) -> None:
    """Write atomically: after a kill or a full disk the file is the old one or the new one. Raises AtsplanError."""
    write_text(path, to_json(record))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` atomically, through a temporary file in the same folder. Raises AtsplanError."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout must not be replaced
            Path(path).write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        temporary = target.parent / f".atsplan-{secrets.token_hex(8)}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AtsplanError(f"Cannot write {path}: {reason}.", "Choose another file or make room.") from error


def check_targets(*paths: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raise UsageError for what `write_text` could not write, or what is read too: better now than after a long run."""
    sources = [os.path.realpath(path) for path in inputs if path is not None]
    for path in filter(None, paths):
        if os.path.realpath(path) in sources and path.is_file():
            raise UsageError(f"{path} is read, and would be overwritten.", "Write to another file.")
        folder = Path(os.path.realpath(path)).parent
        if path.is_dir():
            raise UsageError(f"{path} is a folder.", "Name a file.")
        if path.exists() and not path.is_file():
            continue
        if not folder.is_dir():
            raise UsageError(f"There is no folder {folder}.", "Choose another file.")
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{folder} cannot be written to.", "Choose another file.")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_schema_version(raw: dict[str, Any], cls: type[Any], source: str) -> None:
    """Refuse other versions before anything else, so that a newer file is not reported as malformed."""
    known: Any = next((field.default for field in dataclasses.fields(cls) if field.name == "schema_version"), None)
    if known is None:
        return
    found = raw.get("schema_version")
    kind = _kind_name(cls)
    if found is None:
        raise InvalidFileError(f"{source}: not a {kind}: schema_version is missing.", f"Name a {kind}.")
    if found != known or isinstance(found, bool):
        newer = isinstance(found, int) and found > known
        remedy = "Upgrade atsplan." if newer else f"Make the {kind} again with this version of atsplan."
        raise InvalidFileError(
            f"{source}: {kind} of schema version {found!r:.40}; this atsplan reads version {known}.", remedy
        )


def _check_kind(raw: dict[str, Any], cls: type[Any], source: str) -> None:
    """Refuse a record of another kind as such: a profile for a plan has fields too few and fields too many."""
    fields = dataclasses.fields(cls)
    nothing = dataclasses.MISSING
    missing = [f.name for f in fields if f.name not in raw and f.default is nothing and f.default_factory is nothing]
    if missing and raw.keys() - {field.name for field in fields}:
        kind = _kind_name(cls)
        found = _telling_kind(raw)
        reason = f"it is a {found}" if found not in ("", kind) else f"{missing[0]} is missing"
        raise InvalidFileError(f"{source}: not a {kind}: {reason}.", f"Name a {kind}.")


def _find_bad_value(value: object, path: str) -> str:
    """Return `path: problem` for the first value that no record can mean, or "". Only temperatures go below zero."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = f"{path}.{field.name}" if path else field.name
            problem = _find_bad_value(getattr(value, field.name), inner)
            if problem:
                return problem
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            problem = _find_bad_value(item, f"{path}.{index}")
            if problem:
                return problem
    elif isinstance(value, dict):
        for key, item in value.items():
            problem = _find_bad_value(item, f"{path}.{key}")
            if problem:
                return problem
    elif isinstance(value, float):
        if not math.isfinite(value) or value < 0:
            return f"{path}: {value} is not a finite number of at least 0"
        if value > MAX_SECONDS and (".samples." in path or path.endswith("seconds")):
            return f"{path}: {value:g} seconds cannot be right"
        if value > MAX_NUMBER:
            return f"{path}: {value:g} cannot be right"
    elif isinstance(value, str):
        if _CONTROL_CHARACTERS.search(value):
            return f"{path}: holds control characters"
    elif isinstance(value, int) and not path.endswith("_celsius") and not 0 <= value <= MAX_INTEGER:
        return f"{path}: must be between 0 and 2^53"
    return ""


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "top level"
