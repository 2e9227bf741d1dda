"""Copies of modules with other parameters, and running them without side effects.

A copy consists of new module objects with the same classes and attributes. The user's modules are
not modified, and no random numbers are drawn.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.checkpointing.written_buffers import is_state
from fusedckpt.checkpointing.written_tensors import written_parameters
from fusedckpt.state import rng
from fusedckpt.state.holders import with_tensors
from fusedckpt.state.tensors import tensor_restorer
from fusedckpt.state.variables import noted_variables

Path = tuple[str, ...]

# rows of the random input: enough to tell rules of rounding apart, and few
ROWS = 6


def replica(
    module: nn.Module,
    parameter: Callable[[Tensor, Path], Any],
    *,
    training: bool = False,
    rate: Callable[[Path], float] | None = None,
    sizes: Mapping[int, int] = MappingProxyType({}),
    enter: Callable[[nn.Module, Path], tuple[type, dict[str, Any]]] | None = None,
    path: Path = (),
) -> Any:
    """Return a copy of a module tree with other parameters, shared buffers and no hooks.

    Args:
        module: the module.
        parameter: maps a parameter and its path to the copy's parameter.
        training: the mode of the copy.
        rate: maps the path of an attribute that is a dropout rate to the copy's rate; None keeps
            rates.
        sizes: replacements for numbers that are sizes.
        enter: returns the class of a module's copy, and attributes for it.
        path: of the module below the first one.
    """
    kind, attributes_of_copy = (type(module), {}) if enter is None else enter(module, path)
    clone = object.__new__(kind)
    attributes = vars(module)
    changed: dict[str, Any] = {name: type(attributes[name])() for name in private.HOOK_ATTRIBUTES}
    changed |= {
        name: sizes[value]
        for name, value in attributes.items()
        if type(value) is int and value > 1 and value in sizes
    }
    shape = attributes.get("normalized_shape")
    if sizes and isinstance(shape, tuple):
        changed["normalized_shape"] = tuple(sizes.get(n, n) for n in shape)
    if rate is not None:
        changed |= {name: rate((*path, name)) for name in rates_of(module)}
    changed["_parameters"] = {
        name: None if p is None else parameter(p, (*path, name))
        for name, p in module._parameters.items()
    }
    options: Any = {"training": training, "rate": rate, "sizes": sizes, "enter": enter}
    changed["_modules"] = {
        name: None if child is None else replica(child, parameter, **options, path=(*path, name))
        for name, child in module._modules.items()
    }
    # bypasses a class that records attributes that are set
    object.__getattribute__(clone, "__dict__").update(
        attributes, training=training, **changed, **attributes_of_copy
    )
    return clone


def rates_of(module: nn.Module) -> list[str]:
    """Return the attributes that are dropout rates in training."""
    if type(module) is nn.Dropout:
        return ["p"]
    return [
        name
        for name, value in vars(module).items()
        if "drop" in name and type(value) in (int, float) and name[0] != "_"
    ]


class Draw:
    """Random float64 values for a module's parameters and input, determined by a seed.

    Matrices are scaled so that products are of order one.
    """

    def __init__(
        self,
        module: nn.Module,
        features: tuple[int, ...],
        sizes: Mapping[int, int] = MappingProxyType({}),
        rows: int = ROWS,
        seed: int = 0,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        # by the parameters' ids
        self.values: dict[int, Tensor] = {}
        for parameter in module.parameters():
            value = self.randn([sizes.get(n, n) for n in parameter.shape])
            scale = value.shape[-1] ** -0.5 if value.dim() == 2 else 1.0
            self.values[id(parameter)] = value * scale
        # three dimensions: then the result shows a module that picks one of the first two
        self.x = self.randn([2, rows // 2, *(sizes.get(n, n) for n in features)])

    def randn(self, shape: Any) -> Tensor:
        """Draw a tensor."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")


@contextmanager
def undisturbed(device: torch.device | str) -> Iterator[None]:
    """Restore all random states; run outside of the caller's modes, as plain training code does."""
    kind = torch.device(device).type
    with (
        warnings.catch_warnings(),
        rng.kept(rng.everywhere()),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(kind if kind != "meta" else "cpu", enabled=False),
    ):
        # of dtypes that no user asked for
        warnings.simplefilter("ignore")
        yield


def shared_in_copies(model: nn.Module) -> dict[int, Any]:
    """Return the objects that a copy of a model shares with it, as a memo of `deepcopy`."""
    # generators too: their states are put back
    shared = {id(x): x for x in (*model.parameters(), *rng.generators_in(model))}
    for parameter in written_parameters(model):
        shared.pop(id(parameter), None)
    return shared


@contextmanager
def running_copy_of(model: nn.Module) -> Iterator[None]:
    """Put back the state that a model shares with a copy that runs inside.

    That is generators in its attributes, and the variables that its code may write, with the model
    itself where a hook closes over it.
    """
    states = rng.states_in(model)
    variables = noted_variables(model)
    written = [*filter(is_state, variables.tensors), *variables.parameters]
    restorers = [*map(tensor_restorer, written)]
    try:
        yield
    finally:
        states.restore()
        variables.state.put_back()
        for restore in restorers:
            restore()


def copied_inputs(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments in new containers, with copies of their tensors: a run may write them."""
    return with_tensors((args, kwargs), _copied_input)


def _copied_input(x: Tensor) -> Tensor:
    if isinstance(x, nn.Parameter):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def takes_one(module: nn.Module) -> bool:
    """Whether the module's forward can be called with one argument."""
    try:
        inspect.signature(type(module).forward).bind(module, None)
    except (TypeError, ValueError):
        return False
    return True
