"""The forward of an MLP, gated MLP or linear with its activation, from the state as it is now.

A match has the function of ours that a module computes, and the places of its parameters. Mostly
nothing has changed, and every weight is a plain tensor of a plain layer: then a call reads the
state (match_reader.py), the weights and their dtypes, each once. Layers with adapters, of other
classes, or with other weights are looked at one by one, which finds their operands, or the reason
why the call cannot run fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusedckpt.autograd import dispatch, levels
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.autograd.replay import PLAIN_TENSORS
from fusedckpt.blocks import compiled
from fusedckpt.blocks.builder import GATED, ONE_LINEAR, PACKED, TWO_LINEARS, Linears
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.quantized import quantized
from fusedckpt.checkpointing.call_state import modules_in
from fusedckpt.fusing import adapters
from fusedckpt.fusing.match_reader import Guards, Reader, child_at
from fusedckpt.fusing.recomputed_call import needs_gradient, recomputed_call
from fusedckpt.fusing.replica import Path
from fusedckpt.fusing.swap import Swapped
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.linear import LinearOptions
from fusedckpt.layers.notes import ModuleNotes
from fusedckpt.layers.sharded import Sharding
from fusedckpt.recipes.shared_layers import SharedActivation, SharedLinear, shared_view_of

# the place of a dropout's rate: the path of a module, and its attribute
Rate = tuple[Path, str]
# a linear's weight as [out, in], under the adapters that it has, and its bias
LinearOperands = tuple[Any, Tensor | None]

_LINEARS_OF = {"mlp": TWO_LINEARS, "linear_act": ONE_LINEAR, "gated_mlp": GATED}


class LinearPaths(NamedTuple):
    """The places of a linear's parameters in the module that was matched."""

    # the attributes that lead to its weight
    weight: Path
    # those that lead to its bias, None without one
    bias: Path | None
    # whether the weight lies as [in, out]
    is_transposed: bool


class MLPPattern(NamedTuple):
    """The function of ours that a forward computes, and its arguments."""

    # the function: "mlp", "gated_mlp" or "linear_act"
    kind: str
    # in the order of the function's arguments
    linears: tuple[LinearPaths, ...]
    # its name in the table of activations
    activation: str
    # the half of the first weight that comes first, "gate" or "up"; "" where it has no halves
    packed: str = ""


class MLPMatch(NamedTuple):
    """How an MLP, gated MLP or linear with its activation computes, and from which parameters."""

    # the function of ours that it computes
    pattern: MLPPattern
    # the state for which that holds
    guards: Guards
    # dtypes of the weights for which the match was verified
    dtypes: tuple[torch.dtype, ...] = ()
    # dropout rates that must be 0 in training
    zero_rates: tuple[Rate, ...] = ()
    # the rate of the dropout of the last linear's input
    hidden_rate: Rate | None = None
    # the rate of the dropout of the result
    result_rate: Rate | None = None
    # whether that one writes over the result: on a GPU it draws other numbers then
    writes_result: bool = False

    def reader(self) -> MLPReader:
        """Return the reader of the match's state and operands in calls."""
        return MLPReader(self)


