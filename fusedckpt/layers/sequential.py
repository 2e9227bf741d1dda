"""nn.Sequential that computes runs of its layers as one block; the layers stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.blocks import validate
from fusedckpt.blocks.norm_spec import NormSpec
from fusedckpt.kernels.activations import name_of
from fusedckpt.layers import constructors, fallbacks
from fusedckpt.layers.blocks import letter_of, spec_of
from fusedckpt.layers.linear import linear_act
from fusedckpt.layers.mlp import MLP_LEVELS, mlp
from fusedckpt.layers.norm_linear import norm_linear

__all__ = ["Sequential"]

# what letters form, and of how many layers; the first row that fits is taken
_PATTERNS = (
    ("nlal", "mlp", 4),
    ("lal", "mlp", 3),
    ("la", "linear_act", 2),
    # the activation takes the linear, as it saves more there
    ("nla", "layer", 1),
    ("nl", "norm_linear", 2),
    ("", "layer", 1),
)


# a save level, and chunks
_Options = tuple[str, int | None]


class Run(NamedTuple):
    """Adjacent layers computed as one: the first one's position, how many, and what they form."""

    start: int
    length: int
    # "mlp", "linear_act", "norm_linear", or "layer" for one that is called as it is
    kind: str

    def of(self, layers: list[Any]) -> list[Any]:
        """Return the run's layers."""
        return layers[self.start : self.start + self.length]


class Sequential(nn.Sequential):
    """nn.Sequential that runs norm, linear, activation, linear as one block saving only its input.

        x -> F.linear(act(F.linear(norm(x), ...)), ...), or a part of that

    Arguments, children and state_dict are nn.Sequential's. Every call looks for blocks: [norm,]
    linear, activation, linear (`functional.mlp`); linear, activation (`linear_act`); norm, linear
    (`norm_linear`). A layer that is not of one of torch's or our classes, has a hook or a replaced
    forward, or whose weights or input are a tensor subclass, is called as in nn.Sequential. Global
    module hooks, such as FlopCounterMode's, do not prevent fusion.

    Args:
        save: "inputs" or "preact": what a block with an activation saves, see `functional.mlp`.
        chunks: the number of token chunks of a block with two linears, see `functional.mlp`.
    """

    # of those that were pickled without
    chunks: int | None = None

    def __init__(self, *args: Any, save: str = "inputs", chunks: int | None = None):
        levels.check("Sequential", save, MLP_LEVELS)
        validate.block("Sequential", False, chunks)
        constructors.layers("Sequential", args)
        super().__init__(*args)
        self.save, self.chunks = save, chunks

    def extra_repr(self) -> str:
        """Say which layers run as one block, and what such a block saves."""
        found = [run for run in runs(list(self._modules.values())) if run.kind != "layer"]
        names = list(self._modules)
        blocks = [f"{names[r.start]}-{names[r.start + r.length - 1]} as {r.kind}" for r in found]
        chunks = "" if self.chunks is None else f", chunks={self.chunks}"
        return f"save={self.save}{chunks}, fused: {', '.join(blocks) or 'nothing'}"

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def __getitem__(self, idx: slice | int) -> Any:
        found = super().__getitem__(idx)
        if isinstance(idx, slice):
            found.save, found.chunks = self.save, self.chunks  # type: ignore[assignment]  # of this class
        return found

    def forward(self, input: Tensor) -> Tensor:
        """Pass the input through all layers."""
        if dispatch.is_recorded(input):
            return super().forward(input)
        level = levels.resolve("Sequential", None, self.save, MLP_LEVELS)
        layers = list(self._modules.values())
        for run in runs(layers):
            if run.kind != "layer":
                if dispatch.are_plain(input):
                    options = (level, levels.chunks_of(self.chunks))
                    input = _COMPUTE[run.kind](input, options, *run.of(layers))
                    continue
                fallbacks.note(self, fallbacks.unplain(input))
            for layer in run.of(layers):
                input = layer(input)
        return input


def runs(layers: list[Any]) -> Iterator[Run]:
    """Cut layers into the longest runs that are one block each."""
    letters = "".join([letter_of(layer) for layer in layers])
    start = 0
    while start < len(letters):
        for pattern, kind, length in _PATTERNS:
            if letters.startswith(pattern, start):
                yield Run(start, length, kind)
                start += length
                break


def _spec(norm: Any, x: Any) -> NormSpec:
    """Describe a norm that reads x: a record without a weight would take any x."""
    spec = spec_of(norm)
    given = {"x": x, "weight": spec.weight, "bias": spec.bias}
    validate.dense("Sequential", {key: value for key, value in given.items() if value is not None})
    shape = validate.normalized_shape("Sequential", norm.normalized_shape)
    validate.norm("Sequential", x, shape, spec.weight, bias=spec.bias)
    return spec


def _run_mlp(x: Tensor, options: _Options, *layers: Any) -> Tensor:
    *norm, fc1, activation, fc2 = layers
    spec = _spec(norm[0], x) if norm else None
    weights = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    name, (save, chunks) = name_of(activation), options
    return mlp(x, *weights, name, norm=spec, save=save, chunks=chunks)  # type: ignore[arg-type]  # an "a" has a name


def _run_linear_act(x: Tensor, options: _Options, linear: Any, activation: Any) -> Tensor:
    return linear_act(x, linear.weight, linear.bias, name_of(activation), save=options[0])


def _run_norm_linear(x: Tensor, options: _Options, norm: Any, linear: Any) -> Tensor:
    return norm_linear(x, _spec(norm, x), [linear.weight], [linear.bias])[0]


_COMPUTE: dict[str, Callable[..., Tensor]] = {
    "mlp": _run_mlp,
    "linear_act": _run_linear_act,
    "norm_linear": _run_norm_linear,
}
