"""Drop-in PyTorch layers that keep only their inputs for backward and recompute the rest."""

from fusedckpt import functional
from fusedckpt._dispatch import paths
from fusedckpt.blocks import MLP, GatedMLP, NormLinear
from fusedckpt.levels import saving
from fusedckpt.linear import Linear
from fusedckpt.norm import LayerNorm, RMSNorm
from fusedckpt.sequential import Sequential
from fusedckpt.spec import NormSpec
from fusedckpt.swap import FuseReport, fuse, unfuse

__all__ = [
    "MLP",
    "FuseReport",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "NormLinear",
    "NormSpec",
    "RMSNorm",
    "Sequential",
    "functional",
    "fuse",
    "paths",
    "saving",
    "unfuse",
]

__version__ = "0.1.0"
