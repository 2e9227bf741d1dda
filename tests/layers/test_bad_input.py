"""Every argument of every layer against what it is not: refused by name, before any op runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from bad_values import BAD, D, F, N, t
from layer_calls import CONSTRUCTORS, FUNCTIONS, GATED, LINEAR, MLP, MODULES, X, linear
from support import DEVICE, Watched
from torch import Tensor, nn

import fusedckpt
from fusedckpt import NormSpec
from fusedckpt import functional as f
from fusedckpt.autograd import dispatch


class Row(NamedTuple):
    """One bad call: `what` names the argument, `says` is in the message."""

    name: str
    what: str
    call: Callable[[], Any]
    says: str


# a module goes on to run what is no dense tensor as its children would
RUN_BY_MODULES = ("sparse", "Tensor-nested", "NestedTensor", "DTensor")


def label(value: Any) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        return "Tensor-nested"
    is_sparse = isinstance(value, Tensor) and value.layout != torch.strided
    return "sparse" if is_sparse else type(value).__name__


def came(value: Any) -> str:
    """What the message says of a value: its type or itself, of a tensor what does not fit."""
    inner = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(inner, Tensor):
        return r"got|has|\([xh] \["
    names = {type(v).__name__ for v in (value, inner)} | {
        re.escape(repr(v)) for v in (value, inner)
    }
    return f"got .*({'|'.join(sorted(names))})"


def rows() -> Iterator[Any]:
    """Yield the bad calls of an argument at a time."""
    for target in (*FUNCTIONS, *CONSTRUCTORS, *MODULES):
        for key, kind in target.kinds.items():
            found = [
                Row(
                    target.name,
                    "x" if key == "input" else key,
                    partial(target.call, **target.valid | {key: value}),
                    came(value),
                )
                for value in BAD[kind]
                if key != "input" or label(value) not in RUN_BY_MODULES
            ]
            yield pytest.param(found, id=f"{target.name}-{key}")


W, B, FC1, FC2 = LINEAR["weight"], LINEAR["bias"], MLP["fc1_weight"], MLP["fc2_weight"]
RMS_SPEC = NormSpec("rms", t(D))
NARROW = fusedckpt.MLP(D, F, norm=nn.RMSNorm(D + 1)).to(DEVICE)


def calls(name: str, what: str, says: str, function: Callable[..., Any], *args: Any, **kwargs: Any):
    row = Row(name, what, partial(function, *args, **kwargs), says)
    return pytest.param([row], id=f"{name}-{what}-{says}")


# arguments that are well by themselves and do not fit each other
MISFITS = [
    calls("linear_act", "weight", r"expects 3 .*x has 4 \(x \[3, 4\]", f.linear_act, X, W[:, 1:]),
    calls("linear_act", "weight", "weight two", f.linear_act, X, B),
    calls("linear_act", "bias", r"\[6\], got \[5\]", f.linear_act, X, W, B[1:]),
    calls("linear_act", "save", "inputs, preact, got 'gate'", f.linear_act, X, W, save="gate"),
    calls("linear_act", "kernel", "split, fused, got", f.linear_act, X, W, kernel="hybrid"),
    *(
        calls(norm.__name__, what, says, norm, X, *args)
        for norm in (f.rms_norm, f.layer_norm)
        for what, says, *args in (
            ("normalized_shape", r"\[5\], got \[3, 4\]", D + 1),
            ("normalized_shape", r"\[2, 3, 4\], got", (2, N, D)),
            ("weight", r"\[4\], got \[3\]", D, t(D - 1)),
            ("weight", r"\[3, 4\], got \[4\]", (N, D), t(D)),
        )
    ),
    calls("layer_norm", "bias", r"\[4\], got \[3\]", f.layer_norm, X, D, None, t(D - 1)),
    calls("add_rms_norm", "residual", r"\[3, 4\], got \[2, 4\]", f.add_rms_norm, X, X[1:], D),
    calls("rms_norm", "offset", "got none", f.rms_norm, X, D, offset=1.0),
    calls("RMSNorm", "offset", "none", fusedckpt.RMSNorm, D, None, False, offset=1.0),
    calls("mlp", "fc1_weight", "expects 4 .*x has 3", f.mlp, **MLP | {"x": X[:, 1:]}),
    calls("mlp", "fc1_bias", r"\[6\], got \[5\]", f.mlp, **MLP | {"fc1_bias": t(F - 1)}),
    calls("mlp", "fc2_weight", "expects 5 .*h has 6", f.mlp, **MLP | {"fc2_weight": FC2[:, 1:]}),
    calls("mlp", "fc2_bias", r"\[4\], got \[3\]", f.mlp, **MLP | {"fc2_bias": t(D - 1)}),
    calls("mlp", "residual", "has 7", f.mlp, X, FC1, None, t(7, F), None, residual=True),
    calls("mlp", "kernel", "split, hybrid, got", f.mlp, **MLP, kernel="fused"),
    calls("mlp", "save", "inputs, preact, got 'gate'", f.mlp, **MLP, save="gate"),
    calls("mlp", "norm.weight", r"\[4\], got \[3\]", f.mlp, **MLP, norm=NormSpec("rms", t(N))),
    calls("mlp", "norm.bias", "None", f.mlp, **MLP, norm=RMS_SPEC._replace(bias=t(D))),
    calls("mlp", "norm.kind", "'batch'", f.mlp, **MLP, norm=NormSpec("batch")),
    calls("mlp", "norm.offset", "none", f.mlp, **MLP, norm=NormSpec("rms", offset=1.0)),
    *(
        calls(
            "mlp",
            f"norm.{key}",
            "'layer'",
            f.mlp,
            **MLP,
            norm=NormSpec("layer", t(D))._replace(**{key: value}),
        )
        for key, value in (("offset", 1.0), ("cast", "llama"))
    ),
    calls(
        "gated_mlp",
        "gate_weight and up_weight",
        "number of rows, got 6 and 5",
        f.gated_mlp,
        **GATED | {"up_weight": t(F - 1, D), "up_bias": None},
    ),
    calls("gated_mlp", "gate_weight", "got 5", f.gated_mlp, X, t(F - 1, D), None, FC2),
    calls("gated_mlp", "down_weight", "h has 3", f.gated_mlp, X, FC1, None, FC2),
    calls("gated_mlp", "up_bias", "None", f.gated_mlp, X, FC1, None, FC2[:, 3:], up_bias=t(3)),
    calls("norm_linear", "weights", "got none", f.norm_linear, X, RMS_SPEC, []),
    calls("norm_linear", "biases", "0 for 1", f.norm_linear, X, RMS_SPEC, [W], []),
    calls("norm_linear", r"weights[1]", "3 input", f.norm_linear, X, RMS_SPEC, [W, W[:, 1:]]),
    calls("norm_linear", r"biases[0]", "got .5", f.norm_linear, X, RMS_SPEC, [W], [t(F - 1)]),
    calls("MLP", "residual", "4, got 7", fusedckpt.MLP, D, F, 7, residual=True),
    calls("GatedMLP", "residual", "4, got 7", fusedckpt.GatedMLP, D, F, 7, residual=True),
    calls("MLP", "save", "inputs, preact, got 'gate'", fusedckpt.MLP, D, F, save="gate"),
    calls("Linear", "weight", "expects 4 .*x has 3", linear(), X[:, 1:]),
    calls("Linear", "weight", "float16", linear(), X.half()),
    calls("NormLinear", "linears", "got none", fusedckpt.NormLinear, nn.RMSNorm(D)),
    calls("MLP", "normalized_shape", r"\[5\], got \[3, 4\]", NARROW, X),
]


ROWS = [*rows(), *MISFITS]


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_bad_input_is_refused_by_name_before_any_work(rows, disabled, monkeypatch):
    """Where ours runs, and where eager does."""
    monkeypatch.setattr(dispatch, "DISABLED", disabled)
    for row in rows:
        with Watched() as ops, pytest.raises((TypeError, ValueError)) as raised:
            row.call()
        message = str(raised.value)
        assert message.startswith(f"{row.name}: "), message
        assert row.what in message.removeprefix(row.name), message
        assert re.search("must|expects|needs|is added to|are RMSNorm's", message), message
        assert re.search(row.says, message), message
        assert ops.seen == []


def test_there_are_many_rows():
    assert sum(len(param.values[0]) for param in ROWS) > 2000
