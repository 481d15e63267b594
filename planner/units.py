"""Sizes: parsing what people type, printing what they read. Everything else counts bytes."""

from __future__ import annotations

import re

from .errors import AtsplanError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(K|M|G|T)(?:iB)?\s*$")
_SCALE = {"K": KIB, "M": MIB, "G": GIB, "T": 1024 * GIB}


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`, such as `6G`, `6GiB` or `6144M` (binary units).

    Raises AtsplanError for anything else: `6Gb` is gigabits to some and gigabytes to others.
    """
    match = _SIZE.match(text)
    size = round(float(match[1]) * _SCALE[match[2]]) if match else 0
    if size <= 0:
        raise AtsplanError(f"'{text}' is not a size.", "Write it like 6G, 6GiB or 6144M (binary units).")
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
