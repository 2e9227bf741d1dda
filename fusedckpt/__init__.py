"""Drop-in PyTorch layers that keep only their inputs for backward and recompute the rest."""

from fusedckpt import functional
from fusedckpt._dispatch import paths
from fusedckpt.levels import saving
from fusedckpt.linear import Linear
from fusedckpt.norm import LayerNorm, RMSNorm
from fusedckpt.swap import FuseReport, fuse, unfuse

__all__ = [
    "FuseReport",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "functional",
    "fuse",
    "paths",
    "saving",
    "unfuse",
]

__version__ = "0.1.0"
