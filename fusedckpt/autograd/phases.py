"""Where a fused layer's forward runs: free, or in a checkpoint's forward or recompute.

In a checkpoint's forward a layer's saved tensors are dropped, so it computes nothing for it; the
recompute saves all that spares its backward a GEMM. Without that, forward would run a third time.

The phase is read from autograd's own stack of saved-tensor hooks, which is thread-local and nests.
Where that is missing, layers save the tensors of their level, which recomputes more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from fusedckpt.autograd import private
from fusedckpt.autograd.private import Hooks

# shape and dtype of a product, a GEMM output that a layer may save; None where backward reads none
ProductMeta = tuple[Sequence[int], torch.dtype] | None
ProductMetas = Sequence[ProductMeta]
Tensors = Sequence[Tensor | None]


class PhaseLevels(NamedTuple):
    """The save levels of every layer in a phase of a checkpoint."""

    # the level of the products that backward can count on
    counted: str
    # the level of the products that the forward computes
    computed: str


class SavePhase:
    """A phase in which saved tensors go through hooks.

    A layer saves its operands, and products: GEMM outputs that its backward can recompute.
    """

    # whether it is a recompute
    recomputes = False
    # whether backward may write over the products: no other code has got them by a hook
    owns_products = False
    # None for the layer's own level
    levels: PhaseLevels | None = None

    def enter(self, tensors: Tensors, product_metas: ProductMetas = ()) -> None:
        """Note the operands that the layer is about to save, before it computes anything."""

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        products: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        """Save operands and products on an autograd Function's ctx; `backward.begin` reads them."""
        ctx.save_for_backward(*tensors, *products)
        ctx.recall = None
        ctx.first_product = len(tensors)
        ctx.owns_products = self.owns_products


class _ReentrantRecompute(SavePhase):
    """The recompute of a reentrant checkpoint: its own graph runs next."""

    recomputes = owns_products = True
    levels = PhaseLevels("preact", "preact")


class _Stock(SavePhase):
    """torch's non-reentrant checkpoint, which matches saved tensors by position and metadata."""

    def __init__(self, levels: PhaseLevels):
        self.levels = levels
        self.recomputes = levels.computed == "preact"

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        products: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        device = next((t.device for t in tensors if t is not None), None)
        matched = (
            product if product is not None or meta is None else _placeholder(*meta, device)
            for product, meta in zip(fitting(products, product_metas), product_metas, strict=True)
        )
        super().save(ctx, name, tensors, list(matched))
        ctx.recall = _without_placeholders


class _StockRecompute(_Stock):
    """The recompute of torch's non-reentrant checkpoint, which ends with the last saved tensor.

    The layer with the last tensors passes them before it computes anything; its backward then makes
    the products that it reads.
    """

    def __init__(self, pack: Callable[[Tensor], Any]):
        super().__init__(_STOCK_RECOMPUTE_LEVELS)
        self.pack = pack

    def enter(self, tensors: Tensors, product_metas: ProductMetas = ()) -> None:
        present = [tensor for tensor in tensors if tensor is not None]
        missing = [meta for meta in product_metas if meta is not None]
        if present and private.num_wanted(self.pack) == len(present) + len(missing):
            present += [_placeholder(*meta, present[0].device) for meta in missing]
            for tensor in present:
                self.pack(tensor)


_STOCK_RECOMPUTE_LEVELS = PhaseLevels("inputs", "preact")
_HOOKED = SavePhase()
_REENTRANT = _ReentrantRecompute()
_STOCK_FORWARD = _Stock(PhaseLevels("inputs", "inputs"))


