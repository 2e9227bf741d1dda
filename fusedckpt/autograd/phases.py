"""Where a fused layer's forward runs: free, or in a checkpoint's forward or recompute.

In a checkpoint's forward a layer's saved tensors are dropped, so it computes nothing for it; the
recompute saves all that spares its backward a GEMM. Without that, forward would run a third time.

The phase is read from autograd's own stack of saved-tensor hooks, which is thread-local and nests.
Where that is missing, layers save the tensors of their level, which recomputes more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedckpt.autograd import private
from fusedckpt.autograd.private import Hooks

# shape and dtype of a tensor that a layer may keep; None where the layer has no such tensor
ProductMeta = tuple[Sequence[int], torch.dtype] | None
ProductMetas = Sequence[ProductMeta]
Tensors = Sequence[Tensor | None]


class SavePhase:
    """A phase in which saved tensors go through hooks: a layer saves the tensors of its level.

    These are tensors that it was given, and extras: GEMM outputs that its backward can recompute,
    and write over where no hooks may have passed them on. levels: the level with the extras that
    backward can count on, and that at which forward computes them; None for the layer's own level.
    """

    recomputes = False
    owns_extras = False
    levels: tuple[str, str] | None = None

    def enter(self, tensors: Tensors, product_metas: ProductMetas = ()) -> None:
        """Take note of the tensors that the layer is about to save, before it computes anything."""

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        extras: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        """Keep tensors on an autograd Function's ctx; `backward.begin` returns them."""
        ctx.save_for_backward(*tensors, *extras)
        ctx.recall = None
        ctx.num_given = len(tensors)
        ctx.owns_extras = self.owns_extras


class _ReentrantRecompute(SavePhase):
    """The recompute of a reentrant checkpoint: its own graph runs next."""

    recomputes = owns_extras = True
    levels = "preact", "preact"


class _Stock(SavePhase):
    """torch's non-reentrant checkpoint, which matches saved tensors by position and metadata."""

    def __init__(self, level: str):
        self.levels = "inputs", level
        self.recomputes = level == "preact"

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        extras: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        device = next((t.device for t in tensors if t is not None), None)
        standing = (
            extra if extra is not None or meta is None else _placeholder(*meta, device)
            for extra, meta in zip(fitting(extras, product_metas), product_metas, strict=True)
        )
        super().save(ctx, name, tensors, list(standing))
        ctx.recall = _without_placeholders


class _StockRecompute(_Stock):
    """Its recompute, which ends with the last tensor that it is given.

    A layer whose tensors are the last gives them before it computes anything; its backward then
    makes the extras that it reads.
    """

    def __init__(self, pack: Callable[[Tensor], Any]):
        super().__init__("preact")
        self.pack = pack

    def enter(self, tensors: Tensors, product_metas: ProductMetas = ()) -> None:
        present = [tensor for tensor in tensors if tensor is not None]
        missing = [meta for meta in product_metas if meta is not None]
        if present and private.num_wanted(self.pack) == len(present) + len(missing):
            present += [_placeholder(*meta, present[0].device) for meta in missing]
            for tensor in present:
                self.pack(tensor)


_HOOKED = SavePhase()
_REENTRANT = _ReentrantRecompute()
_STOCK_FORWARD = _Stock("inputs")


