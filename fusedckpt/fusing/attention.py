"""Attention modules and mixers whose forward runs again in backward, but for attention and scans.

Such a module saves its input, and the results of attention and of scans: calls of
`F.scaled_dot_product_attention`, of transformers' attention interface, of the functions of `scans`.
Its forward is the original one, in a checkpoint with these calls as regions. Where a fused norm
made its input, the norm's input is saved in its place. Attention that is no such call, and a scan
in torch's ops, runs again, too, where it would save more than four times its result.

At the levels "gate" and "preact" an attention module also saves the outputs of its linears, and
recomputes its norms and all between these and attention. A module without norms, which would save
no less, runs as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels, phases
from fusedckpt.autograd.backward import Versioned, versions_of
from fusedckpt.autograd.private import pytree
from fusedckpt.blocks.norm_sharing import OUTPUT, Output
from fusedckpt.checkpointing.attention import LINEAR, NAME
from fusedckpt.checkpointing.calls import ATOMS, objects_in
from fusedckpt.checkpointing.regions import MOST
from fusedckpt.checkpointing.scans import SCAN
from fusedckpt.checkpointing.segment import NODE_KEY, checkpoint
from fusedckpt.fusing import adapters, reasons, sharing
from fusedckpt.fusing.again import Again, needs_gradient
from fusedckpt.fusing.forwards import Swap, Swapped
from fusedckpt.fusing.held import MARK, Part
from fusedckpt.fusing.matcher import unfit
from fusedckpt.fusing.mixing import mixers, united
from fusedckpt.fusing.running import mixers_of
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.sharing import recipe_of
from fusedckpt.fusing.state import is_noted
from fusedckpt.fusing.subclass import made_of, subclass
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import Fallback

# objects of these classes do not change in a forward
_CONSTANT = ("BlockMask", "device", "dtype", "Size")
# the attributes of a module: its options whose calls run as ever, and why; its level; see `_gains`
_SEEN, _SAVE, _GAINS = "_fusedckpt_unseen", "_fusedckpt_save", "_fusedckpt_gains"
# kinds of the functions by which it mixes tokens
_MIXES = "_fusedckpt_mixes"


class FusedAttention(Swapped):
    """Forward of an attention module, recomputed in backward but for attention itself.

    At the levels "gate" and "preact", but for its linears, too.
    """

    # offered to a plan
    save_levels = "inputs", "preact"
    # of those that were pickled without
    _fusedckpt_save = "inputs"
    _fusedckpt_gains = False
    _fusedckpt_mixes = frozenset((NAME,))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, in a checkpoint while training."""
        forward = super(Swapped, self).forward
        x: Any = args[0] if args else kwargs.get(next(iter(self._fusedckpt_names), ""))
        keeps_linears = (levels.override.level or self._fusedckpt_save) != "inputs"
        if not self.training or (keeps_linears and not self._fusedckpt_gains) or _is_plain(x):
            return forward(*args, **kwargs)
        given = *args, *kwargs.values()
        tensors = [one for one in objects_in([*given]) if isinstance(one, Tensor)]
        if not needs_gradient(self, tensors):
            return forward(*args, **kwargs)
        found = self._obstacle(given)
        way = keeps_linears, *_way(self, kwargs)
        seen = self.__dict__.get(_SEEN)
        if found is None and seen is not None and seen[0] == (way, x.shape):
            found = seen[1], ""
        if found is not None:
            fallbacks.note(self, found)
            return forward(*args, **kwargs)
        again = Again(self, forward, given, tuple(kwargs))
        run = partial(
            checkpoint,
            *(again, *given),
            preserve_python_rng=True,
            save_regions=(NAME, LINEAR) if keeps_linears else (NAME, SCAN),
            debug="samples",
        )
        recipe = recipe_of(x)
        y = run() if recipe is None else sharing.read(recipe, x, lambda _: run())
        self._look_at(x, y, way)
        return y

    def _obstacle(self, given: tuple[Any, ...]) -> Fallback | None:
        """Return why this call cannot be made twice."""
        for value in given:
            for one in objects_in(value) if type(value) not in ATOMS else ():
                is_known = isinstance(one, Tensor) or is_noted(one)
                if not is_known and type(one).__name__ not in _CONSTANT:
                    return "cache", type(one).__name__
        hooked = (
            name for name, layer in self.named_modules() if name and dispatch.has_hooks(layer)
        )
        name = next(hooked, None)
        return None if name is None else ("hooked", name)

    def _look_at(self, x: Tensor, y: Any, way: tuple[Any, ...]) -> None:
        """Note that attention or a scan runs again; where it gains little, later calls are as ever.

        That is at other levels, and where attention is no region, and saves little itself.
        """
        results = [one for one in pytree.tree_leaves(y) if isinstance(one, Tensor)]
        for place, one in enumerate(results):
            node: Any = one.grad_fn
            segment = node and node.metadata.get(NODE_KEY, lambda: None)()
            if not segment:
                continue
            again = [record.name for record in segment.records if record.outputs is None]
            is_unseen = self._fusedckpt_mixes == {NAME} and NAME not in {
                record.name for record in segment.records
            }
            found = None
            if again:
                found = ("large", "") if way[0] else ("again", again[0])
            elif is_unseen:
                is_large = segment.samples.nbytes > MOST * results[0].nbytes
                found = ("again", NAME) if is_large and not way[0] else ("unseen", "")
            if found is not None and found[0] != "again":
                self.__dict__[_SEEN] = (way, x.shape), found[0]
            if found is not None:
                fallbacks.note(self, found)
            elif not (way[0] or dispatch.has_hooks(self)):
                # a norm of it saves nothing; hooks may gather weights for the call alone
                given = Versioned(*self.parameters())
                node.metadata[OUTPUT] = Output(weakref.ref(segment), place, given, versions_of(one))
            return


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


