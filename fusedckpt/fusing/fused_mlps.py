"""The forward of an MLP, gated MLP or linear with its activation of any class, fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusedckpt.autograd import dispatch, levels
from fusedckpt.blocks import compiled
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.fusing.call_state import modules_in
from fusedckpt.fusing.mlp_reader import MLPReader, shardable_linears
from fusedckpt.fusing.recomputed_call import needs_gradient, recomputed_call
from fusedckpt.fusing.shared_layers import SharedActivation, SharedLinear, shared_view_of
from fusedckpt.fusing.swap import Swapped
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import ModuleNotes


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
