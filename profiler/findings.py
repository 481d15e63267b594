"""One thing that was looked at, how it stands, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """`warning`: it runs, but not as well as it could. `error`: no plan can run on a GPU here.

    A warning and an error always have a remedy; where all is well it is advice, or empty.
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""
