"""Arithmetic, comparisons, conversions and moves between registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from . import floats, integers
from .binding import Binding, Call, kinds_in
from .floats import TYPES
from .forms import UnknownInstruction

Array = np.ndarray
# a function, the kinds of its operands, the kind of its result
Function = tuple[Callable[..., Any], list[str], str]

_HALVES: dict[str, tuple[int, Callable[..., Any]]] = {
    "fma": (3, floats.fma), "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
    "neg": (1, np.negative), "abs": (1, np.abs), "min": (2, np.fmin), "max": (2, np.fmax),
}  # fmt: skip
# by whether the name has "rn": IEEE's result instead of an approximation
_DIVISIONS: dict[tuple[str, bool], tuple[int, Callable[..., Any]]] = {
    ("div", False): (2, floats.div_full), ("div", True): (2, np.divide),
    ("rcp", False): (1, floats.rcp_approx), ("rcp", True): (1, lambda x: np.float32(1) / x),
    ("sqrt", False): (1, floats.sqrt_approx), ("sqrt", True): (1, np.sqrt),
}  # fmt: skip
_FLOATS: dict[str, tuple[int, Callable[..., Any]]] = {
    "ex2": (1, floats.ex2_approx), "lg2": (1, floats.lg2_approx), "rsqrt": (1, floats.rsqrt_approx),
    "tanh": (1, floats.tanh_approx), "add": (2, np.add), "sub": (2, np.subtract),
    "mul": (2, np.multiply), "neg": (1, np.negative), "abs": (1, np.abs), "mov": (1, lambda x: x),
}  # fmt: skip
_INTEGERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, np.add), "sub": (2, np.subtract), "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or), "xor": (2, np.bitwise_xor), "min": (2, np.minimum),
    "max": (2, np.maximum), "mov": (1, lambda x: x), "neg": (1, np.negative), "abs": (1, np.abs),
    "not": (1, np.invert), "div": (2, integers.quotient), "rem": (2, integers.remainder),
}  # fmt: skip


def bind_arithmetic(b: Binding) -> Call:
    """Apply a function to registers, the result to a register."""
    function, kinds, result = _function(b.instruction.name)
    sources = [b.source(text, kind) for text, kind in zip(b.operands[1:], kinds, strict=True)]
    if isinstance(function, np.ufunc):
        return _in_place(function, sources, b.place(b.operands[0], result))
    write = b.target(b.operands[0], result)
    if len(sources) == 1:
        (x,) = sources
        return lambda mask: write(function(x), mask)
    if len(sources) == 2:
        x, y = sources
        return lambda mask: write(function(x, y), mask)
    x, y, z = sources
    return lambda mask: write(function(x, y, z), mask)


def _in_place(function: np.ufunc, sources: list[Any], place: Array) -> Call:
    """Let NumPy write the result to the register itself."""

    def run(mask: Any) -> None:
        function(*sources, out=place, where=True if mask is None else mask)

    return run


@cache
def _function(name: str) -> Function:
    opcode, *words = name.split(".")
    if words[-1] in ("u16x2", "s16x2"):
        return integers.add_halves, ["b32", "b32"], "b32"
    kind = kinds_in(name)[-1]
    if opcode in ("mul", "mad") and TYPES[kind].kind in "iu" and kind[0] in "us":
        return _integer_product(opcode, kind, words)
    if opcode == "selp":
        return (lambda x, y, p: np.where(p, x, y)), [kind, kind, "pred"], kind
    if opcode in ("shl", "shr"):
        shift = integers.shift_left if opcode == "shl" else integers.shift_right
        return shift, [kind, "u32"], kind
    if opcode == "bfe":
        return integers.extract_bits, [kind, "u32", "u32"], kind
    if opcode == "popc":
        return integers.population, [kind], "u32"
    if opcode == "prmt":
        return integers.permute_bytes, ["u32"] * 3, "u32"
    if kind == "f32":
        return _float_function(opcode, words)
    if kind.startswith(("bf16", "f16")):
        return _half_function(opcode, kind)
    count, function = _INTEGERS[opcode]
    return function, [kind] * count, kind


def _half_function(opcode: str, kind: str) -> Function:
    """Compute in float32, rounded to half precision; `bf16x2` is two numbers in a register."""
    count, function = _HALVES[opcode]
    if kind.endswith("x2"):
        return floats.on_pairs(kind[:-2], function), [kind] * count, "b32"

    def run(*args: Any) -> Array:
        return floats.narrow(function(*(floats.widen(x, kind) for x in args)), kind)

    return run, ["b16"] * count, "b16"


def _float_function(opcode: str, words: list[str]) -> Function:
    if opcode == "fma":
        rounding = next(word for word in ("rn", "rm", "rp", "rz") if word in words)
        count, function = 3, lambda x, y, z: floats.fma(x, y, z, rounding)
    elif opcode in ("min", "max"):
        # without NaN in the name, the other operand is the result
        named = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
        count, function = 2, named[opcode]["NaN" in words]
    elif opcode in ("div", "rcp", "sqrt"):
        count, function = _DIVISIONS[opcode, "rn" in words]
    elif opcode in _FLOATS:
        # add.rn forbids contraction, nothing more
        count, function = _FLOATS[opcode]
    else:
        raise UnknownInstruction(".".join([opcode, *words]))
    return floats.flushing(function) if "ftz" in words else function, ["f32"] * count, "f32"


def _integer_product(opcode: str, kind: str, words: list[str]) -> Function:
    product, result = (integers.high_product if "hi" in words else np.multiply), kind
    if "wide" in words:
        result = f"{kind[0]}{2 * int(kind[1:])}"
        wide = TYPES[result]
        product = lambda x, y: np.multiply(x, y, dtype=wide)  # noqa: E731
    if opcode == "mul":
        return product, [kind] * 2, result
    return (lambda x, y, z: product(x, y) + z), [kind, kind, result], result


def bind_mov(b: Binding) -> Call:
    """Move a register, pack several into one, or unpack one."""
    to, source = b.operands
    if isinstance(to, tuple):
        return _unpack(b, to, source)
    if isinstance(source, tuple):
        return _pack(b, to, source)
    if source in b.unit.program.params:
        write = b.target(to, "b64")
        return lambda mask: write(np.uint64(b.unit.launch.params[source].handle), mask)
    return bind_arithmetic(b)


def _unpack(b: Binding, to: tuple[str, ...], source: str) -> Call:
    whole = b.source(source, b.kind)
    bits = 8 * whole.dtype.itemsize // len(to)
    writes = [b.target(name, f"b{bits}") for name in to]
    shifts = [whole.dtype.type(bits * index) for index in range(len(to))]

    def unpack(mask: Any) -> None:
        # a target may be the source
        parts = [(whole >> shift).astype(f"u{bits // 8}") for shift in shifts]
        for write, part in zip(writes, parts, strict=True):
            write(part, mask)

    return unpack


def _pack(b: Binding, to: str, source: tuple[str, ...]) -> Call:
    dtype = TYPES[b.kind]
    bits = 8 * dtype.itemsize // len(source)
    parts = [b.source(name, f"b{bits}") for name in source]
    write = b.target(to, b.kind)

    def pack(mask: Any) -> None:
        value = np.zeros(b.unit.lanes, dtype)
        for index, part in enumerate(parts):
            value |= np.asarray(part).astype(dtype) << dtype.type(bits * index)
        write(value, mask)

    return pack


def bind_cvta(b: Binding) -> Call:
    """Copy an address: those of parameters are handles here."""
    write, source = b.target(b.operands[0], "u64"), b.source(b.operands[1], "u64")
    return lambda mask: write(source, mask)


def bind_setp(b: Binding) -> Call:
    """Compare into a predicate, or into two where registers hold pairs."""
    kind, how = b.kind, b.instruction.words[1]
    is_half = kind.startswith(("bf16", "f16"))
    holds = floats.comparison(how, is_half or TYPES[kind].kind == "f")
    to = b.operands[0].split("|")
    writes = [b.target(name, "pred") for name in to]
    is_pair = kind.endswith("x2")
    assert len(to) == 1 + is_pair, b.text
    first, second = (b.source(text, f"b{16 + 16 * is_pair}" if is_half else kind)
                     for text in b.operands[1:3])  # fmt: skip
    if is_pair:
        return _compare_pairs(kind[:-2], holds, first, second, writes)
    read: Callable[[Any], Any] = lambda x: x  # noqa: E731
    if is_half:
        read = lambda x: floats.widen(x, kind)  # noqa: E731
    elif b.has("ftz"):
        read = floats.flush
    elif isinstance(holds, np.ufunc):
        return _in_place(holds, [first, second], b.unit.registers[to[0]])
    return lambda mask: writes[0](holds(read(first), read(second)), mask)


def _compare_pairs(kind: str, holds: Any, first: Any, second: Any, writes: list[Any]) -> Call:
    def compare(mask: Any) -> None:
        pairs = zip(floats.halves(first, kind), floats.halves(second, kind), strict=True)
        for write, (x, y) in zip(writes, pairs, strict=True):
            write(holds(x, y), mask)

    return compare


def bind_cvt(b: Binding) -> Call:
    """Convert between kinds of numbers, or two float32 to a pair of half precision."""
    to, *sources = b.operands
    target, source = b.kinds[0], b.kinds[-1]
    if target.endswith("x2"):
        high, low = (b.source(text, "f32") for text in sources)
        write, half = b.target(to, "b32"), target[:-2]

        def pair(mask: Any) -> None:
            bits = [np.asarray(floats.narrow(x, half)).astype(np.uint32) for x in (low, high)]
            write(bits[0] | (bits[1] << np.uint32(16)), mask)

        return pair
    (text,) = sources
    rounding = next((w for w in ("rni", "rzi", "rmi", "rpi") if b.has(w)), None)
    operand = b.unit.registers[text] if text in b.unit.registers else b.source(text, source)
    dtype, result, register = TYPES[source], TYPES[target], b.unit.registers[to]
    write = b.target(to, f"b{8 * register.dtype.itemsize}")
    flushes, saturates = b.has("ftz"), b.has("sat")

    def convert(mask: Any) -> None:
        x = operand
        if x.dtype.itemsize != dtype.itemsize:
            x = x.astype(f"u{dtype.itemsize}")
        x = x.view(dtype)
        x = floats.flush(x) if flushes else x
        y = np.ascontiguousarray(floats.converted(x, source, target, rounding, saturates))
        if y.dtype.itemsize != register.dtype.itemsize:
            # a wider register holds the sign of a signed number
            wide = f"{'i' if result.kind == 'i' else 'u'}{register.dtype.itemsize}"
            y = y.view(result).astype(wide)
        write(y.view(register.dtype), mask)

    return convert
