"""What commands tell the user beside their result."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print to stderr at once: stdout is for results, which may be piped on."""
    print(text, file=sys.stderr, flush=True)
