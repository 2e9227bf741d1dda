"""What no argument of a kind takes: of a wrong type, or of the right one and wrong."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from support import DEVICE
from torch import Tensor, nn

from fusedckpt import LoRA, NormSpec, QuantizedWeight

D, F, N = 4, 6, 3
NAN, INF = float("nan"), float("inf")


def t(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, device=DEVICE, **options)


class DTensor(torch.Tensor):
    """Refused by its name, as torch's own is."""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([t(2, D), t(1, D)])
    JAGGED = torch.nested.nested_tensor([t(2, D), t(1, D)], layout=torch.jagged)

# what no argument of a kind takes; a type where the message must name it, else what it must say
STRINGS = ["", "nope", b"inputs", 1, True, 1.5, NAN, t(), ["inputs"], np.array(["inputs"])]
BAD: dict[str, list[Any]] = {
    "tensor": [
        [1.0],
        1.0,
        True,
        "x",
        np.zeros((N, D)),
        (t(N, D),),
        t(N, D, dtype=torch.int32),
        t(N, D, dtype=torch.bool),
        t(N, D, dtype=torch.complex64),
        torch.zeros(N, D).to(torch.float8_e4m3fn).to(DEVICE),
        t(N, D).to_sparse(),
        NESTED,
        JAGGED,
        t(N, D).as_subclass(DTensor),
        t(N, D).to("meta"),
        t(),
        t(7, 7),
    ],
    "eps": ["1e-5", [1e-5], t(), True, np.array(1e-5), NAN, INF, -INF, -1.0, -1, 10**400, 1j],
    "offset": ["1", [1.0], t(), True, np.array(1.0), NAN, INF, 10**400, np.float32("nan"), 1j],
    "probability": [
        *("0.1", "", b"", None, [], [0.1], (), {}, t(), True, False, np.array(0.1)),
        *(NAN, INF, -0.1, 1.5, -1, 2, 1j),
    ],
    "sizes": ["64", None, 4, (), (F,), (F, D, 1, 1), (-1, D), ("6", D), (6.0, D), {F, D}, t(F, D)],
    "callable": [None, 1, "w", t(F, D)],
    "segments": [None, "1", 1.0, True, [1], t(), t(1, dtype=torch.int64), t(dtype=torch.int64) + 1]
    + [0, -1, 10**30],
    "flag": ["yes", "", None, t(), t(dtype=torch.bool), np.array(True), [True], 2, -1, 1.0, NAN],
    "size": [
        *("4", None, 4.0, NAN, INF, True, np.True_, [4], (4,), t(), np.float64(4), np.array([4])),
        *(-1, np.int64(-1), 2**63, 10**30),
    ],
    "chunks": ["2", 2.0, NAN, True, [2], t(), np.float32(2), 0, -1, np.int64(0), 10**30],
    "shape": [
        *("4", None, 4.0, NAN, True, t(), np.float64(4), ("4",), (4.0,), (True,), (None,)),
        *((), [], (-1,), -1, 10**30, [[4]]),
    ],
    "name": STRINGS,
    "activation": [*STRINGS, torch.relu, nn.GELU()],
    "device": ["xyz", "", "cpu:x", 1.5, True, NAN, [], t(), -1, 10**30],
    "dtype": [*("float32", 1, True, float, np.float32), torch.int32, torch.bool, torch.complex64],
    "norm": ["rms", 1, True, ("rms",), {"kind": "rms"}, t(D), nn.RMSNorm(D), NormSpec],
    "module": ["rms", 1, True, t(D), nn.RMSNorm, torch.relu, [nn.RMSNorm(D)], NormSpec("rms")],
    "tensors": ["w", 1, True, t(2, F, D), {"q": t(F, D)}, [1.0], ["w"], [t(F, D).to("meta")]],
}
# in the place of a weight alone
BAD["weight"] = [*BAD["tensor"]]
BAD["tensor"] += [
    LoRA(t(F, D), t(2, D), t(F, 2)),
    QuantizedWeight((F, D), torch.float32, DEVICE, lambda _: t(F, D)),
]
# kinds of which a default of None is one more value, else one less
TAKES_NONE = "none or "
for kind in (
    "tensor",
    "weight",
    "eps",
    "offset",
    "name",
    "norm",
    "module",
    "tensors",
    "device",
    "dtype",
):
    BAD[kind], BAD[TAKES_NONE + kind] = [*BAD[kind], None], BAD[kind]
BAD[TAKES_NONE + "chunks"], BAD[TAKES_NONE + "size"] = BAD["chunks"], [*BAD["size"]]
BAD[TAKES_NONE + "size"].remove(None)
BAD["rows"] = [[1.0], 1.0, True, "x", None, np.zeros((F, D)), (t(F, D),), t()]
