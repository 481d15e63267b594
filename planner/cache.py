"""The user's cache of profiles and plans, keyed by everything that could make an entry stale."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from .errors import AtsplanError, InvalidFileError
from .hardware import Software
from .measurements import PROFILE_SCHEMA_VERSION, Profile, Series
from .plan import PLAN_SCHEMA_VERSION, Plan
from .records import read_record, to_json, write_record, write_text
from .workload import Workload

Record = TypeVar("Record", Profile, Plan)

logger = logging.getLogger(__name__)

_SILENT_WAIT_SECONDS = 0.5  # for a lock; storing a record takes less

MAX_NOISY_FRACTION = 0.25  # of a profile's series; beyond it the machine was busy and the plan would be luck


def cache_folder() -> Path:
    """Return $ATSPLAN_CACHE, $XDG_CACHE_HOME/atsplan or ~/.cache/atsplan, without creating it."""
    if os.environ.get("ATSPLAN_CACHE"):
        return Path(os.environ["ATSPLAN_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "atsplan"
    return Path.home() / ".cache" / "atsplan"


def store_profile(profile: Profile) -> Path:
    """Store `profile` as the one to find for its model, hardware, software and settings. Return its file."""
    return _store("profiles", _profile_name(profile), profile)


def find_profile(
    model_fingerprint: str,
    hardware_fingerprint: str | None = None,
    software: Software | None = None,
    *,
    n_context: int | None = None,
    n_ubatch: int | None = None,
    thread_counts: tuple[int, ...] | None = None,
    is_simulated: bool | None = None,
    device: str | None = None,
) -> Profile | None:
    """Return the newest profile that matches everything that is given, or None.

    `thread_counts` need only be among those measured. What is found becomes the last profile.
    """
    for path, profile in _profiles(model_fingerprint, hardware_fingerprint):
        if (
            (software is None or profile.software == software)
            and (n_context is None or profile.n_context == n_context)
            and (n_ubatch is None or profile.n_ubatch == n_ubatch)
            and (thread_counts is None or set(thread_counts) <= set(profile.thread_counts))
            and (is_simulated is None or profile.is_simulated == is_simulated)
            and (device is None or profile.state.device in ("", device))
        ):
            _touch(path)
            return profile
    return None


def profiles(model_fingerprint: str, hardware_fingerprint: str) -> Iterator[Profile]:
    """Yield the profiles of a model on a machine, the newest first."""
    for _, profile in _profiles(model_fingerprint, hardware_fingerprint):
        yield profile


def _profiles(model_fingerprint: str, hardware_fingerprint: str | None) -> Iterator[tuple[Path, Profile]]:
    hardware = _digest(hardware_fingerprint) if hardware_fingerprint is not None else "*"
    for path in _newest_first("profiles", f"{_digest(model_fingerprint)}-{hardware}-*.v{PROFILE_SCHEMA_VERSION}.json"):
        profile = _load(path, Profile)
        if (
            profile is not None
            and profile.model.fingerprint == model_fingerprint
            and (hardware_fingerprint is None or profile.hardware.fingerprint == hardware_fingerprint)
        ):
            yield path, profile


def last_profile() -> Profile | None:
    """Return the profile that was stored or found last, or None."""
    for path in _newest_first("profiles", f"*.v{PROFILE_SCHEMA_VERSION}.json"):
        profile = _load(path, Profile)
        if profile is not None:
            return profile
    return None


def noisy_fraction(profile: Profile) -> float:
    """Return the share of the profile's series whose spread is too large to be trusted (0 to 1)."""
    groups = (profile.kernels, profile.glue, profile.link, profile.crossings, profile.experts)
    series: list[Series] = [timing.seconds for group in groups for timing in group]
    return sum(item.is_noisy for item in series) / len(series) if series else 0.0


def is_too_noisy(profile: Profile) -> bool:
    """Tell whether the profile must not be cached: a machine that busy gives a plan for another machine."""
    return noisy_fraction(profile) > MAX_NOISY_FRACTION


