"""Which fused modules run fused, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fusedckpt.autograd import dispatch, fallbacks
from fusedckpt.fusing import left, reasons
from fusedckpt.fusing.held import MARK, Original, Part
from fusedckpt.fusing.match_sequentials import blocks_of
from fusedckpt.layers.sequential import Sequential

__all__ = ["forget", "found", "join", "parts", "reason_now"]

_DISABLED = "FUSEDCKPT_DISABLE is set"


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Part]]:
    """Yield a name, the swapped module, the name below it, and what is known of every part."""
    for name, module in model.named_modules():
        original: Original | None = module.__dict__.get(MARK)
        for inner, part in original.parts.items() if original is not None else ():
            yield join(name, inner), module, inner, part


def reason_now(module: nn.Module, inner: str) -> str | None:
    """Return why a part of a swapped module ran last as its class would, None if it ran fused."""
    note = module.__dict__.get(fallbacks.NOTE)
    if dispatch.DISABLED:
        return _DISABLED
    if note is not None:
        return reasons.of_call(module, note)
    if not isinstance(module, Sequential):
        return None
    # which blocks there are it finds anew in every call
    if any(block.name == inner for block in blocks_of(module, module.save)):
        return None
    return dict(left.apart(module)).get(inner, f"{inner} forms no block with what follows it now")


def found(model: nn.Module) -> dict[str, str]:
    """Return the names of parts that did not run fused, and why."""
    now = ((name, reason_now(module, inner)) for name, module, inner, _ in parts(model))
    return {name: reason for name, reason in now if reason is not None}


def forget(model: nn.Module) -> None:
    """Begin anew."""
    for module in model.modules():
        fallbacks.taken(module)


def join(prefix: str, name: str) -> str:
    """Return the name of what is called `name` inside `prefix`; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
