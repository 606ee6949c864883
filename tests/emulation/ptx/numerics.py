"""Correctly rounded arithmetic: values are carried as an exact sum ``value + error`` of two doubles.

The modes are rn (nearest, ties to even), rz, rm and rp (towards zero, down, up); doubles know rn only.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from emulation.ptx.types import Type

_SPLITTER = 134217729.0  # 2**27 + 1


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum and its exact error (0 where the sum is not finite)."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    product = a * b
    high_a = a * _SPLITTER - (a * _SPLITTER - a)
    high_b = b * _SPLITTER - (b * _SPLITTER - b)
    low_a, low_b = a - high_a, b - high_b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def _to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Rounds ``value + error`` to a double with an odd last bit when inexact: a second rounding is then
    harmless.
    """
    even = (value.view(np.uint64) & np.uint64(1)) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(value, towards), value)


def _directed(value: np.ndarray, error: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    near = value.astype(dtype)
    wide = near.astype(np.float64)
    above = (wide > value) | ((wide == value) & (error < 0))
    below = (wide < value) | ((wide == value) & (error > 0))
    negative = np.signbit(value)
    down = above & {"rm": True, "rp": False, "rz": ~negative}[mode]
    up = below & {"rm": False, "rp": True, "rz": negative}[mode]
    lowest, highest = dtype.type(-np.inf), dtype.type(np.inf)
    return np.where(down, np.nextafter(near, lowest), np.where(up, np.nextafter(near, highest), near))


def _to_bf16(value: np.ndarray, error: np.ndarray, mode: str) -> np.ndarray:
    """As float32 with 16 zero bits."""
    truncated = _directed(value, error, np.dtype(np.float32), "rz")
    exact = (truncated.astype(np.float64) == value) & (error == 0)
    bits = np.ascontiguousarray(truncated).view(np.uint32) | np.where(exact, 0, 1).astype(np.uint32)
    rest = bits & np.uint32(0xFFFF)
    top = bits >> np.uint32(16)
    negative = (bits >> np.uint32(31)) == 1
    if mode == "rn":
        up = (rest > 0x8000) | ((rest == 0x8000) & ((top & np.uint32(1)) == 1))
    else:
        up = (rest != 0) & {"rz": False, "rm": negative, "rp": ~negative}[mode]
    result = (top + up.astype(np.uint32)) << np.uint32(16)
    special = ~np.isfinite(value)
    plain = np.where(np.isnan(value), np.uint32(0x7FFF0000), value.astype(np.float32).view(np.uint32))
    return np.where(special, plain, result).astype(np.uint32).view(np.float32)


def round_to(value: np.ndarray, error: np.ndarray | float, kind: Type, mode: str = "rn") -> np.ndarray:
    """The exact number ``value + error`` (doubles) in the type, rounded once."""
    error = np.broadcast_to(np.asarray(error, dtype=np.float64), value.shape)
    if (kind.element or kind.name) == "bf16":
        return _to_bf16(value, error, mode)
    if kind.dtype == np.float64:
        return value
    if mode == "rn":
        return _to_odd(value, error).astype(kind.dtype)
    return _directed(value, error, kind.dtype, mode)


def add(a: np.ndarray, b: np.ndarray, kind: Type, mode: str = "rn") -> np.ndarray:
    if kind.dtype == np.float64:
        return a + b
    return round_to(*two_sum(a.astype(np.float64), b.astype(np.float64)), kind, mode)


def multiply(a: np.ndarray, b: np.ndarray, kind: Type, mode: str = "rn") -> np.ndarray:
    if kind.dtype != np.float64:
        return round_to(a.astype(np.float64) * b.astype(np.float64), 0.0, kind, mode)
    return a * b


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: Type, mode: str = "rn") -> np.ndarray:
    """``a * b + c`` rounded once."""
    if kind.dtype == np.float64:
        return _fma64(a, b, c)
    product = a.astype(np.float64) * b.astype(np.float64)
    return round_to(*two_sum(product, c.astype(np.float64)), kind, mode)


def _fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Exact product, exact sums, and one rounding to odd before the last (Boldo and Melquiond)."""
    high, low = _two_product(a, b)
    sum_low, rest_low = two_sum(c, low)
    sum_high, rest_high = two_sum(high, sum_low)
    result = sum_high + _to_odd(*two_sum(rest_low, rest_high))
    plain = a * b + c
    sizes = [np.abs(x) for x in (a, b, c, high)]
    ordinary = np.ones(a.shape, bool)
    for size in sizes:
        ordinary &= ((size > 1e-120) & (size < 1e150)) | (size == 0)
    ordinary &= (sum_high != 0) & (high != 0)
    out = np.where(ordinary, result, plain)
    zero_product = (a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c)
    for i in np.nonzero(~ordinary & ~zero_product)[0]:
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        try:
            out[i] = float(exact) if exact else plain[i]
        except OverflowError:
            out[i] = np.inf if exact > 0 else -np.inf
    return out


def flush(values: np.ndarray) -> np.ndarray:
    """``.ftz``: float32 subnormals become zero of the same sign."""
    small = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(values.dtype.type(0), values), values)


def saturate(values: np.ndarray) -> np.ndarray:
    """``.sat``: into 0..1, NaN to 0."""
    return np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)


def extremum(a: np.ndarray, b: np.ndarray, largest: bool, propagate_nan: bool) -> np.ndarray:
    """Minimum or maximum; −0 is below +0, and a NaN wins only with ``.NaN``."""
    if a.dtype.kind != "f":
        return np.maximum(a, b) if largest else np.minimum(a, b)
    if propagate_nan:
        result = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        result = np.fmax(a, b) if largest else np.fmin(a, b)
    both_zero = (a == 0) & (b == 0)
    negative = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
    return np.where(both_zero, np.where(negative, a.dtype.type(-0.0), a.dtype.type(0.0)), result)
