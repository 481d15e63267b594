"""What a plan is optimised for."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

# Others crash llama.cpp's attention.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0")


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


def parse_kv_types(text: str) -> tuple[str, str]:
    """Return the types of keys and values in `q8_0`, which is both, or `q8_0/q4_0`."""
    types = text.split("/")
    if len(types) > 2 or not set(types) <= set(KV_TYPES):
        raise UsageError(
            f"'{text}' is no type of a KV cache.", f"Write it like q8_0, or q8_0/q4_0; there are {', '.join(KV_TYPES)}."
        )
    return types[0], types[-1]


def kv_label(type_k: str, type_v: str) -> str:
    """Return what `parse_kv_types` reads."""
    return type_k if type_k == type_v else f"{type_k}/{type_v}"


PRESETS: dict[str, tuple[int, int]] = {  # name -> prompt tokens, generated tokens
    "chat": (512, 256),
    "agent": (4096, 256),
    "summarise": (8192, 512),
}
