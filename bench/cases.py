"""What `python -m bench run` measures: each case once, over the functions of either library.

A case calls functions of the library that it is given: `fusedckpt.reference` is its eager form,
`fusedckpt.functional` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench.defaults import CASE_NAMES
from bench.layers import EPS, LAYERS, decoder_layer, layer_shapes, norm_of, stack
from bench.results import Load
from bench.sizes import SEQUENCE, Size
from fusedckpt import functional, reference

__all__ = ["CASES", "Case", "Function", "Tensors", "Way", "draw", "load_of"]

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Shapes = tuple[tuple[int, ...], ...]
Tensors = Sequence[Tensor]


class Case(NamedTuple):
    """How a library's functions are called, on which parameters, with which choices.

    call: (lib, size, x, *parameters, **options) -> the result; shapes: of the parameters;
    num_inputs: tensors of x's shape in front of them; sequences: x is [B, S, D], not [T, D].
    """

    call: Callable[..., Any]
    shapes: Callable[[Size], Shapes]
    levels: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    num_inputs: int = 1
    sequences: bool = False

    def eager(self, size: Size) -> Function:
        """The eager form, of x and the parameters."""
        return partial(self.call, reference, size)

    def fused(self, size: Size) -> Function:
        """Ours, of x and the parameters, with `save` and `kernel` where there are any."""
        return partial(self.call, functional, size)

    def seq(self, size: Size, tokens: int) -> int | None:
        """Return how many tokens attend to one another; None in a case without sequences.

        Raises ValueError where sequences would not be equally long.
        """
        if not self.sequences:
            return None
        seq = min(tokens, SEQUENCE if size.tokens is None else size.tokens // 2)
        if tokens % seq:
            raise ValueError(
                f"{tokens} tokens are no multiple of {seq}, a sequence of decoder_layer and stack"
            )
        return seq

    def inputs(self, size: Size, tokens: int) -> Shapes:
        """Return the shapes of all tensors, x first. Raises ValueError as `seq` does."""
        seq = self.seq(size, tokens)
        x = (tokens, size.dim) if seq is None else (tokens // seq, seq, size.dim)
        return (*[x] * self.num_inputs, *self.shapes(size))


class Way(NamedTuple):
    """One way of computing a case: a function of its inputs, or why there is none.

    prepare: inputs -> those that the function takes, where it wants weights laid out in its own
    way; restore: its gradients -> the case's.
    """

    fn: Function | None
    missing: str | None = None
    prepare: Callable[[Tensors], Tensors] | None = None
    restore: Callable[[Tensors], Tensors] | None = None


def _rms_norm(lib: Any, size: Size, x: Tensor, weight: Tensor) -> Any:
    return lib.rms_norm(x, (size.dim,), weight, EPS)


def _layer_norm(lib: Any, size: Size, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return lib.layer_norm(x, (size.dim,), weight, bias)


def _add_rms_norm(lib: Any, size: Size, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return lib.add_rms_norm(x, residual, (size.dim,), weight, EPS)


def _linear_act(lib: Any, size: Size, *inputs: Tensor, **options: Any) -> Any:
    return lib.linear_act(*inputs, **options)


def _norm_linear(lib: Any, size: Size, x: Tensor, norm_weight: Tensor, *weights: Tensor) -> Any:
    return lib.norm_linear(x, norm_of(norm_weight), weights)


def _mlp(lib: Any, size: Size, *inputs: Tensor, **options: Any) -> Any:
    return lib.mlp(*inputs, **options)


def _gated_mlp(lib: Any, size: Size, *inputs: Tensor, **options: Any) -> Any:
    return lib.gated_mlp(*inputs, **options)


def _block(
    lib: Any, size: Size, x: Tensor, norm_weight: Tensor, *weights: Tensor, **options: Any
) -> Any:
    return lib.gated_mlp(x, *weights, norm=norm_of(norm_weight), residual=True, **options)


def _vector(size: Size) -> Shapes:
    return ((size.dim,),)


def _mlp_shapes(size: Size) -> Shapes:
    return (size.hidden, size.dim), (size.hidden,), (size.dim, size.hidden), (size.dim,)


def _gated_shapes(size: Size) -> Shapes:
    up = (size.hidden, size.dim)
    return up, up, up[::-1]


LEVELS, GATED_LEVELS = ("inputs", "preact"), ("inputs", "gate", "preact")
FUSED, HYBRID = ("split", "fused"), ("split", "hybrid")

_ROWS = (
    Case(_rms_norm, _vector),
    Case(_layer_norm, lambda size: _vector(size) * 2),
    Case(_add_rms_norm, _vector, num_inputs=2),
    Case(_linear_act, lambda size: _mlp_shapes(size)[:2], LEVELS, FUSED),
    Case(_norm_linear, lambda size: layer_shapes(size)[:4]),
    Case(_mlp, _mlp_shapes, LEVELS, HYBRID),
    Case(_gated_mlp, _gated_shapes, GATED_LEVELS, HYBRID),
    Case(_block, lambda size: _vector(size) + _gated_shapes(size), GATED_LEVELS, HYBRID),
    Case(decoder_layer, layer_shapes, GATED_LEVELS, sequences=True),
    Case(stack, lambda size: layer_shapes(size) * LAYERS, LEVELS, sequences=True),
)
CASES: dict[str, Case] = dict(zip(CASE_NAMES, _ROWS, strict=True))


def draw(
    case: Case, size: Size, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Draw x, which requires grad, and the case's parameters; results are of order one.

    The same numbers on every device and in every dtype, up to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    inputs: list[Tensor] = []
    for index, shape in enumerate(case.inputs(size, tokens)):
        value = torch.randn(shape, generator=generator)
        if index < case.num_inputs:
            inputs.append(value.to(device, dtype).requires_grad_())
            continue
        if len(shape) == 2:
            value /= shape[1] ** 0.5
        inputs.append(nn.Parameter(value.to(device, dtype)))
    return inputs


def load_of(case: Case, size: Size, tokens: int, dtype: torch.dtype) -> Load:
    """Count what any way of computing a case must do, on tensors without data.

    FLOPs are those of eager's GEMMs, attention counted without its mask; bytes are each input and
    result read or written once, in backward also the gradients.
    """
    shapes = case.inputs(size, tokens)
    inputs = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    with FlopCounterMode(display=False) as forward:
        found = case.eager(size)(*inputs)
    outputs = (found,) if isinstance(found, Tensor) else found
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs])
    given, made = sum(x.nbytes for x in inputs), sum(y.nbytes for y in outputs)
    flops = forward.get_total_flops(), backward.get_total_flops()
    return Load(*flops, given + made, 2 * given + made)
