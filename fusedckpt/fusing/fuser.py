"""Replace layers of a model in place by those that save only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks,
children and state_dict are unchanged.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from fusedckpt.autograd import arguments, levels
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.blocks import validate
from fusedckpt.fusing import adapters, reasons
from fusedckpt.fusing.fuse_report import FuseReport, join
from fusedckpt.fusing.fused_experts import holds as holds_experts
from fusedckpt.fusing.fused_heads import find_head
from fusedckpt.fusing.fused_mlps import FusedFeedForward, Swap, within
from fusedckpt.fusing.held import MARK, Original, Part, child_at
from fusedckpt.fusing.match_mixers import find_mixers
from fusedckpt.fusing.match_mlps import blocks_of, feed_forward_of
from fusedckpt.fusing.match_shared import find_shared, may_share
from fusedckpt.fusing.matcher import Matcher, unfit
from fusedckpt.fusing.recipe_models import find_root
from fusedckpt.fusing.search import Names, Search, patterns
from fusedckpt.fusing.subclass import made_of, subclass
from fusedckpt.fusing.tail import tail_of, tail_swap
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.sequential import Sequential


def fuse(
    model: nn.Module,
    *,
    save: str = "inputs",
    chunks: int | None = None,
    only: Names = None,
    skip: Names = None,
    norm: bool = True,
    mlp: bool = True,
    linear: bool = True,
    attention: bool = True,
    experts: bool = True,
    head: bool | str = False,
    verify: bool = True,
    batch: Any = None,
    recipes: bool = False,
) -> FuseReport:
    """Replace layers of `model` in place by fused ones, which save less for the backward pass.

    They are found by their computation, not by their classes:

    - norms: RMSNorms that round as torch, Llama or Gemma do, LayerNorms that round as torch does,
      over one dimension, with their epsilon, if any, in an attribute; nn.RMSNorm and nn.LayerNorm;
    - MLPs and gated MLPs: two or three linears (gate and up may be packed, weights may lie as
      [in, out]), an activation of `functional.linear_act`, dropouts; a linear with its activation;
    - an nn.Sequential with [norm,] linear, activation, linear, or part of that;
    - experts with transformers' parameters, `gate_up_proj` and `down_proj` of three dimensions;
    - modules that call F.scaled_dot_product_attention, flash_attn or transformers' attention
      functions: while training they save their input, and attention's output and log-sum-exp; at
      other levels those with norms of queries and keys also save their linears' outputs;
    - mixers: modules that call a scan (transformers' kernels, fla, mamba_ssm, a function that
      `region(fn, "scan")` returned) or causal_conv1d. At level "inputs" they save their input, and
      the scan's result.

    A module gets a subclass of its class, or fusedckpt's class for one of torch's. A call that was
    not proven equal (another dtype, a child replaced or hooked since) runs the original forward.
    Parameter objects, hooks, module names and the state_dict are unchanged; `unfuse` restores the
    classes. A module that is fused already is unchanged.

    Args:
        model: any module, which may itself be a norm, an MLP or a Sequential.
        save: the level of blocks with an activation: "inputs", "gate", "preact", see `functional`.
            In blocks without a gate "gate" means "inputs".
        chunks: into how many chunks MLPs cut their tokens, see `functional.mlp`. With None every
            call chooses by its shapes.
        only, skip: one name of a module or pattern of fnmatch, or a list of them.
        norm, mlp, linear, attention, experts: whether norms, MLPs, linears with a norm or
            activation, attention modules and mixers, and experts are swapped.
        head: whether causal language models of transformers compute their loss in training without
            logits, as `functional.linear_cross_entropy` does: then `logits` of their output is
            None. A scale and a softcap of logits are read in the first step; a model that does
            anything else to them is named there, and computes them as before. "always": in
            evaluation with labels, too.
        batch: arguments of the model, as a dict, a tuple, or one tensor. With these a copy of the
            model runs once, without gradients, and modules that call attention or a scan are found
            whatever helper calls it. Without, they are found by their code.
        verify: before a swap, compare outputs and gradients of the fused module with the
            original's, on random inputs and weights: the error against float64 may be twice the
            original's plus 8 epsilons. A module that differs is left and named. Forwards of unknown
            classes are recorded on meta tensors in any case. The model itself is not run;
            gradients, buffers and RNG state do not change.
        recipes: whether results of cheap functions anywhere in the model, norms, activations,
            dropouts, gates and sums, are made again in backward where their inputs are saved
            anyway, instead of saved. That costs some time on the CPU for each function, so tensors
            below 1 MiB are left; it applies to eager training without saved-tensor hooks of others.

    Returns:
        The modules swapped, fused before, and left with the reason, and the bytes saved per token.
        Printed after a step the report also names modules that did not run fused, and why.

    Raises:
        TypeError: `model` is not an nn.Module, names or `save` are not strings, or `chunks` not an
            int.
        ValueError: `save` is not a level, `chunks` is below 1, a pattern of `only` matches nothing,
            or head=True for a model without an output embedding of transformers.
        After an error the model is unchanged.
    """
    _check_module("fuse", model)
    levels.check("fuse", save, LEVELS)
    validate.block("fuse", False, chunks)
    if head not in (False, True, "always"):
        raise ValueError(f'fuse: head must be True, False or "always", got {head!r}')
    flags = {"norm": norm, "mlp": mlp, "linear": linear, "attention": attention}
    flags["experts"] = experts
    search = Search(
        *(dict(model.named_modules()), save, patterns("only", only), patterns("skip", skip)),
        kinds={**flags, "head": bool(head)},
    )
    # all are found before anything is touched
    matcher = Matcher(save, chunks, verify)
    _Blocks(search, matcher).find()
    find_mixers(model, search, batch)
    if head:
        find_head(model, search, always=head == "always")
    search.check()
    search.report.watch(model)
    if linear:
        find_shared(search)
    if arguments.flag("fuse", "recipes", recipes):
        find_root(model, search)
    for module, swap in search.swaps:
        swap.apply(module)
    return search.report


class _Blocks:
    """Finds modules that are one block, and the modules that these compute."""

    def __init__(self, search: Search, matcher: Matcher):
        self.search, self.report, self.matcher = search, search.report, matcher

    def find(self) -> None:
        """Look at every module, those inside a block excepted."""
        inside = self.search.inside
        for name, module in self.search.modules.items():
            if module in inside:
                continue
            swap = self._swap_of(name, module)
            attributes = vars(module) if swap is None else swap.attributes
            if swap is None and (swap := self._feed_forward(name, module)) is not None:
                inside.update(swap.own.children())
            if swap is not None:
                self.search.swaps.append((module, swap))
            inside.update(_computed_in(module, attributes))

    def _swap_of(self, name: str, module: nn.Module) -> Swap | None:
        """Return a module's swap, if any; report it, or why a module that looks like one is not."""
        wanted = self.search
        report = self.report
        if (original := module.__dict__.get(MARK)) is not None:
            for inner, part in original.parts.items():
                if wanted.has(join(name, inner), part.kind):
                    report.keep(join(name, inner), part)
        if MARK in vars(module) or type(module).__module__.startswith("fusedckpt."):
            return None
        if isinstance(module, ScriptModule):
            if wanted.has(name, "mlp") and any(True for _ in module.parameters()):
                report.leave(name, "mlp", NotFused("scripted"), module.original_name)
            return None
        if isinstance(module, nn.Sequential) and not self._is_one(module):
            return self._sequential(name, module)
        obstacles: dict[str, NotFused] = {}
        for kind in self._kinds(module):
            if not wanted.has(name, kind) and not (kind == "mlp" and wanted.has(name, "linear")):
                continue
            swap = self.matcher.of(module, kind)
            if isinstance(swap, NotFused):
                obstacles[kind] = swap
            elif swap is not None and wanted.has(name, swap.kind):
                report.swap(name, swap.parts[""])
                return swap
        # name it, if it is one that could have been
        is_experts = holds_experts(module)
        kind = (
            "experts" if is_experts else reasons.looks_like(module) or next(iter(obstacles), None)
        )
        if kind is not None and wanted.has(name, kind):
            reason = obstacles.get(kind) or (obstacles.get("mlp") if kind == "linear" else None)
            reason = reasons.of_module(module, kind, reason)
            report.leave(name, kind, reason, type(module).__name__)
        return None

    def _kinds(self, module: nn.Module) -> tuple[str, ...]:
        if adapters.is_lora(module):
            return ("linear",)
        if holds_experts(module):
            return ("experts",)
        return ("mlp",) if isinstance(module, nn.Sequential) else ("norm", "mlp")

    def _is_one(self, module: nn.Sequential) -> bool:
        kinds = self.search.kinds
        return (kinds["mlp"] or kinds["linear"]) and self.matcher.is_one_block(module)

    def _feed_forward(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a layer's method that is an MLP."""
        mlp = None if MARK in vars(module) else feed_forward_of(module)
        if mlp is None or not self.search.has(name, "mlp"):
            return None
        swap = self.matcher.of(mlp, "mlp")
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        if unfit(module, swap.attributes, [module]) is not None:
            return None
        self.report.swap(name, swap.parts[""])
        match = swap.attributes["_fusedckpt_match"]
        match = match._replace(held=tuple(state for state in match.held if state.path))
        to = subclass(FusedFeedForward, type(module))
        return replace(
            swap, to=to, attributes={**swap.attributes, "_fusedckpt_match": match}, own=mlp
        )

    def _tail(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with an MLP of another kind behind its first layers."""
        tail_and_mlp, kind = tail_of(parent), type(parent)
        is_plain = (kind.forward, kind.__iter__) == (nn.Sequential.forward, nn.Sequential.__iter__)
        if tail_and_mlp is None or not is_plain or reasons.of_storage(parent) is not None:
            return None
        tail, mlp = tail_and_mlp
        name = join(prefix, tail.mlp[0])
        swap = self.matcher.of(mlp, "mlp") if self.search.has(name, "mlp") else None
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        swap = tail_swap(parent, tail, swap)
        if unfit(parent, swap.attributes, [parent, *mlp.modules()]) is not None:
            return None
        self.report.swap(name, swap.parts[tail.mlp[0]])
        return swap

    def _sequential(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with blocks in it."""
        matcher = self.matcher
        report = self.report
        kind = type(parent)
        save = within(matcher.save, ("inputs", "preact"))
        attributes = {"save": save, "chunks": matcher.chunks}
        blocks = blocks_of(parent, save, matcher.chunks)
        fused = [layer for layers, _ in blocks.values() for layer in layers.values()]
        if not any(block.kind == "mlp" for _, block in blocks.values()):
            swap = self._tail(prefix, parent)
            if swap is not None:
                return swap
        for name, reason in reasons.apart(parent):
            is_meant = self.search.has(join(prefix, name), "linear")
            if is_meant and parent.get_submodule(name) not in fused:
                reason = reasons.of_storage(parent) or reason
                report.leave(join(prefix, name), "linear", reason, kind.__name__)
        meant = {
            n: pair for n, pair in blocks.items() if self.search.has(join(prefix, n), pair[1].kind)
        }
        # one layer that no kernel takes, or a block that is not meant, keeps it as it is
        obstacle = reasons.of_storage(parent) or unfit(parent, attributes, fused)
        if (kind.forward, kind.__iter__) != (nn.Sequential.forward, nn.Sequential.__iter__):
            obstacle = obstacle or NotFused("sequential")
        if len(meant) < len(blocks):
            obstacle = obstacle or NotFused("neighbour")
        parts: dict[str, Part] = {}
        for name, (layers, block) in meant.items():
            swap = obstacle or matcher.checked(nn.Sequential(*layers.values()), block)
            if isinstance(swap, NotFused):
                obstacle = swap
            else:
                parts[name] = swap.parts[""]
        for name, (_, block) in meant.items():
            if obstacle is not None:
                report.leave(join(prefix, name), block.kind, obstacle, kind.__name__)
            else:
                report.swap(join(prefix, name), parts[name])
        if obstacle is not None or not meant:
            return None
        # Sequentials inside that a block begins or ends in are not called
        inner = [name for layers, _ in meant.values() for name in layers if "." in name]
        opened = {name[:place] for name in inner for place, c in enumerate(name) if c == "."}
        self.search.inside.update(map(parent.get_submodule, opened))
        to = Sequential if kind is nn.Sequential else subclass(Sequential, kind)
        return Swap("mlp", "", to, attributes, parts=parts)


def _computed_in(module: nn.Module, attributes: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that a module computes itself, which are then skipped.

    None where it may run its children.
    """
    match = attributes.get("_fusedckpt_match")
    rates = getattr(match, "rates", ())
    dropping = any(getattr(child_at(module, path), name, 0) > 0 for path, name in rates)
    # a linear and its activation may read a recipe, and be read by one
    shares = may_share(module, getattr(match, "block", None))
    if isinstance(module, ScriptModule):
        return [*module.modules()]
    if match is None or dropping or shares:
        return []
    tail = attributes.get("_fusedckpt_tail")
    layers = [module] if tail is None else [module._modules[name] for name in tail.mlp]
    return [inner for layer in layers if layer is not None for inner in layer.modules()]


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class, and return the model.

    Works after training, deepcopy, pickling and loading. Layers that were constructed as
    fusedckpt's stay.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: a fused module has changed its class since, by parametrization or sharding.
            Nothing is changed then.
    """
    _check_module("unfuse", model)
    swapped = [(name, m) for name, m in model.named_modules() if MARK in m.__dict__]
    if not swapped:
        warnings.warn("unfuse: no module of the model is fused", stacklevel=2)
    for name, module in swapped:
        kind = type(module)
        was = kind
        original = module.__dict__[MARK].kind
        while was is not original and (made := made_of(was)) is not None:
            if getattr(made[0], "_fusedckpt_is_role", False):
                # a plan is applied
                break
            was = made[1]
        if was not in (original, LayerNorm, RMSNorm, Sequential):
            where = name or "the model"
            raise ValueError(f"unfuse: {where} became a {kind.__name__}: undo that first")
    for _, module in swapped:
        original: Original = module.__dict__.pop(MARK)
        fallbacks.taken(module)
        for attribute in original.attributes:
            del module.__dict__[attribute]
        module.__class__ = original.kind
    return model


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")
