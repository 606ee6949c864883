"""Logic, shifts, bit fields and permutations against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from emulation.snippets import Case, case, random_integers, run

CASES: list[Case] = []
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def each(function, dtype, *arrays):
    """A function of Python's integers for every element, modulo the type's range."""
    bits = 8 * np.dtype(dtype).itemsize
    values = [function(*map(int, row)) % (1 << bits) for row in zip(*arrays, strict=True)]
    return np.array(values, f"u{bits // 8}").view(dtype)


def logic_cases() -> None:
    for bits, dtype in UNSIGNED.items():
        a, b = (random_integers(dtype, seed=seed) for seed in range(2))
        CASES.append(case(f"and.b{bits} $d, $a, $b;", (a, b), a & b))
        CASES.append(case(f"or.b{bits} $d, $a, $b;", (a, b), a | b))
        CASES.append(case(f"xor.b{bits} $d, $a, $b;", (a, b), a ^ b))
        CASES.append(case(f"not.b{bits} $d, $a;", a, ~a))
    a, b = np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.uint32)
    for operation, expected in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        text = (
            f"setp.ne.u32 %p1, $a, 0; setp.ne.u32 %p2, $b, 0; {operation}.pred %p3, %p1, %p2; "
            f"selp.u32 $d, 1, 0, %p3;"
        )
        CASES.append(case(text, (a, b), expected))
    CASES.append(case("setp.ne.u32 %p1, $a, 0; not.pred %p2, %p1; selp.u32 $d, 1, 0, %p2;", a, 1 - a))
    a, b, c = (random_integers(np.uint32, seed=seed) for seed in range(3))
    CASES.append(case("lop3.b32 $d, $a, $b, $c, 0x96;", (a, b, c), a ^ b ^ c))
    CASES.append(case("lop3.b32 $d, $a, $b, $c, 0xE2;", (a, b, c), (a & b) | (c & ~b)))


def shift_cases() -> None:
    for bits in (16, 32, 64):
        for kind in "bus":
            dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
            a = random_integers(dtype)
            amount = np.random.default_rng(1).integers(0, bits + 5, len(a)).astype(np.uint32)
            right = each(lambda x, n, b=bits: x >> min(n, b), dtype, a, amount)
            CASES.append(case(f"shr.{kind}{bits} $d, $a, $b;", (a, amount), right))
            if kind == "b":
                left = each(lambda x, n: x << n, dtype, a, amount)
                CASES.append(case(f"shl.b{bits} $d, $a, $b;", (a, amount), left))
    low, high = (random_integers(np.uint32, seed=seed) for seed in (3, 4))
    amount = np.random.default_rng(2).integers(0, 40, len(low)).astype(np.uint32)
    for limit, clip in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        left = each(lambda lo, hi, n, c=clip: ((hi << 32 | lo) << c(n)) >> 32, np.uint32, low, high, amount)
        right = each(lambda lo, hi, n, c=clip: (hi << 32 | lo) >> c(n), np.uint32, low, high, amount)
        CASES.append(case(f"shf.l.{limit}.b32 $d, $a, $b, $c;", (low, high, amount), left))
        CASES.append(case(f"shf.r.{limit}.b32 $d, $a, $b, $c;", (low, high, amount), right))


def field_cases() -> None:
    for bits in (32, 64):
        random = np.random.default_rng(bits)
        position = random.integers(0, bits + 3, 64).astype(np.uint32)
        length = random.integers(0, bits + 3, 64).astype(np.uint32)

        def extract(value, at, count, signed, bits=bits):
            sign = value >> min(at + count - 1, bits - 1) & 1 if signed and count else 0
            inside = [value >> at + i & 1 if i < count and at + i < bits else sign for i in range(bits)]
            return sum(bit << i for i, bit in enumerate(inside))

        for kind in "us":
            dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
            a = random_integers(dtype)
            signed = np.full(64, kind == "s")
            expected = each(extract, dtype, a, position, length, signed)
            CASES.append(case(f"bfe.{kind}{bits} $d, $a, $b, $c;", (a, position, length), expected))
        a, b = (random_integers(UNSIGNED[bits], seed=seed) for seed in (7, 8))
        mask = ((1 << 9) - 1) << 5
        inserted = each(lambda x, y, m=mask: (y & ~m) | (x << 5 & m), UNSIGNED[bits], a, b)
        CASES.append(case(f"bfi.b{bits} $d, $a, $b, 5, 9;", (a, b), inserted))
        zeros = each(lambda x, n=bits: n - x.bit_length(), np.uint32, a)
        CASES.append(case(f"clz.b{bits} $d, $a;", a, zeros))
        CASES.append(case(f"popc.b{bits} $d, $a;", a, each(int.bit_count, np.uint32, a)))
        backwards = each(lambda x, n=bits: int(f"{x:0{n}b}"[::-1], 2), UNSIGNED[bits], a)
        CASES.append(case(f"brev.b{bits} $d, $a;", a, backwards))
        for kind in "us":
            dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
            a = random_integers(dtype)
            length = [int(v if v >= 0 else ~v).bit_length() for v in map(int, a)]
            leading = np.array([n - 1 if n else 2**32 - 1 for n in length], np.uint32)
            amount = np.array([bits - n if n else 2**32 - 1 for n in length], np.uint32)
            CASES.append(case(f"bfind.{kind}{bits} $d, $a;", a, leading))
            CASES.append(case(f"bfind.shiftamt.{kind}{bits} $d, $a;", a, amount))


def permute_cases() -> None:
    a, b = (random_integers(np.uint32, seed=seed) for seed in (5, 6))
    control = random_integers(np.uint32, seed=9)
    orders = {
        "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
        "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
        "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
        "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
        "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
        "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
    }

    def gather(x, y, order):
        pool = (y << 32 | x).to_bytes(8, "little")
        return int.from_bytes(bytes(pool[i] for i in order), "little")

    for mode, table in orders.items():
        expected = each(lambda x, y, c, t=table: gather(x, y, t[c & 3]), np.uint32, a, b, control)
        CASES.append(case(f"prmt.b32.{mode} $d, $a, $b, $c;", (a, b, control), expected))

    def general(x, y, selector):
        pool = (y << 32 | x).to_bytes(8, "little")
        out = bytearray()
        for i in range(4):
            code = selector >> 4 * i & 15
            byte = pool[code & 7]
            out.append((255 if byte & 128 else 0) if code & 8 else byte)
        return int.from_bytes(out, "little")

    CASES.append(case("prmt.b32 $d, $a, $b, $c;", (a, b, control), each(general, np.uint32, a, b, control)))
    CASES.append(
        case(
            "prmt.b32 $d, $a, $b, 0x5410;",
            (a, b),
            each(lambda x, y: (y & 0xFFFF) << 16 | x & 0xFFFF, np.uint32, a, b),
        )
    )


logic_cases()
shift_cases()
field_cases()
permute_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_bits(item):
    run(item)
