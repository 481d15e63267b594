"""Random weights of every ggml type, by the gigabyte: a modest pool of random blocks, tiled over the tensors.

Nothing is quantised. The quants are random bits and the blocks' scales are set so that the weights have the wanted
standard deviation and mean zero, without which hidden states collapse to one direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.gguf_model import GGML_TYPES

Bytes = npt.NDArray[np.uint8]

TYPE_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}


@dataclass(frozen=True)
class _Layout:
    """Where a block keeps its scales, and the standard deviation of its weights when all scales are one."""

    unit_std: float
    scale_bytes: tuple[int, ...] = (0,)  # offsets of the f16 scales
    min_byte: int | None = None  # offset of the f16 that is subtracted, times the sub-block's own min
    min_ratio: float = 0.0  # what min / scale must be for weights symmetric about zero


_LAYOUTS = {
    "q1_0": _Layout(1.0),
    "q2_0": _Layout(0.7071),
    "q4_0": _Layout(4.637),
    "q4_1": _Layout(4.609, min_byte=2, min_ratio=-7.5),
    "q5_0": _Layout(9.248),
    "q5_1": _Layout(9.233, min_byte=2, min_ratio=-15.5),
    "q8_0": _Layout(73.9),
    "q2_K": _Layout(9.842, scale_bytes=(80,), min_byte=82, min_ratio=1.5),
    "q3_K": _Layout(43.3, scale_bytes=(108,)),
    "q4_K": _Layout(28.2, min_byte=2, min_ratio=7.5),
    "q5_K": _Layout(56.6, min_byte=2, min_ratio=15.5),
    "q6_K": _Layout(113.2, scale_bytes=(208,)),
    "iq1_s": _Layout(7.20),
    "iq1_m": _Layout(7.20, scale_bytes=()),
    "iq2_xxs": _Layout(53.3),
    "iq2_xs": _Layout(55.9),
    "iq2_s": _Layout(56.5),
    "iq3_xxs": _Layout(142.2),
    "iq3_s": _Layout(140.1),
    "iq4_nl": _Layout(67.4),
    "iq4_xs": _Layout(1247.0),
    "tq1_0": _Layout(0.8165, scale_bytes=(52,)),
    "tq2_0": _Layout(0.7071, scale_bytes=(64,)),
    "mxfp4": _Layout(5.85, scale_bytes=()),
    "nvfp4": _Layout(5.85, scale_bytes=()),
}

MATRIX_TYPES = ("f32", "f16", "bf16", *_LAYOUTS)


class WeightPool:
    """Random weights of one type: about `n_bytes` of blocks, given out over and over, with any scale."""

    def __init__(self, type_name: str, n_bytes: int, generator: np.random.Generator) -> None:
        if type_name not in MATRIX_TYPES:
            raise ValueError(f"no weights of type {type_name}")
        _, self.block_elements, self.block_bytes = GGML_TYPES[TYPE_IDS[type_name]]
        self._type_name = type_name
        # A prime number of blocks: rows and experts repeat as late as they can.
        self.n_blocks = _prime_at_least(max(n_bytes // self.block_bytes, 64))
        self.n_taken = 0  # blocks of the current round
        self._scaled: dict[float, Bytes] = {}
        self._unit: npt.NDArray[Any]  # blocks whose scales are not set yet, or floats of standard deviation one
        if type_name in _LAYOUTS:
            blocks = generator.integers(0, 256, (self.n_blocks, self.block_bytes), dtype=np.uint8)
            self._unit = _symmetric(type_name, blocks)
            self._signs = generator.choice(np.array([-1.0, 1.0], np.float16), self.n_blocks)
        else:
            self._unit = generator.standard_normal(self.n_blocks, dtype=np.float32)

    def take(self, n_bytes: int, std: float) -> Iterator[memoryview]:
        """Yield the next `n_bytes` in pieces: weights of standard deviation `std`, that go on where the last ended."""
        if std not in self._scaled:
            self._scaled[std] = self._scale(std)
        data = self._scaled[std].reshape(-1).data
        first = self.n_taken * self.block_bytes
        self.n_taken = (self.n_taken + n_bytes // self.block_bytes) % self.n_blocks
        while n_bytes:
            piece = data[first : first + n_bytes]
            yield piece
            n_bytes, first = n_bytes - len(piece), 0

    def _scale(self, std: float) -> Bytes:
        if self._type_name not in _LAYOUTS:
            return _from_floats(self._type_name, self._unit * np.float32(std)).reshape(self.n_blocks, self.block_bytes)
        layout = _LAYOUTS[self._type_name]
        blocks: Bytes = self._unit.copy()
        scale = std / layout.unit_std
        for offset in layout.scale_bytes:
            blocks[:, offset : offset + 2] = _half_bytes(_short_half(scale) * self._signs)
        if layout.min_byte is not None:
            minimum = np.float16(layout.min_ratio) * _short_half(scale)
            blocks[:, layout.min_byte : layout.min_byte + 2] = _half_bytes(minimum * self._signs)
        match self._type_name:
            case "iq1_m":  # the f16 is spread over the top four bits of four 16-bit words
                bits = (_short_half(scale) * self._signs).view(np.uint16)
                words = blocks[:, 48:56].copy().view(np.uint16)
                for word in range(4):
                    words[:, word] = words[:, word] & 0x0FFF | (bits >> 4 * word & 0xF) << 12
                blocks[:, 48:56] = words.view(np.uint8)
            case "mxfp4":  # a power of two
                blocks[:, 0] = 128 + round(math.log2(scale))
            case "nvfp4":  # unsigned floats of 4 exponent and 3 mantissa bits, doubled
                blocks[:, :4] = _unsigned_e4m3(2 * scale)
        return blocks


def _symmetric(type_name: str, blocks: Bytes) -> Bytes:
    """Set the sub-blocks' own scales: equal to the mins, and small, so that the f16 scale keeps its precision.

    Where four quants stand for -1, 0, 1 and 2, leave out the 2.
    """
    if type_name in ("q2_0", "tq2_0"):
        both_bits = blocks & blocks >> 1 & 0x55
        blocks &= ~(both_bits << 1)
    elif type_name in ("q4_K", "q5_K"):  # eight 6-bit scales and mins, here below 16
        scales = 4 + (blocks[:, 4:12] & 3) + (blocks[:, 4:12] >> 2 & 1)  # 4 ... 8
        low, high = scales[:, :4], scales[:, 4:]
        blocks[:, 4:8], blocks[:, 8:12] = low, low
        blocks[:, 12:16] = high | high << 4
    elif type_name == "q2_K":  # sixteen pairs of 4-bit scale and min
        scales = blocks[:, :16] & 0xF
        blocks[:, :16] = scales | scales << 4
    elif type_name == "q6_K":  # sixteen signed 8-bit scales
        magnitudes = (4 + (blocks[:, 192:208] & 3) + (blocks[:, 192:208] >> 2 & 1)).astype(np.int8)
        signs = np.where(blocks[:, 192:208] & 128, -1, 1).astype(np.int8)
        blocks[:, 192:208] = (magnitudes * signs).view(np.uint8)
    return blocks


def _from_floats(type_name: str, values: npt.NDArray[np.float32]) -> Bytes:
    if type_name == "f16":
        return values.astype(np.float16).view(np.uint8)
    if type_name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)


def _short_half(value: float) -> np.float16:
    """Round to an f16 with few enough bits that it times 7.5 or 15.5 is an f16 too, also among the subnormals."""
    mantissa, exponent = math.frexp(value)
    short = math.ldexp(round(mantissa * 64) / 64, exponent)
    return np.float16(max(1, round(short * 2**23)) / 2**23)


def _half_bytes(values: npt.NDArray[np.float16]) -> Bytes:
    return np.ascontiguousarray(values, np.float16).view(np.uint8).reshape(-1, 2)


def _unsigned_e4m3(value: float) -> int:
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2**exponent, mantissa in [0.5, 1)
    if exponent < -5:
        return max(1, round(value * 2**9))
    return (exponent + 6) * 8 + min(7, round((2 * mantissa - 1) * 8))


def _prime_at_least(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
