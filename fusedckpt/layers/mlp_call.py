"""What a call of an MLP block comes down to: checked, and settled once for calls that are alike."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd import dispatch, levels
from fusedckpt.autograd.dispatch import Around
from fusedckpt.autograd.norm_spec import NormSpec, rule_of, sums_dtype
from fusedckpt.kernels import mlp as kernels
from fusedckpt.kernels.mlp import Block, Weights
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.products import product_for
from fusedckpt.layers import validate
from fusedckpt.layers.adapted_call import AdaptedCall
from fusedckpt.layers.norm_function import NormCall


class Args(NamedTuple):
    """The constants of a call, as the ops take them; kind "none" is no norm."""

    kind: str
    eps: float
    offset: float
    cast: str
    activation: str
    residual: bool
    dtype: torch.dtype
    chunks: int | None
    kernel: str | None

    @property
    def rule(self) -> NormRule | None:
        """The norm, None for none."""
        return None if self.kind == "none" else NormRule(*self[:4])


def block_of(args: Args, rows: int, w: Any) -> Block:
    """Settle what the caller left open: the variant, and into how many chunks rows are cut.

    w: Weights, or what is known of them, in the dtypes that their gradients are to have.
    """
    (first, d), (out, f) = w.gate.shape, w.down.shape
    op, gemms = ("mlp", 2) if w.up is None and first == f else ("gated_mlp", 3)
    # the GEMM that the hybrid variant does itself contracts over the output features
    sizes = rows, f, out
    kernel = dispatch.variant_for(op, w.gate, args.dtype, sizes, kernel=args.kernel, fused="hybrid")
    kernel = kernel if d else "aten"
    chunks = args.chunks or kernels.chunks_for(rows, d, f, gemms, itemsize=args.dtype.itemsize)
    product = product_for(w.gate.device, args.dtype, w.gate.dtype)
    return Block(args.rule, args.activation, args.residual, kernel, chunks=chunks, product=product)


# gate and up in one weight
PACKED = ("gate", "down")


class MLPCall(NamedTuple):
    """What a call comes down to.

    block: what kernels compute; direct: whether nothing traces or watches ops; dtypes: of x and
    Weights; adds_after: whether x is added to the result outside, in another dtype.
    """

    options: Args
    block: Block | None
    level: str
    direct: bool
    dtypes: tuple[torch.dtype | None, ...]
    adds_after: bool


class MLPOptions(NamedTuple):
    """The options of a call; norm: a NormSpec without its tensors, of `kinds`; over: its shape."""

    caller: str
    linears: tuple[str, ...]
    activation: str
    residual: bool
    save: str | None
    levels: tuple[str, ...]
    chunks: int | None
    kernel: str | None = None
    norm: NormSpec | None = None
    kinds: tuple[type, ...] = ()
    over: Any = None
    default: str = "inputs"
    is_module: bool = False
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def name(self) -> str:
        """Who refuses tensors: the function, or a module that has a norm."""
        if self.over is not None:
            return self.caller
        return "mlp" if self.linears[0] == "fc1" else "gated_mlp"

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors: x, then Weights."""
        first, *up, last = [(f"{key}_weight", f"{key}_bias?") for key in self.linears]
        up = up or [("up_weight?", "up_bias?")]
        return ("x", "norm.weight?", "norm.bias?", *first, *up[0], *last)

    def chosen(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse options that there are not."""
        level = levels.chosen(self.caller, (self.save, override, self.default), self.levels)
        activation = validate.activation(self.caller, self.activation)
        validate.block(self.caller, self.residual, self.chunks)
        validate.kernel(self.caller, self.kernel, "hybrid")
        return activation, level

    def settle(self, around: Around, x: Any, *metas: Any) -> MLPCall | None:
        """Refuse a block whose parts do not fit."""
        name, w = self.name, Weights(*metas)
        activation, level = self.chosen(around.level)
        norm, chunks = self.norm, self.chunks
        if self.is_module and around.chunks is not None:
            chunks = around.chunks
        if norm is not None:
            if isinstance(norm, NormSpec):
                norm = norm._replace(weight=w.norm, bias=w.norm_bias)  # type: ignore[arg-type]
            validate.norm_spec(name, norm)
        validate.tensors(name, self.names, (x, *metas))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, w.norm, bias=w.norm_bias)
        up = [] if w.up is None else [(w.up, w.up_bias)]
        pairs = [(w.gate, w.gate_bias), *up, (w.down, w.down_bias)]
        linears: Any = dict(zip(self.linears, pairs, strict=True))
        packed = self.linears == PACKED
        validate.mlp(name, x, linears, bool(self.residual), packed=packed)
        given = dict(zip([key.rstrip("?") for key in self.names[3:]], metas[2:], strict=True))
        dtype = validate.multiplied(name, around, validate.normed(name, x, norm, around), given)
        validate.runs(name, self.kernel, "hybrid", x, dtype=dtype)
        if around.twin:
            return None
        if packed:
            # where they are taken apart
            w = w._replace(up=w.gate, up_bias=w.gate_bias)
        constants = ("none", 0.0, 0.0, "torch") if norm is None else rule_of(norm, x.dtype)
        adds = bool(self.residual) and x.dtype == dtype
        args = Args(*constants, activation, adds, dtype, chunks, self.kernel)
        block = block_of(args, math.prod(x.shape[:-1]), w) if around.direct else None
        dtypes = tuple([None if t is None else t.dtype for t in (x, *w)])
        level = level if around.grad else "inputs"
        adds_after = bool(self.residual) and not adds
        return MLPCall(args, block, level, around.direct, dtypes=dtypes, adds_after=adds_after)

    def adapted(self, around: Around, x: Any, norm: Any, linears: Any) -> AdaptedCall | None:
        """Settle a call with adapters by what these are beside; gate and up are not packed."""
        up = linears[1:-1] or [(None, None)]
        indirect = around._replace(direct=False)
        # what is direct has a kernel chosen for it, which adapters have no use for
        call = self.settle(indirect, x, *norm, *linears[0], *up[0], *linears[-1])
        if call is None:
            return None
        args, dtype, normed = call.options, call.options.dtype, None
        sizes = math.prod(x.shape[:-1]), x.shape[-1], linears[0][0].shape[0]
        chunks = args.chunks or kernels.chunks_for(*sizes, len(linears), dtype.itemsize)
        if args.rule is not None:
            # over several chunks they are rounded at the end
            wide = torch.promote_types(x.dtype, torch.float32)
            sums = sums_dtype(x, *norm) if chunks == 1 else wide
            normed = NormCall(1, args.rule, dtype, sums, direct=around.direct)
        return AdaptedCall(
            dtype,
            norm=normed,
            activation=args.activation,
            level=call.level,
            has_last=True,
            chunks=chunks,
            adds=args.residual,
            adds_after=call.adds_after,
            # the first seeds are theirs
            dropout=(self.dropout, 0),
            output_dropout=(self.output_dropout, int(self.dropout > 0)),
        )


def split(norm: Any) -> tuple[tuple[Any, tuple[type, ...]], tuple[Any, Any]]:
    """Return a record without its tensors, and the types in it; and these tensors."""
    if not isinstance(norm, NormSpec):
        # refused where it is no None
        return (norm, ()), (None, None)
    bare = norm._replace(weight=None, bias=None)
    return (bare, tuple(map(type, bare))), (norm.weight, norm.bias)
