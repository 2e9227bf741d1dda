"""Triton's interpreter without what it computes again and again: its numbers stay what they are.

It spends its time on the types of a kernel's tensors, not on their numbers. A type is computed
once here, what a function does for its types is recorded once, and the language is patched once a
process.
"""

import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

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


# functions of Triton's language and of its tensors: what these do is told by types and constants
REPEATED = {
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "neg"),
    *("and", "or", "xor", "invert", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"),
    *("load", "store", "where", "cast", "to", "getitem", "expand_dims", "broadcast_to", "reshape"),
    *("trans", "dot", "fma", "maximum", "minimum", "abs", "exp", "exp2", "log", "log2", "erf"),
    *("sqrt", "sqrt_rn", "rsqrt", "div_rn", "sin", "cos", "floor"),
}
# the tile of sums over rows that users get, which a test of its own runs
USERS_SUM_TILE: dict[str, int] = {}
# the types of constants, but for Triton's own
CONSTANTS = {bool, int, float, str, type(None)}


class State(threading.local):
    """Of a thread: the semantic of a call that is recorded, and whether the call read a number."""

    semantic = None
    has_read = reads = False


state = State()


class Recorder:
    """Triton's builder, which notes its calls that take or return numbers."""

    def __init__(self, builder):
        self._builder, self.calls = builder, []

    def __getattr__(self, name):
        member = getattr(self._builder, name)
        if not callable(member):
            return member

        def noted(*args, **kwargs):
            result = member(*args, **kwargs)
            if any(type(x) is interpreter.TensorHandle for x in (result, *args)):
                self.calls.append((member, args, kwargs, result))
            return result

        return noted


class Rule(NamedTuple):
    """What a function does for types and constants: no steps where that is unclear.

    Values are numbered: first the handles of tensors, then results of steps.
    """

    # calls of the builder: the function, the places of its arguments, other arguments
    steps: list
    # the one step's function, if it takes the handles as they are
    only: Callable | None = None
    # which value the result has, and all else of the result
    last: int = 0
    facts: dict | None = None
    # so that ids stay theirs
    kept: object = None


def repeated(function, builder, reads):
    """Return a function of Triton that finds once what the builder is to do.

    Later calls make the same calls of the builder, without Triton's checks of types. reads: whether
    the function asks arguments of one number, and them alone, whether they are zero.
    """
    rules, semantic, new, tensor = {}, TritonSemantic(builder), object.__new__, tl.tensor

    def called(*args, _semantic=None, **kwargs):
        key, handles = [], []
        for x in args if not kwargs else (*args, *kwargs, *kwargs.values()):
            if type(x) is tensor:
                handles.append(x.handle)
                key.append(id(x.type))
                if reads:
                    key.append(x.handle.data.size == 1)
            else:
                key.append(constant(x))
        key = tuple(key)
        rule = rules.get(key)
        if rule is None or state.semantic is not None:
            if None in key or state.semantic is not None:
                return function(*args, _semantic=state.semantic or semantic, **kwargs)
            rules[key], result = record(function, builder, reads, args, kwargs)
            return result
        steps, only, last, facts, _ = rule
        if only is not None:
            handle = only(*handles)
        elif steps:
            for member, places, given, named in steps:
                given = given.copy()
                for index, source in places:
                    given[index] = handles[source]
                handles.append(member(*given, **named))
            handle = handles[last]
        else:
            return function(*args, _semantic=semantic, **kwargs)
        made = new(tensor)
        made.__dict__.update(facts)
        made.handle = handle
        return made

    return called


def constant(x):
    """Return what tells a constant from others, None if nothing does."""
    kind = type(x)
    if kind is tl.constexpr:
        x = x.value
        kind = type(x)
    if kind in CONSTANTS:
        # -0.0 equals 0.0, and True 1
        return kind, x or repr(x)
    if kind in (tuple, list, tl.tuple):
        parts = tuple(map(constant, x))
        return None if None in parts else parts
    if isinstance(x, tl.dtype):
        return kind, x
    return "all" if kind is slice and x == slice(None) else None


def record(function, builder, reads, args, kwargs):
    """Call a function; return what it does, and its result."""
    recorder, tensors = Recorder(builder), []
    # each with a handle of its own, by which it is known
    args = [fresh(x, tensors) for x in args]
    kwargs = {name: fresh(x, tensors) for name, x in kwargs.items()}
    state.semantic, state.has_read, state.reads = TritonSemantic(recorder), False, reads
    try:
        result = function(*args, _semantic=state.semantic, **kwargs)
    finally:
        state.semantic = None
    rule = Rule([]) if state.has_read else rule_of(recorder.calls, tensors, result)
    return rule._replace(kept=[tensor.type for tensor in tensors]), result


