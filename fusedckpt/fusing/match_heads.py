"""Find the causal language models of transformers that can compute their loss without logits."""

from __future__ import annotations

from torch import nn

from fusedckpt.autograd import dispatch
from fusedckpt.fusing.code_names import names_in_forward
from fusedckpt.fusing.fused_heads import (
    ALWAYS,
    MAPPING,
    FusedCausalModel,
    FusedHead,
    is_causal_loss,
)
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.swap import MARK, Part, Swap
from fusedckpt.layers.fallbacks import NotFused


def find_heads(model: nn.Module, search: Search, always: bool) -> None:
    """Find the causal models of transformers in a model, and their output embeddings."""
    pairs = [(module, _head_of(module)) for module in model.modules()]
    pairs = [(module, head) for module, head in pairs if head is not None]
    if not pairs:
        raise ValueError(
            "fuse: head=True needs a model of transformers with an output embedding, and "
            f"{type(model).__name__} has none: compute its loss with fusedckpt.LinearCrossEntropy"
        )
    names = {module: name for name, module in search.modules.items()}
    for module, head in pairs:
        name = names.get(head)
        if name is None or not search.has(name, "head"):
            continue
        if (original := vars(head).get(MARK)) is not None:
            if issubclass(type(head), FusedHead):
                search.report.keep(name, original.parts[""])
            continue
        if (reason := _obstacle(module, head)) is not None:
            search.report.leave(name, "head", reason, type(head).__name__)
            continue
        part = Part("head", f"{type(head).__name__} -> loss without logits", None)
        search.report.swap(name, part)
        head_swap = Swap("head", part.change, subclass(FusedHead, type(head)), {}, parts={"": part})
        model_class = subclass(FusedCausalModel, type(module))
        model_swap = Swap("head", part.change, model_class, {MAPPING: None, ALWAYS: always})
        search.swaps += [(head, head_swap), (module, model_swap)]


def _head_of(module: nn.Module) -> nn.Module | None:
    """Return the output embedding that a model of transformers names itself, None for others."""
    find = getattr(type(module), "get_output_embeddings", None)
    if find is None or not hasattr(type(module), "loss_function"):
        return None
    head = module.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Module) else None


def _obstacle(module: nn.Module, head: nn.Module) -> NotFused | None:
    """Return why a model cannot compute its loss without logits, None if it may."""
    if type(head).forward is not dispatch.own_forward(nn.Linear) or "forward" in vars(head):
        return NotFused("head class")
    if not dispatch.are_plain(*head._parameters.values()):
        return NotFused("head weight")
    calls_loss = "loss_function" in names_in_forward(type(module))
    if not is_causal_loss(module.loss_function) or not calls_loss:
        return NotFused("head loss", type(module).__name__)
    return None
