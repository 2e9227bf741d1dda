"""The forwards of swapped modules, and their record of the match.

A swapped module gets a subclass of its class that overrides forward: isinstance checks, attributes
and methods keep working, and calls that were not proven equal run the old forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.blocks import compiled, reader
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import GATED, LINEAR, PACKED, PLAIN, Linears
from fusedckpt.blocks.programs import LEVELS, BlockOptions
from fusedckpt.fusing import shared_layers
from fusedckpt.fusing.held import MARK, Held, MatchedBlock, Original, Part, broken
from fusedckpt.fusing.mlp_weights import MLPMatch, dropped, drops_of, linear_tensors_of, linears_of
from fusedckpt.fusing.recomputed_call import needs_gradient, recomputed_call
from fusedckpt.fusing.shared_layers import SharedActivation, SharedLinear, shared_view_of
from fusedckpt.fusing.subclass import made_of
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.norm import layer_norm, rms_norm
from fusedckpt.layers.sharded import Sharding


def call(module: Any, x: Tensor) -> Any:
    """Run the module's forward, without the hooks around it."""
    return type(module).forward(module, x)


@dataclass(frozen=True)
class Swap:
    """One change of class, not yet made."""

    # an argument of `fuse`: "norm", "mlp", "linear", ...
    kind: str
    # its text in the report
    change: str
    # the class that the module gets
    to: type[nn.Module]
    # the attributes that it gets, and loses by `unfuse`
    attributes: dict[str, Any]
    # the trailing shape of the module's input
    features: tuple[int, ...] = ()
    # whether the module computes the same with smaller parameters, which are then verified
    is_sized: bool = False
    # what reports say, by the name below the module
    parts: dict[str, Part] = field(default_factory=dict)
    # where a method is swapped: a module of the children that the method calls
    own: Any = None
    # calls the module on one tensor
    run: Callable[[Any, Tensor], Any] = call

    def apply(self, module: nn.Module) -> None:
        """Change the module's class."""
        module.__dict__.update(self.attributes)
        module.__dict__[MARK] = Original(type(module), tuple(self.attributes), self.parts)
        module.__class__ = self.to


class NormMatch(NamedTuple):
    """The norm that a module of some class computes: see `functional.rms_norm` and `layer_norm`."""

    # the attribute of the weight, None for a norm without one
    weight: str | None
    # the attribute of epsilon, or its value
    eps: str | float
    # added to the weight: 1 for Gemma's
    offset: float
    # where the norm rounds: "torch", "llama" or "gemma"
    cast: str
    # pairs of x's and the weight's dtype that were verified, x's twice without a weight
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    # "rms" or "layer"
    kind: str = "rms"
    # the attribute of the bias
    bias: str | None = None
    # whether the result has x's dtype even under autocast
    casts_back: bool = False
    # state that must not change
    held: tuple[Held, ...] = ()
    # whether it may run under autocast
    autocasts: bool = True


# the parts of a function, as FunctionType takes them
_FUNCTION = ("__code__", "__globals__", "__name__", "__defaults__", "__closure__")


