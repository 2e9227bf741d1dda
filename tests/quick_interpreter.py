"""Triton's interpreter without what it computes again and again: its numbers stay what they are.

It spends its time on the types of a kernel's tensors, not on their numbers. A type is computed
once here, what two types become together is found once, and the language is patched once a process.
"""

import math
import os
from contextlib import suppress
from functools import lru_cache

import numpy as np

with suppress(ImportError):
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter


def share_block_types() -> None:
    """Make one object of equal block types, with what a tensor of it asks."""
    new, init, known = object.__new__, tl.block_type.__init__, {}

    def shared(cls, element_ty, shape):
        sizes = shape.values if type(shape) is tl.tuple else shape
        # the type that is kept keeps element_ty, and so its id, alive
        key = (id(element_ty), *[s.value if type(s) is tl.constexpr else s for s in sizes])
        if key not in known:
            known[key] = new(cls)
            try:
                init(known[key], element_ty, shape)
            except Exception:
                del known[key]
                raise
        return known[key]

    tl.block_type.__new__, tl.block_type.__init__ = shared, lambda self, element_ty, shape: None


def share_shapes() -> None:
    """Give every tensor of a type the same shape and number of elements."""
    init = tl.tensor.__init__

    def shared(self, handle, type):
        facts = type.__dict__.get("of_a_tensor")
        if facts is None:
            init(self, handle, type)
            facts = type.__dict__["of_a_tensor"] = dict(self.__dict__)
        self.__dict__.update(facts)
        self.handle = handle

    tl.tensor.__init__ = shared


def remember_operands() -> None:
    """Find once what types two operands of two types get, and the constant of a number beside one.

    An operand is broadcast by NumPy in the operation that follows.
    """
    check, pairs, constants = TritonSemantic.binary_op_type_checking_impl, {}, {}

    def fit(self, x, type):
        if x.type is type:
            return x
        if x.type.scalar is not type.scalar:
            x = self.cast(x, type.scalar)
        return tl.tensor(x.handle, type)

    def of_tensors(self, lhs, rhs, *rules, **named):
        a, b = lhs.type, rhs.type
        key = (id(a), id(b), rules, *named.items())
        if key in pairs:
            left, right, *_ = pairs[key]
            return fit(self, lhs, left), fit(self, rhs, right)
        operands = check(self, lhs, rhs, *rules, **named)
        # with the types, so that their ids stay theirs
        pairs[key] = operands[0].type, operands[1].type, a, b
        return operands

    def with_a_number(self, lhs, rhs, *rules, **named):
        is_left = type(lhs) is tl.tensor
        tensor, number = (lhs, rhs) if is_left else (rhs, lhs)
        key = (id(tensor.type), type(number), number, is_left, rules, *named.items())
        if key not in constants:
            operands = check(self, lhs, rhs, *rules, **named)
            constants[key] = operands[is_left], operands[not is_left].type, tensor.type
            # one for all: what writes to it raises
            operands[is_left].handle.data.setflags(write=False)
            return operands
        constant, wanted, _ = constants[key]
        tensor = fit(self, tensor, wanted)
        return (tensor, constant) if is_left else (constant, tensor)

    def checked(self, lhs, rhs, *rules, **named):
        tensors = (type(lhs) is tl.tensor) + (type(rhs) is tl.tensor)
        checked_by = (check, with_a_number, of_tensors)[tensors]
        return checked_by(self, lhs, rhs, *rules, **named)

    TritonSemantic.binary_op_type_checking_impl = checked


def share_types_of_arguments() -> None:
    """Make one type of equal names: each launch makes one for each pointer."""
    tl.str_to_ty = lru_cache(None)(tl.str_to_ty)


def call_builtins_directly() -> None:
    """Give each of Triton's functions its semantic without looking through its arguments."""
    checks = tl.load.__code__

    def patch(obj, name, member, builder, scope):
        # a class has no code
        is_checked = getattr(member, "__code__", None) is checks
        function = member.__wrapped__ if is_checked else member
        semantic = TritonSemantic(builder)

        def called(*args, _semantic=None, **kwargs):
            return function(*args, _semantic=semantic, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch


def compute_arrays_at_once() -> None:
    """Apply erf and products' high halves to arrays: NumPy's vectorize calls for each number."""
    erf = np.frompyfunc(math.erf, 1, 1)
    interpreter.np_erf_fp32 = lambda x: erf(x).astype(np.float32)
    interpreter.np_erf_fp64 = lambda x: erf(x).astype(np.float64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)

    def high_half(a, b):
        a, b = a.astype(np.uint64), b.astype(np.uint64)
        first = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
        second = (a & low) * (b >> half) + (first & low)
        return (a >> half) * (b >> half) + (first >> half) + (second >> half)

    interpreter.np_umulhi_u64 = high_half


def shift_bfloat16() -> None:
    """Convert between bfloat16 and float32 by a shift, where no number is subnormal."""
    convert, width = interpreter._convert_float, {tl.bfloat16: np.uint16, tl.float32: np.uint32}

    def converted(x, source, target, rounding):
        if rounding is not None or source not in width or target not in width:
            return convert(x, source, target, rounding)
        unsigned = width[source]
        bits, single = x.view(unsigned), unsigned(1)
        magnitude = (bits << single) >> single
        # one below zero is the greatest number
        if np.any(magnitude - single < unsigned((1 << source.fp_mantissa_width) - 1)):
            return convert(x, source, target, rounding)
        if target is tl.float32:
            return bits.astype(np.uint32) << np.uint32(16)
        return (bits >> np.uint32(16)).astype(np.uint16)

    interpreter._convert_float = converted


def look_up_dtypes() -> None:
    """Find numpy's dtype by the name of Triton's: the interpreter builds a table each time."""
    find, known = interpreter._get_np_dtype, {}

    def found(ty):
        name = ty.scalar.name
        if name not in known:
            known[name] = find(ty)
        return known[name]

    interpreter._get_np_dtype = found


def skip_overflow_checks() -> None:
    """Compute no integer again in int64, for an assert that debugging alone has."""
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def take_tensors_as_they_are() -> None:
    """Copy none to the host, where all are: a copy's cycles keep tensors alive until collected."""
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def patch_once() -> None:
    """Leave the interpreter's functions in the place of Triton's, instead of for each launch."""
    patch, none, patched = interpreter._patch_lang, interpreter._LangPatchScope, set()

    def patch_new(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(fn)
        return none()

    interpreter._patch_lang = patch_new


def patch() -> None:
    """Do all of it where kernels are interpreted, with triton 3.6 to 3.8: another one is slower."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with suppress(AttributeError, NameError):
        share_block_types()
        share_shapes()
        remember_operands()
        share_types_of_arguments()
        call_builtins_directly()
        compute_arrays_at_once()
        shift_bfloat16()
        look_up_dtypes()
        skip_overflow_checks()
        take_tensors_as_they_are()
        patch_once()