class MLPReader(Reader):
    """A match, ready to read a module's state and operands."""

    def __init__(self, match: MLPMatch):
        pattern = match.pattern
        rates = [*match.zero_rates, match.hidden_rate, match.result_rate]
        layers = [
            path[:-1] for linear in pattern.linears for path in linear[:2] if path is not None
        ]
        super().__init__(match.guards, (*layers, *(rate[0] for rate in rates if rate is not None)))
        self.match = match
        # the place of the layer with the weight, the weight's name, and the same of the bias
        self.linears: tuple[Any, ...] = tuple(
            (self.places[weight[:-1]], weight[-1])
            + ((None, None) if bias is None else (self.places[bias[:-1]], bias[-1]))
            for weight, bias, _ in pattern.linears
        )
        self.has_dropouts = any(rate is not None for rate in rates)
        self.has_transposed = any(linear.is_transposed for linear in pattern.linears)
        # of a linear below an adapter that was fused by itself nothing is usual
        self.are_usual = not any("base_layer" in path for path in layers)
        self.levels = LEVELS_OF.get(pattern.kind, ())
        # of a call at each level, but for chunks and dropouts
        linears = Linears(PACKED if pattern.packed == "gate" else _LINEARS_OF.get(pattern.kind, ()))
        self.options = {
            level: LinearOptions(
                pattern.kind, pattern.kind, linears, pattern.activation, save=level
            )
            for level in self.levels
        }

    def __reduce__(self) -> Any:
        return MLPReader, (self.match,)

    def rate(self, parts: list[Any], rate: Rate | None) -> float:
        """Return the rate by which a dropout drops now; 0 in eval mode, or without a dropout."""
        if rate is None:
            return 0.0
        path, attribute = rate
        owner = parts[self.places[path]]
        return getattr(owner, attribute) if owner.training else 0.0

    def operands(
        self,
        module: nn.Module,
        parts: list[Any],
        is_usual: bool,
        x: Tensor,
        sharding: Sharding | None,
    ) -> list[LinearOperands] | NotFused:
        """Return the weights and biases of a pattern, or why the call is not the matched one.

        parts, is_usual: as `read` returns them. A first weight with up before gate is cut in two,
        as programs have gate first.
        """
        match = self.match
        if self.has_dropouts and (obstacle := self._dropout(module, parts, sharding)) is not None:
            return obstacle
        if sharding is None and not dispatch.are_plain(x):
            return fallbacks.fallback_of(x)
        is_usual = is_usual and self.are_usual and sharding is None
        is_mixed = False
        pairs: list[Any] = []
        for place, name, bias_place, bias_name in self.linears:
            weight = parts[place]._parameters.get(name)
            bias = None
            is_usual = is_usual and type(weight) in PLAIN_TENSORS and weight.dtype in match.dtypes
            is_mixed = is_mixed or not is_usual or weight.dtype != x.dtype
            if bias_name is not None:
                bias = parts[bias_place]._parameters.get(bias_name)
                is_usual = is_usual and type(bias) in PLAIN_TENSORS
                is_mixed = is_mixed or not is_usual or bias.dtype != x.dtype
            pairs.append((weight, bias))
        if is_usual and is_mixed:
            is_usual = dispatch.autocast_dtype(x.device) is not None
        if not (is_usual and dispatch.are_plain(*chain.from_iterable(pairs))):
            if sharding is not None:
                pairs = sharded.shards_of(pairs, sharding.mesh)
            unusual = self._unusual(module, parts, pairs, x)
            if isinstance(unusual, NotFused):
                return unusual
            pairs = unusual
        elif self.has_transposed:
            transposed = [linear.is_transposed for linear in match.pattern.linears]
            pairs = [(w.t() if t else w, b) for t, (w, b) in zip(transposed, pairs, strict=True)]
        return _gate_first(pairs) if match.pattern.packed == "up" else pairs

    def _dropout(
        self, module: nn.Module, parts: list[Any], sharding: Sharding | None
    ) -> NotFused | None:
        """Return why the dropouts that are on now cannot be fused, None if they can."""
        match = self.match
        rates = match.zero_rates
        if match.hidden_rate is not None and (sharding is not None or not module.training):
            # on shards a result is dropped after it is summed; and a module that is not in training
            # may not call a dropout that is
            rates = (*rates, match.hidden_rate)
        for path, attribute in rates:
            if self.rate(parts, (path, attribute)) > 0:
                return NotFused("dropout", ".".join(path) or attribute)
        rate = match.result_rate
        # the recording does not tell which module's mode the forward reads
        if rate is not None and rate[1] != "p" and len({m.training for m in module.modules()}) > 1:
            return NotFused("dropout", rate[1])
        return None

    def _unusual(
        self, module: nn.Module, parts: list[Any], pairs: list[Any], x: Tensor
    ) -> list[LinearOperands] | NotFused:
        """Return the operands of linears, some with adapters or weights of other classes."""
        operands: list[LinearOperands] = []
        for number, (weight, bias) in enumerate(pairs):
            operand = self._unusual_weight(module, parts, number, weight, bias, x=x)
            if isinstance(operand, NotFused):
                return operand
            operands.append((operand, bias))
        return operands

    def _unusual_weight(
        self, module: nn.Module, parts: list[Any], number: int, weight: Any, bias: Any, *, x: Tensor
    ) -> Any:
        """Return the operand for a linear's weight, or why it cannot run fused as it is now."""
        match = self.match
        linear = match.pattern.linears[number]
        for tensor, path in ((weight, linear.weight), (bias, linear.bias)):
            is_taken = dispatch.are_plain(tensor) or quantized(tensor) is not None
            # gone as a parametrization or sharding leaves it, or of another class
            if path is not None and (tensor is None or not is_taken):
                return NotFused("weight", ".".join(path))
        record = quantized(weight)
        dtype = (record or weight).dtype
        if dtype not in match.dtypes:
            return NotFused("dtype", dtype)
        layer = parts[self.linears[number][0]]
        is_mixed = dtype != x.dtype or (bias is not None and bias.dtype != x.dtype)
        is_uncast = is_mixed and dispatch.autocast_dtype(x.device) is None
        if is_uncast or adapters.casts(layer, x):
            return NotFused("dtype", x.dtype)
        path = linear.weight[:-1]
        name = ".".join(path)
        outermost = _outermost(module, path)
        is_adapted = outermost is not layer
        if is_adapted and outermost is not module and has_hooks(outermost):
            return NotFused("hook", name)
        if match.pattern.packed == "up" and number == 0 and (is_adapted or record is not None):
            return NotFused("packed", name)
        operand = adapters.adapted(outermost, weight.t() if linear.is_transposed else weight)
        is_problem = isinstance(operand, str)
        return NotFused("adapter", f"{name} is {operand}") if is_problem else operand


