"""The linears and activations of a model that may save a recipe of their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fusedckpt.autograd import dispatch
from fusedckpt.fusing import reasons
from fusedckpt.fusing.fuse_report import join_names
from fusedckpt.fusing.fused_mlps import MLPPattern
from fusedckpt.fusing.norms import FusedNorm
from fusedckpt.fusing.reasons import (
    child_layers,
    is_transposed,
    looks_like,
)
from fusedckpt.fusing.recording import is_activation
from fusedckpt.fusing.replica import takes_one
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Swap, original_of, subclass
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential
from fusedckpt.recipes.shared_channels import (
    CHANNEL_NORMS,
    CONV_LAYERS,
    SharedChannelActivation,
    SharedChannelDropout,
    SharedChannelNorm,
    SharedChannels,
    SharedInputActivation,
    SharedPool,
    channels_class_of,
)
from fusedckpt.recipes.shared_code import SharedCode
from fusedckpt.recipes.shared_layers import (
    SharedActivation,
    SharedCheap,
    SharedLinear,
    SharedNorm,
    SharedProduct,
    SharedReader,
)

# names in code of functions with results that readers make again
_MAKERS_IN_CODE = frozenset(
    ("batch_norm", "group_norm", "avg_pool2d", "silu", "gelu", "mish", "sigmoid")
    + ("hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus")
)

# and of functions that save their input, which those make
_READERS_IN_CODE = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    + ("max_pool2d", "max_pool3d")
)


def find_shared(search: Search) -> None:
    """Find linears and activations that may save a recipe: a layer of these is not "left"."""
    modules = search.modules
    report = search.report
    seen = _computed_elsewhere(search)
    swaps = _layers(search, seen)
    if search.save == "inputs":
        _note_readers(swaps)
        _add_code(search, seen, swaps)
    swaps = _with_sources(search, swaps)
    if not any(
        issubclass(s.new_class, (SharedProduct, SharedNorm, SharedChannels)) for s in swaps.values()
    ):
        return
    report.shared.update((name, _change(modules[name], swap)) for name, swap in swaps.items())
    for name in [n for n in report.left if n in modules and _is_shared(n, search, swaps)]:
        del report.left[name], report.kinds[name], report.classes[name]
    search.swaps += [(modules[name], swap) for name, swap in swaps.items()]


def _computed_elsewhere(search: Search) -> set[nn.Module]:
    """Return the modules that are swapped, or that another module computes."""
    seen = {*search.inside, *(module for module, _ in search.swaps)}
    # of Sequentials that a run begins or ends in
    seen.update([child for module in search.inside for child in module.children()])
    for module, swap in search.swaps:
        # its runs are told by the classes of its layers
        seen.update(module.children() if issubclass(swap.new_class, Sequential) else ())
    for module in search.modules.values():
        if type(module).__module__.startswith("fusedckpt.") or isinstance(module, Sequential):
            seen.update(module.modules())
    return seen


def _layers(search: Search, seen: Set[nn.Module]) -> dict[str, Swap]:
    """Return the swaps of layers that may save a recipe of their input, by name."""
    swaps: dict[str, Swap] = {}
    channels = _layers_of_channels(search)
    behind = _behind(search, channels)
    reads_in_code = bool(channels) and any(map(_may_read_channels, search.modules.values()))
    for name, module in search.modules.items():
        if module in seen or not search.may_share(name):
            continue
        if module._modules and not reasons.wraps_norm(module):
            continue
        ours = channels.get(name) or _shared(module)
        is_norm = ours in (SharedNorm, SharedChannelNorm)
        if ours is None or (is_norm and not search.has(name, "norm")):
            continue
        if search.save != "inputs" and issubclass(ours, (SharedCheap, SharedNorm, SharedChannels)):
            continue
        notes: dict[str, Any] = {"save": search.save} if ours is SharedLinear else {}
        if issubclass(ours, SharedChannels):
            notes["is_behind"] = module in behind
            notes["reads_in_code"] = reads_in_code
            notes["compared"] = {}
        swaps[name] = Swap("linear", "", subclass(ours, type(module)), notes=notes)
    return swaps


def _note_readers(swaps: Mapping[str, Swap]) -> None:
    """Note at linears that an activation stands beside them, which may read their results."""
    places = {
        _parent(name)
        for name, swap in swaps.items()
        if issubclass(swap.new_class, SharedActivation)
    }
    for name, swap in swaps.items():
        if _parent(name) in places and issubclass(swap.new_class, SharedLinear):
            swap.notes["readers"] = "layers"


def _add_code(search: Search, seen: Set[nn.Module], swaps: dict[str, Swap]) -> None:
    """Add the swaps of layers with code that may call functions between linears."""
    for name, module in search.modules.items():
        if module in seen or not search.may_share(name):
            continue
        linears = {n: search.modules[n] for n in _own_linears(name, module, swaps)}
        layers = [*linears.values()]
        hidden = [n for place, n in enumerate(linears) if _is_hidden(place, layers)]
        if not hidden:
            continue
        new_class = subclass(SharedCode, type(module))
        swaps[name] = Swap("linear", "", new_class, notes={"shares_code": True})
        for linear in hidden:
            swaps[linear].notes["readers"] = "code"


def _is_hidden(place: int, linears: Sequence[Any]) -> bool:
    """Whether a linear of a layer may make an MLP's wide tensor, or gate and up in one.

    Narrow results, as of queries or of a sum with the input, are not worth a GEMM, nor are logits.
    """
    wide = linears[place].out_features
    if wide <= linears[place].in_features:
        return False
    halves = [down.in_features for down in linears[place + 1 :]]
    return wide // 2 in halves or any(down.in_features == wide for down in linears)


def _change(module: nn.Module, swap: Swap) -> str:
    """Return the text of a report on a layer."""
    name = type(module).__name__
    if issubclass(swap.new_class, SharedCode):
        return f"{name} -> functions of its linears' results run again"
    if issubclass(swap.new_class, (SharedNorm, SharedChannelNorm)):
        return f"{name} -> saves its input"
    if issubclass(swap.new_class, SharedChannels):
        return f"{name} -> saves the input of the layers before it"
    return f"{name} -> saves the input of a norm or linear before it"


def _with_sources(search: Search, swaps: Mapping[str, Swap]) -> dict[str, Swap]:
    """Return the swaps of layers with inputs that may have a recipe: an MLP's, or behind norms."""
    places = {_parent(name) for name, swap in swaps.items() if "readers" in swap.notes}
    places.update(name for name, swap in swaps.items() if issubclass(swap.new_class, SharedCode))
    has_norms = _has_norms(search, swaps)
    return {
        name: swap
        for name, swap in swaps.items()
        if name in places
        or _parent(name) in places
        or issubclass(swap.new_class, SharedChannels)
        or (has_norms and not issubclass(swap.new_class, SharedCheap))
    }


