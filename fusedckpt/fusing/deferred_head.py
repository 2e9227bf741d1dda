"""The head that returns deferred logits in training.

Logits of a head that a known style splits by its classes are deferred in place of the style's
hooks: each rank makes those of its classes alone. With any other hook the head runs as before, as
hooks may read logits, or take the weight away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.blocks.head import LEVELS
from fusedckpt.fusing.deferred import Deferred, DeferredLogits, Operands
from fusedckpt.fusing.forwards import Swap
from fusedckpt.fusing.held import MARK, Part
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.subclass import subclass
from fusedckpt.layers.sharded import is_sharded, library, placed


class DeferredHead(nn.Module):
    """Forward of a model's output embedding: in training it returns deferred logits."""

    _fusedckpt_prefix = "Deferred"
    _parameters: Any
    save_levels = LEVELS

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, deferred where they may be."""
        made = None if dispatch.has_hooks(self) else self._deferred(input, None)
        return super().forward(input) if made is None else made

    def _deferred(self, x: Any, style: Any) -> Tensor | None:
        weight: Any = self.weight
        if not (self.training and torch.is_grad_enabled() and _may_defer(self, x, style)):
            return None
        if style is not None:
            x = x if is_sharded(x) else placed(x, style.mesh, style.input)
            x = x.redistribute(placements=[library().Replicate()])
        # autocast leaves float64 as it is
        cast = None if x.dtype == torch.float64 else autocast_dtype(x.device)
        operands = Operands(x, weight, self.bias, cast, self, style)  # type: ignore[arg-type]  # nn.Linear's
        like = torch.empty(*x.shape[:-1], weight.shape[0], dtype=cast or x.dtype, device="meta")
        return DeferredLogits.of(Deferred(operands), like)

    def _fusedckpt_loss(self, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Compute a loss: the work of the module, which a plan may let run otherwise."""
        return run(*args)


def _may_defer(head: Any, x: Any, style: Any) -> bool:
    """Whether logits may be computed later: the same on every rank."""
    if torch.compiler.is_compiling() or dispatch.DISABLED or dispatch.is_recorded(x):
        return False
    if not isinstance(x, Tensor):
        return False
    given = [t for t in (x, head.weight, head.bias) if t is not None]
    if style is not None and is_sharded(x):
        fits = (x.device_mesh, x.placements) == (style.mesh, (style.input,))  # type: ignore[attr-defined]  # a DTensor
    else:
        fits = dispatch.are_plain(*given if style is None else [x])
    is_one = len({t.dtype for t in given}) == 1 or autocast_dtype(x.device) is not None
    transformed = private.are_transforms_active() or private.forward_level() >= 0
    return fits and is_one and not transformed and any(t.requires_grad for t in given)


def find_head(model: Any, search: Search) -> None:
    """Find a model's output embedding."""
    find = getattr(model, "get_output_embeddings", None)
    head: Any = find() if search.kinds["head"] and find is not None else None
    name = next((name for name, module in search.modules.items() if module is head), None)
    if name is None or MARK in vars(head) or not search.has(name, "head"):
        return
    kind = type(head)
    is_plain = "forward" not in vars(head) and dispatch.are_plain(*head._parameters.values())
    if kind.forward is not nn.Linear.forward or not (is_plain):
        reason = "its output embedding is no nn.Linear with a plain weight, or one split by classes"
        search.report.leave(name, "head", reason, kind.__name__)
        return
    part = Part("head", f"{kind.__name__} -> deferred logits", None)
    search.report.swap(name, part)
    swap = Swap("head", part.change, subclass(DeferredHead, kind), {}, parts={"": part})
    search.swaps.append((head, swap))
