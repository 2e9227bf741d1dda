"""A linear to classes and the statistics of its rows, from which layers/head.py makes losses.

Saves x, target and the statistics: in chunks of rows, backward recomputes the logits and writes
their gradient over them. At level "preact" it saves the logits, too, in one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import eager, validate
from fusedckpt.blocks.builder import ONE_LINEAR, Builder, Linears, flat_of
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import chosen, cross_entropy
from fusedckpt.kernels.cross_entropy import WIDTH, LogitRule

# logits of a chunk: as many bytes as this, or a fourth of the weight's
LOGIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Statistics(Op):
    """y [M, 4 + k] = log p(target), log-sum-exp, mean log p, entropy; log p(ids), where it reads k.

    Reads logits, a target and perhaps ids.
    """

    rule: LogitRule
    kernel: str
    dtype: torch.dtype = torch.float32
    # how many ids each row has
    num_ids: int = 0

    gradients = (("r0", ("r0", "r1", "r2", "y")),)

    def width(self, read: int, weight: Any) -> int:
        """Return how many statistics there are."""
        return WIDTH + self.num_ids

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the statistics."""
        fn = chosen.statistics if self.num_ids else cross_entropy.statistics
        return [code.call(fn, *reads, self.rule, self.kernel)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient over the logits."""
        fn = chosen.statistics_grad if self.num_ids else cross_entropy.statistics_grad
        reads = [grad.reads[slot] for slot in ("r0", "r1", "r2", "y") if slot in grad.reads]
        args = (grad.dy, *reads, self.rule, self.kernel)
        return {"r0": code.call(fn, *args, over={"dz": (reads[0],)})}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return the statistics in torch's ops."""
        fn = chosen.eager_statistics if len(reads) > 2 else cross_entropy.eager_statistics
        return fn(*reads, self.rule)  # type: ignore[arg-type]  # logits, target and ids


class HeadOptions(NamedTuple):
    """The options of a head, as of any call of linears (programs.py), with a target, and ids."""

    # the name in errors
    name: str
    # how logits come from the linear
    rule: LogitRule
    # into how many chunks rows are cut, None for as many as LOGIT_BYTES says
    chunks: int | None = None
    # the level of a call, None for the default
    save: str | None = None
    # the name of the weight
    linears: Linears = Linears(ONE_LINEAR)
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # the types in `rule`, as True equals 1
    kinds: tuple[type, ...] = ()
    # whether a call has ids
    has_ids: bool = False
    # seeds of its own dropouts: it has none
    num_seeds: int = 0

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        ids = (Operand("ids"),) if self.has_ids else ()
        return (Operand("x"), Operand("target"), *ids, *self.linears.operands)

    def check(self, override: str | None) -> str:
        """Return the save level; refuse invalid options."""
        name = self.name
        rule = self.rule
        arguments.number(name, "scale", rule.scale)
        if rule.softcap is not None:
            arguments.number(name, "softcap", rule.softcap)
            if rule.softcap <= 0:
                arguments.wrong_value(name, "softcap", "a positive number", rule.softcap)
        arguments.integer(name, "ignore_index", rule.ignore_index, least=-(2**63))
        if self.chunks is not None:
            arguments.integer(name, "chunks", self.chunks, 1)
        return levels.level_of(name, self.save, override, "inputs", LEVELS_OF["head"])

    def reference(self, x: Any, between: Any, linears: Sequence[tuple[Any, Any]]) -> Tensor:
        """Return the statistics by torch's own ops; between: the target, and ids."""
        target, *ids = between
        z = eager.linear(x, *linears[0])
        return Statistics(self.rule, "aten").eager((z, target.unsqueeze(-1), *ids), ())

    def split_packed(self, linears: Any, saves_half: bool) -> None:
        """Return None: no weight is packed."""

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the GEMM that makes the logits, where they are saved."""
        return (0,) if self.check(levels.override.level) == "preact" else ()

    def make_call(self, context: Context, x: Any, target: Any, *metas: Any) -> Any:
        """Refuse a call with parts that do not fit; return None where only eager may run."""
        level = self.check(context.level)
        name = self.name
        ids, metas = (metas[:1], metas[1:]) if self.has_ids else ((), metas)
        linears = self.linears.of(metas)
        validate.check_tensors(name, (Operand("x"), *self.linears.operands), (x, *flat_of(linears)))
        by_names = dict(zip(ONE_LINEAR, linears, strict=True))
        validate.check_linears(name, x, by_names, None, 1, adds=False)
        self._check(x, target, *ids)
        dtype = context.compute_dtype(x.dtype)
        validate.check_multiplied(name, context, dtype, by_names)
        if context.reference_only:
            return None
        b = Builder(context, dtype)
        classes = linears[0].weight.shape[0]
        on_aten = dispatch.is_aten(x.device, dtype, classes)
        wide = torch.promote_types(dtype, torch.float32)
        num_ids = ids[0].shape[-1] if ids else 0
        op = Statistics(self.rule, "aten" if on_aten else "triton", wide, num_ids)
        z = b.apply(b.linear(*ONE_LINEAR, linears[0]), None, "x", "z")
        b.add(op, "y", (z, "target", "ids") if ids else (z, "target"))
        level = level if context.grad else "inputs"
        chunks = self.chunks or 1
        if level == "inputs" and self.chunks is None:
            rows = math.prod(x.shape[:-1])
            chunks = max(chunks, head_chunks_for(rows, classes, x.shape[-1], dtype))
        # in a checkpoint's recompute not all logits are to exist at once
        how: Any = {
            "level": level,
            "level_in_checkpoint": "inputs",
            "chunks": chunks,
            "casts": True,
        }
        fields = {"dtype": dtype, "gemm_outputs": ("z",), "saved_beside": ("y",)}
        column = target._replace(shape=torch.Size((*target.shape, 1)))
        inputs = {"x": x, "target": column, **({"ids": ids[0]} if ids else {})}
        return b.build(name, inputs, ["y"], fields, **how)

    def _check(self, x: Meta, target: Meta, ids: Meta | None = None) -> None:
        rows = list(x.shape[:-1])
        if ids is not None:
            validate.check_integers(self.name, "ids", ids, x, (torch.int64,))
            if list(ids.shape[:-1]) != rows or len(ids.shape) != len(x.shape) or not ids.shape[-1]:
                raise ValueError(
                    f"{self.name}: ids must be {[*rows, 'k']} with k >= 1, as x is "
                    f"{list(x.shape)}, got {list(ids.shape)}"
                )
        validate.check_integers(self.name, "target", target, x, (torch.int64,))
        if target.shape != x.shape[:-1]:
            raise ValueError(
                f"{self.name}: target must be {rows}, as x is {list(x.shape)}, got "
                f"{list(target.shape)}"
            )


def head_chunks_for(rows: int, classes: int, d: int, dtype: torch.dtype) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    Each chunk reads the weight, and adds to a float32 gradient as large: a large weight takes few.
    """
    size = classes * dtype.itemsize
    return max(1, math.ceil(rows * size / max(LOGIT_BYTES, size * d // 4, 1)))
