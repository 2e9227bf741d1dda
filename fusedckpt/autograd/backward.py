"""A Function's backward and its op: wanted gradients, donated outputs, second derivatives.

Ops exist for code that watches ops, such as selective checkpoints and FLOP counters. Where nothing
does, the Function calls the implementation itself, which is quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from fusedckpt.autograd import private, tracker
from fusedckpt.autograd.index import versions_of
from fusedckpt.autograd.private import pytree

# classes of tensors without ops of their own; None is absent
DENSE = frozenset((Tensor, nn.Parameter, type(None)))
_library = torch.library.Library("fusedckpt", "DEF")


def begin(ctx: Any, *dys: Tensor | None) -> tuple[list[bool], list[Any], bool] | None:
    """Return which gradients a Function's backward computes, and the saved tensors; None for none.

    The last result is whether nothing traces or watches ops, so that they need not be seen.
    """
    needs = wanted_gradients(ctx)
    present = [dy for dy in dys if dy is not None]
    if not present or not any(needs):
        return None
    saved = list(ctx.saved_tensors)
    if ctx.recall is not None:
        # GEMM outputs come last
        saved[ctx.first_product :] = ctx.recall(saved[ctx.first_product :])
    if torch.compiler.is_compiling() or is_batch(dys) or present[0].device.type == "meta":
        return needs, saved, False
    # hooks may have handed out tensors of any class
    return needs, saved, is_unwatched() and DENSE.issuperset(map(type, (*dys, *saved)))


def wanted_gradients(ctx: Any) -> list[bool]:
    """Return for each argument of a Function whether the backward that runs it wants its gradient.

    Fewer than `ctx.needs_input_grad` where `torch.autograd.grad` asks for some; all of these where
    the engine cannot be asked, or its answer makes no sense.
    """
    needed = list(ctx.needs_input_grad)
    # a compiled backward, and one called by hand inside of another, is not the engine's
    if torch.compiler.is_compiling() or private.current_node() is not ctx:
        return needed
    executed = []
    for node, _ in ctx.next_functions:
        # as `nodes_of_inputs`, without a call
        if node is not None:
            try:
                executed.append(private.will_execute(node))
            except RuntimeError:
                # a leaf that torch.autograd.grad is asked for, or no node that the engine tells of
                executed.append(True)
    if all(executed) or len(executed) != sum(needed):
        return needed
    # the engine runs a Function for nothing only if it is named itself, in backward(inputs=...);
    # the one of torch.distributed.autograd keeps no record, and says no to all
    if not any(executed) and not private.will_execute(ctx):
        return needed
    remaining = iter(executed)
    return [need and next(remaining) for need in needed]


def nodes_of_inputs(ctx: Any) -> list[Any]:
    """Return the node of every argument of a Function that requires grad, in their order."""
    return [node for node, _ in ctx.next_functions if node is not None]


def is_unwatched() -> bool:
    """Whether nothing traces or watches ops here, so that they need not be seen."""
    return not (
        torch.compiler.is_compiling()
        or private.num_dispatch_modes()
        or (private.num_function_modes() and tracker.num_other_modes())
        or private.are_transforms_active()
        or private.is_profiled()
    )


def is_batch(dys: Sequence[Tensor | None]) -> bool:
    """Whether any of a function's gradients is a batch: one that depends on none is not."""
    for dy in dys:  # a generator costs more
        if dy is not None and (private.is_legacy_batch(dy) or private.is_vmap_batch(dy)):
            return True
    return False


def one_by_one(run: Callable[..., Sequence[Any]], dys: Sequence[Tensor | None]) -> list[Any]:
    """Return the gradients that `run(dys)` returns, for a batch of dys: run once for each of it."""
    batch = next(dy for dy in dys if is_batch((dy,)))
    remove, add, size = private.batch_of(batch)  # type: ignore[arg-type]  # a tensor
    # a tensor that is no batch is repeated
    each = [None if dy is None else remove(dy) for dy in dys]
    results = []
    for i in range(size):
        element = [None if dy is None else dy[i] for dy in each]
        # of several vmaps
        results.append(one_by_one(run, element) if is_batch(element) else run(element))
    return [
        None if grads[0] is None else add(torch.stack(grads))
        for grads in zip(*results, strict=True)
    ]


