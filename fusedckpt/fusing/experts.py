"""Experts as transformers writes them, run by `functional.experts`.

They are told by their parameters: `gate_up_proj` and `down_proj` of three dimensions. The gating is
looked up by its values, and a small replica is compared with the original's forward. The router is
not touched, nor which experts implementation the config names.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, levels
from fusedckpt.blocks.eager import gated
from fusedckpt.blocks.experts import LEVELS
from fusedckpt.fusing.accuracy import FLOOR, Errors
from fusedckpt.fusing.forwards import Swap, of_chunks
from fusedckpt.fusing.held import is_function, is_simple
from fusedckpt.fusing.replica import Draw, replica, undisturbed
from fusedckpt.fusing.subclass import subclass
from fusedckpt.fusing.verification import small_sizes
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.routed import ClampedSwiGLU, Gating
from fusedckpt.layers import fallbacks
from fusedckpt.layers.experts import experts
from fusedckpt.layers.fallbacks import Fallback
from fusedckpt.memory import saved_tensors

_WEIGHTS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
# of inputs: a clamp that verification at 1 alone would not reach
SCALES = (1.0, 30.0)


class ExpertsMatch(NamedTuple):
    """The experts that a module computes.

    names: of its forward's arguments; held: attributes that must not change, and children's types.
    """

    gating: Gating
    is_transposed: bool
    names: tuple[str, ...]
    held: tuple[tuple[str, Any], ...]


class FusedExperts(nn.Module):
    """Forward of experts of any class; saves the tensors that its level names."""

    _fusedckpt_match: ExpertsMatch
    save: str
    chunks: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused forward, or that of the original class."""
        names = self._fusedckpt_match.names
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        is_whole = len(given) == len(args) + len(kwargs) == len(names)
        y: Any = self._fused(*given) if is_whole else ("arguments", "")
        if type(y) is not tuple:
            return y
        fallbacks.note(self, y)
        return super().forward(*args, **kwargs)

    def _fused(self, x: Any, index: Any, scores: Any) -> Tensor | Fallback:
        """Return the result, or why this call cannot run fused."""
        match = self._fusedckpt_match
        # a property while peft's LoRA, or another parametrization, is active
        weights = {name: getattr(self, name, None) for name in (*_WEIGHTS, *_BIASES)}
        for name, value in match.held:
            found = getattr(self, name, None)
            found = type(found) if isinstance(found, nn.Module) else found
            if found is not value and found != value:
                return "changed", name
        if not all(isinstance(t, Tensor) for t in (x, index, scores)):
            return "arguments", ""
        if dispatch.is_recorded(x) or index.shape != scores.shape or index.is_floating_point():
            return "arguments", ""
        if not dispatch.are_plain(x, index, scores, *weights.values()):
            return fallbacks.unplain(x, **weights)
        implementation = getattr(vars(self).get("config"), "_experts_implementation", None)
        if implementation not in (None, "eager"):
            # they multiply in the weights' dtype, and ignore autocast
            with torch.autocast(x.device.type, enabled=False):
                return self._computed(x.to(weights[_WEIGHTS[0]].dtype), index, scores, weights).to(
                    x.dtype
                )
        is_cast = dispatch.autocast_dtype(x.device) is not None
        if x.dtype != weights[_WEIGHTS[0]].dtype and not is_cast:
            return "dtype", x.dtype
        return self._computed(x, index, scores, weights).to(x.dtype)

    def _computed(self, x: Tensor, index: Tensor, scores: Tensor, weights: Any) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = weights.values()
        return experts(
            *(x, index, scores, gate_up, down),
            activation=self._fusedckpt_match.gating,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            is_transposed=self._fusedckpt_match.is_transposed,
            save=levels.resolve("experts", None, self.save, LEVELS),
            chunks=levels.chunks_of(self.chunks),
        )

    def extra_repr(self) -> str:
        """Describe the module as its class does, and name the function that it computes now."""
        own, now = super().extra_repr(), f"fused as experts, save={self.save}"
        return f"{own}, {now}" if own else now


