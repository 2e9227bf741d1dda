"""Layers without state for Hugging Face's `kernels`, which `integrations.hub` puts into a folder.

`kernelize` sets their forwards on a model's own modules, whose parameters they read. A layer saves
its input for backward, and makes the rest again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fusedckpt.kernels.activations import CANONICAL, activation_name_of
from fusedckpt.layers.mlp import gated_mlp
from fusedckpt.layers.norm import NormSpec, rms_norm

__all__ = ["RMSNorm", "RMSNormMLP", "RMSNormMLPLayout"]


def _renamings(norm: str, mlp: str) -> list[Any]:
    """Return how the names of a checkpoint become those of a model with `RMSNormMLPLayout`."""
    try:
        from transformers.core_model_loading import WeightRenaming  # noqa: PLC0415
    except ImportError:
        # a layout is of transformers alone
        return []
    linears = ("gate_proj", "up_proj", "down_proj")
    return [WeightRenaming(rf"\.{mlp}\.{name}\.", f".{norm}.{name}.") for name in linears]


class RMSNorm(nn.Module):
    """The RMSNorm that transformers' models register as "RMSNorm": x [..., D], weight [D].

    Saves x. It reads `weight` and `variance_epsilon`, or `eps`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return weight * (hidden_states / rms(hidden_states)), rounded as Llama's is."""
        weight: Any = self.weight
        return rms_norm(hidden_states, weight.shape, weight, _eps_of(self), cast="llama")


class RMSNormMLP(nn.Module):
    """An RMSNorm and the gated MLP behind it as one layer: x [..., D].

    Saves x; backward makes the norm and both first GEMMs again. It reads the parameters of an
    `RMSNormMLPLayout`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return down_proj(act(gate_proj(n)) * up_proj(n)), n the norm of hidden_states."""
        gate_proj: Any = self.gate_proj
        up_proj: Any = self.up_proj
        down_proj: Any = self.down_proj
        weight: Any = self.weight
        activation: Any = self.activation
        return gated_mlp(
            hidden_states,
            gate_proj.weight,
            up_proj.weight,
            down_proj.weight,
            activation,
            gate_bias=gate_proj.bias,
            up_bias=up_proj.bias,
            down_bias=down_proj.bias,
            norm=NormSpec("rms", weight, eps=_eps_of(self), cast="llama"),
        )


class RMSNormMLPLayout(nn.Module):
    """The norm's weight and the MLP's linears, which `RMSNormMLP` reads, in a transformers model.

    transformers puts it where the norm was and nn.Identity where the MLP was. Checkpoints keep
    their names: `conversion_mapping` renames the weights when one is loaded or saved.
    """

    conversion_mapping = _renamings("post_attention_layernorm", "mlp")

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        """Take the parameters of modules as transformers' LlamaRMSNorm and LlamaMLP.

        Raises:
            ValueError: the MLP has other linears, or an activation that is not known.
        """
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = _eps_of(norm)
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj
        self.activation = _activation_of(mlp)


def _eps_of(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _activation_of(mlp: Any) -> str:
    """Return the name of an MLP's activation."""
    act_fn = getattr(mlp, "act_fn", None)
    name = activation_name_of(act_fn) if isinstance(act_fn, nn.Module) else None
    # transformers' own classes of activations are known by the name that the config has
    name = name or CANONICAL.get(getattr(getattr(mlp, "config", None), "hidden_act", ""))
    linears = {child for child, _ in mlp.named_children()} - {"act_fn"}
    if name is None or linears != {"gate_proj", "up_proj", "down_proj"}:
        raise ValueError(
            "RMSNormMLPLayout: expected an MLP of gate_proj, up_proj, down_proj and an activation "
            f"among {', '.join(sorted(CANONICAL))}, got {mlp}"
        )
    return name
