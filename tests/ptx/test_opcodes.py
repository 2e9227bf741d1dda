"""Each form of an instruction, on random and special numbers, against numpy.

A probe loads an operand per lane, executes one instruction, and stores the result. An approximate
instruction may err by the bound in PTX's manual. Needs no GPU and no Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx.emulator import UnknownInstruction
from tests.ptx.probes import LANES, NUMPY, drawn, execute, from_bf16, probe, small, to_bf16


def pairwise(function: Callable[..., Any], kind: str) -> Callable[..., np.ndarray]:
    """Apply a function to both halves of registers."""

    def apply(*words: np.ndarray) -> np.ndarray:
        parts = []
        for shift in (0, 16):
            halves = [(w >> np.uint32(shift)).astype("u2") for w in words]
            if kind == "bf16x2":
                parts.append(to_bf16(function(*map(from_bf16, halves))))
            else:
                found = function(*(h.view("f2").astype("f4") for h in halves))
                parts.append(found.astype("f2").view("u2"))
        return parts[0].astype("u4") | parts[1].astype("u4") << np.uint32(16)

    return apply


def added_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.add(*(x.astype("<u4").view("<u2") for x in (a, b))).view("<u4")


def shift_right(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    wide = x.astype(object) >> np.minimum(by, 64).astype(object)
    return np.array(wide.tolist(), x.dtype)


def shift_left(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    ones = (1 << 8 * x.itemsize) - 1
    return np.array([int(a) << min(int(b), 64) & ones for a, b in zip(x, by, strict=True)], x.dtype)


def towards_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([int(abs(int(x)) // abs(int(y)) * np.sign(x) * np.sign(y)) if y else 0
                     for x, y in zip(a, b, strict=True)]).astype(a.dtype)  # fmt: skip


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    products = [(int(x) * int(y) >> bits) & ((1 << bits) - 1) for x, y in zip(a, b, strict=True)]
    return np.array(products, f"u{a.itemsize}").view(a.dtype)


def field(x: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe as PTX's manual writes it, bit by bit."""
    found, bits, signed = [], 8 * x.itemsize, x.dtype.kind == "i"
    for value, p, n in zip(x, at & 0xFF, length & 0xFF, strict=True):
        value, p, n = int(value) & ((1 << bits) - 1), int(p), int(n)
        sign = value >> min(p + n - 1, bits - 1) & 1 if signed and n else 0
        word = sum((value >> p + i & 1 if i < n and p + i < bits else sign) << i
                   for i in range(bits))  # fmt: skip
        found.append(word)
    return np.array(found, f"u{x.itemsize}").view(x.dtype)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype("f4")


def add_wide(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype("f4")


def nan_aware(order: Callable[..., Any], holds_for_nan: bool) -> Callable[..., np.ndarray]:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), holds_for_nan, order(a, b))