def holds(module: nn.Module) -> bool:
    """Whether a module has the parameters of transformers' experts."""
    found = [module._parameters.get(name) for name in _WEIGHTS]
    return all(p is not None and p.dim() == 3 for p in found)


def experts_swap(module: nn.Module, save: str, chunks: int | None) -> Swap | str:
    """Return the swap of experts, or why they cannot be swapped."""
    others = [name for name, _ in module.named_parameters() if name not in (*_WEIGHTS, *_BIASES)]
    if others:
        return f"its experts have other parameters: {', '.join(others)}"
    gate_up, down = [module._parameters[name] for name in _WEIGHTS]
    assert gate_up is not None
    assert down is not None
    first, last = gate_up.shape[1:], down.shape[1:]
    sides = [turned for turned in (False, True) if _fits(first, last, turned)]
    if len(sides) == 2:
        # square: either could be
        sides = [bool(getattr(module, "is_transposed", False))]
    names = tuple(inspect.signature(module.forward).parameters)
    if len(names) != 3:
        return f"its forward takes {len(names)} arguments, not x, index and scores"
    gating = _gating_of(module)
    if not sides or gating is None:
        return "its weights have other shapes" if not sides else "its gating is none of ours"
    # sizes may change, as in expert parallelism
    held = tuple(
        (name, value)
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and type(value) is not int
        if is_simple(value) or is_function(value)
    )
    held += tuple((name, type(child)) for name, child in module._modules.items())
    name = gating if isinstance(gating, str) else "clamped SwiGLU"
    details = [name, *(["weights as [in, out]"] if sides[0] else []), *of_chunks(chunks)]
    return Swap(
        "experts",
        f"{type(module).__name__} -> experts ({', '.join(details)})",
        subclass(FusedExperts, type(module)),
        {
            "_fusedckpt_match": ExpertsMatch(gating, sides[0], names, held),
            **{"save": save, "chunks": chunks},
        },
        features=(first[0 if sides[0] else 1],),
        is_sized=True,
    )


def _fits(first: Sequence[int], last: Sequence[int], turned: bool) -> bool:
    (n, k), (d, f) = (first[::-1], last[::-1]) if turned else (first, last)
    return n == 2 * f and k == d


def _gating_of(module: Any) -> Gating | None:
    """Return the gating that computes what the module's own does, None if none of ours does."""
    near = torch.linspace(-30, 30, 601, dtype=torch.float64)
    z = torch.stack([near, near[torch.arange(len(near)) * 97 % len(near)]]).T.reshape(1, -1)
    gate = getattr(module, "_apply_gate", None)
    act: Any = getattr(module, "act_fn", None)
    with undisturbed("cpu"), torch.no_grad(), torch.device("cpu"):
        for gating in _candidates(module):
            pair = _split(z, gating)
            try:
                found = gate(z.clone()) if callable(gate) else act(pair[0].clone()) * pair[1]
            except Exception:  # arbitrary code of others
                return None
            if torch.allclose(found, gated(*pair, gating), rtol=1e-9, atol=1e-9):
                return gating
    return None


def _split(z: Tensor, gating: Gating) -> Any:
    is_interleaved = not isinstance(gating, str) and gating.is_interleaved
    return (z[:, ::2], z[:, 1::2]) if is_interleaved else z.chunk(2, 1)


def _candidates(module: nn.Module) -> Iterator[Gating]:
    """Yield gatings, with the numbers of the module."""
    yield from ACTIVATIONS
    numbers = {float(v) for v in vars(module).values() if type(v) is float and v > 0}
    for limit, alpha in product(numbers, {1.0, *numbers}):
        for offset, is_interleaved in product((0.0, 1.0), (True, False)):
            yield ClampedSwiGLU(alpha, limit, offset, is_interleaved)


