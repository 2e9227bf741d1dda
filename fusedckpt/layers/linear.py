"""A linear and its activation that save only their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, levels
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import validate
from fusedckpt.blocks.builder import ONE_LINEAR, Linears
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.programs import LinearOptions

_LINEAR_NAMES = Linears(ONE_LINEAR)


def linear_act(
    x: Tensor,
    weight: Tensor | LoRA,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    *,
    save: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return act(F.linear(x, weight, bias)), saving only x for backward.

    Args:
        x: [..., in_features], float32, bfloat16, float16 or float64.
        weight: [out_features, in_features], of x's dtype; under autocast of any dtype but float64.
            Or a `LoRA` record, or a quantized weight, as in `mlp`.
        bias: [out_features] or None.
        activation: identity (or None), relu, relu2, leaky_relu, gelu (erf), gelu_tanh, quick_gelu,
            silu, sigmoid, tanh, softplus, mish, or their names in torch and transformers.
        save: "inputs" (the default) saves x, in_features elements per token, and recomputes the
            pre-activation in backward: one more GEMM. "preact" saves the pre-activation too,
            out_features elements per token, and recomputes no GEMM.
        kernel: "fused" (one Triton GEMM with the activation in its epilogue) or "split" (the
            vendor's GEMM, then an elementwise kernel in place); by default split.

    Returns:
        [..., out_features], in the dtype that F.linear would give.

    Raises:
        ValueError: invalid shapes, devices, activation, level or kernel, or kernel="fused" where
            Triton cannot run.
        TypeError: a tensor is not dense or not floating point (DTensors and nested tensors are not
            dense), F.linear rejects the dtypes, or an argument has another type.

    Other tensor subclasses, and inference tensors where gradients are needed, run in eager.
    """
    name = "linear_act"
    options = LinearOptions(name, name, _LINEAR_NAMES, activation, save=save, kernel=kernel)
    return run_layer(options, x, (), [(weight, bias)])


class Linear(nn.Linear):
    """nn.Linear followed by an activation, which saves only its input [..., in_features].

        y = act(F.linear(x, weight, bias))

    Constructor, parameters and state_dict are nn.Linear's; `activation` and `save`
    are those of `functional.linear_act`, with no activation by default, and so are the errors.
    With an activation, backward recomputes the GEMM, or only the activation with save="preact".
    """

    save_levels = LEVELS_OF["linear_act"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        save: str = "inputs",
    ):
        activation = validate.activation("Linear", activation)
        levels.check("Linear", save, LEVELS_OF["linear_act"])
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.linear_sizes("Linear", sizes, bias, device, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        options = LinearOptions(
            name="Linear",
            caller="Linear",
            linears=_LINEAR_NAMES,
            activation=self.activation,
            default=self.save,
            is_module=True,
        )
        pair = self.weight, self.bias
        y = run_layer(options, input, (), [pair])
        return options.reference(input, (), [pair]) if y is None else y

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the activation and level after it."""
        return f"{super().extra_repr()}, activation={self.activation}, save={self.save}"