def fresh(x, tensors):
    """Return an argument, a tensor with another handle, and add a tensor."""
    if type(x) is tl.tensor and type(x.handle) is interpreter.TensorHandle:
        handle = x.handle
        x = tl.tensor(interpreter.TensorHandle(handle.data, handle.dtype, handle.attr), x.type)
    if type(x) is tl.tensor:
        tensors.append(x)
    return x


def rule_of(calls, tensors, result):
    """Return the calls of the builder that led from tensors to a result."""
    sources, steps = {id(tensor.handle): i for i, tensor in enumerate(tensors)}, []
    for member, args, kwargs, made in calls:
        inside = [y for x in args if isinstance(x, (list, tuple)) for y in x]
        if any(type(y) is interpreter.TensorHandle for y in (*inside, *kwargs.values())):
            return Rule([])
        places = [(i, sources[id(x)]) for i, x in enumerate(args) if id(x) in sources]
        if not places:
            # a constant, which what writes to it would change for all
            made.data.setflags(write=False)
            continue
        steps.append((member, places, [None if id(x) in sources else x for x in args], kwargs))
        if made is not None:
            sources[id(made)] = len(tensors) + len(steps) - 1
    has_handles = all(type(tensor.handle) is interpreter.TensorHandle for tensor in tensors)
    if type(result) is not tl.tensor or not steps or not has_handles:
        return Rule([])
    # a store has none
    last = -1 if result.handle is None else sources.get(id(result.handle))
    if last is None:
        return Rule([])
    facts = {name: value for name, value in result.__dict__.items() if name != "handle"}
    member, places, given, named = steps[0]
    in_order = places == [(i, i) for i in range(len(tensors))] and len(given) == len(tensors)
    only = member if in_order and len(steps) == 1 and not named else None
    return Rule(steps, only, last, facts)


def note_reads() -> None:
    """Note where Triton reads a number: what it does then is not told by types."""
    for name in ("__bool__", "__index__"):
        read = getattr(tl.tensor, name)

        def noted(self, read=read):
            state.has_read = state.has_read or not state.reads or self.handle.data.size == 1
            return read(self)

        setattr(tl.tensor, name, noted)


def repeat_calls_of_the_builder() -> None:
    """Give Triton's functions their semantic, and let most of them repeat what they did."""
    checks = tl.load.__code__

    def patch(obj, name, member, builder, scope):
        # a class has no code
        is_checked = getattr(member, "__code__", None) is checks
        function = member.__wrapped__ if is_checked else member
        semantic = TritonSemantic(builder)

        def called(*args, _semantic=None, **kwargs):
            return function(*args, _semantic=state.semantic or semantic, **kwargs)

        if is_checked and name.strip("_") in REPEATED:
            called = repeated(function, builder, reads=name in ("load", "store"))
        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch


def make_handles_quickly() -> None:
    """Compare the size of numbers with their type once, and share attributes until one is set."""
    kind, check, known = interpreter.TensorHandle, interpreter._validate_np_data_size, {}
    kind.attr = {}

    def init(self, data, dtype, attr=None):
        self.data, self.dtype = data, dtype
        if attr:
            self.attr = attr
        if (id(dtype), data.itemsize) not in known:
            self.__post_init__()
            # with the type, so that its id stays its
            known[id(dtype), data.itemsize] = dtype

    def set_attr(self, key, value):
        self.attr = {**self.attr, key: value}

    def binary_op(self, lhs, rhs, op):
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if (id(dtype), output.itemsize) not in known and not check(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return kind(output, dtype)

    def create_expand_dims(self, arg, axis):
        return kind(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    def create_broadcast(self, arg, shape):
        output = np.empty(shape, arg.data.dtype)
        output[...] = arg.data
        return kind(output, arg.dtype.scalar)

    kind.__init__, kind.set_attr = init, set_attr
    builder = type(interpreter.interpreter_builder)
    builder.binary_op, builder.create_expand_dims = binary_op, create_expand_dims
    builder.create_broadcast = create_broadcast


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
            note_reads()
        return none()

    interpreter._patch_lang = patch_new


def widen_sums() -> None:
    """Sum more columns in a program, which takes the time of its Python."""
    from fusedckpt.kernels import partials

    USERS_SUM_TILE.update(partials.SUM_TILE)
    partials.SUM_TILE.update(BLOCK_M=16, BLOCK_N=256)


def patch() -> None:
    """Do all of it where kernels are interpreted, with triton 3.6 to 3.8: another one is slower."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with suppress(AttributeError, NameError):
        share_block_types()
        share_shapes()
        remember_operands()
        share_types_of_arguments()
        repeat_calls_of_the_builder()
        make_handles_quickly()
        compute_arrays_at_once()
        shift_bfloat16()
        look_up_dtypes()
        skip_overflow_checks()
        take_tensors_as_they_are()
        patch_once()
        widen_sums()
