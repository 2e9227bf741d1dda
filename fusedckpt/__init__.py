"""Drop-in PyTorch layers that keep only their inputs for backward and recompute the rest."""

from fusedckpt import functional
from fusedckpt._dispatch import paths
from fusedckpt.blocks import MLP, GatedMLP, NormLinear
from fusedckpt.checkpointing import checkpoint, checkpoint_sequential, is_recomputing
from fusedckpt.levels import saving
from fusedckpt.linear import Linear
from fusedckpt.norm import LayerNorm, RMSNorm
from fusedckpt.sequential import Sequential
from fusedckpt.spec import NormSpec
from fusedckpt.swap import FuseReport, fuse, unfuse
from fusedckpt.wrapper import Checkpoint

__all__ = [
    "MLP",
    "Checkpoint",
    "FuseReport",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "NormLinear",
    "NormSpec",
    "RMSNorm",
    "Sequential",
    "checkpoint",
    "checkpoint_sequential",
    "functional",
    "fuse",
    "is_recomputing",
    "paths",
    "saving",
    "unfuse",
]

__version__ = "0.1.0"