class Swapped(nn.Module):
    """Forward of a swapped module: fused if proven equal for this call, else the original one."""

    # how many tensors a fused call takes, and their names
    _fusedckpt_count = 1
    _fusedckpt_names: tuple[str, ...]
    # how the weights are laid out over ranks, None for whole ones
    _fusedckpt_sharding: Sharding | None = None
    # returns the result, or why this call cannot run fused
    _fused: Callable[..., Tensor | NotFused]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours, original = made_of(cls) or (nn.Module, nn.Module)
        if issubclass(ours, Swapped):
            # with the original's signature, by which torch.fx names a trace's inputs
            call = FunctionType(*(getattr(ours.forward, key) for key in _FUNCTION))
            cls.forward = wraps(original.forward)(call)
            _, *names = inspect.signature(original.forward).parameters.values()
            parameters = [p.name for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
            cls._fusedckpt_names = tuple(parameters[: cls._fusedckpt_count])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused forward, or that of the original class."""
        tensors = self._by_position(args, kwargs) if kwargs else args
        if not dispatch.is_recorded(tensors[0] if tensors else None):
            is_taken = len(tensors) == self._fusedckpt_count
            for x in tensors:
                is_taken = is_taken and isinstance(x, Tensor)
            y = self._fused(*tensors) if is_taken else NotFused("arguments")
            if not isinstance(y, NotFused):
                return y
            fallbacks.note_fallback(self, y)
        if self._fusedckpt_sharding is not None and len(tensors) == 1:
            return sharded.on_dtensors(super().forward, tensors[0], self._fusedckpt_sharding)
        return super().forward(*args, **kwargs)

    __prepare_scriptable__ = shared_layers.Shared.__prepare_scriptable__

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return a fused call's tensors, nothing where others are passed by name."""
        names = self._fusedckpt_names[len(args) :]
        return (*args, *(kwargs[n] for n in names)) if {*names} == kwargs.keys() else ()

    def _original(self, x: Tensor) -> Any:
        return super().forward(x)

    def _now(self) -> str:
        """Name the function that it computes now, "" for its own."""
        return ""

    def extra_repr(self) -> str:
        """Describe the module as its class does, and name the function that it computes now."""
        return ", ".join(filter(None, (super().extra_repr(), self._now())))


class FusedNorm(Swapped):
    """Forward of a norm of any class; saves only x for the verified dtypes."""

    _fusedckpt_match: NormMatch
    save_levels = ()

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        names = self._fusedckpt_match.weight, self._fusedckpt_match.bias
        weight, bias = (None if name is None else self._parameters.get(name) for name in names)
        if dispatch.are_plain(x, weight, bias):
            return self._computed(x, weight, bias)
        y = sharded.on_rows(self._computed, 1, x, weight, bias)
        by_name = {name or "": tensor for name, tensor in zip(names, (weight, bias), strict=True)}
        return fallbacks.unplain(x, **by_name) if y is None else y

    def _computed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | NotFused:
        match = self._fusedckpt_match
        if (changed := broken(self, match.held)) is not None:
            return changed
        for name, tensor in ((match.weight, weight), (match.bias, bias)):
            if name is not None and tensor is None:
                return NotFused("changed", name)
        dtype = x.dtype if weight is None else weight.dtype
        # F.layer_norm takes two dtypes on a CPU, and where autocast casts them
        is_taken = match.kind == "rms" or x.device.type in ("cpu", "meta") or dtype == x.dtype
        is_cast = dispatch.autocast_dtype(x.device) is not None
        is_taken = match.autocasts if is_cast else is_taken
        if (x.dtype, dtype) not in match.dtypes or not is_taken:
            return NotFused("dtype", x.dtype)
        return normalised(self, match, x, weight, bias)

    def _now(self) -> str:
        match = self._fusedckpt_match
        ours = "layer_norm" if match.kind == "layer" else f"rms_norm, cast={match.cast}"
        return f"fused as {ours}"


def normalised(
    module: nn.Module, match: NormMatch, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the norm that a match describes; note its inputs for readers of the result."""
    shape = x.shape[-1:] if weight is None else weight.shape
    eps = getattr(module, match.eps) if isinstance(match.eps, str) else match.eps
    if match.kind == "layer":
        weight = weight + match.offset if weight is not None and match.offset else weight
        y = layer_norm(x, shape, weight, bias, eps=eps)
    else:
        y = rms_norm(x, shape, weight, eps, offset=match.offset, cast=match.cast)
    if match.casts_back and y.dtype != x.dtype:
        return y.to(x.dtype)
    return reader.note_norm(module, y, weight, bias)


class FusedMLP(Swapped):
    """Forward of an MLP of any class; saves the tensors that its level names."""

    _fusedckpt_match: MLPMatch
    save: str
    chunks: int | None

    @property
    def save_levels(self) -> tuple[str, ...]:
        """Return the levels that it offers to a plan."""
        return LEVELS[self._fusedckpt_match.block.kind]

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        return _mlp(self, self._original, x)

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return the modules with the block's weights, or why they must stay whole."""
        return linears_of(self, self._fusedckpt_match)

    def _now(self) -> str:
        block = self._fusedckpt_match.block
        more = [] if self.chunks is None else [f"chunks={self.chunks}"]
        now = f"fused as {block.kind}, activation={block.activation}", f"save={self.save}"
        return ", ".join([*now, *more])


class FusedFeedForward(nn.Module):
    """Overrides a layer's method that is an MLP."""

    def _ff_block(self, x: Tensor) -> Tensor:
        original = super()._ff_block  # type: ignore[misc]  # of the layer's class
        y = NotFused("arguments") if dispatch.is_recorded(x) else _mlp(self, original, x)
        if not isinstance(y, NotFused):
            return y
        fallbacks.note_fallback(self, y)
        return original(x)


def _mlp(module: Any, original: Callable[[Tensor], Any], x: Tensor) -> Tensor | NotFused:
    """Return the result of a module's MLP, or why this call cannot run fused."""
    match = module._fusedckpt_match
    block = match.block
    if block.kind == "linear_act" and _shares(module, x):
        # its layers save no more, and let the next linear save as little
        return original(x)
    known = LEVELS[block.kind]
    default = module.save if known == levels.LEVELS else within(module.save, known)
    level = levels.resolve(block.kind, None, default, known)
    sharding = getattr(module, "_fusedckpt_sharding", None)
    if sharding is not None:
        sharded.check_input(type(module).__name__, x, sharding)
        if torch.compiler.is_compiling():
            count = {"inputs": 0, "gate": 1, "preact": max(1, len(block.linears) - 1)}[level]
            run = partial(sharded.on_dtensors, original, sharding=sharding)
            return compiled.run(run, tuple(range(count)), x)
    tensors = broken(module, match.held) or linear_tensors_of(module, match, x, sharding)
    if isinstance(tensors, NotFused):
        runs_again = tensors.key == "dropout" and sharding is None and torch.is_grad_enabled()
        if runs_again and dispatch.are_plain(x) and level != "preact":
            return (
                recomputed_call(module, original, x, (x,))
                if needs_gradient(module, (x,))
                else original(x)
            )
        return tensors
    options = _options(module, block, level, drops := drops_of(module, match))

    def computed(x: Tensor) -> Tensor:
        return run_linears(options, x, (), tensors)

    y = computed(x) if sharding is None else sharded.spread(computed, x, sharding)
    return y if drops else dropped(module, match, y)


def _options(module: Any, block: MatchedBlock, level: str, drops: dict[str, Any]) -> BlockOptions:
    names = {"mlp": PLAIN, "linear_act": LINEAR, "gated_mlp": GATED}[block.kind]
    linears = Linears(PACKED if block.packed == "gate" else names)
    return BlockOptions(
        *(block.kind, block.kind, linears, block.activation),
        save=level,
        chunks=module.chunks,
        **drops,
    )


def _shares(module: nn.Module, x: Tensor) -> bool:
    """Whether a linear and its activation are layers that save a recipe of this input."""
    kinds = [type(layer) for layer in module._modules.values()]
    are_all = (any(issubclass(k, ours) for k in kinds) for ours in (SharedLinear, SharedActivation))
    return len(kinds) > 1 and all(are_all) and shared_view_of(x) is not None


def of_chunks(chunks: int | None) -> list[str]:
    """Return the words of reports on the chunks of an MLP; none if they are not set."""
    return [] if chunks is None else [f"{chunks} chunk{'s' * (chunks > 1)}"]


def within(level: str, known: tuple[str, ...]) -> str:
    """Return a level, "inputs" for one that the layer does not have."""
    levels.check("fuse", level, levels.LEVELS)
    return level if level in known else "inputs"
