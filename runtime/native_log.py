"""What llama.cpp and ggml say when something goes wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence


def last_problem(lines: Sequence[str]) -> str:
    """Return the message among llama.cpp's log lines that says best what went wrong, or ""."""
    told = [line.strip() for line in lines if line.strip()]
    for pattern in (
        r"GGML_ASSERT|ggml_abort",
        r"out of memory|unable to allocate",
        r"\berror\b.*: |\binvalid\b",
        r"\bfailed\b",
    ):
        for line in reversed(told):
            if re.search(pattern, line, re.IGNORECASE) and not re.search(r"failed to load model\b", line):
                return re.sub(r"^(\S*: |error loading model: )+", "", line)
    return told[-1] if told else ""
