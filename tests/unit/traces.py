"""Traces for tests: a run that is slowed down halfway, is changed twice, and recovers."""

from __future__ import annotations

from planner.plan import Plan
from planner.trace import CardSample, Change, PromptSample, TokenSample, Trace
from planner.units import MIB

N_TOKENS = 60


def slowed_trace(plan: Plan, *, reason: str = "The CPU is slower than planned.", is_adaptive: bool = True) -> Trace:
    """Return 60 tokens after a prompt of 2 s: 50 ms each, from the 20th on 100 ms, from the 40th on 80 ms."""
    tokens, now = [], 2.0
    for index in range(N_TOKENS):
        seconds = 0.05 if index < 20 else 0.1 if index < 40 else 0.08
        now += seconds
        streamed_bytes = (200 if index < 40 else 300) * MIB
        tokens.append(TokenSample(now, seconds, 0.5 * seconds, 0.3 * seconds, 0.8 * seconds, streamed_bytes))
    changes = (
        Change(tokens[39].at_seconds, reason, 200 * MIB, 300 * MIB, 64 * MIB, 0.45, 0.98),
        Change(tokens[50].at_seconds, reason, 300 * MIB, 300 * MIB, 96 * MIB, 0.5, 1.0),
    )
    card = tuple(
        CardSample(float(second), 1980 - 100 * second, 40 + second, ("power limit",) if second > 5 else (), 512 * MIB)
        for second in range(8)
    )
    prompts = (PromptSample(2.0, 2.0, 512),)
    return Trace(plan, plan.hardware, is_adaptive, tuple(tokens), prompts, changes if is_adaptive else (), card)