def _gains(module: nn.Module) -> bool:
    """Whether it saves less with the outputs of its linears alone: norms work on these."""
    parts = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    linears = [m for m in parts if any(p.dim() > 1 for p in m.parameters(recurse=False))]
    is_plain = not any(map(adapters.is_lora, module.modules()))
    return is_plain and len(linears) < len(parts) and all(map(_is_linear, linears))


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (made_of(type(module)) or (None, None))[1] is nn.Linear


def find_mixers(model: nn.Module, search: Search, batch: Any) -> None:
    """Find attention and mixers that are not swapped otherwise, in a block, or around an MLP."""
    save, report = search.save, search.report
    found = mixers(search.modules)
    if batch is not None and search.kinds["attention"]:
        called = mixers_of(model, batch)
        if isinstance(called, str):
            report.notes.append(f"attention and mixers were found by their code, as {called}")
        else:
            found = united(called, found)
            report.notes.append("attention and mixers were found by running the batch")
    known = {*search.inside, *(module for module, _ in search.swaps)}
    mlps = {module for module, swap in search.swaps if swap.kind == "mlp"}
    for name, kinds in found.items():
        module = search.modules[name]
        if module in known or MARK in vars(module) or not mlps.isdisjoint(module.modules()):
            continue
        gains = kinds == {NAME} and _gains(module)
        attributes = {_SEEN: None, _SAVE: save, _GAINS: gains, _MIXES: kinds}
        if not search.has(name, "attention") or not (save == "inputs" or gains):
            continue
        kind = type(module)
        reason = reasons.of_storage(module) or unfit(module, attributes, [])
        if reason is not None:
            report.leave(name, "attention", reason, kind.__name__)
            continue
        change = f"{kind.__name__} -> recomputed{_kept(save, kinds)}"
        part, to = Part("attention", change, None), subclass(FusedAttention, kind)
        report.swap(name, part)
        search.swaps.append((module, Swap("attention", change, to, attributes, parts={"": part})))


def _kept(save: str, kinds: frozenset[str]) -> str:
    if save != "inputs":
        return " but for attention and linears"
    kept = ["attention itself"] * (NAME in kinds) + ["its scan"] * (SCAN in kinds)
    return f" but for {' and '.join(kept)}" if kept else ""