def plan_key(profile: Profile, budget_bytes: int, workload: Workload, objective: str) -> str:
    """Return the key of the plan that these inputs give: they, and the planner's own code, decide everything."""
    code = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        code.update(source.read_bytes())
    inputs = [to_json(profile), budget_bytes, asdict(workload), objective, code.hexdigest()]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


def store_plan(key: str, plan: Plan) -> Path:
    """Store the plan under `plan_key(...)`. Return its file."""
    return _store("plans", f"{_digest(key)}.v{PLAN_SCHEMA_VERSION}.json", plan)


def find_plan(key: str) -> Plan | None:
    path = cache_folder() / "plans" / f"{_digest(key)}.v{PLAN_SCHEMA_VERSION}.json"
    return _load(path, Plan) if path.exists() else None


def remember_model_path(model_fingerprint: str, path: str | os.PathLike[str]) -> None:
    """Remember where the model with this fingerprint was last seen, so that a plan finds it again."""
    folder = cache_folder() / "models"
    with locked(folder):
        write_text(folder / f"{_digest(model_fingerprint)}.path", os.path.abspath(path))


def model_path(model_fingerprint: str) -> Path | None:
    """Return the model file remembered for this fingerprint if it still exists, or None."""
    try:
        path = Path((cache_folder() / "models" / f"{_digest(model_fingerprint)}.path").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return path if path.is_file() else None


@contextmanager
def best_effort() -> Iterator[None]:
    """Warn of what keeps the block from using the cache: a result that took minutes must not be lost for that."""
    try:
        yield
    except AtsplanError as error:
        logger.warning("%s", error)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock against other processes, waiting for it. Creates the folder. Raises AtsplanError.

    Who waits for long is told for whom: the lock holds its owner's process id.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise AtsplanError(
            f"Cannot use the cache {folder}: {error.strerror}.", "Set ATSPLAN_CACHE to a folder you can write to."
        ) from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _SILENT_WAIT_SECONDS
    while not _try_lock(descriptor, fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            owner = os.pread(descriptor, 20, 0)
            who = f"process {int(owner)}" if owner.isdigit() else "another process"
            logger.warning("Waiting for %s, which is using %s ...", who, folder)
            _try_lock(descriptor)
            break
        time.sleep(_SILENT_WAIT_SECONDS / 20)
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def _try_lock(descriptor: int, flags: int = 0) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        return False
    return True


def _profile_name(profile: Profile) -> str:
    settings = [
        profile.n_context, profile.n_ubatch, profile.is_simulated, profile.thread_counts, profile.state.device
    ]  # fmt: skip
    rest = json.dumps([asdict(profile.software), settings])
    parts = (profile.model.fingerprint, profile.hardware.fingerprint, rest)
    return "-".join(_digest(part) for part in parts) + f".v{PROFILE_SCHEMA_VERSION}.json"


def _store(kind: str, name: str, record: Profile | Plan) -> Path:
    folder = cache_folder() / kind
    with locked(folder):
        write_record(folder / name, record)
    return folder / name


def _load(path: Path, cls: type[Record]) -> Record | None:
    """Return the entry, or None after discarding it if it is corrupt."""
    try:
        return read_record(path, cls)
    except InvalidFileError:
        pass
    with best_effort(), locked(path.parent):  # another process may have replaced it just now: look again
        try:
            return read_record(path, cls)
        except InvalidFileError as error:
            logger.warning("Discarded a damaged cache entry. %s", error)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                logger.warning("Could not delete %s", path)
    return None


def _newest_first(kind: str, pattern: str) -> list[Path]:
    dated = []
    for path in (cache_folder() / kind).glob(pattern):
        try:
            dated.append((path.stat().st_mtime_ns, path))
        except OSError:  # deleted meanwhile
            continue
    return [path for _, path in sorted(dated, reverse=True)]


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        logger.debug("Could not touch %s", path)


def _digest(text: str) -> str:
    """Return 16 hex digits. Fingerprints come from files, so they are never used as file names themselves."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
