"""What a plan is optimised for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One typical request. Token counts, not bytes; threads = 0 lets the planner choose."""

    n_prompt_tokens: int = 512
    n_generated_tokens: int = 256
    n_context: int = 4096
    n_ubatch: int = 512
    n_threads: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True


PRESETS: dict[str, tuple[int, int]] = {  # name -> prompt tokens, generated tokens
    "chat": (512, 256),
    "agent": (4096, 256),
    "summarise": (8192, 512),
}
