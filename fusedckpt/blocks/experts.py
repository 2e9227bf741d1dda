"""The program of a mixture of experts, and the checks of its calls.

x -> gather -> gate and up -> act(gate) * up * score -> down -> sum over a token's experts

A score multiplies h, not the result: both are linear in it. So its gradient is a sum of dh * h, and
backward neither saves nor recomputes the results of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Around
from fusedckpt.blocks import run, validate
from fusedckpt.blocks.builder import Builder
from fusedckpt.blocks.call import Layout
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.routed_steps import Gated, Grouped, Move, Route
from fusedckpt.kernels import routed
from fusedckpt.kernels.routed import ClampedSwiGLU, Gating

LEVELS = ("inputs", "gate", "preact")
_INPUTS: tuple[str, ...] = ("x", "index", "scores")
_INTEGERS = (torch.int64, torch.int32)


class ExpertOptions(NamedTuple):
    """The options of a call of experts; is_split: whether gate and up are weights of their own."""

    caller: str
    gating: Any
    is_transposed: bool = False
    save: str | None = None
    default: str = "inputs"
    chunks: int | None = None
    is_module: bool = False
    is_split: bool = False
    name: str = "experts"
    # their weights are no records
    linears = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of a call."""
        firsts = ("gate_up.0", "gate_up.1") if self.is_split else ("gate_up",)
        weights = [f"{key}{end}" for key in (*firsts, "down") for end in ("", "_bias?")]
        return (*_INPUTS, *weights)

    @property
    def products(self) -> tuple[str, ...]:
        """The grouped products that a level may save."""
        return ("gate", "up") if self.is_split else ("z",)

    def chosen(self, override: str | None) -> tuple[Gating, str]:
        """Return gating and save level; refuse invalid options."""
        level = levels.chosen(self.caller, (self.save, override, self.default), LEVELS)
        arguments.flag(self.caller, "is_transposed", self.is_transposed)
        validate.block(self.caller, False, self.chunks)
        if not isinstance(self.gating, ClampedSwiGLU):
            return validate.activation(self.caller, self.gating), level
        for key in ("alpha", "limit", "offset"):
            arguments.number(self.caller, f"activation.{key}", getattr(self.gating, key))
        return self.gating, level

    def settle(self, around: Around, x: Any, index: Any, scores: Any, *metas: Any) -> Any:
        """Refuse a call with parts that do not fit; return None where only eager may run."""
        gating, level = self.chosen(around.level)
        weights = list(zip(metas[::2], metas[1::2], strict=True))
        self._check(around, x, index, scores, weights)
        if around.twin:
            return None
        dtype = around.compute_dtype(x.dtype)
        num_experts, *sizes = weights[-1][0].shape
        # temporaries of z, h and three times x, beside float32 sums over chunks
        nbytes = index.shape.numel() * 3 * sum(sizes) * dtype.itemsize
        sums = 4 * 3 * num_experts * math.prod(sizes) if dtype.itemsize == 2 else 0
        chunks = around.chunks_of(self) or run.cut_for(nbytes, sums)
        b, inputs = Builder(around, dtype), dict(zip(_INPUTS, (x, index, scores), strict=True))
        self._steps(b, gating, x, index, weights)
        given = {"products": self.products, "top_k": index.shape[-1]}
        level = level if around.grad else "inputs"
        return b.call("experts", inputs, ["y"], given, casts=True, level=level, chunks=chunks)

    def _check(self, around: Around, x: Any, index: Any, scores: Any, weights: Any) -> None:
        """Refuse tensors that do not fit each other."""
        name, flat = self.name, [t for pair in weights for t in pair]
        names = [key for key in self.names if key != "index"]
        validate.tensors(name, names, (x, scores, *flat))
        validate.integers(name, "index", index, x, _INTEGERS)
        leads = list(x.shape[:-1])
        if not x.shape or list(index.shape[:-1]) != leads or 0 in index.shape[-1:]:
            expected, got = [*leads, "K"], list(index.shape)
            raise ValueError(f"{name}: index must be {expected}, K at least 1, got {got}")
        validate.fits(name, "scores", scores, *index.shape)
        dtype, down = around.compute_dtype(x.dtype), weights[-1][0].shape
        if len(down) != 3 or not down[0]:
            raise ValueError(f"{name}: down must be [E, D, F], E at least 1, got {list(down)}")
        sides = (1, 2) if self.is_transposed else (2, 1)
        hidden, out = [down[side] for side in sides]
        widths = [(x.shape[-1], hidden if self.is_split else 2 * hidden)] * (len(weights) - 1)
        for key, pair, (k, n) in zip(
            self.names[3::2], weights, [*widths, (hidden, out)], strict=True
        ):
            sizes = (k, n) if self.is_transposed else (n, k)
            validate.fits(name, key, pair[0], down[0], *sizes)
            validate.fits(name, f"{key}_bias", pair[1], down[0], n)
            given = {key: pair[0], f"{key}_bias": pair[1]}
            validate.dtypes(name, around, dtype, given)

    def _steps(self, b: Builder, gating: Gating, x: Any, index: Any, weights: Any) -> None:
        """Add the parameters and steps."""
        dtype, top_k = b.dtype, index.shape[-1]
        numbers = [
            (b.param(key, Layout(3, dtype), w), b.param(f"{key}_bias", Layout(2, dtype), bias))
            for key, (w, bias) in zip(self.names[3::2], weights, strict=True)
        ]
        num_experts, *sizes = weights[-1][0].shape
        path = dispatch.path_of(x.device, dtype)
        kernel = routed.kernel_for(path, x.device, dtype, x.shape[-1], *sizes)
        grouped = Grouped(top_k, self.is_transposed, dtype)
        b.add(Route(num_experts, kernel), "route", ("index",))
        b.add(Move(top_k, gathers=True, dtype=dtype), "rows", ("x", "route"))
        for out, number in zip(self.products, numbers, strict=False):
            b.add(grouped, out, ("rows", "route"), number)
        b.add(Gated(gating, not self.is_split), "h", (*self.products, "scores", "route"))
        reads = ("h", "route") if weights[-1][1] is None else ("h", "route", "scores")
        b.add(grouped, "down_rows", reads, numbers[-1])
        b.add(Move(top_k, gathers=False, dtype=dtype), "y", ("down_rows", "route"))

    def eager(self, x: Tensor, given: Sequence[Tensor], pairs: Sequence[Any]) -> Tensor:
        """Return the result by torch's own ops; given: index and scores."""
        autocast = dispatch.autocast_dtype(x.device)
        around = Around(False, autocast, None, None, twin=True, direct=False, forced=())
        b, (gating, _) = Builder(around, around.compute_dtype(x.dtype)), self.chosen(None)
        self._steps(b, gating, x, given[0], pairs)
        rows = [t.reshape(-1, t.shape[-1]) for t in (x, *given)]
        program = Program(_INPUTS, tuple(b.steps), ("y",), tuple(b.params))
        weights = [t for pair in pairs for t in pair]
        (y,) = program.eager(dict(zip(_INPUTS, rows, strict=True)), weights)
        return y.view(*x.shape[:-1], y.shape[-1])

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the first grouped product, which makes z, where it is saved."""
        return (0,) if self.chosen(levels.override.level)[1] == "preact" else ()

    def halved(self, pairs: Sequence[Any], saves_half: bool) -> Any:
        """Return the options and weights of gate and up apart, None to run them packed."""
        if self.is_split or not saves_half:
            return None
        (weight, bias), last = pairs
        dim = 2 if self.is_transposed else 1
        firsts = zip(_halves(weight, self.gating, dim), _halves(bias, self.gating, 1), strict=True)
        return self._replace(is_split=True), [*firsts, last]


def _halves(weight: Any, gating: Any, dim: int) -> Any:
    """Return gate's and up's part of a weight or bias, as views."""
    if weight is None:
        return None, None
    if isinstance(gating, ClampedSwiGLU) and gating.is_interleaved:
        return weight.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return weight.chunk(2, dim)
