"""The linears and activations of a model that may save a recipe of their input."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from fusedckpt.autograd import dispatch
from fusedckpt.fusing.fuse_report import join_names
from fusedckpt.fusing.fused_norms import FusedNorm
from fusedckpt.fusing.lookalikes import is_transposed
from fusedckpt.fusing.mlp_reader import MatchedBlock
from fusedckpt.fusing.recorded_block import is_activation
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.shared_layers import (
    SharedActivation,
    SharedLinear,
    SharedProduct,
    SharedReader,
)
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import MARK, Swap
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential


def find_shared(search: Search) -> None:
    """Find linears and activations that may read a norm's recipe; a layer of such is not left."""
    modules = search.modules
    report = search.report
    norms = (LayerNorm, RMSNorm, FusedNorm)
    kinds = [*map(type, modules.values()), *(swap.new_class for _, swap in search.swaps)]
    if not any(issubclass(kind, norms) for kind in kinds):
        return
    seen = {*search.inside, *(module for module, _ in search.swaps)}
    # of Sequentials that a block begins or ends in
    seen.update([child for module in search.inside for child in module.children()])
    for module, swap in search.swaps:
        # its blocks are told by the classes of its layers
        seen.update(module.children() if issubclass(swap.new_class, Sequential) else ())
    swaps: dict[str, Swap] = {}
    for name, module in modules.items():
        if type(module).__module__.startswith("fusedckpt.") or isinstance(module, Sequential):
            seen.update(module.modules())
        if module in seen or module._modules or not search.may_share(name):
            continue
        if (ours := _shared(module)) is not None:
            attributes = {"_fusedckpt_save": search.save} if ours is SharedLinear else {}
            swaps[name] = Swap("linear", "", subclass(ours, type(module)), attributes)
    if not any(issubclass(swap.new_class, SharedProduct) for swap in swaps.values()):
        return
    report.shared.update((name, type(modules[name]).__name__) for name in swaps)
    for name in [n for n in report.left if n in modules and _is_shared(n, modules[n], swaps)]:
        del report.left[name], report.kinds[name], report.classes[name]
    search.swaps += [(modules[name], swap) for name, swap in swaps.items()]


def _is_shared(name: str, module: nn.Module, shared: Mapping[str, Swap]) -> bool:
    """Whether a module, or the linears and activations that it calls, save recipes of inputs."""
    if name in shared and issubclass(shared[name].new_class, SharedReader):
        return True
    swaps = [shared.get(join_names(name, child)) for child, _ in module.named_children()]
    kinds = [swap.new_class for swap in swaps if swap is not None]
    acts = sum(issubclass(kind, SharedActivation) for kind in kinds)
    return acts > 0 and len(kinds) >= acts + 2


def _shared(module: nn.Module) -> type[nn.Module] | None:
    """Return our class of a layer that may read a recipe, None for other modules."""
    if "forward" in vars(module) or MARK in vars(module):
        return None
    if not dispatch.are_plain(*module._parameters.values()):
        return None
    if type(module).forward is dispatch.own_forward(nn.Linear):
        return SharedLinear
    if isinstance(module, nn.Linear) or is_transposed(module):
        # its own forward runs, and saves its input or something else
        return SharedProduct
    if is_activation(module):
        return SharedActivation
    return SharedReader if _has_one_matrix(module) else None


def _has_one_matrix(module: nn.Module) -> bool:
    """Whether a module of a library multiplies by a weight of its own, as routers do."""
    weights = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    is_own = not type(module).__module__.startswith("torch.")
    return is_own and sum(p.dim() == 2 for p in weights) == 1 and all(p.dim() < 3 for p in weights)


def may_share(module: nn.Module, block: MatchedBlock | None) -> bool:
    """Whether a linear with its activation are two layers of a module, and nothing else is."""
    if block is None or block.kind != "linear_act" or block.activation == "identity":
        return False
    layers = [*module.children()]
    return len(block.linears[0].weight) == 2 and sum(map(is_activation, layers)) == 1
