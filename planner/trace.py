"""The trace of a run: what every token took, what the load-aware runtime changed, and what the card said meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .plan import Plan

# History: 1 = first version.
TRACE_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TokenSample:
    """One decoded token. `at_seconds` counts from the start of the trace, as everywhere here, to the token's end."""

    at_seconds: float
    seconds: float
    cpu_seconds: float  # computing on the CPU
    wait_seconds: float  # of the host thread, for results of the GPU
    link_seconds: float  # weights under way; estimated from sampled copies
    streamed_bytes: int


@dataclass(frozen=True)
class PromptSample:
    """A batch of tokens evaluated at once."""

    at_seconds: float
    seconds: float
    n_tokens: int


@dataclass(frozen=True)
class Change:
    """The runtime moved weights, resized the ring, or took other threads. Speeds are fractions of what was planned."""

    at_seconds: float
    reason: str
    streamed_bytes_before: int  # per token
    streamed_bytes_after: int
    ring_bytes: int
    cpu_speed: float
    link_speed: float
    n_threads: int = 0  # 0: not recorded


@dataclass(frozen=True)
class CardSample:
    """The card's own account, at most once a second."""

    at_seconds: float
    clock_mhz: int
    temperature_celsius: int
    throttle_reasons: tuple[str, ...]
    free_vram_bytes: int


@dataclass(frozen=True)
class Trace:
    plan: Plan
    hardware: Hardware  # where it ran
    is_adaptive: bool
    tokens: tuple[TokenSample, ...]
    prompts: tuple[PromptSample, ...]
    changes: tuple[Change, ...]
    card: tuple[CardSample, ...]
    schema_version: int = TRACE_SCHEMA_VERSION
