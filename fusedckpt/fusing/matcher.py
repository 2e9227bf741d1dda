"""Finds and verifies swaps, once for all equal modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing import adapters, reasons, verification
from fusedckpt.fusing.guards import is_simple
from fusedckpt.fusing.match_experts import checked_experts, experts_swap
from fusedckpt.fusing.match_gated_norms import gated_norm_swap
from fusedckpt.fusing.match_mlps import blocks_of, lora_swap, mlp_swap, recomputed_swap
from fusedckpt.fusing.match_norms import norm_swap
from fusedckpt.fusing.swap import Part, Swap
from fusedckpt.layers.fallbacks import NotFused

# the attributes that every module has
_OF_MODULES = frozenset(vars(nn.Module()))


class Matcher:
    """The swaps of one call of `fuse`."""

    def __init__(self, save: str, chunks: int | None, verify: bool):
        self.save, self.chunks, self.verify = save, chunks, verify
        self.known: dict[Hashable, Swap | NotFused | None] = {}

    def of(self, module: nn.Module, kind: str) -> Swap | NotFused | None:
        """Return how a module is swapped, why it cannot be, or None for one of another kind."""
        # a linear, or a module that must not be run
        if adapters.is_dequantising(module) or any(map(reasons.of_storage, module.modules())):
            return None
        bare = adapters.rebuilt(module, adapters.bare)

        def find() -> Swap | NotFused | None:
            if kind == "norm":
                swap = gated_norm_swap(bare) or norm_swap(bare)
            elif kind == "experts":
                swap = experts_swap(module, self.save, self.chunks)
            else:
                swap = (lora_swap if kind == "linear" else mlp_swap)(bare, self.save, self.chunks)
            if isinstance(swap, NotFused) and kind == "mlp":
                return self._rerun(module, bare) or swap
            if not isinstance(swap, Swap):
                return swap
            obstacle = _of_adapters(module) or unfit(module, swap.attributes, [*module.modules()])
            return obstacle or self._check(adapters.rebuilt(module, adapters.dense), swap)

        return self._once((kind, adapters.described_layers(module)), bare, find)

    def _rerun(self, module: nn.Module, bare: nn.Module) -> Swap | None:
        """Return the swap of an MLP that no program computes, where it saves much less."""
        if isinstance(module, nn.Sequential) or self.save != "inputs" or bare is not module:
            return None
        swap = recomputed_swap(module)
        if swap is None or unfit(module, swap.attributes, [*module.modules()]) is not None:
            return None
        checked = self._check(module, swap)
        saved = checked.parts[""].saved if isinstance(checked, Swap) else None
        is_worth = saved is not None and saved[1] < saved[0] / 2
        return checked if is_worth and isinstance(checked, Swap) else None

    def checked(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        """Return a swap with the bytes saved per token, or how it would change results."""
        checked = self._once(repr(swap), module, lambda: self._check(module, swap))
        assert checked is not None
        return checked

    def is_one_block(self, parent: nn.Sequential) -> bool:
        """Whether a Sequential is one block that no run of its layers is."""
        blocks = blocks_of(parent, self.save).values()
        kinds = [swap.kind for _, swap in blocks]
        inside = {layer for layers, _ in blocks for layer in layers.values()}
        # a dropout before the first linear is recomputed with the whole
        drops = any(isinstance(m, nn.Dropout) and m not in inside for m in parent.modules())
        swap_of_all = self.of(parent, "mlp") if drops or "mlp" not in kinds else None
        return isinstance(swap_of_all, Swap) and not (kinds and swap_of_all.kind == "linear")

    def _once(
        self, what: Hashable, module: nn.Module, find: Callable[[], Swap | NotFused | None]
    ) -> Swap | NotFused | None:
        key = what, state_key(module)
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

    def _check(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        if swap.kind == "experts":
            return checked_experts(module, swap, self.verify)
        problem = verification.difference(module, swap) if self.verify else None
        if problem is not None:
            return problem
        part = Part(swap.kind, swap.change, verification.saved_per_token(module, swap))
        return replace(swap, parts={"": part})


def state_key(module: nn.Module) -> Hashable:
    """Return a module's state without tensor values; mutable objects by identity."""
    tensors: dict[int, int] = {}

    def described(tensor: Any) -> Hashable:
        if tensor is None:
            return None
        # the same number for tied ones
        number = tensors.setdefault(id(tensor), len(tensors))
        return number, type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout

    def value(attribute: Any) -> Hashable:
        # in writing, where 1 and True differ
        return repr(attribute) if is_simple(attribute) else id(attribute)

    return tuple(
        (
            name,
            type(part),
            has_hooks(part),
            tuple(
                (n, described(t)) for n, t in [*part._parameters.items(), *part._buffers.items()]
            ),
            tuple((n, value(v)) for n, v in vars(part).items() if n not in _OF_MODULES),
        )
        for name, part in module.named_modules(remove_duplicate=False)
    )


def _of_adapters(module: nn.Module) -> NotFused | None:
    """Return why adapters in a module cannot be fused now, None if they can or there are none."""
    wrappers = ((n, layer) for n, layer in module.named_modules() if adapters.is_lora(layer))
    return next(filter(None, (reasons.of_class(n or "it", layer) for n, layer in wrappers)), None)


def unfit(module: nn.Module, attributes: dict[str, Any], layers: list[Any]) -> NotFused | None:
    """Return why this module cannot be swapped, None if it can."""
    if "forward" in module.__dict__:
        return NotFused("forward")
    name = next((attribute for attribute in attributes if hasattr(module, attribute)), None)
    if name is not None:
        return NotFused("attribute", name)
    return next(filter(None, map(reasons.of_layer, [module, *layers])), None)
