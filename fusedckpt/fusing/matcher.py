"""Decide how a module is swapped: match, look for obstacles, verify; once for all equal modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing import adapters, reasons, verification
from fusedckpt.fusing.experts import experts_swap, verified_experts
from fusedckpt.fusing.match_gated_norms import gated_norm_swap
from fusedckpt.fusing.match_mlps import lora_swap, mlp_swap, recomputed_swap, swapped_runs
from fusedckpt.fusing.match_norms import norm_swap
from fusedckpt.fusing.outside_reads import is_simple
from fusedckpt.fusing.swap import Part, Swap
from fusedckpt.layers.fallbacks import NotFused


class Matcher:
    """The swaps of one call of `fuse`."""

    def __init__(self, save: str, chunks: int | None, verify: bool):
        self.save = save
        self.chunks = chunks
        self.verify = verify
        # by kind and state: equal modules have equal swaps
        self._known: dict[Hashable, Swap | NotFused | None] = {}

    def swap_of(self, module: nn.Module, kind: str) -> Swap | NotFused | None:
        """Return how a module is swapped, why it cannot be, or None for one of another kind."""
        # a linear, or a module that must not be run
        if adapters.is_dequantizing(module) or any(map(reasons.of_storage, module.modules())):
            return None
        key = kind, adapters.described_layers(module)
        bare = adapters.rebuilt(module, adapters.bare)
        return self._once(key, bare, lambda: self._decide(module, bare, kind))

    def _decide(self, module: nn.Module, bare: nn.Module, kind: str) -> Swap | NotFused | None:
        """Match and verify a module; bare: the same without adapters and quantization."""
        swap = self._match(module, bare, kind)
        if isinstance(swap, NotFused) and kind == "mlp":
            return self._recomputed(module, bare) or swap
        if not isinstance(swap, Swap):
            return swap
        obstacle = _adapter_obstacle(module)
        obstacle = obstacle or reasons.of_swap(module, swap.attributes, [*module.modules()])
        return obstacle or self._verify(adapters.rebuilt(module, adapters.dense), swap)

    def _match(self, module: nn.Module, bare: nn.Module, kind: str) -> Swap | NotFused | None:
        if kind == "norm":
            return gated_norm_swap(bare) or norm_swap(bare)
        if kind == "experts":
            return experts_swap(module, self.save, self.chunks)
        if kind == "linear":
            return lora_swap(bare, self.save, self.chunks)
        return mlp_swap(bare, self.save, self.chunks)

    def _recomputed(self, module: nn.Module, bare: nn.Module) -> Swap | None:
        """Return the swap of an MLP that runs its own forward again, if it saves less than half."""
        if isinstance(module, nn.Sequential) or self.save != "inputs" or bare is not module:
            return None
        swap = recomputed_swap(module)
        if swap is None:
            return None
        if reasons.of_swap(module, swap.attributes, [*module.modules()]) is not None:
            return None
        verified = self._verify(module, swap)
        if not isinstance(verified, Swap):
            return None
        saved = verified.parts[""].saved
        return verified if saved is not None and saved[1] < saved[0] / 2 else None

    def verified(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        """Return a swap with the bytes saved per token, or how it would change results."""
        verified = self._once(repr(swap), module, lambda: self._verify(module, swap))
        assert verified is not None
        return verified

    def is_swapped_whole(self, parent: nn.Sequential) -> bool:
        """Whether a Sequential is swapped as a whole, and not by runs of its layers."""
        found_runs = swapped_runs(parent, self.save).values()
        kinds = [run.swap.kind for run in found_runs]
        inside = {layer for run in found_runs for layer in run.layers.values()}
        # a dropout before the first linear is recomputed with the whole
        drops = any(isinstance(m, nn.Dropout) and m not in inside for m in parent.modules())
        swap_of_all = self.swap_of(parent, "mlp") if drops or "mlp" not in kinds else None
        return isinstance(swap_of_all, Swap) and not (kinds and swap_of_all.kind == "linear")

    def _once(
        self, key: Hashable, module: nn.Module, decide: Callable[[], Swap | NotFused | None]
    ) -> Swap | NotFused | None:
        key = key, state_key(module)
        if key not in self._known:
            self._known[key] = decide()
        return self._known[key]

    def _verify(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        """Return a swap with the bytes saved per token, or how it would change results."""
        if swap.kind == "experts":
            return verified_experts(module, swap, self.verify)
        problem = verification.difference(module, swap) if self.verify else None
        if problem is not None:
            return problem
        part = Part(swap.kind, swap.change, verification.saved_per_token(module, swap))
        return replace(swap, parts={"": part})


def state_key(module: nn.Module) -> Hashable:
    """Return a module's state without tensor values; mutable objects by identity."""
    numbers: dict[int, int] = {}

    def described_tensor(tensor: Any) -> Hashable:
        if tensor is None:
            return None
        # the same number for tied ones
        number = numbers.setdefault(id(tensor), len(numbers))
        return number, type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout

    def described_value(value: Any) -> Hashable:
        # in writing, where 1 and True differ
        return repr(value) if is_simple(value) else id(value)

    def described_module(name: str, part: nn.Module) -> Hashable:
        tensors = (*part._parameters.items(), *part._buffers.items())
        attributes = ((n, v) for n, v in vars(part).items() if n not in private.MODULE_ATTRIBUTES)
        return (
            name,
            type(part),
            has_hooks(part),
            tuple((n, described_tensor(tensor)) for n, tensor in tensors),
            tuple((n, described_value(value)) for n, value in attributes),
        )

    named = module.named_modules(remove_duplicate=False)
    return tuple(described_module(name, part) for name, part in named)


def _adapter_obstacle(module: nn.Module) -> NotFused | None:
    """Return why adapters in a module cannot be fused now, None if they can or there are none."""
    wrappers = ((n, layer) for n, layer in module.named_modules() if adapters.is_lora(layer))
    return next(filter(None, (reasons.of_linear(n or "it", layer) for n, layer in wrappers)), None)
