"""Plans and profiles that people share: a folder per machine, in it one per model. Shipped, and the user's own."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from . import cache
from .errors import AtsplanError, InvalidFileError
from .hardware import Gpu, Hardware
from .measurements import Profile
from .plan import Plan
from .records import kind_of_file, read_record, write_record
from .units import GIB, MIB

logger = logging.getLogger(__name__)

Record = TypeVar("Record", Plan, Profile)

BENCH_SUFFIX = ".bench.json"
PRESSURE_SUFFIX = ".pressure.json"
PROFILE_PREFIX = "profile"
_NOISE_WORDS = re.compile(
    r"\(r\)|\(tm\)|nvidia|geforce|intel|amd\b|core\b|processor|cpu|gpu|with radeon.*|@.*|\d+-core", re.IGNORECASE
)


@dataclass(frozen=True)
class Entry(Generic[Record]):
    path: Path
    record: Record


def folders() -> list[Path]:
    """Return where shared plans lie: the user's own folder, which may not exist, then the shipped one."""
    here = Path(__file__).parent
    shipped = [here / "shipped_plans", here.parent / "plans"]  # of an installed wheel, of a checkout
    return [own_folder(), *(folder for folder in shipped if folder.is_dir())][:2]


def own_folder() -> Path:
    """Return $ATSPLAN_PLANS, or a folder in the cache."""
    named = os.environ.get("ATSPLAN_PLANS")
    return Path(named) if named else cache.cache_folder() / "library"


def files(folder: Path) -> list[Path]:
    """Return the plans, profiles and measurements of plans in `folder`, sorted."""
    return sorted(folder.glob("*/*/*.json"))


def kind_of(path: Path) -> type[Plan] | type[Profile] | None:
    """Return what a library file must hold, by its name; None for what was measured with a plan."""
    if path.name.endswith((BENCH_SUFFIX, PRESSURE_SUFFIX)):
        return None
    return Profile if path.name.startswith(PROFILE_PREFIX) else Plan


def read_library_file(path: Path) -> Plan | Profile | None:
    """Return what the name promises. Raises InvalidFileError if it is something else."""
    kind = kind_of(path)
    return None if kind is None else read_record(path, kind)


def read_plan_or_profile(path: Path) -> Plan | Profile:
    """Return what the file holds. Raises InvalidFileError; a broken file is reported as what it seems to be."""
    return read_record(path, Profile) if kind_of_file(path) == "profile" else read_record(path, Plan)


def plans() -> Iterator[Entry[Plan]]:
    """Yield every plan that can be read."""
    return _entries(Plan)


def profiles() -> Iterator[Entry[Profile]]:
    return _entries(Profile)


def _entries(kind: type[Record]) -> Iterator[Entry[Record]]:
    for folder in folders():
        for path in files(folder):
            if kind_of(path) is kind:
                try:
                    yield Entry(path, read_record(path, kind))
                except InvalidFileError as error:
                    logger.warning("Ignored. %s", error)


def nearest(entries: Iterable[Entry[Record]], hardware: Hardware) -> list[Entry[Record]]:
    """Return the entries, those of the most similar machine first."""
    return sorted(entries, key=lambda entry: (distance(entry.record.hardware, hardware), str(entry.path)))


def differences(there: Hardware, here: Hardware) -> list[str]:
    """Return what is different there, in words; empty if both machines have the same fingerprint."""
    if there.fingerprint == here.fingerprint:
        return []
    found = []
    if there.gpu is None or here.gpu is None:
        if there.gpu is not here.gpu:
            found.append(f"{there.gpu_name} instead of {here.gpu_name}")
    else:
        if there.gpu.name != here.gpu.name:
            found.append(f"{there.gpu.name} instead of {here.gpu.name}")
        if round(there.gpu.memory_bytes / GIB) != round(here.gpu.memory_bytes / GIB):
            found.append(f"{_gib(there.gpu.memory_bytes)} instead of {_gib(here.gpu.memory_bytes)} of VRAM")
        if _lanes(there.gpu) != _lanes(here.gpu):
            found.append(f"PCIe {_lanes(there.gpu)} instead of {_lanes(here.gpu)}")
    if there.cpu.model != here.cpu.model:
        found.append(f"{there.cpu.model} instead of {here.cpu.model}")
    if there.cpu.physical_cores != here.cpu.physical_cores:
        found.append(f"{there.cpu.physical_cores} instead of {here.cpu.physical_cores} cores")
    if round(there.cpu.memory_bytes / GIB) != round(here.cpu.memory_bytes / GIB):
        found.append(f"{_gib(there.cpu.memory_bytes)} instead of {_gib(here.cpu.memory_bytes)} of RAM")
    return found or ["small differences of CPU or GPU"]


def distance(there: Hardware, here: Hardware) -> float:
    """Return how unlike two machines are: 0 for the same fingerprint; what decides about speed counts most."""
    if there.fingerprint == here.fingerprint:
        return 0.0
    total = 0.1 + 2.0 * (there.cpu.model != here.cpu.model)
    total += 2 * _octaves(there.cpu.physical_cores, here.cpu.physical_cores)
    total += 0.2 * _octaves(there.cpu.memory_bytes, here.cpu.memory_bytes)
    if there.gpu is None or here.gpu is None:
        return total + (0.0 if there.gpu is here.gpu else 100.0)
    total += 4.0 * (there.gpu.name != here.gpu.name) + 10.0 * (there.gpu.backend != here.gpu.backend)
    total += _octaves(there.gpu.memory_bytes, here.gpu.memory_bytes)
    return total + 3 * _octaves(_link_rate(there.gpu), _link_rate(here.gpu))


