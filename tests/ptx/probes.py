"""Runs single PTX instructions on arrays: what the tests of the emulator are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.ptx.emulator import Hostility, Param, parse, run

LANES = 64
# bytes of a block
SHARED = 16384
NUMPY = {
    "b8": "u1", "b16": "u2", "b32": "u4", "b64": "u8", "u16": "u2", "u32": "u4", "u64": "u8",
    "s16": "i2", "s32": "i4", "s64": "i8", "f32": "f4", "f64": "f8", "bf16": "u2", "f16": "f2",
    "bf16x2": "u4", "f16x2": "u4", "pred": "u4",
}  # fmt: skip
SPECIAL_FLOATS = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-42, 3.4e38, 0.5, 2.0, 65504.0]


def bits_of(kind: str) -> int:
    """Return the width of a kind of number."""
    return 8 * np.dtype(NUMPY[kind]).itemsize


def drawn(kind: str, seed: int, lanes: int = LANES) -> np.ndarray:
    """Draw numbers of a kind, special ones first."""
    rng = np.random.default_rng(seed)
    if kind == "pred":
        return rng.integers(0, 2, lanes).astype("u4")
    if kind in ("f32", "f64", "f16"):
        x = rng.standard_normal(lanes) * 4
        x[: len(SPECIAL_FLOATS)] = rng.permutation(SPECIAL_FLOATS)
        with np.errstate(over="ignore"):
            return x.astype(NUMPY[kind])
    if kind == "bf16":
        return to_bf16(drawn("f32", seed, lanes))
    if kind.endswith("x2"):
        low, high = (drawn(kind[:-2], seed + i, lanes).view("u2").astype("u4") for i in (0, 1))
        return low | high << np.uint32(16)
    info = np.iinfo(NUMPY[kind])
    x = rng.integers(info.min, info.max, lanes, dtype=NUMPY[kind], endpoint=True)
    x[:4] = [0, 1, info.max, info.min]
    return rng.permutation(x)


def small(kind: str, seed: int, top: int = 70) -> np.ndarray:
    """Draw numbers below `top`."""
    return np.random.default_rng(seed).integers(0, top, LANES).astype(NUMPY[kind])


def to_bf16(x: Any) -> np.ndarray:
    """Round by torch."""
    rounded = torch.from_numpy(np.asarray(x, "f4").copy()).bfloat16()
    return rounded.view(torch.int16).numpy().view("u2")


def from_bf16(x: Any) -> np.ndarray:
    """Widen bits by torch."""
    return torch.from_numpy(np.asarray(x).view("i2").copy()).view(torch.bfloat16).float().numpy()


def execute(
    body: str,
    arrays: Sequence[np.ndarray],
    lanes: int = LANES,
    maps: dict[int, Any] | None = None,
    **how: Any,
) -> None:
    """Run PTX in one block; %r0 is the lane.

    Register %rd0 has the address of the first array, %rd1 of the second; `maps` are tensor maps by
    the number by which the body names them.
    """
    names = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [p{i}];" for i in range(len(arrays)))
    text = f""".extern .shared .align 16 .b8 global_smem[];
    .visible .entry probe({names})
    {{
    .reg .pred %p<9>; .reg .b16 %rs<40>; .reg .b32 %r<60>; .reg .b64 %rd<40>;
    {loads}
    mov.u32 %r0, %tid.x;
    {body}
    ret;
    }}"""
    tensors = [torch.from_numpy(a.view("u1").reshape(-1)) for a in arrays]
    params = {f"p{i}": Param(np.uint64(t.data_ptr()).tobytes()) for i, t in enumerate(tensors)}
    with np.errstate(all="ignore"):
        run(parse(text), (1, 1, 1), lanes, SHARED, params, tensors, maps or {}, Hostility(**how))


REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}


def probe(form: str, kinds: list[str], result: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Execute one form on an operand per lane; a predicate is a number other than 0."""
    lines, names, address = [], [], ""
    for index, kind in enumerate([*kinds, result]):
        address = f"%rd{20 + index}"
        size = bits_of(kind) // 8
        lines += [f"mul.wide.u32 {address}, %r0, {size};",
                  f"add.s64 {address}, {address}, %rd{index};"]  # fmt: skip
        if index == len(kinds):
            break
        name = f"{REGISTER[bits_of(kind)]}{30 + index}"
        lines.append(f"ld.global.b{bits_of(kind)} {name}, [{address}];")
        if kind == "pred":
            lines.append(f"setp.ne.b32 %p{index}, {name}, 0;")
            name = f"%p{index}"
        names.append(name)
    out = np.zeros(LANES, NUMPY[result])
    bits = bits_of(result)
    target = "%p8" if result == "pred" else f"{REGISTER[bits]}10"
    lines.append(f"{form} {target}, {', '.join(names)};")
    if result == "pred":
        lines.append("selp.b32 %r10, 1, 0, %p8;")
    lines.append(f"st.global.b{bits} [{address}], {REGISTER[bits]}10;")
    execute("\n".join(lines), [*arrays, out])
    return out
