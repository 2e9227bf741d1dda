"""Triton's interpreter without what it computes again and again: its numbers stay what they are.

It spends its time on the types of a kernel's tensors, not on their numbers. A type is computed
once here, and the language is patched once a process.
"""

import os
from contextlib import suppress

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


def compare_types_by_identity() -> None:
    """Ask whether two types or shapes are the same, before whether they are equal or fit."""
    equal, broadcast = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    def broadcast_others(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        same = a is b or (a.is_block() and b.is_block() and a.shape.values == b.shape.values)
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others


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
    """Do all of it where kernels are interpreted, with triton 3.6 or 3.7: another one is slower."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with suppress(AttributeError, NameError):
        share_block_types()
        share_shapes()
        compare_types_by_identity()
        look_up_dtypes()
        skip_overflow_checks()
        take_tensors_as_they_are()
        patch_once()
