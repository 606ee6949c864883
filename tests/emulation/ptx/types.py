"""PTX types: how wide they are, and how register bits become numpy values and back.

Registers hold raw unsigned integers. ``decode`` gives the values that arithmetic works on: bfloat16 as
float32 (every bfloat16 is one), and the packed types as two columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RAW = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


@dataclass(frozen=True)
class Type:
    """One PTX type; ``element`` is the type of each half of a packed one."""

    name: str
    bytes: int
    kind: str  # "u", "s", "b" (bits), "f" or "pred"
    dtype: np.dtype
    element: str = ""

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_signed(self) -> bool:
        return self.kind == "s"

    @property
    def bits(self) -> int:
        return 8 * self.bytes


def _types() -> dict[str, Type]:
    types = {"pred": Type("pred", 1, "pred", np.dtype(np.bool_))}
    for size in (1, 2, 4, 8):
        for kind in "usb":
            dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
            types[f"{kind}{8 * size}"] = Type(f"{kind}{8 * size}", size, kind, dtype)
    types["b128"] = Type("b128", 16, "b", RAW[8])
    for name, size, dtype in (("f16", 2, "f2"), ("f32", 4, "f4"), ("f64", 8, "f8"), ("tf32", 4, "f4")):
        types[name] = Type(name, size, "f", np.dtype(dtype))
    types["bf16"] = Type("bf16", 2, "f", np.dtype(np.float32))
    for name, size, element in (("f16x2", 4, "f16"), ("bf16x2", 4, "bf16"), ("f32x2", 8, "f32")):
        types[name] = Type(name, size, "f", types[element].dtype, element)
    for name, element in (("u16x2", "u16"), ("s16x2", "s16")):
        types[name] = Type(name, 4, element[0], types[element].dtype, element)
    return types


TYPES = _types()


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """The float32 value of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def decode(bits: np.ndarray, kind: Type) -> np.ndarray:
    """Values of raw register bits that are exactly as wide as the type."""
    if kind.name == "b128" or kind.kind == "pred":
        return bits
    if kind.element:
        half = np.ascontiguousarray(bits)[:, None].view(RAW[kind.bytes // 2])
        return decode(half.reshape(-1), TYPES[kind.element]).reshape(-1, 2)
    if kind.name == "bf16":
        return widen_bf16(bits)
    return bits.view(kind.dtype)


def encode(values: np.ndarray, kind: Type) -> np.ndarray:
    """Raw bits of values; bfloat16 values must be float32 that a bfloat16 can hold."""
    if kind.name == "b128" or kind.kind == "pred":
        return values
    if kind.element:
        half = encode(np.ascontiguousarray(values).reshape(-1), TYPES[kind.element])
        return half.reshape(-1, 2).view(RAW[kind.bytes])[:, 0]
    values = np.ascontiguousarray(values, dtype=kind.dtype)
    if kind.name == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.view(RAW[kind.bytes])


def resize(bits: np.ndarray, size: int, signed: bool) -> np.ndarray:
    """Raw bits cut to ``size`` bytes, or extended by zeros or by the sign."""
    have = bits.dtype.itemsize
    if have == size:
        return bits
    if signed and size > have:
        return bits.view(f"i{have}").astype(f"i{size}").view(RAW[size])
    return bits.astype(RAW[size])
