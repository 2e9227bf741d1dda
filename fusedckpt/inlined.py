"""Why linears and an activation that a module holds are not computed as one block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.parity import is_transposed
from fusedckpt.recording import record
from fusedckpt.structure import activation_by, activation_of

_DROPOUTS = nn.modules.dropout._DropoutNd


def activations_of(module: nn.Module) -> dict[str, str | None]:
    """Return what a module holds that may be an activation: its name -> the table's, or None.

    Children without parameters, buffers and children, and functions of torch.
    """
    leaves = _leaves(module).items()
    found = {name: activation_by(record(child, (2, 3, 8))) for name, child in leaves}
    functions = {
        name: activation_of(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("torch")
        if callable(value) and not isinstance(value, type)
    }
    return found | {name: known for name, known in functions.items() if known}


def _leaves(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: child
        for name, child in module.named_children()
        if not (child._parameters or child._buffers or child._modules)
        if type(child) is not nn.Identity and not isinstance(child, _DROPOUTS)
    }


def _linears(module: nn.Module) -> dict[str, Any]:
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) or is_transposed(child)
    }


def _wraps_linear(child: nn.Module) -> bool:
    """Whether a layer stands for a linear, as adapters do."""
    inner = [one for one in child.children() if isinstance(one, nn.Linear)]
    # it passes for a linear to whoever asks for its weight
    return bool(inner) and isinstance(getattr(child, "weight", None), Tensor)


def beside(module: nn.Module, named: dict[str, str | None], is_small: bool) -> str | None:
    """Return why linears and an activation beside other layers are no block, None for none.

    named: the module's activations; is_small: whether it has no more linears than a block.
    """
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    counts = [tensor.shape[0] for tensor in own.values() if tensor.dim() == 3]
    if len(counts) > 1 and len({*counts}) == 1 < counts[0]:
        return "its weights are 3-dimensional: a mixture of experts is not fused"
    if not any(known not in (None, "identity") for known in named.values()):
        return None
    linears = _linears(module)
    known = {*linears, *_leaves(module)}
    others = {
        name: child
        for name, child in module.named_children()
        if name not in known and not isinstance(child, (nn.Identity, _DROPOUTS))
    }
    if others and all(map(_wraps_linear, others.values())):
        name, child = next(iter(others.items()))
        return f"{name} is a {type(child).__name__}: adapters are not fused"
    if not ((linears and is_small) or linears_fit(module)) or not (own or others):
        return None
    names = ", ".join([*own, *others])
    return f"its linears and activation stand beside {names}: no module computes them alone"


def linears_fit(module: nn.Module) -> bool:
    """Whether one of a module's linears may read what the activation of another one makes."""
    linears = _linears(module)
    shapes = [tuple(linear.weight.shape) for linear in linears.values()]
    shapes = [
        s[::-1] if is_transposed(c) else s for s, c in zip(shapes, linears.values(), strict=True)
    ]
    return any(
        a is not b and len(a) == len(b) == 2 and a[0] in (b[1], 2 * b[1]) and a[0] != a[1]
        for a in shapes
        for b in shapes
    )


def unfit_children(module: nn.Module, named: dict[str, str | None]) -> str | None:
    """Return why the layers of what may be a block cannot be computed as one, None if they may."""
    linears = _linears(module)
    if not linears:
        return None
    if any(named.values()):
        for name, child in module.named_children():
            if name not in linears and child._modules and _wraps_linear(child):
                kind = type(child).__name__
                return f"{name} is a {kind}: adapters are not fused"
    for name, child in module.named_children():
        if name in linears and parametrize.is_parametrized(child):
            return f"{name}: a parametrization makes its weights"
        if has_hooks(child):
            return f"{name}: a hook watches it, or its forward was replaced"
    dtypes = sorted({str(linear.weight.dtype) for linear in linears.values()})
    return f"its weights have several dtypes: {', '.join(dtypes)}" if len(dtypes) > 1 else None
