"""Drop-in PyTorch layers that save only their inputs for backward and recompute the rest."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusedckpt import functional
from fusedckpt.autograd.accumulation import accumulate_in_fp32
from fusedckpt.autograd.levels import saving
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.quantized import QuantizedWeight, register_quantized
from fusedckpt.blocks.shown import explain
from fusedckpt.checkpointing.entry import checkpoint
from fusedckpt.checkpointing.module_calls import is_recomputing
from fusedckpt.checkpointing.prefetch import prefetch_recompute
from fusedckpt.checkpointing.regions import region
from fusedckpt.checkpointing.sequential import checkpoint_sequential
from fusedckpt.checkpointing.wrapper import checkpoint_module
from fusedckpt.deprecated import RENAMED, warn_of
from fusedckpt.functional import backends
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.fuser import fuse, unfuse
from fusedckpt.layers.approximate import ReGELU2, ReSiLU2
from fusedckpt.layers.experts import ClampedSwiGLU, Experts
from fusedckpt.layers.gated_norm import GatedRMSNorm
from fusedckpt.layers.head import LinearCrossEntropy, TokenLogprobs
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.mlp import MLP, GatedMLP
from fusedckpt.layers.ms_norm import MSLayerNorm, MSRMSNorm, merge_affine, unmerge_affine
from fusedckpt.layers.norm import LayerNorm, NormSpec, RMSNorm
from fusedckpt.layers.norm_linear import NormLinear
from fusedckpt.layers.sequential import Sequential
from fusedckpt.planning.max_size import MaxSizes, find_max_size
from fusedckpt.planning.planner import plan
from fusedckpt.planning.plans import Plan
from fusedckpt.reporting.memory_report import MemoryReport, report
from fusedckpt.reporting.meta_step import estimate
from fusedckpt.reporting.out_of_memory import report_on_oom

if TYPE_CHECKING:
    from fusedckpt import parallel

__all__ = [
    "MLP",
    "ClampedSwiGLU",
    "Experts",
    "FuseReport",
    "GatedMLP",
    "GatedRMSNorm",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LoRA",
    "MSLayerNorm",
    "MSRMSNorm",
    "MaxSizes",
    "MemoryReport",
    "NormLinear",
    "NormSpec",
    "Plan",
    "QuantizedWeight",
    "RMSNorm",
    "ReGELU2",
    "ReSiLU2",
    "Sequential",
    "TokenLogprobs",
    "accumulate_in_fp32",
    "backends",
    "checkpoint",
    "checkpoint_module",
    "checkpoint_sequential",
    "estimate",
    "explain",
    "find_max_size",
    "functional",
    "fuse",
    "is_recomputing",
    "merge_affine",
    "parallel",
    "plan",
    "prefetch_recompute",
    "region",
    "register_quantized",
    "report",
    "report_on_oom",
    "saving",
    "unfuse",
    "unmerge_affine",
]

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    # torch's tensor parallelism, which it is made for, takes a second to import
    if name == "parallel":
        return import_module("fusedckpt.parallel")
    if name in RENAMED:
        warn_of(f"fusedckpt.{name}", f"fusedckpt.{RENAMED[name]}")
        return globals()[RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
