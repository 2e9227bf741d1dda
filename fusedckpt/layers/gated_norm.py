"""RMSNorm with a gate, of mixers' results: saves only x and the gate.

Backward recomputes statistics, the normalized rows and the gate's activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments
from fusedckpt.blocks.gated_norm import GatedNormOptions
from fusedckpt.blocks.layer_function import run_layer


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    normalized_shape: int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    groups: int = 1,
    gates_first: bool = False,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return rms_norm(x) * act(gate), or rms_norm(x * act(gate)), saving only x and the gate.

        y = F.rms_norm(x, (normalized_shape,), weight, eps) * F.silu(gate)
        y = F.rms_norm(x * F.silu(gate), (normalized_shape,), weight, eps)  # gates_first

    All is computed in float32, float64 for float64, and rounded once.

    Args:
        x: [..., N], float32, bfloat16, float16 or float64.
        gate: [..., N], the shape of x, of any floating dtype.
        normalized_shape: N.
        weight: [N], of any floating dtype, or None.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype.
        activation: of the gate, see `functional.linear_act`.
        groups: how many groups of N / groups columns are normalized, each by itself.
        gates_first: whether x is multiplied by act(gate) before the norm, as in Mamba 2.
        offset: added to the weight.
        cast: "llama" rounds the normalized x to x's dtype before the weight; where the gate is
            first, the result has the promoted dtype then. "torch" and "gemma" round at the end.

    Returns:
        The shape and dtype of x, but for `cast`.

    Raises:
        ValueError: shapes that do not fit each other, or invalid options.
        TypeError: tensors are not dense or not floating point, or an argument has another type.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060 (Mamba 2's gated norm).
    """
    options = GatedNormOptions(
        normalized_shape, eps, activation, groups, gates_first, offset=offset, cast=cast
    )
    return run_layer(options, x, (gate, weight))


class GatedRMSNorm(nn.Module):
    """An RMSNorm with a gate that saves only x and the gate, 2 N elements a row.

    `functional.gated_rms_norm` as a module, with a weight [N] that starts at 1 - offset.
    """

    # fused, but without a choice
    save_levels = ()

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
        groups: int = 1,
        gates_first: bool = False,
        offset: float = 0.0,
        cast: str = "torch",
    ):
        super().__init__()
        name = "GatedRMSNorm"
        affine = arguments.flag(name, "elementwise_affine", elementwise_affine)
        arguments.factory(name, device, dtype)
        options = GatedNormOptions(
            normalized_shape,
            eps,
            activation,
            groups,
            gates_first,
            offset=offset,
            cast=cast,
            name=name,
            is_module=True,
        )
        options.check(None, affine or None)
        self.normalized_shape = options.sizes()
        self.options = options._replace(normalized_shape=self.normalized_shape)
        weight = torch.empty(self.normalized_shape, device=device, dtype=dtype) if affine else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale, weight + offset, to one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.options.offset)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize x [..., N] with a gate [..., N]."""
        tensors = gate, self.weight
        y = run_layer(self.options, x, tensors)
        return self.options.reference(x, tensors) if y is None else y

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def extra_repr(self) -> str:
        """Describe the options."""
        options = self.options
        order = "norm(x * act(gate))" if options.gates_first else "norm(x) * act(gate)"
        words = f"{self.normalized_shape[0]}, eps={options.eps}, groups={options.groups}"
        return f"{words}, {order}, activation={options.activation}, cast={options.cast}"