def _has_norms(search: Search, shared: Mapping[str, Swap]) -> bool:
    """Whether the model has norms with results of which any layer may save the recipe."""
    swaps = [*(swap for _, swap in search.swaps), *shared.values()]
    kinds = [*map(type, search.modules.values()), *(swap.new_class for swap in swaps)]
    return any(issubclass(kind, (LayerNorm, RMSNorm, FusedNorm, SharedNorm)) for kind in kinds)


def _own_linears(name: str, module: nn.Module, shared: Mapping[str, Swap]) -> list[str]:
    """Return the linears with results that the code of a layer, not of a model, may read."""
    kind = type(module)
    if kind.__module__.startswith(("torch.", "fusedckpt.")) or kind.forward is nn.Module.forward:
        return []
    if (
        "forward" in vars(module)
        or original_of(module) is not None
        or isinstance(module, ScriptModule)
    ):
        return []
    if _has_blocks(module):
        return []
    names = [join_names(name, child) for child, _ in child_layers(module)]
    return [
        child
        for child in names
        if child in shared and issubclass(shared[child].new_class, SharedLinear)
    ]


def _has_blocks(module: nn.Module) -> bool:
    """Whether a module is a model of blocks: each function of it would be looked at."""
    lists = (m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    entries = (entry for layers in lists for entry in layers.children())
    return any(e._modules and not type(e).__module__.startswith("torch.") for e in entries)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_shared(name: str, search: Search, shared: Mapping[str, Swap]) -> bool:
    """Whether a module, or the linears and activations that it calls, save recipes of inputs."""
    reason = search.report.left[name].key
    if reason in ("differs", "random"):
        # an MLP was found, and its owner should know why it is not taken
        return False
    kind = shared[name].new_class if name in shared else nn.Module
    if issubclass(kind, SharedReader):
        return True
    ours = SharedNorm, SharedChannelNorm, SharedCode
    if issubclass(kind, ours) and reason in ("other norm", "rule", "beside"):
        return True
    children = (join_names(name, child) for child, _ in search.modules[name].named_children())
    kinds = [shared[child].new_class for child in children if child in shared]
    has_activation = any(issubclass(kind, SharedActivation) for kind in kinds)
    return has_activation and sum(issubclass(kind, SharedProduct) for kind in kinds) >= 2


def _shared(module: nn.Module) -> type[nn.Module] | None:
    """Return our class of a layer that may read a recipe, None for other modules."""
    if not _is_swappable(module):
        return None
    if type(module).forward is dispatch.own_forward(nn.Linear):
        return SharedLinear
    if isinstance(module, nn.Linear) or is_transposed(module):
        # its own forward runs, and saves its input or something else
        return SharedProduct
    if is_activation(module):
        return SharedActivation
    if _has_one_matrix(module):
        return SharedReader
    if isinstance(module, nn.Dropout):
        return SharedCheap
    return _of_vectors(module)


def _is_swappable(module: nn.Module) -> bool:
    """Whether a layer has its class's forward, and plain parameters that may be looked at."""
    if "forward" in vars(module) or original_of(module) is not None:
        return False
    if reasons.of_storage(module) is not None:
        return False
    return dispatch.are_plain(*module._parameters.values())


def _layers_of_channels(search: Search) -> dict[str, type[SharedChannels]]:
    """Return our classes of layers of channels, by name: of activations those beside others."""
    known: dict[str, type[SharedChannels]] = {}
    for name, module in search.modules.items():
        ours = channels_class_of(module) if search.may_share(name) else None
        if ours is not None and _is_swappable(module):
            known[name] = ours
    beside = (SharedChannelActivation, SharedChannelDropout)
    places = set[str]()
    for name, ours in known.items():
        if not issubclass(ours, beside):
            parts = name.split(".")
            places.update(".".join(parts[:count]) for count in range(len(parts)))
    layers = {
        name: ours
        for name, ours in known.items()
        if not issubclass(ours, beside) or _parent(name) in places
    }
    if len(layers) < 2:
        return {}
    # a ReLU alone saves what its readers save
    makers = SharedChannelNorm, SharedInputActivation, SharedPool
    has_maker = any(issubclass(ours, makers) for ours in layers.values())
    if has_maker or _has_norms(search, {}):
        return layers
    return layers if any(map(_may_make_channels, search.modules.values())) else {}


def _may_make_channels(module: nn.Module) -> bool:
    """Whether a module's code may call functions with results that layers of channels make again.

    That of a subclass of a norm calls the norm, by whichever name.
    """
    kind = type(module)
    if kind.__module__.startswith(("torch.", "fusedckpt.")):
        return False
    return issubclass(kind, CHANNEL_NORMS) or not _MAKERS_IN_CODE.isdisjoint(
        reasons.names_called(module)
    )


def _may_read_channels(module: nn.Module) -> bool:
    """Whether a module's code may call convolutions or max pools."""
    kind = type(module)
    if kind.__module__.startswith(("torch.", "fusedckpt.")):
        return False
    return issubclass(kind, CONV_LAYERS) or not _READERS_IN_CODE.isdisjoint(
        reasons.names_called(module)
    )


def _behind(search: Search, channels: Mapping[str, type[SharedChannels]]) -> set[nn.Module]:
    """Return the layers of channels that are only called behind another one in an nn.Sequential."""
    places = Counter[nn.Module]()
    behind = Counter[nn.Module]()
    ours = {search.modules[name] for name in channels}
    for module in search.modules.values():
        layers = [child for child in module._modules.values() if child is not None]
        places.update(layers)
        is_behind = False
        is_sequence = isinstance(module, nn.Sequential) and not isinstance(module, ScriptModule)
        for layer in layers if is_sequence else ():
            behind[layer] += is_behind
            # one that returns its input tells nothing of the layers before it
            is_transparent = isinstance(layer, (nn.Dropout, nn.Dropout2d, nn.Identity))
            is_behind = is_behind if is_transparent else layer in ours
    return {layer for layer, count in behind.items() if count == places[layer]}


def _of_vectors(module: nn.Module) -> type[nn.Module] | None:
    """Return our class of a layer of other code with vectors alone, as norms over channels are."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if not parameters or type(module).__module__.startswith("torch."):
        return None
    if any(is_lazy(p) or sum(n > 1 for n in p.shape) > 1 for p in parameters):
        return None
    if not takes_one(module):
        return None
    is_norm = looks_like(module) == "norm" or reasons.wraps_norm(module)
    return SharedNorm if is_norm else SharedCheap


def _has_one_matrix(module: nn.Module) -> bool:
    """Whether a module of a library multiplies by a weight of its own, as routers do."""
    weights = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    is_own = not type(module).__module__.startswith("torch.")
    return is_own and sum(p.dim() == 2 for p in weights) == 1 and all(p.dim() < 3 for p in weights)


def may_share(module: nn.Module, pattern: MLPPattern | None) -> bool:
    """Whether a linear with its activation are two layers of a module, and nothing else is."""
    if pattern is None or pattern.kind != "linear_act" or pattern.activation == "identity":
        return False
    layers = [*module.children()]
    return len(pattern.linears[0].weight) == 2 and sum(map(is_activation, layers)) == 1
