"""Walk over a model's modules, and find the swaps of norms, MLPs, linears and experts.

A module that is none of these itself may hold one: a Sequential with runs that can be fused, or
a layer with a method that is an MLP. How a module is swapped is decided once for all equal modules:
it is matched, looked at for obstacles, and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.jit import ScriptModule

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing import adapters, reasons, verification
from fusedckpt.fusing.experts import experts_swap, has_experts_parameters, verified_experts
from fusedckpt.fusing.fuse_report import join_names
from fusedckpt.fusing.fused_mlps import (
    FusedFeedForward,
    FusedTail,
    Tail,
    chunk_words,
    level_or_inputs,
    rates_above_zero,
)
from fusedckpt.fusing.match_mlps import (
    feed_forward_of,
    lora_swap,
    mlp_swap,
    recomputed_swap,
)
from fusedckpt.fusing.match_shared import may_share
from fusedckpt.fusing.norms import norm_swap
from fusedckpt.fusing.reasons import looks_like
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Part, Swap, original_of, subclass
from fusedckpt.kernels.activations import activation_name_of
from fusedckpt.layers.children import letter_of
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import notes_of
from fusedckpt.layers.sequential import Sequential, fused_runs
from fusedckpt.outside.reads import is_simple


class Matcher:
    """The swaps of one call of `fuse`."""

    def __init__(self, save: str, chunks: int | None, verify: bool):
        self.save = save
        self.chunks = chunks
        self.verify = verify
        # by kind and state: equal modules have equal swaps
        self._known: dict[Hashable, Swap | NotFused | None] = {}

    def swap_of(self, module: nn.Module, kind: str) -> Swap | NotFused | None:
        """Return how a module is swapped, why it cannot be, or None for one of another kind."""
        # a linear, or a module that must not be run
        if adapters.is_dequantizing(module) or any(map(reasons.of_storage, module.modules())):
            return None
        key = kind, adapters.described_layers(module)
        bare = adapters.rebuilt(module, adapters.bare)
        return self._once(key, bare, lambda: self._decide(module, bare, kind))

    def _decide(self, module: nn.Module, bare: nn.Module, kind: str) -> Swap | NotFused | None:
        """Match and verify a module; bare: the same without adapters and quantization."""
        swap = self._match(module, bare, kind)
        if isinstance(swap, NotFused) and kind == "mlp":
            return self._recomputed(module, bare) or swap
        if not isinstance(swap, Swap):
            return swap
        obstacle = _adapter_obstacle(module)
        obstacle = obstacle or reasons.of_swap(module, swap.attributes, [*module.modules()])
        return obstacle or self._verify(adapters.rebuilt(module, adapters.dense), swap)

    def _match(self, module: nn.Module, bare: nn.Module, kind: str) -> Swap | NotFused | None:
        if kind == "norm":
            return norm_swap(bare)
        if kind == "experts":
            return experts_swap(module, self.save, self.chunks)
        if kind == "linear":
            return lora_swap(bare, self.save, self.chunks)
        return mlp_swap(bare, self.save, self.chunks)

    def _recomputed(self, module: nn.Module, bare: nn.Module) -> Swap | None:
        """Return the swap of an MLP that runs its own forward again, if it saves less than half."""
        if isinstance(module, nn.Sequential) or self.save != "inputs" or bare is not module:
            return None
        swap = recomputed_swap(module)
        if swap is None:
            return None
        if reasons.of_swap(module, swap.attributes, [*module.modules()]) is not None:
            return None
        verified = self._verify(module, swap)
        if not isinstance(verified, Swap):
            return None
        saved = verified.parts[""].saved
        return verified if saved is not None and saved[1] < saved[0] / 2 else None

    def verified(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        """Return a swap with the bytes saved per token, or how it would change results."""
        verified = self._once(repr(swap), module, lambda: self._verify(module, swap))
        assert verified is not None
        return verified

    def is_swapped_whole(self, parent: nn.Sequential) -> bool:
        """Whether a Sequential is swapped as a whole, and not by runs of its layers."""
        found_runs = swapped_runs(parent, self.save).values()
        kinds = [run.swap.kind for run in found_runs]
        inside = {layer for run in found_runs for layer in run.layers.values()}
        # a dropout before the first linear is recomputed with the whole
        drops = any(isinstance(m, nn.Dropout) and m not in inside for m in parent.modules())
        swap_of_all = self.swap_of(parent, "mlp") if drops or "mlp" not in kinds else None
        return isinstance(swap_of_all, Swap) and not (kinds and swap_of_all.kind == "linear")

    def _once(
        self, key: Hashable, module: nn.Module, decide: Callable[[], Swap | NotFused | None]
    ) -> Swap | NotFused | None:
        key = key, state_key(module)
        if key not in self._known:
            self._known[key] = decide()
        return self._known[key]

    def _verify(self, module: nn.Module, swap: Swap) -> Swap | NotFused:
        """Return a swap with the bytes saved per token, or how it would change results."""
        if swap.kind == "experts":
            return verified_experts(module, swap, self.verify)
        problem = verification.difference(module, swap) if self.verify else None
        if problem is not None:
            return problem
        part = Part(swap.kind, swap.change, verification.saved_per_token(module, swap))
        return replace(swap, parts={"": part})


def state_key(module: nn.Module) -> Hashable:
    """Return a module's state without tensor values; mutable objects by identity."""
    numbers: dict[int, int] = {}

    def described_tensor(tensor: Any) -> Hashable:
        if tensor is None:
            return None
        # the same number for tied ones
        number = numbers.setdefault(id(tensor), len(numbers))
        return number, type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout

    def described_value(value: Any) -> Hashable:
        # in writing, where 1 and True differ
        return repr(value) if is_simple(value) else id(value)

    def described_module(name: str, part: nn.Module) -> Hashable:
        tensors = (*part._parameters.items(), *part._buffers.items())
        attributes = ((n, v) for n, v in vars(part).items() if n not in private.MODULE_ATTRIBUTES)
        return (
            name,
            type(part),
            has_hooks(part),
            tuple((n, described_tensor(tensor)) for n, tensor in tensors),
            tuple((n, described_value(value)) for n, value in attributes),
        )

    named = module.named_modules(remove_duplicate=False)
    return tuple(described_module(name, part) for name, part in named)


