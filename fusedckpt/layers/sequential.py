"""nn.Sequential that computes runs of its layers as one block; the layers stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.blocks import validate
from fusedckpt.blocks.block import run_linears
from fusedckpt.blocks.builder import LINEAR, PLAIN, Linears
from fusedckpt.blocks.programs import Options, split
from fusedckpt.kernels.activations import name_of
from fusedckpt.layers import fallbacks
from fusedckpt.layers.blocks import letter_of, spec_of
from fusedckpt.layers.mlp import MLP_LEVELS

# the block that letters form, and its number of layers; the first row that fits is taken
_PATTERNS = (
    ("nlal", "mlp", 4),
    ("lal", "mlp", 3),
    ("la", "linear_act", 2),
    # the activation takes the linear, as it saves more there
    ("nla", "layer", 1),
    ("nl", "norm_linear", 2),
    ("", "layer", 1),
)


_WEIGHTS = {"mlp": PLAIN, "linear_act": LINEAR, "norm_linear": ("weights[0]",)}


class Run(NamedTuple):
    """Adjacent layers computed as one: the first one's position, how many, and their block."""

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
    forward, or has weights or an input of a tensor subclass, is called as in nn.Sequential. Global
    module hooks, such as FlopCounterMode's, do not prevent fusion.

    Args:
        save: "inputs" or "preact": the level of a block with an activation, see `functional.mlp`.
        chunks: the number of token chunks of a block with two linears, see `functional.mlp`.
    """

    # of those that were pickled without
    chunks: int | None = None

    def __init__(
        self,
        *args: Any,
        save: str = "inputs",
        chunks: int | None = None,
    ):
        levels.check("Sequential", save, MLP_LEVELS)
        validate.block("Sequential", False, chunks)
        arguments.modules("Sequential", "args", args)
        super().__init__(*args)
        self.save, self.chunks = save, chunks

    @property
    def save_levels(self) -> tuple[str, ...] | None:
        """Return the levels that it offers to a plan, None where it runs no block."""
        is_block = any(run.kind != "layer" for run in runs(list(self._modules.values())))
        return MLP_LEVELS if is_block else None

    def extra_repr(self) -> str:
        """Say which layers run as one block, and the save level of such a block."""
        found = [run for run in runs(list(self._modules.values())) if run.kind != "layer"]
        names = list(self._modules)
        blocks = [f"{names[r.start]}-{names[r.start + r.length - 1]} as {r.kind}" for r in found]
        more = "" if self.chunks is None else f", chunks={self.chunks}"
        return f"save={self.save}{more}, fused: {', '.join(blocks) or 'nothing'}"

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
        levels.check("Sequential", self.save, MLP_LEVELS)
        layers, chunks = list(self._modules.values()), self.chunks
        how = {"save": self.save, "chunks": chunks}
        for run in runs(layers):
            if run.kind != "layer":
                if dispatch.are_plain(input):
                    input = _run(run, run.of(layers), input, **how)
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


def _run(run: Run, layers: list[Any], x: Tensor, save: str, chunks: int | None) -> Tensor:
    """Compute the layers of a run as one block."""
    norms, linears, acts = ([m for m in layers if letter_of(m) == letter] for letter in "nla")
    norm, kinds, tensors = split(spec_of(norms[0]) if norms else None)
    activation = name_of(acts[0]) if acts else None
    options = Options(
        "Sequential" if norms else run.kind,
        "Sequential",
        Linears(_WEIGHTS[run.kind]),
        activation,
        norm,
        kinds,
        norms[0].normalized_shape if norms else None,
        default=save if acts else "inputs",
        chunks=chunks,
    )
    y = run_linears(options, x, tensors, [(m.weight, m.bias) for m in linears])
    return y[0] if isinstance(y, tuple) else y
