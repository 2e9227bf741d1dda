"""The functions behind the modules, with torch.nn.functional's argument order."""

from fusedckpt.layers.linear import linear_act
from fusedckpt.layers.mlp import gated_mlp, mlp
from fusedckpt.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedckpt.layers.norm_linear import norm_linear

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gated_mlp",
    "layer_norm",
    "linear_act",
    "mlp",
    "norm_linear",
    "rms_norm",
]