def _adapter_obstacle(module: nn.Module) -> NotFused | None:
    """Return why adapters in a module cannot be fused now, None if they can or there are none."""
    wrappers = ((n, layer) for n, layer in module.named_modules() if adapters.is_lora(layer))
    return next(filter(None, (reasons.of_linear(n or "it", layer) for n, layer in wrappers)), None)


class SwapFinder:
    """The walk of one call of `fuse` over the modules of a model."""

    def __init__(self, search: Search, matcher: Matcher):
        self.search = search
        self.report = search.report
        self.matcher = matcher

    def find(self) -> None:
        """Add the swap of each module to the search, modules inside a swapped one excepted."""
        inside = self.search.inside
        for name, module in self.search.modules.items():
            if module in inside:
                continue
            swap = self._swap_of(name, module)
            notes = vars(notes_of(module)) if swap is None else swap.notes
            if swap is None and (swap := self._feed_forward_swap(name, module)) is not None:
                inside.update(swap.method_mlp.children())
            if swap is not None:
                self.search.swaps.append((module, swap))
            inside.update(_computed_in(module, notes))
            if swap is None and self._runs_norm_again(name, module):
                inside.update(module.children())

    def _runs_norm_again(self, name: str, module: nn.Module) -> bool:
        """Whether a module around a norm saves its own input, and runs the norm again."""
        is_asked = self.search.has(name, "norm") and self.search.may_share(name)
        return is_asked and self.search.save == "inputs" and reasons.wraps_norm(module)

    def _swap_of(self, name: str, module: nn.Module) -> Swap | None:
        """Return a module's swap, if any; report why a module that looks like an MLP has none."""
        if (original := original_of(module)) is not None:
            for inner, part in original.parts.items():
                if self.search.has(join_names(name, inner), part.kind):
                    self.report.keep(join_names(name, inner), part)
        if original is not None or type(module).__module__.startswith("fusedckpt."):
            return None
        if isinstance(module, ScriptModule):
            if self.search.has(name, "mlp") and any(True for _ in module.parameters()):
                self.report.leave(name, "mlp", NotFused("scripted"), module.original_name)
            return None
        if isinstance(module, nn.Sequential) and not self._is_swapped_whole(module):
            return self._sequential_swap(name, module)
        return self._whole_swap(name, module)

    def _whole_swap(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a module as a whole."""
        obstacles: dict[str, NotFused] = {}
        for kind in _kinds_to_try(module):
            is_asked = self.search.has(name, kind)
            # a module tried as an MLP may be one linear with its activation
            if not is_asked and not (kind == "mlp" and self.search.has(name, "linear")):
                continue
            swap = self.matcher.swap_of(module, kind)
            if isinstance(swap, NotFused):
                obstacles[kind] = swap
            elif swap is not None and self.search.has(name, swap.kind):
                self.report.swap(name, swap.parts[""])
                return swap
        self._report_lookalike(name, module, obstacles)
        return None

    def _report_lookalike(
        self, name: str, module: nn.Module, obstacles: dict[str, NotFused]
    ) -> None:
        """Report a module that looks like a fused layer, and why it is none."""
        if has_experts_parameters(module):
            kind = "experts"
        else:
            kind = looks_like(module) or next(iter(obstacles), None)
        if kind is None or not self.search.has(name, kind):
            return
        obstacle = obstacles.get(kind) or (obstacles.get("mlp") if kind == "linear" else None)
        reason = reasons.of_module(module, kind, obstacle)
        self.report.leave(name, kind, reason, type(module).__name__)

    def _is_swapped_whole(self, module: nn.Sequential) -> bool:
        kinds = self.search.kinds
        return (kinds["mlp"] or kinds["linear"]) and self.matcher.is_swapped_whole(module)

    def _feed_forward_swap(self, name: str, module: nn.Module) -> Swap | None:
        """Return the swap of a layer's method that is an MLP."""
        mlp = None if original_of(module) is not None else feed_forward_of(module)
        if mlp is None or not self.search.has(name, "mlp"):
            return None
        swap = self.matcher.swap_of(mlp, "mlp")
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        if reasons.of_swap(module, swap.attributes, [module]) is not None:
            return None
        self.report.swap(name, swap.parts[""])
        match = swap.notes["match"]
        # the layer has more children and attributes than the MLP
        match = match._replace(guards=match.guards.without_root())
        return replace(
            swap,
            new_class=subclass(FusedFeedForward, type(module)),
            notes={**swap.notes, "match": match},
            method_mlp=mlp,
        )

    def _tail_swap(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with an MLP of another kind behind its first layers."""
        tail_and_mlp = tail_of(parent)
        if tail_and_mlp is None or _overrides_calls(type(parent)):
            return None
        if reasons.of_storage(parent) is not None:
            return None
        tail, mlp = tail_and_mlp
        name = join_names(prefix, tail.mlp[0])
        swap = self.matcher.swap_of(mlp, "mlp") if self.search.has(name, "mlp") else None
        if not isinstance(swap, Swap) or swap.kind != "mlp":
            return None
        swap = tail_swap(parent, tail, swap)
        if reasons.of_swap(parent, swap.attributes, [parent, *mlp.modules()]) is not None:
            return None
        self.report.swap(name, swap.parts[tail.mlp[0]])
        return swap

    def _sequential_swap(self, prefix: str, parent: nn.Sequential) -> Swap | None:
        """Return the swap of a Sequential with runs that can be fused."""
        save = level_or_inputs(self.matcher.save, ("inputs", "preact"))
        attributes = {"save": save, "chunks": self.matcher.chunks}
        found_runs = swapped_runs(parent, save, self.matcher.chunks)
        if not any(run.swap.kind == "mlp" for run in found_runs.values()):
            swap = self._tail_swap(prefix, parent)
            if swap is not None:
                return swap
        fused = [layer for run in found_runs.values() for layer in run.layers.values()]
        self._report_linears_apart(prefix, parent, fused)
        asked = {
            name: run
            for name, run in found_runs.items()
            if self.search.has(join_names(prefix, name), run.swap.kind)
        }
        parts = self._parts_of_runs(parent, attributes, found_runs, asked)
        if isinstance(parts, NotFused):
            for name, run in asked.items():
                full_name = join_names(prefix, name)
                self.report.leave(full_name, run.swap.kind, parts, type(parent).__name__)
            return None
        for name, part in parts.items():
            self.report.swap(join_names(prefix, name), part)
        if not parts:
            return None
        self.search.inside.update(_entered(parent, asked.values()))
        is_plain = type(parent) is nn.Sequential
        new_class = Sequential if is_plain else subclass(Sequential, type(parent))
        return Swap("mlp", "", new_class, attributes, parts=parts)

    def _parts_of_runs(
        self,
        parent: nn.Sequential,
        attributes: dict[str, Any],
        found_runs: dict[str, SwappedRun],
        asked: dict[str, SwappedRun],
    ) -> dict[str, Part] | NotFused:
        """Return the parts of the runs that are asked for, by name.

        One run that cannot be fused, or is not asked for, leaves all runs as they are: then the
        reason is returned.
        """
        fused = [layer for run in found_runs.values() for layer in run.layers.values()]
        obstacle = reasons.of_storage(parent) or reasons.of_swap(parent, attributes, fused)
        if obstacle is not None:
            return obstacle
        if _overrides_calls(type(parent)):
            return NotFused("sequential")
        if len(asked) < len(found_runs):
            return NotFused("neighbor")
        parts = {}
        for name, run in asked.items():
            swap = self.matcher.verified(nn.Sequential(*run.layers.values()), run.swap)
            if isinstance(swap, NotFused):
                return swap
            parts[name] = swap.parts[""]
        return parts

    def _report_linears_apart(
        self, prefix: str, parent: nn.Sequential, fused: list[nn.Module]
    ) -> None:
        """Report the linears of a Sequential whose activation is in no run with them."""
        for name, reason in reasons.linears_apart(parent):
            is_asked = self.search.has(join_names(prefix, name), "linear")
            if is_asked and parent.get_submodule(name) not in fused:
                reason = reasons.of_storage(parent) or reason
                self.report.leave(join_names(prefix, name), "linear", reason, type(parent).__name__)


def _kinds_to_try(module: nn.Module) -> tuple[str, ...]:
    """Return the kinds of found_runs that a module may be as a whole."""
    if adapters.is_lora(module):
        return ("linear",)
    if has_experts_parameters(module):
        return ("experts",)
    return ("mlp",) if isinstance(module, nn.Sequential) else ("norm", "mlp")


def _overrides_calls(kind: type[nn.Sequential]) -> bool:
    """Whether a subclass of nn.Sequential may not call its layers one after the other."""
    return (kind.forward, kind.__iter__) != (nn.Sequential.forward, nn.Sequential.__iter__)


class SwappedRun(NamedTuple):
    """Neighbors in a Sequential that are fused together."""

    # its layers, by their names in the Sequential
    layers: dict[str, Any]
    # the swap of a Sequential that has only these
    swap: Swap


def swapped_runs(
    parent: nn.Sequential, save: str, chunks: int | None = None
) -> dict[str, SwappedRun]:
    """Return the runs of a Sequential that can be fused.

    A run has its linear's name in reports, as its norm may be swapped too.
    """
    swapped = {}
    for name, run in fused_runs(parent).items():
        layer_names = [
            activation_name_of(layer) or f"nn.{type(layer).__name__}"
            for layer in run.layers.values()
        ]
        kind = "mlp" if run.kind == "mlp" else "linear"
        change = f"{' + '.join(layer_names)} -> {run.kind}"
        change += f" ({chunk_words(chunks)[0]})" if chunks is not None and kind == "mlp" else ""
        attributes = {"save": save, "chunks": chunks}
        features = (run.layers[name].in_features,)
        swap = Swap(kind, change, Sequential, attributes, features=features, can_shrink=True)
        swapped[name] = SwappedRun(run.layers, swap)
    return swapped


def _entered(parent: nn.Sequential, found_runs: Iterable[SwappedRun]) -> Iterator[nn.Module]:
    """Yield the Sequentials inside in which a run begins or ends: these are not called."""
    names = {name for run in found_runs for name in run.layers if "." in name}
    outer = {name[:place] for name in names for place, c in enumerate(name) if c == "."}
    return map(parent.get_submodule, outer)


def _computed_in(module: nn.Module, notes: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that a module computes itself, which are then skipped.

    None where it may run its children.
    """
    match = notes.get("match")
    is_dropping = any(True for _ in rates_above_zero(module, match))
    # a linear and its activation may read a recipe, and be read by one
    shares = may_share(module, getattr(match, "pattern", None))
    if isinstance(module, ScriptModule):
        return [*module.modules()]
    if match is None or is_dropping or shares:
        return []
    tail = notes.get("tail")
    layers = [module] if tail is None else [module._modules[name] for name in tail.mlp]
    return [inner for layer in layers if layer is not None for inner in layer.modules()]


def tail_of(parent: nn.Sequential) -> tuple[Tail, nn.Sequential] | None:
    """Return the layers from one linear to the next and its dropout, also as a module of their own.

    `layers/sequential.py` knows only the classes of torch's layers; a gating or activation of
    another class is found by recording the MLP's layers without the others. None where they are all
    layers, or a linear is not one of two.
    """
    names = tuple(parent._modules)
    layers = list(parent._modules.values())
    linears = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    if len(linears) != 2 or not linears[0] or linears[1] - linears[0] < 2:
        return None
    first, last = linears
    end = last + 1 + (last + 1 < len(layers) and letter_of(layers[last + 1]) == "d")
    mlp = nn.Sequential()
    # by their own names, which a match holds
    mlp._modules.update(list(parent._modules.items())[first:end])
    mlp.training = parent.training
    return Tail(names[:first], names[first:end], names[end:]), mlp


def tail_swap(parent: nn.Sequential, tail: Tail, swap: Swap) -> Swap:
    """Return the swap of a Sequential whose layers `tail.mlp`, as a module, have this swap."""
    match = swap.notes["match"]
    # the parent has more children than the module of the MLP
    match = match._replace(guards=match.guards.without_root())
    return Swap(
        "mlp",
        swap.change,
        subclass(FusedTail, type(parent)),
        swap.attributes,
        {**swap.notes, "match": match, "tail": tail},
        parts={tail.mlp[0]: swap.parts[""]},
    )
