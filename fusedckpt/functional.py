"""The functions behind the modules, with torch.nn.functional's argument order."""

import torch

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.kernels.routed import has_kernel
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


def backends(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    """Name the backend that each function takes for tensors of this device and dtype.

    Returns:
        Function name -> "eager" (FUSEDCKPT_DISABLE is set), "triton", "interpreter" or "aten".

    Raises:
        TypeError, ValueError: `device` is not a device, or the functions do not take `dtype`.
    """
    arguments.device("backends", device)
    arguments.dtype("backends", dtype)
    path = "eager" if dispatch.DISABLED else dispatch.path_of(torch.device(device), dtype)
    by_function: dict[str, str] = dict.fromkeys(__all__, path)
    # experts multiply by torch's own kernel where there is one
    if path == "triton" and has_kernel(torch.device(device), dtype):
        by_function["experts"] = "aten"
    return by_function
