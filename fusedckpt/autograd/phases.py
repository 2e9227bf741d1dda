"""Where a fused layer's forward runs: free, or in a checkpoint's forward or recompute.

In a checkpoint's forward what a layer saves is thrown away, so it computes nothing for it; in the
recompute it keeps all that spares its backward a GEMM, since the recompute is the one that backward
is about to read. Without that, its forward would run a third time, inside its backward.

The phase is read from autograd's own stack of saved-tensor hooks, which is thread-local and nests.
That is private to torch: where it is missing, layers keep what their level says, which recomputes
more but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Hooks = tuple[Callable[..., Any], Callable[..., Any]]
# shape and dtype of a tensor that a layer may keep; None where the layer has no such tensor
Like = tuple[Sequence[int], torch.dtype] | None
Likes = Sequence[Like]
Tensors = Sequence[Tensor | None]

_top_hooks: Callable[[bool], Hooks | None] | None = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)
# the innermost hooks that saved tensors go through here, None for none
top_hooks: Callable[[], Hooks | None] = partial(_top_hooks or (lambda _: None), False)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


class Phase:
    """Where what a layer saves goes through hooks: it keeps what its level says.

    A layer keeps tensors that it was given, and extras: GEMM outputs that its backward can make
    again from them. Extras are a layer's own, to write over in its backward, where no hooks may
    have handed them on.

    levels: the level whose extras backward can count on, and that at which the forward computes
    them; None for the layer's own level.
    running: of checkpoints inside, one that a later call may go on with: what returns it, or None,
    whose it is, and the place of that call in it.
    """

    recomputes = False
    owns_extras = False
    levels: tuple[str, str] | None = None
    running: tuple[Callable[[], Any], Any, int] = (lambda: None), None, 0

    def enter(self, given: Tensors, likes: Likes = ()) -> None:
        """Take note of what the layer is about to save, before it computes anything."""

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Keep tensors on an autograd Function's ctx; `backward.begin` returns them."""
        ctx.save_for_backward(*given, *extras)
        ctx.recall, ctx.num_given, ctx.owns_extras = None, len(given), self.owns_extras


class _ReentrantRecompute(Phase):
    """The recompute of a reentrant checkpoint: its own graph runs next."""

    recomputes = owns_extras = True
    levels = "preact", "preact"


class _Stock(Phase):
    """torch's non-reentrant checkpoint, which matches saved tensors by position and metadata."""

    def __init__(self, level: str):
        self.levels = "inputs", level
        self.recomputes = level == "preact"

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        device = next((t.device for t in given if t is not None), None)
        standing = (
            extra if extra is not None or like is None else _placeholder(*like, device)
            for extra, like in zip(fitting(extras, likes), likes, strict=True)
        )
        super().save(ctx, name, given, list(standing))
        ctx.recall = _without_placeholders


class _StockRecompute(_Stock):
    """Its recompute, which ends with the last tensor that it hands over.

    Where that is a layer's, it is handed over before the layer computes anything, as torch's own
    functions hand over their inputs; its backward then makes what it needs by itself.
    """

    def __init__(self, pack: Callable[[Tensor], Any]):
        super().__init__("preact")
        self.pack = pack

    def enter(self, given: Tensors, likes: Likes = ()) -> None:
        tensors = [tensor for tensor in given if tensor is not None]
        missing = [like for like in likes if like is not None]
        if tensors and _num_wanted(self.pack) == len(tensors) + len(missing):
            tensors += [_placeholder(*like, tensors[0].device) for like in missing]
            for tensor in tensors:
                self.pack(tensor)


def _num_wanted(pack: Any) -> int | None:
    """Return how many tensors a recompute of torch's ends after, None where that is unknown."""
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    try:
        names = pack.__code__.co_freevars
        cells = {n: c.cell_contents for n, c in zip(names, pack.__closure__, strict=True)}
        frame, backward = cells["target_frame_ref"](), cells["gid"]
        num_saved, done = len(frame.weak_holders), frame.recomp_counter[backward]
        return num_saved - done if frame.early_stop else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


_HOOKED = Phase()
_REENTRANT = _ReentrantRecompute()
_STOCK_FORWARD = _Stock("inputs")


def can_see_hooks() -> bool:
    """Whether this torch tells which hooks saved tensors go through."""
    return _top_hooks is not None


def current() -> Phase | None:
    """Return the phase in which a layer called here runs; None for no checkpoint.

    To be called where grad mode is still the caller's. Under torch.compile it is None: a compiled
    checkpoint decides by itself what is recomputed.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _top_hooks is None:
        return None
    hooks = _top_hooks(False)
    if hooks is None:
        return _REENTRANT if _runs_in_checkpoint() else None
    pack = hooks[0]
    owner = getattr(pack, "__self__", None)
    if isinstance(owner, Phase):
        return owner
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint":
        return None
    if pack.__qualname__ == "_checkpoint_hook.__init__.<locals>.pack_hook":
        return _STOCK_FORWARD
    is_recompute = pack.__qualname__ == "_recomputation_hook.__init__.<locals>.pack_hook"
    return _StockRecompute(pack) if is_recompute else None


def of_layer() -> Phase | None:
    """Return the phase of a layer, None where what it saves goes through no hooks but counting."""
    phase = current()
    if phase is not None:
        return phase
    hooks = top_hooks()
    is_hooked = _top_hooks is None or (hooks is not None and not only_count(hooks))
    return _HOOKED if is_hooked else None


def only_count(hooks: Hooks) -> bool:
    """Whether hooks hand on what they are given, and only count it."""
    return getattr(getattr(hooks[0], "__self__", None), "only_counts", False)


def _runs_in_checkpoint() -> bool:
    """Whether this runs in the backward of a checkpoint's own node: torch's, DeepSpeed's, ..."""
    node = None if _current_node is None else _current_node()
    return node is not None and "CheckpointFunction" in node.name()


def fitting(extras: Tensors, likes: Likes) -> list[Tensor | None]:
    """Return the extras, None for what is none.

    Selective checkpointing may return a forward's result, without extras, in the recompute.
    """
    return [
        None if like is None or extra is None or extra.shape != torch.Size(like[0]) else extra
        for extra, like in zip(extras, likes, strict=True)
    ]


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a tensor of this shape and dtype that owns no memory."""
    # unseen by dispatch modes: selective checkpointing counts the ops of both phases
    with _disable_current_modes():
        tensor = torch.empty(1, dtype=dtype, device=device).expand(*shape)
        tensor.untyped_storage().resize_(0)
    return tensor


def _without_placeholders(extras: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if t is None or t.untyped_storage().nbytes() < t.numel() * t.element_size() else t
        for t in extras
    ]
