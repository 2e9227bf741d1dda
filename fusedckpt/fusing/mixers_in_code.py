"""Find attention and mixers by the functions that their code calls.

A mixer is a module that mixes tokens. Its code is that of its class's forward, of its other methods
and of callable objects in its attributes that are called there, and of functions of the user's
package or file that these call. A softmax and a matrix product are attention written by hand: in
this code, or in modules without weights that it calls, whatever their names. A function that only
other code chooses, out of a table, is found by running the model, see `mixers_in_run`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from inspect import unwrap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fusedckpt.checkpointing import scans
from fusedckpt.checkpointing.attention import NAME
from fusedckpt.fusing.code_names import codes_in, defining_class, names_in

# functions of attention, and of diffusers, which choose one of them
_ATTENTION = frozenset(
    ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "flex_attention")
    + ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
    + ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "dispatch_attention_fn")
    + ("varlen_attn",)
)
# of attention written by hand: a softmax between two products
_SOFTMAXES = "softmax", "entmax", "sparsemax"
# those of losses and of discrete choices
_NO_SOFTMAXES = "log_softmax", "gumbel_softmax"
_MATRIX_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
# their functions beside a class's own file are not looked into
_READ_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "transformers", "diffusers", "timm"}
# how many functions are looked into for one class
_MOST_FUNCTIONS = 200


class _Calls(NamedTuple):
    """The calls in the code of a method, and in that of the functions that it calls."""

    # the kinds of functions that mix tokens
    kinds: frozenset[str] = frozenset()
    # whether there is a matrix product
    has_product: bool = False
    # whether there is a softmax
    has_softmax: bool = False
    # all names in the code
    names: frozenset[str] = frozenset()


def mixers_in_code(modules: Mapping[str, nn.Module]) -> dict[str, frozenset[str]]:
    """Return the names of the modules that mix tokens, and the kinds of functions they call.

    Of several, one inside another, it is the innermost with weights.
    """
    kinds_by_name = dict[str, frozenset[str]]()
    for name, module in modules.items():
        if kinds := kinds_called(module):
            while name and not any(p.dim() > 1 for p in modules[name].parameters()):
                # a module for the call alone
                name = name.rpartition(".")[0]
            kinds_by_name[name] = kinds_by_name.get(name, frozenset()) | kinds
    inner = innermost(kinds_by_name)
    # a whole model runs more than attention
    is_whole = any(isinstance(m, (nn.Embedding, nn.ModuleList)) for m in modules.values())
    return inner if inner or is_whole else kinds_by_name


def innermost(kinds_by_name: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Leave out the model itself, and modules around others."""
    return {
        name: kinds
        for name, kinds in kinds_by_name.items()
        if name and not any(other.startswith(f"{name}.") for other in kinds_by_name)
    }


def kinds_called(module: nn.Module) -> frozenset[str]:
    """Return the kinds of functions that a module's code, or a callable object in it, calls."""
    if isinstance(module, nn.MultiheadAttention):
        return frozenset((NAME,))
    # in attributes, as diffusers' processors are
    classes = [type(value) for value in vars(module).values() if callable(value)]
    functions = [kind for x in vars(module).values() if (kind := _kind_of(x)) is not None]
    calls = _calls_in(type(module), "forward")
    kinds = calls.kinds.union(functions, *(_calls_in(kind, "__call__").kinds for kind in classes))
    if NAME in kinds:
        return kinds
    inside = [calls, *_calls_inside(module, calls.names)]
    is_by_hand = any(x.has_product for x in inside) and any(x.has_softmax for x in inside)
    return kinds | {NAME} if is_by_hand else kinds


def _calls_inside(module: nn.Module, names: Collection[str]) -> Iterator[_Calls]:
    """Yield the calls of functions in a module's attributes, and of modules without weights."""
    for name, value in vars(module).items():
        if name in names and (called := _name_of(value)):
            yield _Calls(has_product=called in _MATRIX_PRODUCTS, has_softmax=_is_softmax(called))
    for name, child in module.named_children():
        if name not in names or any(True for _ in child.parameters()):
            continue
        for inner in child.modules():
            if isinstance(inner, (nn.Softmax, nn.Softmax2d)):
                yield _Calls(has_softmax=True)
            else:
                yield _calls_in(type(inner), "forward")