def donating(
    ctx: Any, products: Sequence[Tensor | None], dy: Tensor, compute: Callable[[bool], Any]
) -> Any:
    """Return compute(donates); where `donates`, it may write over the products.

    Not if the graph is retained, hooks may have returned shared tensors, or gradients are batched.
    A later reader, such as a backward repeated after a failure, raises by their version.
    """
    is_ours = ctx.owns_products and not torch.compiler.is_compiling()
    owned = [t for t in products if t is not None] if is_ours else []
    donates = len(owned) > 0 and not (
        private.keeps_graph() or private.are_transforms_active() or is_batch((dy,))
    )
    if donates:
        # before a byte is written: autograd then refuses to hand them out again
        torch.autograd.graph.increment_version(owned)
    result = compute(donates)
    for product in owned:
        # after the last read, and for readers through hooks, where autograd does not look
        if product._version != donates:
            raise RuntimeError(
                "fusedckpt: an earlier backward overwrote tensors that this layer saved: to run "
                "backward more than once, pass retain_graph=True to each call but the last"
            )
    return result


def reference_gradients(
    reference: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of `reference(*inputs)`, which can be differentiated again in grad mode.

    inputs: as backward got them; a view of each keeps one tensor given twice apart.
    """
    is_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [
            None
            if tensor is None
            else tensor.view_as(tensor)
            if tensor.requires_grad
            else tensor.detach().requires_grad_(need)
            for tensor, need in zip(inputs, needs, strict=True)
        ]
        pairs = zip(reference(*views), grads, strict=True)
        pairs = [(y, dy) for y, dy in pairs if dy is not None and y.requires_grad]
        computed = torch.autograd.grad(
            [y for y, _ in pairs],
            [view for view, need in zip(views, needs, strict=True) if need and view is not None],
            [dy for _, dy in pairs],
            create_graph=is_graph,
            allow_unused=True,
        )
    remaining = iter(computed)
    return [next(remaining) if need else None for need in needs]


class Versioned:
    """Tensors and their versions; to read one that was written since raises, as in autograd."""

    def __init__(self, *tensors: Tensor | None):
        self._tensors = tensors
        self._versions = versions_of(*tensors)

    def read(self) -> tuple[Tensor | None, ...]:
        """Return the tensors."""
        versions = zip(self._tensors, self._versions, versions_of(*self._tensors), strict=True)
        for tensor, old, new in versions:
            if tensor is not None and old != new:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tensor.dtype} {list(tensor.shape)} is at version {new}; "
                    f"expected version {old} instead"
                )
        return self._tensors


# the implementations of ops, for code that watches their memory from inside
implementations: dict[Any, Callable[..., list[Tensor]]] = {}


def define(
    schema: str,
    implementation: Callable[..., list[Tensor]],
    fake: Callable[..., list[Tensor]],
    flops: Callable[..., int],
) -> Callable[..., list[Tensor]]:
    """Define `fusedckpt::<schema>` for every backend, and return its overload.

    fake: takes the same arguments and returns empty tensors of the results' shapes and dtypes;
    flops: takes them with shapes in place of tensors and returns the GEMM FLOPs.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fusedckpt, name).default

    implementations[overload] = implementation

    def refuse(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in pytree.tree_leaves(args)
        ):
            raise RuntimeError(
                f"fusedckpt::{name} has no autograd formula: call fusedckpt.functional instead"
            )
        with private.below_autograd():
            return overload(*args)

    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if private.below_autograd is not None:
        _library.impl(name, refuse, "Autograd")
    torch.library.register_fake(f"fusedckpt::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.fusedckpt, name))(flops)
    return overload