def both_bf16(order: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda a, b: order(from_bf16(a), from_bf16(b))


F32, S32 = ["f32"], ["s32"]
# form, kinds of operands, kind of result, numpy's function
EXACT: list[tuple[str, list[str], str, Callable[..., Any]]] = [
    ("fma.rn.f32", F32 * 3, "f32", add_wide),
    ("mul.f32", F32 * 2, "f32", np.multiply),
    ("add.f32", F32 * 2, "f32", np.add),
    ("sub.f32", F32 * 2, "f32", np.subtract),
    ("neg.f32", F32, "f32", np.negative),
    ("abs.f32", F32, "f32", np.abs),
    ("abs.ftz.f32", F32, "f32", lambda x: np.abs(flushed(x))),
    ("fma.rn.ftz.f32", F32 * 3, "f32",
     lambda a, b, c: flushed(add_wide(*map(flushed, (a, b, c))))),
    ("max.f32", F32 * 2, "f32", np.fmax),
    ("min.f32", F32 * 2, "f32", np.fmin),
    ("max.NaN.f32", F32 * 2, "f32", np.maximum),
    ("mov.b32", ["b32"], "b32", lambda x: x),
    ("mov.u16", ["u16"], "u16", lambda x: x),
    ("mov.b64", ["b64"], "b64", lambda x: x),
    ("mov.pred", ["pred"], "pred", lambda x: x),
    ("add.s64", ["s64"] * 2, "s64", np.add),
    ("add.s32", S32 * 2, "s32", np.add),
    ("add.s16", ["s16"] * 2, "s16", np.add),
    ("sub.s32", S32 * 2, "s32", np.subtract),
    ("sub.s64", ["s64"] * 2, "s64", np.subtract),
    ("neg.s32", S32, "s32", np.negative),
    ("min.s32", S32 * 2, "s32", np.minimum),
    ("div.s32", S32 * 2, "s32", towards_zero),
    ("mul.lo.s64", ["s64"] * 2, "s64", np.multiply),
    ("mul.lo.s32", S32 * 2, "s32", np.multiply),
    ("mul.hi.u64", ["u64"] * 2, "u64", high),
    ("mul.hi.s64", ["s64"] * 2, "s64", high),
    ("mul.wide.s32", S32 * 2, "s64", lambda a, b: a.astype("i8") * b),
    ("mul.wide.u32", ["u32"] * 2, "u64", lambda a, b: a.astype("u8") * b),
    ("mad.lo.s64", ["s64"] * 3, "s64", lambda a, b, c: a * b + c),
    ("mad.wide.s32", ["s32", "s32", "s64"], "s64", lambda a, b, c: a.astype("i8") * b + c),
    ("mad.wide.u32", ["u32", "u32", "u64"], "u64", lambda a, b, c: a.astype("u8") * b + c),
    ("and.b32", ["b32"] * 2, "b32", np.bitwise_and),
    ("and.b16", ["b16"] * 2, "b16", np.bitwise_and),
    ("and.pred", ["pred"] * 2, "pred", np.bitwise_and),
    ("or.b32", ["b32"] * 2, "b32", np.bitwise_or),
    ("or.b64", ["b64"] * 2, "b64", np.bitwise_or),
    ("xor.b32", ["b32"] * 2, "b32", np.bitwise_xor),
    ("xor.b64", ["b64"] * 2, "b64", np.bitwise_xor),
    ("not.pred", ["pred"], "pred", lambda x: 1 - x),
    ("selp.f32", ["f32", "f32", "pred"], "f32", lambda a, b, p: np.where(p, a, b)),
    ("selp.b32", ["b32", "b32", "pred"], "b32", lambda a, b, p: np.where(p, a, b)),
    ("selp.b16", ["b16", "b16", "pred"], "b16", lambda a, b, p: np.where(p, a, b)),
    ("setp.lt.f32", F32 * 2, "pred", nan_aware(np.less, False)),
    ("setp.ltu.f32", F32 * 2, "pred", nan_aware(np.less, True)),
    ("setp.gt.f32", F32 * 2, "pred", nan_aware(np.greater, False)),
    ("setp.ne.f32", F32 * 2, "pred", nan_aware(np.not_equal, False)),
    ("setp.neu.f32", F32 * 2, "pred", nan_aware(np.not_equal, True)),
    ("setp.eq.f32", F32 * 2, "pred", nan_aware(np.equal, False)),
    ("setp.nan.f32", F32 * 2, "pred", lambda a, b: np.isnan(a) | np.isnan(b)),
    ("setp.lt.bf16", ["bf16"] * 2, "pred", both_bf16(nan_aware(np.less, False))),
    ("setp.lt.s32", S32 * 2, "pred", np.less),
    ("setp.lt.s64", ["s64"] * 2, "pred", np.less),
    ("setp.gt.u32", ["u32"] * 2, "pred", np.greater),
    ("setp.eq.b32", ["b32"] * 2, "pred", np.equal),
    ("setp.ne.b64", ["b64"] * 2, "pred", np.not_equal),
    ("cvt.f32.bf16", ["bf16"], "f32", from_bf16),
    ("cvt.f32.f16", ["f16"], "f32", lambda x: x.astype("f4")),
    ("cvt.rn.f16.f32", F32, "f16", lambda x: x.astype("f2")),
    ("cvt.ftz.sat.f32.f32", F32, "f32",
     lambda x: np.where(np.isnan(x), 0, np.clip(flushed(x), 0, 1))),
    ("cvt.rn.f32.s32", S32, "f32", lambda x: x.astype("f4")),
    ("cvt.rn.f32.s16", ["s16"], "f32", lambda x: x.astype("f4")),
    ("cvt.s64.s32", S32, "s64", lambda x: x.astype("i8")),
    ("cvt.u64.u32", ["u32"], "u64", lambda x: x.astype("u8")),
    ("cvt.u32.u64", ["u64"], "u32", lambda x: x.astype("u4")),
    ("cvt.u32.u16", ["u16"], "u32", lambda x: x.astype("u4")),
    ("cvt.u16.u32", ["u32"], "u16", lambda x: x.astype("u2")),
    ("fma.rn.bf16x2", ["bf16x2"] * 3, "bf16x2", pairwise(add_wide, "bf16x2")),
    ("add.f16x2", ["f16x2"] * 2, "f16x2", pairwise(np.add, "f16x2")),
    ("add.s16x2", ["b32"] * 2, "b32", added_halves),
]  # fmt: skip
ids = [row[0] for row in EXACT]


def is_equal(kind: str, values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Compare bits, but any NaN with any other."""
    if kind.startswith(("bf16", "f16")):
        halves = (x.view("u2") for x in (values, np.asarray(expected, NUMPY[kind])))
        widen = from_bf16 if kind.startswith("bf16") else lambda x: x.view("f2").astype("f4")
        values, expected = map(widen, halves)
    same = np.asarray(values == expected)
    if values.dtype.kind == "f":
        same = same & (np.signbit(values) == np.signbit(expected))
        same |= np.isnan(values) & np.isnan(expected)
    return same


@pytest.mark.parametrize(("form", "kinds", "result", "function"), EXACT, ids=ids)
def test_exact(form: str, kinds: list[str], result: str, function: Callable[..., Any]):
    arrays = [drawn(kind, 10 + index) for index, kind in enumerate(kinds)]
    if form.startswith("div"):
        # a division by zero has no result, nor the one that overflows
        arrays[1] = np.where(np.isin(arrays[1], (0, -1)), 3, arrays[1])
    with np.errstate(all="ignore"):
        expected = np.asarray(function(*arrays)).astype(NUMPY[result])
    results = probe(form, kinds, result, arrays)
    assert is_equal(result, results, expected).all()


@pytest.mark.parametrize("form", ["shl.b32", "shl.b64", "shl.b16", "shr.s32", "shr.u32", "shr.u16"])
def test_shifts(form: str):
    kind = form.split(".")[1]
    x, by = drawn(kind, 1), small("u32", 2)
    expected = (shift_left if form.startswith("shl") else shift_right)(x, by)
    assert (probe(form, [kind, "u32"], kind, [x, by]) == expected).all()


@pytest.mark.parametrize("kind", ["s32", "u32", "u64"])
def test_bit_fields(kind: str):
    x, at, length = drawn(kind, 1), small("u32", 2), small("u32", 3)
    fields = probe(f"bfe.{kind}", [kind, "u32", "u32"], kind, [x, at, length])
    assert (fields == field(x, at, length)).all()


def test_bytes_are_permuted():
    a, b, selector = drawn("b32", 1), drawn("b32", 2), drawn("b32", 3)
    expected = []
    for x, y, s in zip(a, b, selector, strict=True):
        pair, s = int(x) | int(y) << 32, int(s)
        picked = [pair >> 8 * (s >> 4 * i & 7) & 255 for i in range(4)]
        signs = [255 * (byte >> 7) for byte in picked]
        chosen = [signs[i] if s >> 4 * i & 8 else picked[i] for i in range(4)]
        expected.append(sum(byte << 8 * i for i, byte in enumerate(chosen)))
    assert (probe("prmt.b32", ["b32"] * 3, "b32", [a, b, selector]) == expected).all()


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_set_bits_are_counted(kind: str):
    numbers = drawn(kind, 1)
    expected = [int(x).bit_count() for x in numbers]
    assert (probe(f"popc.{kind}", [kind], "b32", [numbers]) == expected).all()


def test_half_precision_is_rounded_to_nearest_even():
    x = drawn("f32", 1)
    assert is_equal("bf16", probe("cvt.rn.bf16.f32", ["f32"], "bf16", [x]), to_bf16(x)).all()
    high_half, low_half = drawn("f32", 2), drawn("f32", 3)
    packed = probe("cvt.rn.bf16x2.f32", ["f32", "f32"], "bf16x2", [high_half, low_half])
    assert is_equal("bf16", (packed >> np.uint32(16)).astype("u2"), to_bf16(high_half)).all()
    assert is_equal("bf16", packed.astype("u2"), to_bf16(low_half)).all()


def test_tf32_is_rounded_to_nearest():
    x = np.random.default_rng(0).standard_normal(LANES).astype("f4")
    rounded = probe("cvt.rna.tf32.f32", ["f32"], "b32", [x]).view("f4")
    assert (rounded.view("u4") & 0x1FFF == 0).all()
    assert (np.abs(rounded - x) <= np.abs(x) * 2.0**-11).all()
    assert (np.abs(rounded - x) > np.abs(x) * 2.0**-12).any()


def relative(bound: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda found, truth: np.abs(found - truth) <= bound * np.abs(truth)


def near_log(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.abs(found - truth) <= 2.0**-22 * np.maximum(1, np.abs(truth))


APPROXIMATE = [
    ("ex2.approx.f32", np.exp2, relative(2.0**-22)),
    ("ex2.approx.ftz.f32", np.exp2, relative(2.0**-22)),
    ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x), relative(2.0**-22.9)),
    ("rcp.approx.ftz.f32", lambda x: 1 / x, relative(2.0**-23)),
    ("sqrt.approx.f32", np.sqrt, relative(2.0**-23)),
    ("tanh.approx.f32", np.tanh, relative(2.0**-11)),
    ("lg2.approx.f32", np.log2, near_log),
]


@pytest.mark.parametrize(
    ("form", "function", "is_near"), APPROXIMATE, ids=[row[0] for row in APPROXIMATE]
)
def test_approximate(form: str, function: Callable[..., Any], is_near: Callable[..., Any]):
    x = np.random.default_rng(0).uniform(0.01, 9, LANES).astype("f4")
    results, truth = probe(form, ["f32"], "f32", [x]).astype("f8"), function(x.astype("f8"))
    assert is_near(results, truth).all()
    # an emulator that is exact would hide what depends on the last bits
    assert (results.astype("f4") != truth.astype("f4")).any()


def test_full_division_is_within_two_ulps():
    a, b = (np.random.default_rng(i).standard_normal(LANES).astype("f4") for i in (1, 2))
    quotients = probe("div.full.f32", ["f32", "f32"], "f32", [a, b])
    assert (np.abs(quotients - a.astype("f8") / b) <= 2 * np.spacing(np.abs(a / b))).all()


def test_registers_are_packed_and_unpacked():
    low, high_half, out = drawn("b16", 1), drawn("b16", 2), np.zeros((LANES, 2), "u4")
    execute(
        """
        mul.wide.u32 %rd10, %r0, 2; add.s64 %rd11, %rd10, %rd0; add.s64 %rd12, %rd10, %rd1;
        ld.global.b16 %rs0, [%rd11]; ld.global.cg.b16 %rs1, [%rd12];
        mov.b32 %r1, {%rs0, %rs1};
        mov.b32 {%rs2, %rs3}, %r1;
        mov.b32 %r2, {%rs3, %rs2};
        mul.wide.u32 %rd13, %r0, 8; add.s64 %rd13, %rd13, %rd2;
        st.global.v2.b32 [%rd13], {%r1, %r2};
        """,
        [low, high_half, out],
    )
    a, b = low.astype("u4"), high_half.astype("u4")
    assert (out[:, 0] == (a | b << 16)).all()
    assert (out[:, 1] == (b | a << 16)).all()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("atom.global.add.u32 %r1, [%rd0], 1", "opcode atom"),
        ("setp.ltu.bf16x3 %p1, %r1, %r2", "setp.ltu.bf16x3"),
        ("add.rz.f32 %r1, %r2, %r3", "add.rz.f32"),
        ("cvt.rn.relu.bf16x2.f32 %r1, %r2, %r3", "cvt.rn.relu.bf16x2.f32"),
        ("ld.global.nc.b32 %r1, [%rd0]", "ld.global.nc.b32"),
        ("ld.shared.cg.b32 %r1, [%rd0]", "ld.shared.cg.b32"),
        ("prmt.b32.f4e %r1, %r2, %r3, %r4", "prmt.b32.f4e"),
        ("bar.red.popc.u32 %r1, 0, %p1", "bar.red.popc.u32"),
    ],
)
def test_an_unknown_form_raises_by_name(line: str, name: str):
    with pytest.raises(UnknownInstruction, match=name.replace(".", r"\.")):
        execute(line + ";", [np.zeros(LANES, "u4")])
