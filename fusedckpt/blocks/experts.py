"""The program of a mixture of experts, and the checks of its calls.

x -> gather -> gate and up -> act(gate) * up * score -> down -> sum over a token's experts

A score multiplies h, not the result: both are linear in it. So its gradient is a sum of dh * h, and
backward neither saves nor recomputes the results of experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Around, Meta, Path
from fusedckpt.blocks import compiled, eager, run, validate
from fusedckpt.blocks.block import apply
from fusedckpt.blocks.builder import Builder
from fusedckpt.blocks.call import Call, Layout
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.routed_steps import Gated, Grouped, Move, Route
from fusedckpt.kernels import routed
from fusedckpt.kernels.routed import ClampedSwiGLU, Gating

LEVELS = ("inputs", "gate", "preact")
_INPUTS: tuple[str, ...] = ("x", "index", "scores")
_INTEGERS = (torch.int64, torch.int32)


class ExpertOptions(NamedTuple):
    """The options of a call of experts.

    caller: the name in errors about options; gating: an activation's name or a ClampedSwiGLU;
    is_split: whether gate and up are weights of their own, of which gate's product is saved.
    """

    caller: str
    gating: Any
    is_transposed: bool = False
    save: str | None = None
    default: str = "inputs"
    chunks: int | None = None
    is_module: bool = False
    is_split: bool = False
    name: str = "experts"

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

    def settle(self, around: Around, x: Any, index: Any, scores: Any, *metas: Any) -> Call | Path:
        """Refuse a call with parts that do not fit; return the path where only eager may run."""
        gating, level = self.chosen(around.level)
        weights = list(zip(metas[::2], metas[1::2], strict=True))
        self._check(around, x, index, scores, weights)
        if around.twin:
            return Path.REFERENCE
        dtype, chunks = around.compute_dtype(x.dtype), self.chunks
        if self.is_module and around.chunks is not None:
            chunks = around.chunks
        chunks = chunks or _chunks_for(x, index, weights[-1][0], dtype)
        read = None if x.dtype == dtype else dtype
        x = x if read is None else x._replace(dtype=read)
        b, inputs = Builder(around, dtype), dict(zip(_INPUTS, (x, index, scores), strict=True))
        self._steps(b, gating, x, index, weights)
        given = {"products": self.products, "top_k": index.shape[-1]}
        level = level if around.grad else "inputs"
        return b.call("experts", inputs, ["y"], given, level=level, chunks=chunks, read=read)

    def _check(self, around: Around, x: Any, index: Any, scores: Any, weights: Any) -> None:
        """Refuse tensors that do not fit each other."""
        name, flat = self.name, [t for pair in weights for t in pair]
        names = [key for key in self.names if key != "index"]
        validate.tensors(name, names, (x, scores, *flat))
        if index is None:
            arguments.wrong_type(name, "index", "a tensor", None)
        if index.dtype not in _INTEGERS:
            raise TypeError(f"{name}: index must be int64 or int32, got {index.dtype}")
        if index.device != x.device:
            raise ValueError(f"{name}: index must be on x's device, {x.device}, got {index.device}")
        leads = list(x.shape[:-1])
        if not x.shape or list(index.shape[:-1]) != leads or 0 in index.shape[-1:]:
            expected, got = [*leads, "K"], list(index.shape)
            raise ValueError(f"{name}: index must be {expected}, K at least 1, got {got}")
        if scores.shape != index.shape:
            expected, got = list(index.shape), list(scores.shape)
            raise ValueError(f"{name}: scores must have index's shape {expected}, got {got}")
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
            self._fits(around, dtype, key, pair[0], [down[0], *sizes])
            self._fits(around, dtype, f"{key}_bias", pair[1], [down[0], n])

    def _fits(self, around: Around, dtype: torch.dtype, key: str, given: Any, shape: Any) -> None:
        """Refuse a weight or bias of another shape, or of a dtype that is not multiplied."""
        if given is None:
            return
        if list(given.shape) != shape:
            raise ValueError(
                f"{self.name}: {key} must be {shape}, as x and down have it, got "
                f"{list(given.shape)}"
            )
        is_cast = around.autocast is not None and torch.float64 not in (given.dtype, dtype)
        if given.dtype != dtype and not is_cast:
            raise TypeError(
                f"{self.name}: x and {key} must share a dtype, got {dtype} and {given.dtype}"
            )

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

    def eager(self, x: Tensor, index: Tensor, scores: Tensor, *weights: Any) -> Tensor:
        """Return the result by torch's own ops."""
        autocast = dispatch.autocast_dtype(x.device)
        around = Around(False, autocast, None, None, twin=True, direct=False, forced=())
        b, (gating, _) = Builder(around, around.compute_dtype(x.dtype)), self.chosen(None)
        self._steps(b, gating, x, index, list(zip(weights[::2], weights[1::2], strict=True)))
        rows = [t.reshape(-1, t.shape[-1]) for t in (x, index, scores)]
        program = Program(_INPUTS, tuple(b.steps), ("y",), tuple(b.params))
        (y,) = program.eager(dict(zip(_INPUTS, rows, strict=True)), weights)
        return y.view(*x.shape[:-1], y.shape[-1])


def run_experts(
    options: ExpertOptions, x: Tensor, index: Tensor, scores: Tensor, *weights: Any
) -> Any:
    """Run a call, weights and biases in turn; None where a module calls its own class's forward."""
    if eager.forced.is_on:
        return options.eager(x, index, scores, *weights)
    path, call, phase = dispatch.settled(options, x, index, scores, *weights)
    if call is None and options.is_module and path is Path.OWN:
        return None
    if call is None:
        if not torch.compiler.is_compiling() or dispatch.is_recorded(x):
            return options.eager(x, index, scores, *weights)
        # the first grouped product makes z
        saved = (0,) if options.chosen(levels.override.level)[1] == "preact" else ()
        given = (index, scores, *weights)
        return compiled.run(lambda x: options.eager(x, *given), saved, x)
    is_free = phase is None or phase.levels is None
    if is_free and call.level == "gate" and not options.is_split:
        # a checkpoint's forward and recompute save alike, at every level
        gating, dim = options.gating, 2 if options.is_transposed else 1
        pairs = [_halves(weights[0], gating, dim), _halves(weights[1], gating, 1)]
        firsts = [t for pair in zip(*pairs, strict=True) for t in pair]
        split = options._replace(is_split=True)
        return run_experts(split, x, index, scores, *firsts, *weights[2:])
    return apply(call, phase, x, index, scores, *weights)


def _halves(weight: Any, gating: Any, dim: int) -> Any:
    """Return gate's and up's part of a weight or bias, as views."""
    if weight is None:
        return None, None
    if isinstance(gating, ClampedSwiGLU) and gating.is_interleaved:
        return weight.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return weight.chunk(2, dim)


def _chunks_for(x: Meta, index: Meta, down: Meta, dtype: torch.dtype) -> int:
    """Return into how many chunks tokens are cut, from shapes alone.

    A row's temporaries are z, h, and three of x's width. See `run.chunks_for`.
    """
    rows, (num_experts, *sizes) = index.shape.numel(), down.shape
    width = 3 * sum(sizes)
    nbytes = rows * width * dtype.itemsize
    chunks = max(1, math.ceil(nbytes / run.CHUNK_BYTES))
    # sums over chunks are float32, beside the gradients
    sums = 4 * 3 * num_experts * math.prod(sizes) if dtype.itemsize == 2 else 0
    return chunks if nbytes * (1 - 1 / chunks) > sums else 1
