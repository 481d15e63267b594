"""Sizes and counts: parsing what people type, printing what they read. Everything else counts bytes."""

from __future__ import annotations

import re

from .errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTkmgt](?:i?B)?)?\s*$", re.ASCII)
_HOW = "Write it like 6G, 6GB, 6GiB or 6144M, all in units of 1024."
_SCALE = {"K": KIB, "M": MIB, "G": GIB, "T": 1024 * GIB}


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`, such as `6G`, `6GB`, `6GiB` or `6144M`: all mean units of 1024.

    Raises UsageError for anything else: `6Gb` is gigabits to some and gigabytes to others.
    """
    match = _SIZE.match(text)
    if match and not match["unit"]:
        raise UsageError(f"'{text}' has no unit.", _HOW)
    size = round(float(match["number"]) * _SCALE[match["unit"][0].upper()]) if match else 0
    if size <= 0:
        raise UsageError(f"'{text}' is not a size.", _HOW)
    return size


def mib_ceil(size_bytes: int) -> int:
    """Return the number of whole MiB that hold `size_bytes`."""
    return -(-size_bytes // MIB)


def format_size(size_bytes: float) -> str:
    """Return a size for people: `6.00 GiB`, `51 MiB`, `0.7 MiB`."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if abs(size_bytes) >= 10 * MIB:
        return f"{size_bytes / MIB:.0f} MiB"
    return f"{size_bytes / MIB:.1f} MiB"


def format_count(n: int, noun: str) -> str:
    """Return a count for people: `1 thread`, `8 threads`; `noun` takes an s."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
