"""nn.Sequential that fuses runs of its layers; the layers stay as they are.

The layers are cut into runs in the first call. A later call compares each layer with the one that
was cut, in one loop, and cuts anew where one has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.autograd.weak_map import WeakMap
from fusedckpt.blocks import validate
from fusedckpt.blocks.builder import ONE_LINEAR, TWO_LINEARS, Linears, numbered
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.kernels.activations import activation_name_of
from fusedckpt.layers import fallbacks
from fusedckpt.layers.children import ChildClass, class_of, letter_of, options_of, spec_of
from fusedckpt.layers.linear import LinearOptions
from fusedckpt.layers.norm import is_patched, split_norm
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

    @property
    def linear(self) -> str:
        """Return the name of its first linear, by which reports name the run."""
        return next(name for name, layer in self.layers.items() if isinstance(layer, nn.Linear))


class Sequential(nn.Sequential):
    """nn.Sequential that runs norm, linear, activation, linear fused, saving only their input.

        x -> dropout(F.linear(dropout(act(F.linear(norm(x), ...))), ...)), or a part of that

    Arguments, children and state_dict are nn.Sequential's. Its runs are [norm,]
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
        return LEVELS_OF["mlp"] if fused_runs(self) else None

    def extra_repr(self) -> str:
        """Say which layers are fused, and their save level."""
        runs_now = [
            f"{next(iter(run.layers))}-{next(reversed(run.layers))} as {run.kind}"
            for run in fused_runs(self).values()
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
        planned_runs, layers = _runs_now(self)
        for run in planned_runs:
            if run.options is not None:
                if dispatch.are_plain(input):
                    input = _computed(run, run.options, layers, input)
                    continue
                fallbacks.note_fallback(self, fallbacks.fallback_of(input))
            for place in run.places:
                input = layers[place](input)
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


def fused_runs(parent: nn.Sequential) -> dict[str, LayerRun]:
    """Return the runs that are fused, by the names of their first linears."""
    return {run.linear: run for run in runs(parent) if run.kind != "layer"}


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


class _Settings(NamedTuple):
    """How a Sequential computes its runs."""

    save: str
    chunks: int | None
    # how it keeps its input, None for as it is
    store: str | None


class _PlannedRun(NamedTuple):
    """A run, with all that a call needs of it but for the tensors and the rates of now."""

    # of its layers, among the layers of all runs
    places: Sequence[int]
    # those of its call, None for a layer that is called as it is
    options: LinearOptions | None
    # the place of its norm, None without one
    norm: int | None = None
    # those of its linears
    linears: Sequence[int] = ()
    # of the dropout before the last linear, None without one
    dropout: int | None = None
    # of the dropout after it
    output_dropout: int | None = None


def _plan(layer_runs: Sequence[LayerRun], settings: _Settings) -> list[_PlannedRun]:
    """Plan the runs of a Sequential."""
    planned_runs = []
    start = 0
    for run in layer_runs:
        planned_runs.append(_planned(run, start, settings))
        start += len(run.layers)
    return planned_runs


def _planned(run: LayerRun, start: int, settings: _Settings) -> _PlannedRun:
    """Plan a run; start: the place of its first layer."""
    layers = list(run.layers.values())
    places = [start + number for number in range(len(layers))]
    if run.kind == "layer":
        return _PlannedRun(places, None)
    by_letter: dict[str, list[int]] = {"n": [], "a": [], "d": [], "l": []}
    for number, layer in enumerate(layers):
        by_letter.setdefault(letter_of(layer), []).append(number)
    linears = by_letter["l"]
    norms = [layers[number] for number in by_letter["n"]]
    acts = [layers[number] for number in by_letter["a"]]
    norm, kinds, _ = split_norm(spec_of(norms[0]) if norms else None)
    before = [start + number for number in by_letter["d"] if number < linears[-1]]
    after = [start + number for number in by_letter["d"] if number > linears[-1]]
    options = LinearOptions(
        "Sequential" if norms else run.kind,
        "Sequential",
        Linears(_LINEARS[run.kind]),
        activation_name_of(acts[0]) if acts else None,
        norm,
        kinds,
        normalized_shape=norms[0].normalized_shape if norms else None,
        default=settings.save if acts else "inputs",
        chunks=settings.chunks,
        store=settings.store,
    )
    return _PlannedRun(
        places,
        options,
        start + by_letter["n"][0] if norms else None,
        [start + number for number in linears],
        before[0] if before else None,
        after[0] if after else None,
    )


def _computed(run: _PlannedRun, options: LinearOptions, layers: Sequence[Any], x: Tensor) -> Tensor:
    """Compute the layers of a run in one call."""
    if run.dropout is not None and layers[run.dropout].training:
        options = options._replace(dropout=layers[run.dropout].p)
    if run.output_dropout is not None and layers[run.output_dropout].training:
        options = options._replace(output_dropout=layers[run.output_dropout].p)
    tensors: tuple[Any, ...] = ()
    if run.norm is not None:
        norm = layers[run.norm]
        tensors = norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None
    linears = [(layers[place].weight, layers[place].bias) for place in run.linears]
    y = run_layer(options, x, tensors, linears)
    return y[0] if isinstance(y, tuple) else y


class _CutLayer(NamedTuple):
    """A layer that a cut depends on."""

    # the number of the Sequential that has it, among all layers; -1 for the one that is cut
    owner: int
    # its name there
    name: str
    kind: type
    # see `letter_of`
    letter: str
    # attributes and their values
    options: tuple[tuple[str, Any], ...]
    # of a Sequential that is looked into, the names of its layers
    names: list[str] | None
    # whether it would be in a run, or be looked into, but for a hook, its weights or its options
    is_out: bool


class _Cut:
    """The runs of a Sequential, and the state for which they hold.

    It has names and constants, and no layer. A call reads the layers that are there now, and
    compares them with those that were cut.
    """

    def __init__(self, parent: nn.Sequential, layer_runs: list[LayerRun], settings: _Settings):
        self.settings = settings
        self.runs = _plan(layer_runs, settings)
        self.names = [*parent._modules]
        self._layers: list[_CutLayer] = []
        self._classes: dict[type, ChildClass] = {}
        numbers = self._add_layers(parent, -1)
        # of the layers of the runs, in their order
        self._numbers = [numbers[name] for run in layer_runs for name in run.layers]

    def _add_layers(self, parent: nn.Sequential, owner: int) -> dict[str, int]:
        """Add the layers of a Sequential, and of those inside; return their numbers by name."""
        numbers: dict[str, int] = {}
        for name, layer in parent._modules.items():
            numbers[name] = number = len(self._layers)
            letter = letter_of(layer)
            child_class = class_of(layer)
            names = None
            options: tuple[tuple[str, Any], ...] = ()
            if letter != "-" and child_class is not None:
                self._classes[child_class.kind] = child_class
                options = options_of(layer)
            is_out = _is_left_out(layer)
            if _is_sequential(layer) and not is_out:
                names = [*layer._modules]
                if isinstance(layer, Sequential):
                    options = ("save", layer.save), ("chunks", layer.chunks)
            kind = type(layer)
            self._layers.append(_CutLayer(owner, name, kind, letter, options, names, is_out))
            if names is not None:
                inside = self._add_layers(layer, number)  # type: ignore[arg-type]  # a Sequential
                numbers |= {f"{name}.{inner}": n for inner, n in inside.items()}
        return numbers

    def layers_now(self, parent: nn.Sequential) -> list[Any] | None:
        """Return the layers of the runs as they are now, None where the runs may be others."""
        if [*parent._modules] != self.names:
            return None
        for kind, forward, namespace, name, function in self._classes.values():
            if kind.forward is not forward or namespace[name] is not function:
                return None
        # the Sequential that is cut comes last, where its number -1 finds it
        layers: list[Any] = [None] * len(self._layers) + [parent]
        known: list[Any] = []
        tensors: list[Any] = []
        for number, row in enumerate(self._layers):
            owner, name, kind, letter, options, names, is_out = row
            layers[number] = layer = layers[owner]._modules.get(name)
            if type(layer) is not kind or (names is not None and [*layer._modules] != names):
                return None
            for attribute, value in options:
                now = getattr(layer, attribute, None)
                if now is not value and not (type(now) is type(value) and now == value):
                    return None
            if is_out and not _is_left_out(layer):
                return None
            if names is not None:
                known.append(layer)
            elif letter != "-":
                known.append(layer)
                tensors += layer._parameters.values()
                if letter == "n" and NOTES in layer.__dict__ and is_patched(layer):
                    return None
                if letter == "d" and not (isinstance(layer.p, (int, float)) and 0 <= layer.p <= 1):
                    return None
        if has_hooks(*known) or not dispatch.are_plain(*tensors):
            return None
        return [layers[number] for number in self._numbers]


def _is_sequential(layer: Any) -> TypeGuard[nn.Sequential]:
    return type(layer) in (nn.Sequential, Sequential)


def _is_left_out(layer: Any) -> bool:
    """Whether a layer is in no run, and is not looked into, for a reason that may end."""
    if _is_sequential(layer):
        return has_hooks(layer)
    return class_of(layer) is not None and letter_of(layer) == "-"


# of Sequentials that were called
_CUTS = WeakMap[nn.Sequential, _Cut]()


def _runs_now(parent: Sequential) -> tuple[list[_PlannedRun], list[Any]]:
    """Return the runs of a Sequential, and the layers of all of them.

    They are cut in the first call, and again where a layer has changed.
    """
    store = parent.__dict__.get(NOTES, NO_NOTES).store
    settings = _Settings(parent.save, parent.chunks, store)
    is_compiling = torch.compiler.is_compiling()
    cut = None if is_compiling else _CUTS.get(parent)
    if cut is not None and all(map(is_, settings, cut.settings)):
        layers = cut.layers_now(parent)
        if layers is not None:
            return cut.runs, layers
    levels.check("Sequential", settings.save, LEVELS_OF["mlp"])
    layer_runs = runs(parent)
    layers = [layer for run in layer_runs for layer in run.layers.values()]
    if is_compiling:
        return _plan(layer_runs, settings), layers
    cut = _CUTS.put(parent, _Cut(parent, layer_runs, settings))
    return cut.runs, layers