def current() -> SavePhase | None:
    """Return the phase in which a layer called here runs; None for no checkpoint.

    Grad mode must be the caller's. A compiled checkpoint decides itself about recomputes.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not private.SEES_HOOKS:
        return None
    hooks = private.top_hooks()
    if hooks is None:
        # a forward with gradients in a backward is a recompute: of torch's reentrant checkpoint,
        # DeepSpeed's or Megatron's, and of any that a project wrote for itself
        return _REENTRANT if isinstance(private.current_node(), BackwardCFunction) else None
    owner = getattr(hooks[0], "__self__", None)
    if isinstance(owner, SavePhase):
        return owner
    stock = private.stock_phase(hooks[0])
    if stock is None:
        return None
    return _STOCK_FORWARD if stock == "forward" else _StockRecompute(hooks[0])


@contextmanager
def outside_hooks_of(owner: SavePhase) -> Iterator[None]:
    """Remove the hooks on saved tensors inside: the innermost ones, down to those of a phase."""
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
    """Remove hooks that only count inside, and yield a function that counts a tensor for them."""
    removed: list[Hooks] = []
    while (hooks := private.top_hooks()) is not None and only_count(hooks):
        removed.append(hooks)
        saved_tensors_hooks(*hooks).__exit__()
    try:
        yield removed[0][0] if removed else None
    finally:
        for hooks in reversed(removed):
            saved_tensors_hooks(*hooks).__enter__()


def with_own_hooks(run: Callable[[Any], Any], otherwise: Callable[[], Any]) -> Any:
    """Return run(count), which may set hooks on saved tensors; count: a hook that counts, or None.

    Return otherwise() where hooks take the saved tensors: hooks are set only on tensors saved
    without.
    """
    if private.top_hooks() is None:
        return run(None)
    with uncounted() as count:
        return run(count) if private.top_hooks() is None else otherwise()


class PackHook(partial):
    """The `pack` of a checkpoint's phase, which torch knows by its attributes to be no user's.

    A partial, as its call is none of Python.
    """

    _checkpoint_internal = True

    @property
    def __self__(self) -> Any:
        return self.func.__self__  # type: ignore[attr-defined]

    @property
    def _user_hooks(self) -> Hooks | None:
        with outside_hooks_of(self.__self__):
            return private.user_hooks()


def pack_hook(phase: Any) -> Callable[[Tensor], Any]:
    """Return the hook of a phase that has `pack`, which Dynamo is to leave alone."""
    return phase.pack if private.user_hooks is None else PackHook(phase.pack)


class _OfOthers:
    """Calls of torch's checkpoint with a layer that got a tensor of a class of others.

    Such a layer runs its own forward. The recompute gets plain tensors, as autograd saves no
    classes, so there all layers run their own. It keeps those of other ops, such as DTensor.
    """

    # whether there was any such call
    is_used = False

    def note(self, kind: Any) -> None:
        """Note the call of torch's checkpoint that runs now, if any; kind: the class."""
        plain: Any = Tensor
        if kind.__torch_dispatch__ is not plain.__torch_dispatch__:
            return
        frame = self._frame_in("forward")
        if frame is not None:
            frame._fusedckpt_of_others = True
            self.is_used = True

    def is_recomputed(self) -> bool:
        """Whether such a call is recomputed now."""
        return hasattr(self._frame_in("recompute"), "_fusedckpt_of_others")

    def _frame_in(self, phase: str) -> Any:
        if torch.compiler.is_compiling() or not private.SEES_HOOKS:
            return None
        hooks = private.top_hooks()
        if hooks is None or private.stock_phase(hooks[0]) != phase:
            return None
        return private.stock_frame(hooks[0])


OF_OTHERS = _OfOthers()


def default_stock(around: Hooks | None) -> str:
    """Return "checkpoint" in the forward of torch's non-reentrant checkpoint without options.

    The hooks `around` must be the next ones around it. "offload" where save_on_cpu's are between
    both; "" elsewhere.
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
        is_offload = private.top_hooks() == around
        is_alone = is_offload
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
    """Whether hooks count saved tensors and return them as they are, or there are no hooks."""
    return hooks is None or getattr(getattr(hooks[0], "__self__", None), "only_counts", False)


def hooks_obstacle() -> str | None:
    """Return why hooks of ours may not see the tensors that are saved now, None if they may."""
    hooks = private.top_hooks()
    if not private.SEES_HOOKS or (hooks is not None and not only_count(hooks)):
        return "saved-tensor hooks of other code were active"
    return None if private.why_no_hooks() is None else "saved-tensor hooks were disabled"


def moved_by(hooks: Hooks | None) -> int | None:
    """Return the storage of tensors that come back through hooks elsewhere in memory.

    0 for none, as without hooks, and where they only count; None for any: hooks of other code may
    copy all tensors.
    """
    return 0 if hooks is None or only_count(hooks) else getattr(hooks[0], "moved", None)


def fitting(products: Tensors, product_metas: ProductMetas) -> list[Tensor | None]:
    """Return the products, None for one that selective checkpointing did not recompute."""
    return [
        None if meta is None or product is None or product.shape != torch.Size(meta[0]) else product
        for product, meta in zip(products, product_metas, strict=True)
    ]


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a tensor of this shape and dtype that owns no memory."""
    # unseen by dispatch modes: selective checkpointing counts the ops of both phases
    with private.disable_current_modes():
        tensor = torch.empty(1, dtype=dtype, device=device).expand(*shape)
        tensor.untyped_storage().resize_(0)
    return tensor


def _without_placeholders(products: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if t is None or t.untyped_storage().nbytes() < t.numel() * t.element_size() else t
        for t in products
    ]
