"""Integer arithmetic of PTX on numpy arrays, where numpy's own differs."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def shift_left(a: Array, b: Array) -> Array:
    """Shift left; by the width of a number or more gives zero."""
    width, b = a.dtype.itemsize * 8, b.astype(a.dtype)
    return np.where(b >= width, a.dtype.type(0), a << np.minimum(b, a.dtype.type(width - 1)))


def shift_right(a: Array, b: Array) -> Array:
    """Shift right, copying the sign of a signed number."""
    top, b = a.dtype.itemsize * 8 - 1, b.astype(np.uint64)
    shifted = a >> np.minimum(b, top).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b > top, a.dtype.type(0), shifted)


def add_halves(a: Array, b: Array) -> Array:
    """Add the two numbers of 16 bits in each register."""
    low, half = np.uint32(0xFFFF), np.uint32(16)
    return (a + b & low) | ((a >> half) + (b >> half) << half)


def quotient(a: Array, b: Array) -> Array:
    """Divide towards zero."""
    if a.dtype.kind == "u":
        return a // np.maximum(b, a.dtype.type(1))
    wide = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (wide * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """The remainder of `quotient`, with the sign of a."""
    return (a - quotient(a, b) * b).astype(a.dtype)


def high_product(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    if a.dtype.itemsize < 8:
        wide = a.astype(np.int64 if a.dtype.kind == "i" else np.uint64)
        return ((wide * b.astype(wide.dtype)) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    x, y = a.view(np.uint64), b.view(np.uint64)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x_low, x_high, y_low, y_high = x & mask, x >> half, y & mask, y >> half
    middle = x_high * y_low + ((x_low * y_low) >> half)
    other = x_low * y_high + (middle & mask)
    high = x_high * y_high + (middle >> half) + (other >> half)
    if a.dtype.kind == "u":
        return high
    # a negative number read as unsigned is larger by 2 ** 64
    zero = np.uint64(0)
    return (high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)).view(np.int64)


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """`length` bits from `position` on, copying the sign of a signed number."""
    bits = 8 * a.dtype.itemsize
    position, length = (np.asarray(v).astype(np.int64) & 0xFF for v in (position, length))
    # a field that reaches past the top ends there
    end = np.minimum(position + length, bits)
    raw = a.view(f"u{a.dtype.itemsize}").astype(np.uint64)
    width = np.maximum(end - np.minimum(position, bits), 0).astype(np.uint64)
    ones = np.where(width >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(width, 63)) - 1)
    field = np.where(position >= 64, 0, raw >> np.minimum(position, 63).astype(np.uint64)) & ones
    if a.dtype.kind == "i":
        # past the top, the sign of the number itself
        top = np.uint64(bits - 1)
        at = np.minimum((position + length - 1).clip(0).astype(np.uint64), top)
        is_negative = ((raw >> at) & np.uint64(1)).astype(bool) & (length > 0)
        field = np.where(is_negative, field | ~ones, field)
    return field.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def population(x: Array) -> Array:
    """popc: the number of bits that are set."""
    return np.unpackbits(x.view(np.uint8).reshape(*x.shape, -1), axis=-1).sum(-1, dtype=np.uint32)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 without a mode: each nibble picks a byte of a and b, or eight copies of its sign."""
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    selector, result = np.asarray(selector, np.uint64), np.zeros_like(pair)
    for index in range(4):
        pick = (selector >> np.uint64(4 * index)) & np.uint64(15)
        byte = (pair >> (np.uint64(8) * (pick & np.uint64(7)))) & np.uint64(255)
        signs = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
        result = result | (np.where(pick >= 8, signs, byte) << np.uint64(8 * index))
    return result.astype(np.uint32)
