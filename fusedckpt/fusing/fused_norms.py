"""The forward of a norm of any class, fused, and the record of its function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private, tracker
from fusedckpt.blocks import reader
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.programs import NormOptions
from fusedckpt.fusing.match_reader import Guards, Reader
from fusedckpt.fusing.swap import Swapped
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import NO_NOTES, NOTES


class NormMatch(NamedTuple):
    """The norm that a module of some class computes: see `functional.rms_norm` and `layer_norm`."""

    # the attribute of the weight, None for a norm without one
    weight: str | None
    # the attribute of epsilon, or its value
    eps: str | float
    # added to the weight: 1 for Gemma's
    offset: float
    # where the norm rounds: "torch", "llama" or "gemma"
    cast: str
    # pairs of x's and the weight's dtype that were verified, x's twice without a weight
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    # "rms" or "layer"
    kind: str = "rms"
    # the attribute of the bias
    bias: str | None = None
    # whether the result has x's dtype even under autocast
    casts_back: bool = False
    # state that must not change
    guards: Guards = Guards()
    # whether it may run under autocast
    autocasts: bool = True

    def reader(self) -> Reader:
        """Return the reader of the match's state in calls."""
        return Reader(self.guards)


class FusedNorm(Swapped):
    """Forward of a norm of any class; saves only x for the verified dtypes."""

    save_levels = ()

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        match = self._fusedckpt.match
        if private.num_function_modes() and not match.casts_back and tracker.sees_alone():
            return tracker.outside_mode(self._fused, x)
        weight = None if match.weight is None else self._parameters.get(match.weight)
        bias = None if match.bias is None else self._parameters.get(match.bias)
        if dispatch.are_plain(x, weight, bias):
            return self._normalized(x, weight, bias)
        # DTensors: each rank has whole rows
        y = sharded.on_rows(self._normalized, 1, x, weight, bias)
        by_name = {match.weight or "": weight, match.bias or "": bias}
        return fallbacks.fallback_of(x, **by_name) if y is None else y

    def _normalized(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | NotFused:
        match = self._fusedckpt.match
        if (changed := self._fusedckpt.reader.change(self)) is not None:
            return changed
        for name, tensor in ((match.weight, weight), (match.bias, bias)):
            if name is not None and tensor is None:
                return NotFused("changed", name)
        dtype = x.dtype if weight is None else weight.dtype
        # F.layer_norm takes two dtypes on a CPU, and where autocast casts them
        is_taken = match.kind == "rms" or x.device.type in ("cpu", "meta") or dtype == x.dtype
        is_cast = dispatch.autocast_dtype(x.device) is not None
        is_taken = match.autocasts if is_cast else is_taken
        if (x.dtype, dtype) not in match.dtypes or not is_taken:
            return NotFused("dtype", x.dtype)
        return normalized(self, match, x, weight, bias)

    def _function_now(self) -> str:
        match = self._fusedckpt.match
        ours = "layer_norm" if match.kind == "layer" else f"rms_norm, cast={match.cast}"
        return f"fused as {ours}"


def normalized(
    module: nn.Module, match: NormMatch, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the norm that a match describes; note its inputs for readers of the result."""
    shape = x.shape[-1:] if weight is None else weight.shape
    eps = getattr(module, match.eps) if isinstance(match.eps, str) else match.eps
    store = module.__dict__.get(NOTES, NO_NOTES).store
    if match.kind == "layer":
        weight = weight + match.offset if weight is not None and match.offset else weight
        options = NormOptions("layer_norm", "layer", shape, eps, store=store)
    else:
        rule = match.offset, match.cast
        options = NormOptions("rms_norm", "rms", shape, eps, *rule, store=store)
    y = run_layer(options, x, (weight, None if match.kind == "rms" else bias))
    if match.casts_back and y.dtype != x.dtype:
        return y.to(x.dtype)
    return reader.note_norm(module, y, weight, bias)
