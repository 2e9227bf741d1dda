"""The functions behind the modules, with torch.nn.functional's argument order."""

from fusedckpt.linear import linear_act
from fusedckpt.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "linear_act", "rms_norm"]