def difference(module: nn.Module, swap: Swap) -> str | None:
    """Return how a swap changes outputs or gradients, None if it does not; see `verification`."""
    own = next(module.parameters()).dtype
    sizes = small_sizes(module)
    with undisturbed("cpu"):
        for scale in SCALES:
            found: list[Errors] = []
            for seed in range(2):
                draw = Draw(module, swap.features, sizes, seed=seed)
                runs = ((torch.float64, None), (own, None), (own, swap))
                try:
                    truth, eager, ours = [_results(module, draw, scale, *run) for run in runs]
                except Exception as error:  # arbitrary code of others
                    return f"its check failed: {type(error).__name__}: {error}"
                found = found or [Errors(own) for _ in ours]
                for errors, *three in zip(found, ours, eager, truth, strict=True):
                    errors.add(*three)
            floor = FLOOR if scale == 1 else 8 * FLOOR
            problems = [errors.problem(floor=floor, least=scale) for errors in found]
            for name, problem in zip(
                ("output", "gradient of x", "of scores"), problems, strict=False
            ):
                if problem is not None:
                    return f"{name} at inputs of {scale:g}: {problem}"
            if any(problems):
                return f"gradient of a parameter: {next(filter(None, problems))}"
    return None


def _results(
    module: nn.Module, draw: Draw, scale: float, dtype: torch.dtype, swap: Swap | None
) -> list[Tensor]:
    """Return the output, and the gradients of x, scores and parameters, of a replica."""
    own = next(module.parameters()).dtype

    def leaf(value: Tensor) -> Tensor:
        # rounded to the module's dtype first, as inputs are exact for both
        return value.to(own).to(dtype).requires_grad_(True)

    made = {}
    for key, value in draw.values.items():
        made[key] = leaf(value * value.shape[-1] ** -0.5 if value.dim() == 3 else value)
    num = next(value.shape[0] for value in draw.values.values())
    x, generator = leaf(draw.x.flatten(0, 1) * scale), torch.Generator().manual_seed(1)
    order = torch.rand(len(x), num, generator=generator, dtype=torch.float64, device="cpu")
    values, index = order.topk(min(2, num))
    scores = leaf(values)
    clone = _replica(module, made, draw.sizes, "eager", swap)
    y = type(clone).forward(clone, x, index, scores)
    dy = torch.ones_like(y).cumsum(-1).sin()
    wanted = [x, scores, *made.values()]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def _replica(
    module: nn.Module, made: dict[int, Tensor], sizes: Any, implementation: str, swap: Swap | None
) -> Any:
    """Return a replica by an implementation of transformers', swapped if a swap is given."""
    clone = replica(module, lambda p, _: made[id(p)], training=True, sizes=sizes)
    if "config" in vars(clone):
        clone.config = copy.copy(clone.config)
        clone.config._experts_implementation_internal = implementation
    if swap is not None:
        match = swap.attributes["_fusedckpt_match"]._replace(held=())
        swap.apply(clone)
        clone._fusedckpt_match = match
    return clone


def saved_per_token(module: nn.Module, swap: Swap) -> tuple[float, float] | None:
    """Return the bytes saved per token before and after, for two experts each; see `verification`.

    None where the original does not run on meta tensors. Those of transformers do in bfloat16
    alone, which is scaled to the module's dtype.
    """
    dtype, tokens, found = torch.bfloat16, 64, []
    scale = next(module.parameters()).itemsize / dtype.itemsize
    with undisturbed("meta"):
        for change in (None, swap):
            made = {
                id(p): torch.empty(p.shape, dtype=dtype, device="meta", requires_grad=True)
                for p in module.parameters()
            }
            clone = _replica(module, made, {}, "grouped_mm", change)
            x = torch.empty(tokens, *swap.features, dtype=dtype, device="meta", requires_grad=True)
            scores = torch.empty(tokens, 2, device="meta", requires_grad=True)
            index = torch.empty(tokens, 2, dtype=torch.int64, device="meta")
            with saved_tensors() as saved:
                try:
                    y = type(clone).forward(clone, x * 1, index, scores * 1)
                except Exception:  # arbitrary code of others, on a device that it may not know
                    return None
            found.append(scale * saved.nbytes / tokens)
            del y
    return found[0], found[1]
