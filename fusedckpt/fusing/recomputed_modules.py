"""A module that runs its own forward again in backward, but for calls of attention and of scans.

It saves its input, and the results of these calls: `F.scaled_dot_product_attention`, transformers'
attention interface, the functions of `scans`. Where a fused norm made its input, the norm's input
is saved in its place. Attention that is no such call, and a scan in torch's ops, runs again, too,
where it would save more than four times its result. An MLP that no program computes calls none.

At the levels "gate" and "preact" an attention module runs as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels, origins, phases
from fusedckpt.autograd.private import pytree
from fusedckpt.autograd.recipes import Leaf, Made
from fusedckpt.checkpointing.attention import NAME
from fusedckpt.checkpointing.calls import ATOMS, Packed, objects_in
from fusedckpt.checkpointing.regions import MOST
from fusedckpt.checkpointing.scans import SCAN
from fusedckpt.checkpointing.segment import Segment
from fusedckpt.fusing.call_state import is_noted
from fusedckpt.fusing.guards import first_change
from fusedckpt.fusing.mlp_match import MatchedBlock, MLPMatch
from fusedckpt.fusing.recomputed_call import needs_gradient, recomputed_call
from fusedckpt.fusing.swapped import Swapped
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused

# of an MLP that no program computes
RERUN = MatchedBlock("recomputed", (), "")

# objects of these classes do not change in a forward
_CONSTANT = ("BlockMask", "device", "dtype", "Size")
# the attributes of a module: its options whose calls run as ever, and why; its level
SEEN, SAVE = "_fusedckpt_unseen", "_fusedckpt_save"
# kinds of the functions by which it mixes tokens
MIXES = "_fusedckpt_mixes"


class Recomputed(Swapped):
    """The forward of a module's own class, recomputed in backward but for attention and scans.

    At the levels "gate" and "preact" the forward of an attention module runs as ever.
    """

    # of an MLP that no program computes: the state that was recorded
    _fusedckpt_match: MLPMatch | None = None
    # pickles of earlier releases have none
    _fusedckpt_save = "inputs"
    _fusedckpt_mixes = frozenset((NAME,))

    @property
    def save_levels(self) -> tuple[str, ...] | None:
        """Return the levels that it offers to a plan; None of an MLP, which has one."""
        return ("inputs", "preact") if self._fusedckpt_match is None else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, in a checkpoint where that saves less."""
        forward = super(Swapped, self).forward
        x: Any = args[0] if args else kwargs.get(next(iter(self._fusedckpt_names), ""))
        if self._runs_as_ever(x):
            return forward(*args, **kwargs)
        values = *args, *kwargs.values()
        tensors = [one for one in objects_in([*values]) if isinstance(one, Tensor)]
        if not needs_gradient(self, tensors):
            return forward(*args, **kwargs)
        obstacle = self._obstacle(values)
        way = _way(self, kwargs)
        seen = self.__dict__.get(SEEN)
        if obstacle is None and seen is not None and seen[0] == (way, x.shape):
            obstacle = NotFused(seen[1])
        if obstacle is not None:
            fallbacks.note_fallback(self, obstacle)
            return forward(*args, **kwargs)
        is_mlp = self._fusedckpt_match is not None
        regions = () if is_mlp else (NAME, SCAN)
        draws = self.training, not is_mlp
        y = recomputed_call(self, forward, x, values, tuple(kwargs), regions=regions, draws=draws)
        if not is_mlp:
            self._look_at(x, y, way)
        return y

    def _runs_as_ever(self, x: Any) -> bool:
        """Whether a call saves nothing for backward, or a level, compiler or checkpoint decides."""
        if self._fusedckpt_match is not None:
            return not torch.is_grad_enabled() or dispatch.is_recorded(x)
        level = levels.override.level or self._fusedckpt_save
        return not self.training or level != "inputs" or _is_plain(x)

    def _obstacle(self, given: tuple[Any, ...]) -> NotFused | None:
        """Return why this call cannot be made twice."""
        if self._fusedckpt_match is not None:
            return self._of_mlp(self._fusedckpt_match, given)
        for value in given:
            for part in objects_in(value) if type(value) not in ATOMS else ():
                is_known = isinstance(part, Tensor) or is_noted(part)
                if not is_known and type(part).__name__ not in _CONSTANT:
                    return NotFused("cache", type(part).__name__)
        hooked = (
            name for name, layer in self.named_modules() if name and dispatch.has_hooks(layer)
        )
        name = next(hooked, None)
        return None if name is None else NotFused("hooked", name)

    def _of_mlp(self, match: MLPMatch, given: tuple[Any, ...]) -> NotFused | None:
        if len(given) != 1 or not isinstance(given[0], Tensor):
            return NotFused("arguments")
        change = first_change(self, match.guards)
        if change is not None or dispatch.are_plain(*given, *self.parameters()):
            return change
        return fallbacks.unplain(given[0], **dict(self.named_parameters(recurse=False)))

    def _look_at(self, x: Tensor, y: Any, way: tuple[Any, ...]) -> None:
        """Note that attention or a scan runs again; where it gains little, later calls are as ever.

        That is where attention is no region, and saves little itself.
        """
        results = [one for one in pytree.tree_leaves(y) if isinstance(one, Tensor)]
        for place, one in enumerate(results):
            node: Any = one.grad_fn
            segment = node and origins.segment_of(node)
            if not segment:
                continue
            again = [record.name for record in segment.records if record.outputs is None]
            is_unseen = self._fusedckpt_mixes == {NAME} and NAME not in {
                record.name for record in segment.records
            }
            reason = None
            if again:
                reason = NotFused("again", again[0])
            elif is_unseen:
                samples = segment.samples
                is_large = samples is None or samples.nbytes > MOST * results[0].nbytes
                reason = NotFused("again", NAME) if is_large else NotFused("unseen")
            if reason is not None and reason[0] != "again":
                self.__dict__[SEEN] = (way, x.shape), reason[0]
            if reason is not None:
                fallbacks.note_fallback(self, reason)
            elif not dispatch.has_hooks(self):
                # a norm of it saves nothing; hooks may gather weights for the call alone
                source = partial(_made_again, weakref.ref(segment), place)
                origins.note(one, origins.MODULE, source, *self.parameters())
            return


def _made_again(
    reference: weakref.ref[Segment], place: int, y: Tensor, parameters: Sequence[Any]
) -> Made | None:
    """Return the recipe of an output: the run of its module in backward, which makes it, too."""
    segment = reference()
    if segment is None:
        return None
    output = partial(_output, segment, segment.pack_output(place, y))
    # the module's own backward, which checks parameters, may be over
    return Made("module", output, [Leaf(p) for p in parameters], [y])


def _output(segment: Segment, packed: Packed, *_: Tensor) -> Tensor:
    return segment.unpack(packed)


def _is_plain(x: Any) -> bool:
    """Whether a call saves nothing for backward, or a checkpoint or compiler around decides."""
    return (
        not isinstance(x, Tensor)
        or torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or dispatch.is_recorded(x)
        or phases.current() is not None
    )


def _way(module: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the options by which a module computes attention itself, or calls a function."""
    named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return named, kwargs.get("need_weights"), kwargs.get("output_attentions")