def rates_above_zero(module: nn.Module, match: Any) -> Iterator[Rate]:
    """Yield the rates for which a module does not run fused in training; none without a match."""
    for path, attribute in getattr(match, "zero_rates", ()):
        if getattr(child_at(module, path), attribute, 0) > 0:
            yield path, attribute


def shardable_linears(module: nn.Module, match: MLPMatch) -> list[nn.Module] | str:
    """Return the modules with a pattern's weights, or why these cannot be sharded."""
    pattern = match.pattern
    if match.hidden_rate is not None:
        path, attribute = match.hidden_rate
        if getattr(child_at(module, path), attribute):
            return sharded.DROPS
    is_transposed = any(linear.is_transposed for linear in pattern.linears)
    if pattern.kind == "linear_act" or pattern.packed or is_transposed:
        return f"a {pattern.kind} with packed or transposed weights, or of one linear, stays whole"
    paths = [linear.weight[:-1] for linear in pattern.linears]
    layers = [child_at(module, path) for path in paths]
    for path, layer in zip(paths, layers, strict=True):
        outer = _outermost(module, path)
        if type(layer) is not nn.Linear or outer is not layer or has_hooks(layer):
            return f"{'.'.join(path)} is a {type(outer).__name__} that it has to call"
    return layers  # type: ignore[return-value]  # linears


def _gate_first(operands: list[LinearOperands]) -> list[LinearOperands]:
    """Cut a first weight with up before gate in two, and put gate first."""
    (weight, bias), last = operands
    up, gate = weight.chunk(2)
    up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
    return [(gate, gate_bias), (up, up_bias), last]


def _outermost(module: nn.Module, path: Path) -> nn.Module:
    """Return the layer that is called for the linear at a path, adapters around it included."""
    if not path or adapters.is_lora(module):
        return module
    return child_at(module, path[:-1])._modules[path[-1]]  # type: ignore[union-attr,return-value]  # guarded


class FusedMLP(Swapped):
    """Forward of an MLP of any class; saves the tensors that its level names."""

    save: str
    chunks: int | None

    @property
    def save_levels(self) -> tuple[str, ...]:
        """Return the levels that it offers to a plan."""
        return self._fusedckpt.reader.levels

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        return _mlp(self, self._original, x)

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return the modules with the pattern's weights, or why they must stay whole."""
        return shardable_linears(self, self._fusedckpt.match)

    def _function_now(self) -> str:
        pattern = self._fusedckpt.match.pattern
        more = [] if self.chunks is None else [f"chunks={self.chunks}"]
        now = f"fused as {pattern.kind}, activation={pattern.activation}", f"save={self.save}"
        return ", ".join([*now, *more])


class Tail(NamedTuple):
    """The names of the layers of a Sequential with an MLP behind its first ones, in order."""

    # called before the MLP
    before: tuple[str, ...]
    # of the MLP, its first linear first
    mlp: tuple[str, ...]
    # called after it
    after: tuple[str, ...]


