"""The bytes that each block saves for backward: a table of formulas, asserted for masks of roles.

T tokens of D features, F hidden features. A row of the table names each tensor that a block saves,
and the gradients of which any one makes the block save it. Nothing else is saved. Parameters and
other leaves of the caller are not counted. Chunks, residuals, biases, adapters and quantized
weights change nothing. Each dropout adds a seed of 8 bytes, if any gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from linear_calls import (
    BLOCKS,
    FLOAT,
    HALF,
    LINEARS,
    MLPS,
    NORMS,
    PRIMES,
    SAME,
    Dtypes,
    Operands,
    function_of,
    masks_of,
)
from support import DEVICE, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm

pytestmark = pytest.mark.usefixtures("on_aten")

T, D, F, OUT, _ = PRIMES

# roles are those of linear_calls; a residual that is added before a norm has the role of x
HIDDEN = "x norm.weight norm.bias first.weight first.bias last.weight"
# the gradient of LayerNorm's bias is a sum of rows and reads no x
NORMED = "x norm.weight first.weight"
# block and level: the tensors saved, in elements per token: the gradients that save them
TABLE = {
    ("norm", "inputs"): {"D": "x norm.weight"},
    ("norm_linear", "inputs"): {"D": NORMED},
    ("linear", "inputs"): {"D": "first.weight"},
    ("linear", "preact"): {"D": "first.weight"},
    ("linear_act", "inputs"): {"D": HIDDEN},
    ("linear_act", "preact"): {"D": "first.weight", "F": HIDDEN},
    ("mlp", "inputs"): {"D": HIDDEN},
    ("mlp", "preact"): {"D": "first.weight", "F": HIDDEN},
    ("norm + mlp", "inputs"): {"D": HIDDEN},
    ("norm + mlp", "preact"): {"D": NORMED, "F": HIDDEN},
    ("gated_mlp", "inputs"): {"D": HIDDEN},
    ("gated_mlp", "gate"): {"D": HIDDEN, "F": HIDDEN},
    ("gated_mlp", "preact"): {"D": "first.weight", "2F": HIDDEN},
    ("norm + gated_mlp", "inputs"): {"D": HIDDEN},
    ("norm + gated_mlp", "gate"): {"D": HIDDEN, "F": HIDDEN},
    ("norm + gated_mlp", "preact"): {"D": NORMED, "2F": HIDDEN},
}
FEATURES = {"D": D, "F": F, "2F": 2 * F}

# x is saved as given where a norm reads it, and else as the GEMM reads it
MIXED = {
    "autocast": (None, Dtypes(autocast=HALF, x_bytes=2, hidden_bytes=2)),
    "autocast of a norm": ("layer", Dtypes(autocast=HALF, hidden_bytes=2)),
    "autocast of half precision": (None, Dtypes(HALF, autocast=HALF, x_bytes=2, hidden_bytes=2)),
    "wide norm": ("layer", Dtypes(HALF, linears=HALF, adapters=HALF, x_bytes=2, hidden_bytes=2)),
    "wide adapters": (None, Dtypes(HALF, linears=HALF, x_bytes=2, hidden_bytes=2)),
    "widening norm": ("rms", Dtypes(HALF, x_bytes=2, cast="llama")),
}


def saved(row: tuple[str, str], wanted: set[str], dtypes: Dtypes, seeds: int) -> int:
    """Return the bytes that a call saves where these gradients are wanted."""
    nbytes = 8 * seeds if wanted else 0
    for features, readers in TABLE[row].items():
        itemsize = dtypes.x_bytes if features == "D" else dtypes.hidden_bytes
        nbytes += itemsize * T * FEATURES[features] * bool(wanted.intersection(readers.split()))
    return nbytes


def check(
    call: Callable[..., Any],
    operands: Operands,
    row: tuple[str, str],
    seeds: int = 0,
    inputs: int = 1,
    is_few: bool = False,
) -> None:
    """Assert the bytes that a call of the first leaves saves, for every mask over all leaves."""
    leaves, roles, dtypes = operands.leaves, operands.roles, operands.dtypes
    for mask in masks_of(roles, is_few):
        for leaf, is_wanted in zip(leaves, mask, strict=True):
            leaf.requires_grad_(is_wanted)
        wanted = [role for role, is_wanted in zip(roles, mask, strict=True) if is_wanted]
        around = torch.autocast(DEVICE.type, dtypes.autocast) if dtypes.autocast else nullcontext()
        with around:
            found = saved_bytes(call, leaves[:inputs])
        assert found == saved(row, set(wanted), dtypes, seeds), (row, wanted)


def check_block(
    block: str,
    norm: str | None,
    kinds: Sequence[str] = (),
    dtypes: Dtypes = FLOAT,
    bias: bool = True,
    is_few: bool = True,
    **options: Any,
) -> None:
    """Assert the rows of a block at every level; `kinds` are those of its linears."""
    operands = Operands(PRIMES, dtypes)
    operands.x()
    spec = operands.norm(norm)
    linears = operands.linears(block, kinds, bias, "residual" in options)
    function = function_of(block, spec, linears)
    seeds = sum(kind.partition("+")[2].count("d") for kind in kinds)
    seeds += sum("dropout" in key for key in options)
    name = "gated_mlp" if block == "packed" else block
    name = f"norm + {name}" if norm and block in MLPS else name
    for row in (row for row in TABLE if row[0] == name):
        check(partial(function, save=row[1], **options), operands, row, seeds, is_few=is_few)


@pytest.mark.parametrize("dtypes", SAME.values(), ids=list(SAME))
@pytest.mark.parametrize(("block", "norm"), BLOCKS)
def test_blocks(block, norm, dtypes):
    for bias in (False, True):
        for count in (1, 2, 3) if block == "norm_linear" else [len(LINEARS[block])]:
            # biases change no mask of the other leaves
            kinds, is_few = ["dense"] * count, not bias or dtypes is not FLOAT
            check_block(block, norm, kinds, dtypes, bias, is_few)
        if block in MLPS:
            check_block(block, norm, (), dtypes, bias, residual=True)


@pytest.mark.parametrize("added", [None, torch.float32, HALF], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, dtype, added):
    """Norms that add a residual save the sum, which they return, in the wider dtype."""
    wide = torch.promote_types(dtype, added or dtype)
    operands = Operands(PRIMES, Dtypes(dtype, wide, x_bytes=wide.itemsize))
    inputs = [operands.x()] if added is None else [operands.x(), operands.x(added)]
    spec = operands.norm(norm)
    assert spec is not None
    given: dict[str, Any] = {"normalized_shape": D, "weight": spec.weight}
    functions = rms_norm, add_rms_norm
    if spec.kind == "layer":
        functions, given["bias"] = (layer_norm, add_layer_norm), spec.bias
    call = partial(functions[len(inputs) - 1], **given)
    check(call, operands, ("norm", "inputs"), inputs=len(inputs))


@pytest.mark.parametrize(("norm", "dtypes"), MIXED.values(), ids=list(MIXED))
def test_mixed_dtypes(norm, dtypes):
    if dtypes is MIXED["wide norm"][1] and DEVICE.type != "cpu":
        pytest.skip("torch's LayerNorm takes one dtype there")
    for block in (block for block, name in BLOCKS if name == norm):
        check_block(block, norm, (), dtypes, bias=False)
        middle = ["frozen"] * (len(LINEARS[block]) - 2)
        kinds = ["frozen+a", *middle, "quantized+d"][: len(LINEARS[block])]
        check_block(block, norm, kinds, dtypes, bias=False)


# kinds of linear_calls
KINDS = {"dense+d": "float32", "quantized": "bfloat16", "quantized+d": "bfloat16"}


@pytest.mark.parametrize(("block", "norm"), [b for b in BLOCKS if b[1] in (None, "layer")])
def test_adapters(block, norm):
    """On each linear, and on all."""
    for kind, i in product(KINDS, range(len(LINEARS[block]))):
        kinds = ["frozen"] * len(LINEARS[block])
        kinds[i] = kind
        check_block(block, norm, kinds, SAME[KINDS[kind]])
    kinds = ["frozen+a", "frozen+d", "frozen+d"][: len(LINEARS[block])]
    check_block(block, norm, kinds, SAME["bfloat16"], bias=False)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1, "output_dropout": 0.2, "residual": True},
        {"chunks": 2},
        {"activation": "identity"},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("norm", [None, "layer"])
@pytest.mark.parametrize("block", MLPS)
def test_options(block, norm, options):
    check_block(block, norm, bias=block == "mlp", **options)
    # beside a weight with two adapters, of which one has a dropout
    check_block(block, norm, ["frozen+ad", *["frozen"] * (len(LINEARS[block]) - 1)], **options)


def normed(module: Callable[..., nn.Module]) -> Callable[[str], nn.Module]:
    return lambda save: module(D, F, OUT, norm=nn.LayerNorm(D), save=save)


MODULES: dict[str, list[Callable[[str], nn.Module]]] = {
    "norm": [lambda _: fusedckpt.RMSNorm(D), lambda _: fusedckpt.LayerNorm(D)],
    "norm_linear": [
        lambda _: fusedckpt.NormLinear(nn.LayerNorm(D), nn.Linear(D, F), nn.Linear(D, OUT))
    ],
    "linear": [lambda save: fusedckpt.Linear(D, F, save=save)],
    "linear_act": [lambda save: fusedckpt.Linear(D, F, activation="gelu", save=save)],
    "mlp": [lambda save: fusedckpt.MLP(D, F, OUT, save=save)],
    "norm + mlp": [normed(fusedckpt.MLP)],
    "gated_mlp": [lambda save: fusedckpt.GatedMLP(D, F, OUT, save=save)],
    "norm + gated_mlp": [normed(fusedckpt.GatedMLP)],
}
LAST = ("fc2", "down_proj")


def operands_of(block: str, module: nn.Module) -> Operands:
    operands = Operands(PRIMES)
    operands.x()
    for name, parameter in module.named_parameters():
        child, _, kind = name.rpartition(".")
        role = "norm" if child == "norm" or block == "norm" else "first"
        operands.add(f"{'last' if child in LAST else role}.{kind}", parameter)
    return operands


@pytest.mark.parametrize(("block", "level"), TABLE)
def test_modules(block, level):
    """Modules save as functions do, at their own level or that of `saving`, or nothing."""
    for make in MODULES[block]:
        module = make(level).to(DEVICE)
        operands = operands_of(block, module)
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert saved_bytes(module, operands.leaves[:1]) == 0
        x = operands.leaves[0].requires_grad_()
        # a checkpoint saves its arguments alone
        assert saved_bytes(partial(fusedckpt.checkpoint, module), [x]) == FLOAT.x_bytes * T * D
        check(module, operands, (block, level))
        for wide in ("inputs", "gate", "preact"):
            row = (block, wide) if (block, wide) in TABLE else (block, "inputs")
            for leaf in operands.leaves:
                leaf.requires_grad_()
            with fusedckpt.saving(wide):
                found = saved_bytes(module, operands.leaves[:1])
            assert found == saved(row, {"x", "first.weight"}, FLOAT, 0)
