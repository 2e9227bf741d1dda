"""The child modules that a fused layer can compute itself, each known by a letter.

A fused layer calls a child that was replaced, parametrized, hooked or given another forward, by
itself or by its class.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.kernels.activations import ACTIVATIONS, activation_name_of
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.norm import LayerNorm, NormSpec, RMSNorm, is_patched

# a letter for each kind of child; looked up by type, subclasses have none
_LETTERS: dict[type[nn.Module], str] = {
    **dict.fromkeys((act.module for act in ACTIVATIONS.values() if act.module), "a"),
    **dict.fromkeys((nn.Linear, Linear), "l"),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm), "n"),
    nn.Dropout: "d",
    nn.Identity: "i",
}
# their forwards: a library may assign another one to a class of torch's
_FORWARDS = {kind: dispatch.own_forward(kind) for kind in _LETTERS}


def _called_by(kind: type[nn.Module]) -> tuple[dict[str, Any], str, Any]:
    """Return the function of torch that a class's forward calls: namespace, name, and itself."""
    names = getattr(getattr(_FORWARDS[kind], "__code__", None), "co_names", ())
    for owner, space in (("F", F), ("torch", torch)):
        for name in names if owner in names else ():
            if isinstance(getattr(space, name, None), (FunctionType, BuiltinFunctionType)):
                return vars(space), name, dispatch.own_function(space, name)
    return {"": None}, "", None


# a library may assign another one to its name, too
_CALLED = {kind: _called_by(kind) for kind in _LETTERS}


# the attributes that a letter, or the options of a call, are read from
_OPTION_NAMES = ("activation", "normalized_shape", "eps", "offset", "cast")


class ChildClass(NamedTuple):
    """A class of children that have a letter, as long as torch is as it was."""

    kind: type[nn.Module]
    # its forward
    forward: Any
    # the function of torch that this calls: its namespace, its name there, and itself
    namespace: dict[str, Any]
    name: str
    function: Any


def class_of(layer: Any) -> ChildClass | None:
    """Return the class of a child, None where no child of that class has a letter."""
    kind = type(layer)
    return ChildClass(kind, _FORWARDS[kind], *_CALLED[kind]) if kind in _LETTERS else None


def options_of(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the attributes, with their values, that the letter of a child depends on."""
    states = (act.module_state for act in ACTIVATIONS.values() if act.module is type(layer))
    names = dict.fromkeys((*_OPTION_NAMES, *(name for state in states for name in state)))
    return tuple((name, getattr(layer, name)) for name in names if name in vars(layer))


def letter_of(layer: Any) -> str:
    """Return the letter of a child that a fused layer can compute, else -.

    n, l, a, d, i for a norm, linear, activation, dropout, identity.
    """
    letter = _letter(layer)
    plain = letter != "-" and dispatch.are_plain(*layer._parameters.values())
    return letter if plain and not has_hooks(layer) else "-"


def _letter(layer: Any) -> str:
    kind = type(layer)
    letter = _LETTERS.get(kind, "-")
    if letter == "-" or kind.forward is not _FORWARDS[kind]:
        return "-"
    namespace, name, function = _CALLED[kind]
    if namespace[name] is not function:
        return "-"
    if letter == "l":
        fits = kind is nn.Linear or layer.activation == "identity"
    elif letter == "n":
        fits = len(layer.normalized_shape) == 1 and not is_patched(layer)
    elif letter == "d":
        fits = isinstance(layer.p, (int, float)) and 0 <= layer.p <= 1
    else:
        fits = letter == "i" or activation_name_of(layer) is not None
    return letter if fits else "-"


def are_letter(letter: str, *layers: Any) -> bool:
    """Whether a fused layer can compute these modules, of one letter, without calling them."""
    return {letter}.issuperset(map(_letter, layers)) and not has_hooks(*layers)


def spec_of(norm: Any) -> NormSpec:
    """Describe a norm module of torch's or ours."""
    if isinstance(norm, nn.LayerNorm):
        return NormSpec("layer", norm.weight, norm.bias, norm.eps)
    if isinstance(norm, RMSNorm):
        return NormSpec("rms", norm.weight, None, norm.eps, norm.offset, norm.cast)
    return NormSpec("rms", norm.weight, None, norm.eps)
