"""What a call may keep for backward, where it is known in advance, and what it keeps."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

import fusedckpt
from fusedckpt.memory import saved_tensors

from . import ours
from .config import Config
from .operands import leaves_of, x_shape

# levels, from the least kept to the most, and how many [..., F] tensors each keeps beside x
_PLAIN, _GATED = {"inputs": 0, "preact": 1}, {"inputs": 0, "gate": 1, "preact": 2}
LEVELS = {
    **dict.fromkeys(("linear_act", "Linear", "mlp", "MLP"), _PLAIN),
    **dict.fromkeys(("gated_mlp", "GatedMLP", "packed_mlp"), _GATED),
}
IDENTITIES = (None, "identity", "linear", "none")
ALWAYS_X = (
    *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "norm_linear"),
    *("RMSNorm", "LayerNorm", "NormLinear"),
)


def kept_bytes(c: Config) -> int | None:
    """Return the bytes that the contract states, None where it depends on more than shapes."""
    plain = c.but(frozen=(), dtypes=(), autocast=None, hooks=None, around=None, mode="grad")
    x_lies_plainly = dict(c.layouts).keys().isdisjoint(("x", "residual"))
    if c != plain or c.native or c.tied or not x_lies_plainly:
        return None
    elements = math.prod(x_shape(c))
    if c.function in LEVELS:
        elements += LEVELS[c.function][level_of(c)] * math.prod(c.rows) * c.f
    elif c.function not in ALWAYS_X:
        return None
    return elements * getattr(torch, c.dtype).itemsize


def level_of(c: Config) -> str:
    """Return the level of a call: its argument, else saving's, else a module's own."""
    levels = LEVELS[c.function]
    if c.function in ("linear_act", "Linear") and c.activation in IDENTITIES:
        return "inputs"
    own = c.save if c.save in levels else None
    override = None if c.saving is None else c.saving if c.saving in levels else "inputs"
    first, second = (override, own) if c.function in ours.BUILDERS else (own, override)
    return first or second or "inputs"


def saved_bytes(c: Config) -> int:
    """Return the bytes that one call keeps, x and a residual taken as intermediates of a model."""
    operands = leaves_of(c)
    for name in ("x", "residual"):
        if name in operands:
            operands[name] = operands[name] * 1
    override = nullcontext() if c.saving is None else fusedckpt.saving(c.saving)
    with saved_tensors() as saved, override:
        outputs = ours.call(c, operands)
    del outputs
    return saved.nbytes
