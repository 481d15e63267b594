"""Which experts real text is routed to: a profile with the counts, and two figures that tell what a cache is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.errors import InvalidFileError
from planner.measurements import Profile, Routing
from runtime.routing import count_routing


def with_routing(profile: Profile, model: Path, text_file: Path) -> Profile:
    """Return the profile with the routing of the text in `text_file`, counted by the model itself on the CPU.

    Raises AtsplanError if the text cannot be read or the model has no experts.
    """
    try:
        text = text_file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidFileError(
            f"{text_file}: {error.strerror or error}.", "Name a text file with --routing."
        ) from error
    return replace(profile, routing=count_routing(model, text, profile.hardware.cpu.physical_cores))


def describe(routing: Routing) -> str:
    return (
        f"Routing of {routing.n_tokens} tokens: entropy {routing.entropy_fraction:.1%} of uniform routing's; "
        f"the most used tenth of all experts takes {routing.top_tenth_fraction:.0%} of the uses."
    )
