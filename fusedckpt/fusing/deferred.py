"""Logits that are not computed: a head returns its operands as a tensor, which a loss reads.

`DeferredLogits` has the shape, dtype and device of logits. It notes a scale, a softcap, a cast to
float32, a view of rows and slices of them; F.cross_entropy of it is
`functional.linear_cross_entropy`. Anything else that reads it gets the real logits, computed once,
with their autograd graph. So the code of a model and of its loss is unchanged.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.autograd.private import pytree
from fusedckpt.checkpointing.determinism import same_bits
from fusedckpt.fusing.sharing import cast_by
from fusedckpt.layers.head import linear_cross_entropy
from fusedckpt.layers.sharded import is_sharded, library, parts_of, placed

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

    cast: the dtype of autocast, None where it is off; head: the module that has the weight;
    style: that of a head split by its classes, whose operands are then DTensors.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: torch.dtype | None
    head: Any
    style: Any = None
    pre: float = 1.0
    post: float | None = None

    @property
    def are_parts(self) -> bool:
        """Whether logits and loss are DTensors."""
        return self.style is not None and not self.style.is_local

    def times(self, factor: float) -> Operands:
        """Return the operands of scaled logits."""
        if self.post is None:
            return self._replace(pre=self.pre * factor)
        return self._replace(post=self.post * factor)

    def linear(self, hidden: Tensor) -> Tensor:
        """Return the outputs of the head's linear, laid out as its style has them."""
        with cast_by(hidden.device, self.cast):
            y: Any = F.linear(hidden, self.weight, self.bias)
        if self.style is not None:
            y = y.redistribute(placements=[self.style.output])
            return y.to_local() if self.style.is_local else y
        return y

    def loss(self, target: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        """Return F.cross_entropy of the logits, rows of a dtype."""
        scale = self.pre if self.post is None else self.pre * self.post
        given = {**options, "scale": scale, "softcap": self.post}
        run = partial(_rows_loss, self.weight, self.bias, given)
        with cast_by(self.hidden.device, self.cast):
            rows = target.reshape(self.hidden.shape[:-1])
            loss = self.head._fusedckpt_loss(run, self.hidden, rows)
        if autocast_dtype(loss.device) is not None:
            # it runs the loss in float32
            dtype = torch.promote_types(dtype, torch.float32)
        loss = loss.to(dtype)
        loss = loss.reshape(target.shape) if loss.dim() else loss
        if self.style is None or self.style.is_local:
            return loss
        return placed(loss, self.style.mesh, library().Replicate())


class Deferred:
    """How logits come about: `call` of those of `parent`, or the linear of the operands.

    made: the real logits, owner: a reference to the tensor that has them; is_spent: whether a loss
    was computed without them.
    """

    def __init__(self, operands: Operands, parent: Deferred | None = None, call: Any = None):
        self.operands, self.parent = operands, parent
        self.call: Callable[[Tensor], Tensor] = call or operands.linear
        self.made: Tensor | None = None
        self.is_spent = False
        self.owner: Callable[[], Any] = lambda: None
        self.hooks: list[Callable[[Tensor], Any]] = []
        # of the head's operands; and all logits made of these
        self.versions = self._versions() if parent is None else parent.versions
        self.sample = _sample(operands.weight) if parent is None else parent.sample
        self.family: list[weakref.ref[Deferred]] = [] if parent is None else parent.family
        self.family.append(weakref.ref(self))

    @property
    def line(self) -> list[Deferred]:
        """These logits, and those that they were made of: the last are the head's."""
        return [self] if self.parent is None else [self, *self.parent.line]

    @property
    def root(self) -> Deferred:
        """The logits that the head returned; a reference to itself would outlive them."""
        return self.line[-1]

    def again(self, hidden: Tensor) -> Tensor:
        """Return the logits anew, from the root's hidden states."""
        return self.call(hidden if self.parent is None else self.parent.again(hidden))

    def real(self) -> Tensor:
        """Return the logits; with them those of the family, before anything writes to one."""
        if self.made is None:
            if self.root.made is None and (self.is_lost() or self._is_changed()):
                raise RuntimeError(
                    "fusedckpt: these logits were not computed yet, and the head's weight has been "
                    "modified or freed since: read them before backward and the optimizer's step, "
                    "or fuse with head=False"
                )
            # the graph is that of the call, also for readers without gradients
            with torch.inference_mode(False), torch.enable_grad():
                for reference in self.family:
                    if (one := reference()) is not None and one.made is None:
                        one._make()
            for reference in self.family:
                one = reference()
                if one is not None and one is not self and one.owner() is None:
                    # only a step to others, such as the logits before a softcap
                    one.made = None
        assert self.made is not None
        return self.made

    def _make(self) -> None:
        self.made = self.call(self.operands.hidden if self.parent is None else self.parent.real())
        for hook in self.hooks:
            self.made.register_hook(hook)

    def is_lost(self) -> bool:
        """Whether the head's operands have been modified, or freed, as sharded weights are."""
        parts = parts_of(*self.root.operands[1:3])
        weights = [t for t in parts if t is not None and t.numel() and not t.is_meta]
        freed = any(not t.untyped_storage().nbytes() for t in weights)
        return freed or self.versions != self._versions()

    def _is_changed(self) -> bool:
        """Whether the weight has other numbers: writes to .data are in no version."""
        old, new = self.sample, _sample(self.root.operands.weight)
        if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            return True
        # a NaN is itself
        return not (old.is_meta or same_bits(old, new))

    def _versions(self) -> tuple[int, ...]:
        return versions_of(*parts_of(*self.root.operands[:3]))


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
            made = _Rerun.apply(run, root.hidden, *given)
        made.deferred = deferred
        deferred.owner = weakref.ref(made)
        return made

    @property
    def __class__(self) -> Any:  # type: ignore[override]  # read only
        """The class that the real logits have, of which code asks whether it is DTensor."""
        known = vars(self).get("deferred")
        are_parts = known is not None and known.operands.are_parts
        return library().DTensor if are_parts else DeferredLogits

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real logits that no other tensors have."""
        kind = self.__class__
        if kind is DeferredLogits or not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}")
        return getattr(self.deferred.real(), name)

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
        _check_gradient(func, name, args, kwargs)
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
            if not 0 < (changed.pre if changed.post is None else changed.post) < math.inf:
                return None
        elif name == "tanh" and operands.post is None:
            changed = operands._replace(post=1.0)
        elif name in ("float", "to"):
            if (torch.float32 if name == "float" else value) in (self.dtype, self.device):
                return self
            if name == "float" or value == torch.float32:
                changed = operands
        elif name in _VIEWS:
            changed = operands
        elif name == "__getitem__" and _takes_rows(value, self.dim()):
            hidden = operands.hidden.reshape(*self.shape[:-1], operands.hidden.shape[-1])
            changed = operands._replace(hidden=hidden[args[0]])
        if changed is None:
            return None
        like = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args)
        if like.dim() == 0 or like.shape[-1] != self.shape[-1]:
            return None
        made = Deferred(changed, self.deferred, lambda x: func(x, *args))
        return DeferredLogits.of(made, like)

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
        are_parts, is_lost = self.deferred.operands.are_parts, self.deferred.is_lost()
        if are_parts and is_sharded(target) and target.placements == (library().Replicate(),):
            target = target.to_local()
        is_plain = type(target) is Tensor and target.dtype == torch.int64
        if is_lost or not is_plain or self.dim() != 2 or target.shape != self.shape[:1]:
            return None
        if (weight, size_average, reduce) != (None, None, None):
            return None
        options = {"ignore_index": ignore_index, "reduction": reduction}
        options["label_smoothing"] = label_smoothing
        loss = self.deferred.operands.loss(target, self.dtype, options)
        if loss.requires_grad:
            for one in self.deferred.line:
                one.is_spent = True
                for hook in one.hooks:
                    loss.register_hook(hook)
        return loss


class _Rerun(torch.autograd.Function):
    """A function that saves only its input: backward runs it again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *given: Tensor) -> Tensor:
        """Return run(x), which reads the parameters `given`, too."""
        ctx.save_for_backward(x, *given)
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of x and of the tensors `given`."""
        x, *given = ctx.saved_tensors
        creates = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x if creates else x.detach().requires_grad_(ctx.needs_input_grad[1])
            y = ctx.run(x)
            needs = ctx.needs_input_grad[1:]
            wanted = [t for t, need in zip((x, *given), needs, strict=True) if need]
            grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=creates))
        return (None, *[next(grads) if need else None for need in needs])


def _gathers(hook: Any) -> bool:
    """Whether a hook is of FSDP, which runs before any backward: others need the real logits."""
    module = getattr(getattr(hook, "func", hook), "__module__", None)
    return isinstance(module, str) and module.startswith("torch.distributed.")


def _rows_loss(weight: Any, bias: Any, options: Any, hidden: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, bias, **options)


def _real(value: Any) -> Any:
    return value.deferred.real() if isinstance(value, DeferredLogits) else value


def _numbers(value: Any) -> Any:
    return value.deferred.real().detach() if isinstance(value, DeferredLogits) else value


def _takes_rows(index: Any, dims: int) -> bool:
    """Whether an index is one of rows, by slices and numbers: [:, :-1], [..., 0, :]."""
    parts = index if isinstance(index, tuple) else (index,)
    kinds = [type(part) for part in parts]
    if not {slice, int, type(...)}.issuperset(kinds) or kinds.count(type(...)) > 1:
        return False
    reaches = kinds[-1:] != [type(...)] and (type(...) in kinds or len(parts) >= dims)
    return not reaches or parts[-1] == slice(None)


def _sample(weight: Any) -> Tensor:
    """Return a copy of some numbers of a weight."""
    with torch.no_grad():
        own = weight.to_local() if is_sharded(weight) else weight
        return own[tuple(slice(None, None, max(1, size // 64)) for size in own.shape)].clone()


def _check_gradient(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Refuse to pass on the gradient of logits without which a loss was computed."""
    wanted: Any = (args[1:], kwargs) if func is torch.autograd.grad else ()
    if name == "retain_grad" or (name == "register_hook" and not _gathers(args[1])):
        wanted = args[0]
    for one in pytree.tree_leaves(wanted):
        if isinstance(one, DeferredLogits) and one.deferred.is_spent:
            raise RuntimeError(
                "fusedckpt: a loss was computed without these logits, which get no gradient of it: "
                "register hooks before the loss, or fuse with head=False"
            )
