"""The functions behind the modules, with torch.nn.functional's argument order."""

from fusedckpt.layers.approximate import regelu2, resilu2
from fusedckpt.layers.experts import experts
from fusedckpt.layers.gated_norm import gated_rms_norm
from fusedckpt.layers.head import linear_cross_entropy, token_logprobs
from fusedckpt.layers.linear import linear_act
from fusedckpt.layers.mlp import gated_mlp, mlp
from fusedckpt.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedckpt.layers.norm_linear import norm_linear

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "experts",
    "gated_mlp",
    "gated_rms_norm",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "mlp",
    "norm_linear",
    "regelu2",
    "resilu2",
    "rms_norm",
    "token_logprobs",
]
