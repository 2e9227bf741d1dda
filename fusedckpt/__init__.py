"""Drop-in PyTorch layers that keep only their inputs for backward and recompute the rest."""

from fusedckpt import functional
from fusedckpt._dispatch import paths
from fusedckpt.blocks import MLP, GatedMLP, NormLinear
from fusedckpt.checkpointing import checkpoint, checkpoint_sequential, is_recomputing
from fusedckpt.levels import saving
from fusedckpt.linear import Linear
from fusedckpt.norm import LayerNorm, RMSNorm
from fusedckpt.packing import pack_gate_up, repack_gate_up, unpack_gate_up
from fusedckpt.planner import plan
from fusedckpt.plans import Plan
from fusedckpt.reporting import MemoryReport, report
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
    "MemoryReport",
    "NormLinear",
    "NormSpec",
    "Plan",
    "RMSNorm",
    "Sequential",
    "checkpoint",
    "checkpoint_sequential",
    "functional",
    "fuse",
    "is_recomputing",
    "pack_gate_up",
    "paths",
    "plan",
    "repack_gate_up",
    "report",
    "saving",
    "unfuse",
    "unpack_gate_up",
]

__version__ = "0.1.0"
