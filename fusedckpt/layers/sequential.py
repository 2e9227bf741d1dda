"""nn.Sequential that fuses runs of its layers; the layers stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import validate
from fusedckpt.blocks.builder import ONE_LINEAR, TWO_LINEARS, Linears, numbered
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.programs import LinearOptions, split_norm
from fusedckpt.kernels.activations import activation_name_of
from fusedckpt.layers import fallbacks
from fusedckpt.layers.children import letter_of, spec_of
from fusedckpt.layers.notes import NO_NOTES, NOTES

# the linears by the run that they are of
_LINEARS = {"mlp": TWO_LINEARS, "linear_act": ONE_LINEAR, "norm_linear": numbered(1)}
# a library may assign another one
_SEQUENTIAL_FORWARD = dispatch.own_forward(nn.Sequential)


class LayerRun(NamedTuple):
    """Adjacent layers computed as one."""

    # "mlp", "linear_act", "norm_linear", or "layer" for one that is called as it is
    kind: str
    # by name; names of layers in nested Sequentials have dots
    layers: dict[str, Any]


class Sequential(nn.Sequential):
    """nn.Sequential that runs norm, linear, activation, linear fused, saving only their input.

        x -> dropout(F.linear(dropout(act(F.linear(norm(x), ...))), ...)), or a part of that

    Arguments, children and state_dict are nn.Sequential's. Every call looks for runs: [norm,]
    linear, activation, [dropout,] linear[, dropout] (`functional.mlp`); linear, activation
    (`linear_act`); norm, linear (`norm_linear`). nn.Identity between these layers is skipped, and a
    run may begin or end within an nn.Sequential inside. A dropout of a run draws by a seed, of
    which it saves 8 bytes, and so drops other elements than nn.Dropout.

    A layer that is not of one of torch's or our classes, has a hook or a replaced forward, or has
    weights or an input of a tensor subclass, is called as in nn.Sequential. While other code
    than torch's has hooks on all modules, every layer is called so.

    Args:
        save: "inputs" or "preact": the level of a run with an activation, see `functional.mlp`.
        chunks: the number of token chunks of a run with two linears, see `functional.mlp`.
    """

    # of those that were pickled without
    chunks: int | None = None

    def __init__(
        self,
        *args: Any,
        save: str = "inputs",
        chunks: int | None = None,
    ):
        levels.check("Sequential", save, LEVELS_OF["mlp"])
        validate.check_layer_options("Sequential", False, chunks)
        arguments.modules("Sequential", "args", args)
        super().__init__(*args)
        self.save = save
        self.chunks = chunks

    @property
    def save_levels(self) -> tuple[str, ...] | None:
        """Return the levels that it offers to a plan, None where it fuses no run."""
        return LEVELS_OF["mlp"] if any(run.kind != "layer" for run in runs(self)) else None

    def extra_repr(self) -> str:
        """Say which layers are fused, and their save level."""
        runs_now = [
            f"{next(iter(run.layers))}-{next(reversed(run.layers))} as {run.kind}"
            for run in runs(self)
            if run.kind != "layer"
        ]
        more = "" if self.chunks is None else f", chunks={self.chunks}"
        return f"save={self.save}{more}, fused: {', '.join(runs_now) or 'nothing'}"

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def __getitem__(self, idx: slice | int) -> Any:
        part = super().__getitem__(idx)
        if isinstance(idx, slice):
            part.save = self.save  # type: ignore[assignment]  # of this class
            part.chunks = self.chunks  # type: ignore[assignment]  # of this class
        return part

    def forward(self, input: Tensor) -> Tensor:
        """Pass the input through all layers."""
        if dispatch.is_traced(input) or nn.Sequential.forward is not _SEQUENTIAL_FORWARD:
            return super().forward(input)
        levels.check("Sequential", self.save, LEVELS_OF["mlp"])
        for run in runs(self):
            layers = list(run.layers.values())
            if run.kind != "layer":
                if dispatch.are_plain(input):
                    options = self.save, self.chunks, self.__dict__.get(NOTES, NO_NOTES).store
                    input = _computed(run.kind, layers, input, *options)
                    continue
                fallbacks.note_fallback(self, fallbacks.fallback_of(input))
            for layer in layers:
                input = layer(input)
        return input


def runs(parent: nn.Sequential) -> list[LayerRun]:
    """Cut the layers of a Sequential into the longest runs that can be fused.

    A Sequential inside is one layer, unless a run begins or ends within it.
    """
    fragments = [name for name, child in parent._modules.items() if _is_fragment(child, parent)]
    layer_runs = _cut(_layers_of(parent, fragments))
    if fragments:
        blocks = [run.layers for run in layer_runs if run.kind != "layer"]
        opened = [name for name in fragments if any(_is_border_in(name, names) for names in blocks)]
        layer_runs = _cut(_layers_of(parent, opened))
    return layer_runs


def _is_fragment(child: Any, parent: nn.Sequential) -> bool:
    """Whether a child is a Sequential without an MLP of its own, which runs at its parent's level.

    One with an MLP keeps it: units of a plan, or hooks on all of them, are such children.
    """
    if type(child) is Sequential:
        is_alike = isinstance(parent, Sequential) and child.save == parent.save
        is_open = is_alike and child.chunks == parent.chunks
    else:
        is_open = type(child) is nn.Sequential
    return is_open and not has_hooks(child) and all(run.kind != "mlp" for run in runs(child))


def _layers_of(parent: nn.Sequential, opened: Sequence[str]) -> dict[str, Any]:
    """Return the layers of a Sequential by name, those of the `opened` children in their places."""
    layers: dict[str, Any] = {}
    for name, child in parent._modules.items():
        if name in opened:
            inner_parent: Any = child
            children = inner_parent._modules.items()
            inside = _layers_of(inner_parent, [n for n, m in children if _is_fragment(m, parent)])
            layers.update({f"{name}.{inner}": layer for inner, layer in inside.items()})
        else:
            layers[name] = child
    return layers


def _is_border_in(child: str, run: Iterable[str]) -> bool:
    """Whether some layers of a run are of a child, and others are not."""
    return len({name.startswith(f"{child}.") for name in run}) == 2


def _cut(layers: dict[str, Any]) -> list[LayerRun]:
    """Cut layers into runs."""
    names = list(layers)
    letters = "".join(map(letter_of, layers.values()))
    # a run skips identities
    places = [place for place, letter in enumerate(letters) if letter != "i"]
    bare = letters.replace("i", "")
    layer_runs: list[LayerRun] = []
    at = start = 0
    while start < len(names):
        kind = "layer"
        end = start + 1
        if at < len(places) and start == places[at]:
            kind, length = _run_at(bare, at)
            at += length
            end = places[at - 1] + 1
        layer_runs.append(LayerRun(kind, {name: layers[name] for name in names[start:end]}))
        start = end
    return layer_runs


def _run_at(letters: str, start: int) -> tuple[str, int]:
    """Return the kind of the run that begins at a layer, and how many layers it has."""
    linear = start + letters.startswith("n", start)
    if letters.startswith("la", linear):
        second = _linear_after(letters, linear)
        third = _linear_after(letters, second) if second else 0
        # of three linears the last two are the MLP, as nothing but their input is then saved
        if second and (not third or _linear_after(letters, third)):
            return "mlp", second + 1 + letters.startswith("d", second + 1) - start
        # the activation takes the linear from the norm, as it saves more there
        return ("linear_act", 2) if linear == start else ("layer", 1)
    if linear > start and letters.startswith("l", linear):
        return "norm_linear", 2
    return "layer", 1


def _linear_after(letters: str, linear: int) -> int:
    """Return the place of the linear that reads a linear's activation, 0 if there is none."""
    if not letters.startswith("la", linear):
        return 0
    after = linear + 2 + letters.startswith("d", linear + 2)
    return after if letters.startswith("l", after) else 0


