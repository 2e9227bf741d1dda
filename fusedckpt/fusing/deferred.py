"""Logits that are not computed: a head returns its operands as a tensor, which a loss reads.

`DeferredLogits` has the shape, dtype and device of logits. It notes a scale, a softcap, a cast to
float32, a view of rows and slices of them; F.cross_entropy of it is
`functional.linear_cross_entropy`. Anything else that reads it gets the real logits, computed once,
with their autograd graph. So the code of a model and of its loss is unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.autograd.private import pytree
from fusedckpt.blocks.head import LEVELS
from fusedckpt.fusing.forwards import Swap
from fusedckpt.fusing.held import MARK, Part
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.sharing import Rerun, cast_by
from fusedckpt.fusing.subclass import subclass
from fusedckpt.layers.head import linear_cross_entropy

__all__ = ["DeferredHead", "DeferredLogits", "find_head"]

# properties and methods that need no numbers
_KNOWN = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_cpu", "is_sparse")
    + ("is_quantized", "is_nested", "requires_grad", "grad_fn", "is_leaf", "itemsize", "nbytes")
)
_SIZES = frozenset(("size", "dim", "ndimension", "numel", "nelement", "is_floating_point"))
_TIMES = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
_OVER = frozenset(("div", "divide", "true_divide", "__truediv__"))
_VIEWS = frozenset(("view", "reshape", "flatten", "contiguous"))


class Operands(NamedTuple):
    """The logits post * tanh(pre * F.linear(hidden, weight, bias)); without tanh if post is None.

    cast: the dtype of autocast, None where it is off; head: the module that has the weight.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: torch.dtype | None
    head: DeferredHead
    pre: float = 1.0
    post: float | None = None

    def times(self, factor: float) -> Operands:
        """Return the operands of scaled logits."""
        if self.post is None:
            return self._replace(pre=self.pre * factor)
        return self._replace(post=self.post * factor)

    def linear(self, hidden: Tensor) -> Tensor:
        """Return the outputs of the head's linear."""
        with cast_by(hidden.device, self.cast):
            return F.linear(hidden, self.weight, self.bias)

    def loss(self, target: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        """Return F.cross_entropy of the logits, rows of a dtype."""
        scale = self.pre if self.post is None else self.pre * self.post
        given = {**options, "scale": scale, "softcap": self.post}
        run = partial(_rows_loss, self.weight, self.bias, given)
        with cast_by(self.hidden.device, self.cast):
            rows = target.reshape(self.hidden.shape[:-1])
            loss = self.head._fusedckpt_loss(run, self.hidden, rows)
        # autocast runs the loss in float32
        loss = loss if autocast_dtype(loss.device) else loss.to(dtype)
        return loss.reshape(target.shape) if loss.dim() else loss


class Deferred:
    """How logits come about: `call` of those of `parent`, or the linear of the operands."""

    def __init__(self, operands: Operands, parent: Deferred | None = None, call: Any = None):
        self.operands, self.parent = operands, parent
        self.call: Callable[[Tensor], Tensor] = call or operands.linear
        self.root: Deferred = self if parent is None else parent.root
        self.made: Tensor | None = None
        self.hooks: list[Callable[[Tensor], Any]] = []
        self.versions = versions_of(*operands[:3])
        if parent is None:
            self.family: list[weakref.ref[Deferred]] = []
        self.root.family.append(weakref.ref(self))

    def again(self, hidden: Tensor) -> Tensor:
        """Return the logits anew, from the root's hidden states."""
        return self.call(hidden if self.parent is None else self.parent.again(hidden))

    def real(self) -> Tensor:
        """Return the logits, computed once."""
        if self.made is None:
            if self.parent is None and self.is_lost():
                raise RuntimeError(
                    "fusedckpt: these logits were not computed yet, and the head's weight has been "
                    "modified or freed since: read them before backward and the optimizer's step, "
                    "or fuse with head=False"
                )
            # the graph is that of the call, also for readers without gradients
            with torch.enable_grad():
                parent = self.parent
                made = self.call(self.operands.hidden if parent is None else parent.real())
            for hook in self.hooks:
                made.register_hook(hook)
            self.made = made
        return self.made

    def is_lost(self) -> bool:
        """Whether the operands have been modified, or freed, as sharded weights are."""
        hidden, weight, bias = self.operands[:3]
        freed = weight.numel() and not weight.is_meta and not weight.untyped_storage().nbytes()
        return bool(freed) or self.versions != versions_of(hidden, weight, bias)

    def settle(self) -> None:
        """Compute the other tensors of the family, before one is modified in place."""
        for reference in self.root.family:
            if (one := reference()) is not None:
                one.real()


class DeferredLogits(Tensor):
    """A tensor of logits that are computed when anything but a loss reads them."""

    deferred: Deferred

    @staticmethod
    def of(deferred: Deferred, like: Tensor) -> DeferredLogits:
        """Return a tensor of the shape, dtype and device of `like`, with a node of autograd."""

        def run(hidden: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                # in the backward of code that reads no torch functions
                return deferred.again(hidden)
            one = torch.empty((), dtype=like.dtype, device=hidden.device)
            return one.expand(like.shape).as_subclass(DeferredLogits)

        root = deferred.root.operands
        with torch.enable_grad():
            given = [root.weight] if root.bias is None else [root.weight, root.bias]
            made = Rerun.apply(run, root.hidden, *given)
        made.deferred = deferred
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an op, or run it on the real logits."""
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name == "__get__":
            name = func.__self__.__name__
        if isinstance(first, DeferredLogits) and first.deferred.made is None:
            if name in _KNOWN or name in _SIZES:
                return super().__torch_function__(func, types, args, kwargs or {})
            if name == "_base":
                return None
            if name == "register_hook" and _gathers(args[1]):
                first.deferred.hooks.append(args[1])
                return super().__torch_function__(func, types, args, kwargs or {})
            found = first._noted(func, name, args[1:], kwargs or {})
            if found is not None:
                return found
        if name.endswith("_"):
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, DeferredLogits):
                    one.deferred.settle()
        return func(*pytree.tree_map(_real, args), **pytree.tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of code below torch's functions on the real numbers."""
        return func(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs or {}))

    def _noted(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the result of an op that only notes itself, None for other ops."""
        if func is F.cross_entropy:
            return self._loss(*args, **kwargs)
        operands, changed = self.deferred.operands, None
        value: Any = args[0] if args else None
        if kwargs or (len(args) > 1 and name not in _VIEWS):
            return None
        if name in _TIMES | _OVER and isinstance(value, (int, float)) and value > 0:
            changed = operands.times(value if name in _TIMES else 1 / value)
        elif name == "tanh" and operands.post is None:
            changed = operands._replace(post=1.0)
        elif name in ("float", "to"):
            if (torch.float32 if name == "float" else value) in (self.dtype, self.device):
                return self
            if name == "float" or value == torch.float32:
                changed = operands
        elif name in _VIEWS:
            changed = operands
        elif name == "__getitem__" and _slices_rows(value):
            hidden = operands.hidden.reshape(*self.shape[:-1], -1)
            changed = operands._replace(hidden=hidden[args[0]])
        if changed is None:
            return None
        like = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args)
        if like.dim() == 0 or like.shape[-1] != self.shape[-1]:
            return None
        call = partial(_called, func, args)
        return DeferredLogits.of(Deferred(changed, self.deferred, call), like)

    def _loss(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        is_plain = type(target) is Tensor and target.dtype == torch.int64
        if not is_plain or self.dim() != 2 or target.shape != self.shape[:1]:
            return None
        if (weight, size_average, reduce) != (None, None, None):
            return None
        options = {"ignore_index": ignore_index, "reduction": reduction}
        options["label_smoothing"] = label_smoothing
        return self.deferred.operands.loss(target, self.dtype, options)


def _gathers(hook: Any) -> bool:
    """Whether a hook is of FSDP, which runs before any backward: others need the real logits."""
    module = getattr(getattr(hook, "func", hook), "__module__", None)
    return isinstance(module, str) and module.startswith("torch.distributed.")


def _rows_loss(weight: Any, bias: Any, options: Any, hidden: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, bias, **options)


def _called(func: Any, args: Any, x: Tensor) -> Tensor:
    return func(x, *args)


def _real(value: Any) -> Any:
    return value.deferred.real() if isinstance(value, DeferredLogits) else value


def _numbers(value: Any) -> Any:
    return value.deferred.real().detach() if isinstance(value, DeferredLogits) else value


def _slices_rows(index: Any) -> bool:
    """Whether an index slices leading dimensions alone: [..., a:b, :]."""
    if not isinstance(index, tuple) or not index or index[0] is not Ellipsis:
        return False
    others = index[1:]
    return bool(others) and others[-1] == slice(None) and all(type(s) is slice for s in others)


class DeferredHead(nn.Module):
    """Forward of a model's output embedding: in training it returns deferred logits."""

    _fusedckpt_prefix = "Deferred"
    _parameters: Any
    save_levels = LEVELS

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, deferred where they may be."""
        if not self.training or not torch.is_grad_enabled() or not _may_defer(self, input):
            return super().forward(input)
        weight, bias = self.weight, self.bias
        cast = autocast_dtype(input.device)
        operands = Operands(input, weight, bias, cast, self)  # type: ignore[arg-type]  # nn.Linear's
        dtype = operands.cast or input.dtype
        like = torch.empty(*input.shape[:-1], weight.shape[0], dtype=dtype, device="meta")  # type: ignore[union-attr]
        return DeferredLogits.of(Deferred(operands), like)

    def _fusedckpt_loss(self, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Compute a loss: the work of the module, which a plan may let run otherwise."""
        return run(*args)


def _may_defer(head: Any, x: Any) -> bool:
    """Whether logits may be computed later; hooks may read them, or take the weight away."""
    if torch.compiler.is_compiling() or dispatch.DISABLED or dispatch.is_recorded(x):
        return False
    given = [t for t in (x, head.weight, head.bias) if t is not None]
    if not dispatch.are_plain(*given) or dispatch.has_hooks(head) or not isinstance(x, Tensor):
        return False
    is_one = len({t.dtype for t in given}) == 1 or autocast_dtype(x.device) is not None
    transformed = private.are_transforms_active() or private.forward_level() >= 0
    return is_one and not transformed and any(t.requires_grad for t in given)


def find_head(model: Any, search: Search) -> None:
    """Find a model's output embedding."""
    find = getattr(model, "get_output_embeddings", None)
    head: Any = find() if search.kinds["head"] and find is not None else None
    name = next((name for name, module in search.modules.items() if module is head), None)
    if name is None or MARK in vars(head) or not search.has(name, "head"):
        return
    kind = type(head)
    is_linear = kind.forward is nn.Linear.forward and "forward" not in vars(head)
    if not is_linear or not dispatch.are_plain(*head._parameters.values()):
        reason = "its output embedding is no nn.Linear with a plain weight"
        search.report.leave(name, "head", reason, kind.__name__)
        return
    part = Part("head", f"{kind.__name__} -> deferred logits", None)
    search.report.swap(name, part)
    swap = Swap("head", part.change, subclass(DeferredHead, kind), {}, parts={"": part})
    search.swaps.append((head, swap))
