"""Implementations of the instructions, one module for each family; importing them registers them."""

from emulation.ptx.opcodes import arithmetic, atomics, bits, compare, control, convert, data, warp

__all__ = ["arithmetic", "atomics", "bits", "compare", "control", "convert", "data", "warp"]