def _name_of(fn: Any) -> str:
    """Return the name of a function, also of a partial of it; "" for other objects."""
    if isinstance(fn, partial):
        return _name_of(fn.func)
    return fn.__name__ if isinstance(fn, (FunctionType, BuiltinFunctionType)) else ""


def _is_softmax(name: str) -> bool:
    """Whether a name is that of a softmax over scores, or one of its kind."""
    lower = name.lower()
    return any(word in lower for word in _SOFTMAXES) and lower not in _NO_SOFTMAXES


def _kind_of(fn: Any) -> str | None:
    """Return the kind of a function, also of a partial of it; None where it mixes no tokens."""
    kind = scans.kind_of(fn)
    if kind is None and isinstance(fn, partial):
        return _kind_of(fn.func)
    is_function = isinstance(fn, (FunctionType, BuiltinFunctionType))
    return NAME if is_function and fn.__name__ in _ATTENTION else kind


@cache
def _calls_in(kind: type, method: str) -> _Calls:
    """Return the calls in a method's code, and in that of the functions that it calls."""
    owner = defining_class(kind, method)
    if owner.__module__.startswith("torch."):
        return _Calls()
    kinds = set[str]()
    all_names = set[str]()
    seen = set[CodeType]()
    queue = [*_methods(kind, method)]
    has_product = False
    for fn in queue:
        code = fn.__code__
        if code in seen or len(seen) > _MOST_FUNCTIONS:
            continue
        seen.add(code)
        names = {*names_in(code)}
        values = [*_values_named(fn, names), *_class_attributes(kind, names)]
        # under other names, too
        all_names |= {*names, *map(_name_of, values)}
        has_product = has_product or _has_product_operator(code)
        for value in values:
            mixing = _kind_of(value)
            if mixing is not None:
                kinds.add(mixing)
            elif isinstance(value, FunctionType) and _belongs_to(value, owner):
                queue.append(unwrap(value))
        for name in names:
            queue += _methods(kind, name) if not hasattr(nn.Module, name) else ()
    has_product = has_product or not _MATRIX_PRODUCTS.isdisjoint(all_names)
    has_softmax = any(map(_is_softmax, all_names))
    if not _ATTENTION.isdisjoint(all_names) or (has_product and has_softmax):
        kinds.add(NAME)
    return _Calls(frozenset(kinds), has_product, has_softmax, frozenset(all_names))


def _methods(kind: type, name: str) -> Iterator[FunctionType]:
    """Yield the methods of a name in all bases of a class: one calls the other's by super()."""
    for base in kind.__mro__:
        method = vars(base).get(name)
        method = getattr(method, "__func__", method)
        method = unwrap(method) if callable(method) else None
        if isinstance(method, FunctionType) and not base.__module__.startswith("torch."):
            yield method


def _class_attributes(kind: type, names: set[str]) -> Iterator[Any]:
    """Yield the attributes of a class that are no methods, such as a function of a table."""
    for base in kind.__mro__[: kind.__mro__.index(object)]:
        values = (vars(base)[name] for name in names & vars(base).keys())
        values = (getattr(value, "__func__", value) for value in values)
        yield from (value for value in values if not isinstance(value, FunctionType))


def _belongs_to(fn: FunctionType, kind: type) -> bool:
    """Whether a function is of a class's file or package."""
    if fn.__module__ == kind.__module__:
        return True
    package = kind.__module__.partition(".")[0]
    return package not in _READ_PACKAGES and (fn.__module__ or "").partition(".")[0] == package


def _values_named(fn: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield the values of a function's globals and closed-over variables, and of modules' names."""
    for code in codes_in(fn.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                value = fn.__globals__.get(instruction.argval)
                if isinstance(value, ModuleType):
                    yield from (vars(value).get(name) for name in names)
                yield value
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # not assigned yet
            continue


def _has_product_operator(code: CodeType) -> bool:
    """Whether code has the operator of a matrix product."""
    return any(
        instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"
        for part in codes_in(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname.startswith("BINARY_")
    )