class FusedTail(FusedMLP):
    """Forward of a Sequential with an MLP behind other layers; that runs fused."""

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        tail = self._fusedckpt.tail
        if tuple(self._modules) != (*tail.before, *tail.mlp, *tail.after):
            return NotFused("child", "a layer")
        n: Any = self._called(tail.before, x)
        y: Any = super()._fused(n) if isinstance(n, Tensor) else NotFused("arguments")
        if isinstance(y, NotFused):
            # noted here, as the layers before have run
            fallbacks.note_fallback(self, y)
            y = self._original(n)
        return self._called(tail.after, y)

    def _original(self, x: Any) -> Any:
        return self._called(self._fusedckpt.tail.mlp, x)

    def _called(self, names: Sequence[str], x: Any) -> Any:
        for name in names:
            layer: Any = self._modules[name]
            x = layer(x)
        return x

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return why its weights must stay whole."""
        return "an MLP behind other layers of a Sequential stays whole"


class FusedFeedForward(nn.Module):
    """Overrides a layer's method that is an MLP."""

    _fusedckpt: ModuleNotes

    def _ff_block(self, x: Tensor) -> Tensor:
        original = super()._ff_block  # type: ignore[misc]  # of the layer's class
        y = NotFused("arguments") if dispatch.is_traced(x) else _mlp(self, original, x)
        if not isinstance(y, NotFused):
            return y
        fallbacks.note_fallback(self, y)
        return original(x)


def _mlp(module: Any, original: Callable[[Tensor], Any], x: Tensor) -> Tensor | NotFused:
    """Return the result of a module's MLP, or why this call cannot run fused."""
    reader: MLPReader = module._fusedckpt.reader
    match = reader.match
    if match.pattern.kind == "linear_act" and _shares_recipes(module, x):
        # its layers save no more, and let the next linear save as little
        return original(x)
    save = module.save
    level = levels.override.level or save
    # an array that equals a level is in the tuple, too
    if type(save) is not str or level not in reader.levels or save not in reader.levels:
        level = _level_now(save, match.pattern.kind, reader.levels)
    sharding = module._fusedckpt.sharding
    if sharding is not None:
        sharded.check_input(type(module).__name__, x, sharding)
        if torch.compiler.is_compiling():
            count = {"inputs": 0, "gate": 1, "preact": max(1, len(reader.linears) - 1)}[level]
            run = partial(sharded.on_dtensors, original, sharding=sharding)
            return compiled.run(run, tuple(range(count)), x)
    change, parts, is_usual = reader.read(module)
    operands = change or reader.operands(module, parts, is_usual, x, sharding)
    if isinstance(operands, NotFused):
        runs_again = operands.key == "dropout" and sharding is None and torch.is_grad_enabled()
        if not (runs_again and dispatch.are_plain(x) and level != "preact"):
            return operands
        if needs_gradient(module, (x,)):
            return recomputed_call(modules_in(module), original, x, (x,))
        return original(x)
    hidden = reader.rate(parts, match.hidden_rate) if match.hidden_rate else 0.0
    result = reader.rate(parts, match.result_rate) if match.result_rate else 0.0
    options = reader.options[level]
    if module.chunks is not None:
        options = options._replace(chunks=module.chunks)
    if (store := module._fusedckpt.store) is not None:
        options = options._replace(store=store)
    if hidden:
        options = options._replace(dropout=hidden, output_dropout=result)
    if sharding is None:
        y = run_layer(options, x, (), operands)
    else:
        y = sharded.run_on_shards(lambda x: run_layer(options, x, (), operands), x, sharding)
    if result and not hidden:
        # it draws as before
        y = functional.dropout(y, result, inplace=match.writes_result)
    return y


def _level_now(save: Any, kind: str, known: tuple[str, ...]) -> str:
    """Return the level of a call: `saving` may set one that the MLP does not have, and so may
    the module's own attribute."""
    default = save if known == levels.LEVELS else level_or_inputs(save, known)
    return levels.resolve(kind, None, default, known)


def _shares_recipes(module: Any, x: Tensor) -> bool:
    """Whether a linear and its activation are layers that save a recipe of this input, or x alone.

    A linear that reads the activation's result then saves no more.
    """
    layers = module._modules.values()
    linear = next((layer for layer in layers if isinstance(layer, SharedLinear)), None)
    if linear is None or not any(isinstance(layer, SharedActivation) for layer in layers):
        return False
    if shared_view_of(x) is not None:
        return True
    is_default = levels.override.level in (None, "inputs") and module.save == "inputs"
    if not is_default or module.chunks is not None or torch.compiler.is_compiling():
        return False
    return linear.lets_readers_compute(x)


def chunk_words(chunks: int | None) -> list[str]:
    """Return the words of reports on the chunks of an MLP; none if they are not set."""
    return [] if chunks is None else [f"{chunks} chunk{'s' * (chunks > 1)}"]


def level_or_inputs(level: str, known: tuple[str, ...]) -> str:
    """Return a level, "inputs" for one that the layer does not have."""
    levels.check("fuse", level, levels.LEVELS)
    return level if level in known else "inputs"