def profile_of(plan: Plan, *in_folders: Path) -> Entry[Profile] | None:
    """Return the profile that the plan was made from: in one of the folders, or None."""
    for path in (path for folder in in_folders for path in sorted(folder.glob(f"{PROFILE_PREFIX}*.json"))):
        try:
            profile = read_record(path, Profile)
        except InvalidFileError:
            continue
        if is_profile_of(plan, profile):
            return Entry(path, profile)
    return None


def is_profile_of(plan: Plan, profile: Profile) -> bool:
    """Tell whether the plan was made from this profile, as far as can be seen."""
    return (
        profile.model.fingerprint == plan.model.fingerprint
        and profile.hardware.fingerprint == plan.hardware.fingerprint
        and profile.n_ubatch == plan.workload.n_ubatch
        and plan.workload.n_threads in profile.thread_counts
        and profile.is_simulated == plan.is_simulated
        and plan.profiled_at in ("", profile.state.taken_at)
    )


def find_profile_of(plan: Plan, plan_path: Path) -> Profile | None:
    """Return the plan's profile from beside it, from the cache or from the library, or None."""
    if beside := profile_of(plan, plan_path.parent):
        return beside.record
    for profile in cache.profiles(plan.model.fingerprint, plan.hardware.fingerprint):
        if is_profile_of(plan, profile):
            return profile
    shared = profile_of(plan, *(folder / place_of(plan) for folder in folders()))
    return shared.record if shared else None


def place_of(record: Plan | Profile) -> Path:
    """Return the folder of a record below a library: `rtx-4070-12g-ryzen-7-7700-8c/qwen3-14b-q4-k-m`."""
    return Path(hardware_slug(record.hardware)) / _slug(record.model.file_name.removesuffix(".gguf"))


def hardware_slug(hardware: Hardware) -> str:
    gpu = hardware.gpu
    card = f"{_NOISE_WORDS.sub(' ', gpu.name)} {_gib_number(gpu.memory_bytes)}g" if gpu else "no gpu"
    return _slug(f"{card} {_NOISE_WORDS.sub(' ', hardware.cpu.model)} {hardware.cpu.physical_cores}c")


def add(record: Plan | Profile, name: str = "") -> Path:
    """Write `record` into the user's own folder, without what identifies the machine, and return its file.

    A plan is named after its budget and context, `6g-4k.json`. Raises AtsplanError if another record has the name.
    """
    if isinstance(record, Profile):
        record = replace(record, state=replace(record.state, gpu_uuid=""))
        name = name or PROFILE_PREFIX
    else:
        name = name or f"{_short(record.vram.budget_bytes)}-{_thousands(record.workload.n_context)}"
    path = own_folder() / place_of(record) / f"{name.removesuffix('.json')}.json"
    if kind_of(path) is not type(record) or Path(name).name != name:
        raise AtsplanError(f"A {type(record).__name__.lower()} cannot be called {name}.", "Choose another --name.")
    if path.exists():
        if read_record(path, type(record)) != record:
            raise AtsplanError(f"{path} is there already, with other content.", "Choose another --name.")
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtsplanError(f"Cannot create {path.parent}: {error.strerror}.", "Set ATSPLAN_PLANS.") from error
    write_record(path, record)
    return path


def add_profile_of(plan: Plan, profile: Profile) -> Path:
    """Write the plan's profile into the user's own folder, if it is not there, under a free name. Return its file.

    Raises AtsplanError.
    """
    folder = own_folder() / place_of(plan)
    if there := profile_of(plan, folder):
        return there.path
    names = itertools.chain([PROFILE_PREFIX], (f"{PROFILE_PREFIX}-{n}" for n in itertools.count(2)))
    return add(profile, next(name for name in names if not (folder / f"{name}.json").exists()))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def _short(size_bytes: int) -> str:
    return f"{size_bytes // GIB}g" if size_bytes % GIB == 0 else f"{size_bytes // MIB}m"


def _thousands(n_tokens: int) -> str:
    return f"{n_tokens // 1024}k" if n_tokens % 1024 == 0 else str(n_tokens)


def _octaves(one: float, other: float) -> float:
    return abs(math.log2(one / other)) if one > 0 and other > 0 else 0.0


def _link_rate(gpu: Gpu) -> float:
    return float(gpu.pcie_width * 2**gpu.pcie_generation) if gpu.pcie_width else 0.0


def _lanes(gpu: Gpu) -> str:
    return f"{gpu.pcie_generation}.0 x{gpu.pcie_width}" if gpu.pcie_width else "unknown"


def _gib_number(size_bytes: int) -> int:
    return round(size_bytes / GIB)


def _gib(size_bytes: int) -> str:
    return f"{_gib_number(size_bytes)} GiB"