def current() -> SavePhase | None:
    """Return the phase in which a layer called here runs; None for no checkpoint.

    Grad mode must be the caller's. A compiled checkpoint decides itself what is recomputed.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not private.SEES_HOOKS:
        return None
    hooks = private.top_hooks()
    if hooks is None:
        # the backward of a checkpoint's own node: torch's, DeepSpeed's, ...
        node = private.current_node()
        return _REENTRANT if node is not None and "CheckpointFunction" in node.name() else None
    owner = getattr(hooks[0], "__self__", None)
    if isinstance(owner, SavePhase):
        return owner
    stock = private.stock_phase(hooks[0])
    if stock is None:
        return None
    return _STOCK_FORWARD if stock == "forward" else _StockRecompute(hooks[0])


@contextmanager
def outside_hooks_of(owner: SavePhase) -> Iterator[None]:
    """Remove hooks on saved tensors meanwhile: the innermost ones, down to those of a phase."""
    removed: list[Hooks] = []
    while (hooks := private.top_hooks()) is not None:
        removed.append(hooks)
        saved_tensors_hooks(*hooks).__exit__()
        if getattr(hooks[0], "__self__", None) is owner:
            break
    try:
        yield
    finally:
        for hooks in reversed(removed):
            saved_tensors_hooks(*hooks).__enter__()


@contextmanager
def uncounted() -> Iterator[Callable[[Tensor], Any] | None]:
    """Remove hooks that only count, and yield a function that counts a tensor as they would."""
    removed: list[Hooks] = []
    while (hooks := private.top_hooks()) is not None and only_count(hooks):
        removed.append(hooks)
        saved_tensors_hooks(*hooks).__exit__()
    try:
        yield removed[0][0] if removed else None
    finally:
        for hooks in reversed(removed):
            saved_tensors_hooks(*hooks).__enter__()


class PackHook:
    """The `pack` of a checkpoint's phase, which torch knows by its attributes to be no user's."""

    __slots__ = ("__self__",)
    _checkpoint_internal = True

    def __init__(self, owner: Any):
        self.__self__ = owner

    @private.uncompiled
    def __call__(self, tensor: Tensor) -> Any:
        """Pack a saved tensor."""
        return self.__self__.pack(tensor)

    @property
    def _user_hooks(self) -> Hooks | None:
        with outside_hooks_of(self.__self__):
            return private.user_hooks()


# makes the hook of a phase that has `pack`
pack_hook: Callable[[Any], Callable[[Tensor], Any]] = (
    attrgetter("pack") if private.user_hooks is None else PackHook
)


def default_stock(around: Hooks | None) -> str:
    """Return "checkpoint" in the forward of torch's non-reentrant checkpoint, "" elsewhere.

    The checkpoint has no options, and the hooks `around` are right around it; or save_on_cpu's are
    between both: then "offload".
    """
    hooks = private.top_hooks()
    if hooks is None or private.stock_phase(hooks[0]) != "forward":
        return ""
    saved_tensors_hooks(*hooks).__exit__()
    below = private.top_hooks()
    is_offload = False
    is_alone = below == around
    if below is not None and not is_alone and private.is_save_on_cpu(below[0]):
        saved_tensors_hooks(*below).__exit__()
        is_alone = is_offload = private.top_hooks() == around
        saved_tensors_hooks(*below).__enter__()
    saved_tensors_hooks(*hooks).__enter__()
    try:
        frame = private.variable_of(hooks[0], "frame")
        run = frame.recompute_fn
        is_default = (
            is_alone
            and isinstance(private.variable_of(run, "recompute_context"), nullcontext)
            and private.variable_of(run, "preserve_rng_state") is True
            and (frame.early_stop, frame.unpack_error_cb) == (True, None)
            and "default" in frame.metadata_fn.__name__
        )
    except (AttributeError, TypeError, ValueError):
        is_default = False
    return ("offload" if is_offload else "checkpoint") if is_default else ""


def phase_of_layer() -> SavePhase | None:
    """Return the phase of a layer, None where saved tensors go through no hooks but counting."""
    phase = current()
    if phase is None and not (private.SEES_HOOKS and only_count(private.top_hooks())):
        phase = _HOOKED
    return phase


def only_count(hooks: Hooks | None) -> bool:
    """Whether hooks hand on the tensors they are given, and only count them; as no hooks do."""
    return hooks is None or getattr(getattr(hooks[0], "__self__", None), "only_counts", False)


def fitting(extras: Tensors, product_metas: ProductMetas) -> list[Tensor | None]:
    """Return the extras, None for one that selective checkpointing did not recompute."""
    return [
        None if meta is None or extra is None or extra.shape != torch.Size(meta[0]) else extra
        for extra, meta in zip(extras, product_metas, strict=True)
    ]


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a tensor of this shape and dtype that owns no memory."""
    # unseen by dispatch modes: selective checkpointing counts the ops of both phases
    with private.disable_current_modes():
        tensor = torch.empty(1, dtype=dtype, device=device).expand(*shape)
        tensor.untyped_storage().resize_(0)
    return tensor


def _without_placeholders(extras: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if t is None or t.untyped_storage().nbytes() < t.numel() * t.element_size() else t
        for t in extras
    ]
