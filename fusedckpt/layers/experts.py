"""Mixtures of experts that save only their input, the routing and its scores.

Elements saved and GEMM FLOPs recomputed at each level, per token, for K experts of hidden width F;
eager saves K (2 D + 4 F) and more:

    level      saved            backward recomputes
    inputs     D                gate and up: 4 D F K
    gate       D + K F          up: 2 D F K
    preact     D + 2 K F        nothing but elementwise work

and 12 K bytes of index (int64) and scores (float32). The down GEMM is never recomputed, nor is its
result saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks.experts import ExpertOptions, kinds_in
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.kernels.gating import ClampedSwiGLU


def experts(
    x: Tensor,
    index: Tensor,
    scores: Tensor,
    gate_up: Tensor | LoRA,
    down: Tensor | LoRA,
    *,
    activation: str | ClampedSwiGLU = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_transposed: bool = False,
    save: str | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Return the sum of each token's experts, gated MLPs, times their scores.

        for e, s in zip(index[t], scores[t]):
            gate, up = F.linear(x[t], gate_up[e], gate_up_bias[e]).chunk(2)
            y[t] += s * F.linear(act(gate) * up, down[e], down_bias[e])

    Saves x, index and scores; see the table in fusedckpt/layers/experts.py for the levels.

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        index: [..., K], int64 or int32: the experts of each token. An expert of E or more, as
            expert parallelism marks experts of other ranks, adds nothing.
        scores: [..., K], floating point; they get a gradient. They multiply the hidden layer: in
            float16 one above 1 may overflow where eager, which multiplies the result, does not.
        gate_up: [E, 2 F, D] of x's dtype, under autocast of any dtype but float64; gate's rows
            first. Or a weight that dequantizes, or a `LoRA` record with A [E, r, D], B [E, 2 F, r]
            and no dropout, see `mlp`; A and B are cast to the dtype of the weight, as by peft.
        down: [E, D_out, F], as gate_up.
        activation: a name as in `linear_act`, or a `ClampedSwiGLU` record.
        gate_up_bias, down_bias: [E, 2 F] and [E, D_out], or None.
        is_transposed: whether the weights lie as [E, D, 2 F] and [E, F, D_out], and A and B
            accordingly, as [E, D, r] and [E, r, 2 F].
        save: "inputs" (the default), "gate" or "preact".
        chunks: into how many chunks forward and backward cut the tokens, which divides their
            temporaries: 3 F and 3 D elements for each of a token's K experts. Weight gradients then
            accumulate in float32. The default is one, unless the temporaries exceed 512 MiB and
            chunks save more than the accumulators take.

    Returns:
        [..., D_out]. Each chunk waits for the device once, to learn where each expert's rows end;
        not where a kernel multiplies, on a GPU. Weights that dequantize are multiplied in a loop.

    Raises:
        ValueError: invalid shapes, devices, activation, level or chunks; a negative index; an
            adapter with dropout.
        TypeError: tensors are not dense, or of dtypes that do not fit.

    Source: Guo et al., "SonicMoE", arXiv 2512.14080: the gradient of a score is a sum of dh * h.
    """
    kinds = kinds_in(activation)
    options = ExpertOptions("experts", activation, is_transposed, save, chunks=chunks, kinds=kinds)
    weights = [(gate_up, gate_up_bias), (down, down_bias)]
    return run_layer(options, x, (index, scores), weights)


class Experts(nn.Module):
    """A mixture of gated MLPs; only the input, the routing and its scores are saved for backward.

    Args:
        num_experts, in_features, hidden_features: E, D and F.
        activation: see `functional.experts`.
        bias, device, dtype: of both weights, as nn.Linear has them.
        save, chunks: see `functional.experts`.

    Parameters, as in transformers: `gate_up_proj` [E, 2 F, D], `down_proj` [E, D, F] and, with
    bias, `gate_up_proj_bias` and `down_proj_bias`, all drawn as nn.Linear's.
    """

    save_levels = LEVELS_OF["experts"]

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        activation: str | ClampedSwiGLU = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        save: str = "inputs",
        chunks: int | None = None,
    ):
        name = type(self).__name__
        sizes = {"num_experts": num_experts}
        sizes |= {"in_features": in_features, "hidden_features": hidden_features}
        arguments.linear_sizes(name, sizes, bias, device, dtype)
        self._options(activation, save, chunks).check(None)
        super().__init__()
        self.activation = activation
        self.save = save
        self.chunks = chunks
        shapes = {
            "gate_up_proj": (num_experts, 2 * hidden_features, in_features),
            "down_proj": (num_experts, in_features, hidden_features),
        }
        for key, shape in shapes.items():
            weight = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(key, nn.Parameter(weight))
            bias_of_weight = (
                nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
            )
            self.register_parameter(f"{key}_bias", bias_of_weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of each expert as nn.Linear draws its own."""
        for weight, bias in self._pairs():
            bound = max(1, weight.shape[2]) ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs of weight and bias."""
        keys = ("gate_up_proj", "down_proj")
        return [(getattr(self, key), getattr(self, f"{key}_bias")) for key in keys]

    @staticmethod
    def _options(activation: Any, save: str, chunks: int | None) -> ExpertOptions:
        return ExpertOptions(
            "Experts",
            activation,
            default=save,
            chunks=chunks,
            is_module=True,
            kinds=kinds_in(activation),
        )

    def forward(self, input: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        """Map [..., D] to [..., D] by the experts `index` [..., K], weighted by `scores`."""
        options = self._options(self.activation, self.save, self.chunks)
        routing = (index, scores)
        pairs = self._pairs()
        y = run_layer(options, input, routing, pairs)
        return options.reference(input, routing, pairs) if y is None else y

    def extra_repr(self) -> str:
        """Describe the sizes and settings."""
        (first, _), (down, _) = self._pairs()
        settings = [f"{first.shape[0]}, {first.shape[2]}, {down.shape[2]}"]
        settings += [f"{key}={getattr(self, key)}" for key in ("activation", "save")]
        return ", ".join([*settings, *([] if self.chunks is None else [f"chunks={self.chunks}"])])