def _computed(
    kind: str, layers: list[Any], x: Tensor, save: str, chunks: int | None, store: str | None
) -> Tensor:
    """Compute the layers of a run in one call."""
    by_letter: dict[str, list[Any]] = {}
    for layer in layers:
        by_letter.setdefault(letter_of(layer), []).append(layer)
    linears = by_letter["l"]
    norms = by_letter.get("n")
    acts = by_letter.get("a")
    dropout, output_dropout = _rates(layers)
    norm, kinds, tensors = split_norm(spec_of(norms[0]) if norms else None)
    options = LinearOptions(
        "Sequential" if norms else kind,
        "Sequential",
        Linears(_LINEARS[kind]),
        activation_name_of(acts[0]) if acts else None,
        norm,
        kinds,
        normalized_shape=norms[0].normalized_shape if norms else None,
        default=save if acts else "inputs",
        chunks=chunks,
        dropout=dropout,
        output_dropout=output_dropout,
        store=store,
    )
    y = run_layer(options, x, tensors, [(linear.weight, linear.bias) for linear in linears])
    return y[0] if isinstance(y, tuple) else y


def _rates(layers: list[Any]) -> tuple[float, float]:
    """Return the probabilities of the dropouts before and after the last linear, as set now."""
    before = 0.0
    after = 0.0
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Dropout) and layer.training:
            is_last = not any(isinstance(m, nn.Linear) for m in layers[place:])
            before, after = (before, layer.p) if is_last else (layer.p, after)
    return before, after
