"""What the commands choose among and take by default, readable without torch."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BLOCKS",
    "CAPACITY_DEFAULTS",
    "CASE_NAMES",
    "CLASSICS_DEFAULTS",
    "DEMO_DEFAULTS",
    "MODEL_NAMES",
    "RUN_DEFAULTS",
    "TUNE_DEFAULTS",
]

# sized for a minute: on two CPU cores, on one data-centre GPU
DEMO_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "steps": 32,
        "layers": 4,
        "dim": 256,
        "seq": 128,
        "batch": 16,
        "dtype": "float32",
    },
    "cuda": {
        "steps": 200,
        "layers": 12,
        "dim": 1024,
        "seq": 1024,
        "batch": 8,
        "dtype": "bfloat16",
    },
}

MODEL_NAMES = ("own", "llama", "gpt2", "bert", "vit")

CASE_NAMES = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "linear_act",
    "norm_linear",
    "mlp",
    "gated_mlp",
    "norm_gated_mlp_residual",
    "decoder_layer",
    "stack",
)

RUN_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"size": "cpu", "dtype": "float32", "repeat": 10},
    "cuda": {"size": "llama-3-8b", "dtype": "bfloat16", "repeat": 50},
}

# the classic sizes, but for the convolutions' width on a CPU: 320 channels would be 92 million
# parameters and 1.1 TFLOP a step; the stack has more activations than parameters
_CLASSIC: dict[str, Any] = {
    "layers": 100,
    "batch": 64,
    "mlp_layers": 20,
    "mlp_width": 1024,
    "mlp_batch": 32,
    "depth_dim": 64,
    "depth_seq": 128,
    "steps": 2,
}
CLASSICS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": _CLASSIC | {"width": 32, "depth_batch": 8, "depth_budget": "24MiB", "repeat": 2},
    "cuda": _CLASSIC | {"width": 320, "depth_batch": 512, "depth_budget": "4GiB", "repeat": 10},
}

# what trades memory at all
BLOCKS = ("norm_gated_mlp_residual", "decoder_layer", "stack")
CAPACITY_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"size": "gpt2", "dtype": "float32", "repeat": 3, "memory": 1 << 10},
    "cuda": {"size": "llama-3-8b", "dtype": "bfloat16", "repeat": 10, "memory": 1 << 14},
}

TUNE_DEFAULTS: dict[str, Any] = {
    "size": ("gpt2", "vit-l", "llama-3.2-1b", "llama-3-8b"),
    "tokens": (2048, 8192),
    "dtype": "bfloat16",
    "repeat": 10,
    "minutes": 30.0,
}
