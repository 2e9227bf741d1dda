"""How configurations are drawn: every field apart from all others, each often enough plain."""

from __future__ import annotations

import random
from typing import Any

from .config import Config
from .eager import ACTIVATIONS
from .operands import LAYOUTS, shapes_of

FUNCTIONS = (
    *("linear_act", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"),
    *("norm_linear", "mlp", "gated_mlp", "packed_mlp", "experts", "Sequential", "shared"),
)
OPTIONAL = (
    *("bias", "norm_weight", "norm_bias", "fc1_bias", "fc2_bias"),
    *("gate_bias", "up_bias", "down_bias", "bias0", "bias1", "bias2"),
)
# those that an nn.Module of torch's computes
IN_MODULES = (
    *("relu", "leaky_relu", "gelu", "gelu_tanh", "silu"),
    *("sigmoid", "tanh", "softplus", "mish"),
)
STACKS = ("la", "lal", "nlal", "nl", "nla", "l", "n", "lalal", "nlanl", "nlalnlal", "alan")
READERS = ("Linear", "linear_act", "mlp", "gated_mlp", "norm_linear", "n")
VALUES = ("zeros", "tiny", "large", "huge", "inf", "-inf", "nan", "some_zeros")
SMALL = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 31, 32, 33)
MIDDLE = (45, 61, 64, 65, 70, 96, 127, 130)
LONG = (257, 300, 512, 641, 1000, 1031, 2048, 3001)


def draw(seed: int, index: int, path: str) -> Config:
    """Return the configuration number `index` of a seed."""
    rng = random.Random(f"{seed}:{index}")
    function = rng.choice(FUNCTIONS)
    # float64 has no kernels, nor ATen a fused variant
    doubles, kernels = (1, ("split",)) if path == "aten" else (0.3, ("split", "fused"))
    config = Config(
        function=function,
        seed=rng.randrange(1 << 30),
        dtype=rng.choices(("float32", "bfloat16", "float16", "float64"), (2, 2, 1.5, doubles))[0],
        **_sizes(rng),
        present=_subset(rng, OPTIONAL),
        tied=rng.random() < 0.05,
        views=rng.random() < 0.25,
        activation=rng.choice(IN_MODULES if function == "Sequential" else [*ACTIVATIONS]),
        norm=rng.choice((None, "rms", "layer")),
        eps=rng.choice((None, None, 1e-6, 1e-5, 1e-3, 1)),
        offset=rng.choice((0.0, 0.0, 1.0, -0.5, 1)),
        cast=rng.choice(("torch", "torch", "llama", "gemma")),
        residual=rng.random() < 0.4,
        save=rng.choice((None, None, "inputs", "gate", "preact", "preact")),
        saving=_rarely(rng, 0.15, "inputs", "gate", "preact"),
        chunks=_rarely(rng, 0.4, 1, 2, 3, 5, 100),
        kernel=_rarely(rng, 0.5, *kernels),
        stack=rng.choice(STACKS),
        readers=tuple(rng.choice(READERS) for _ in range(rng.choice((1, 1, 2, 3)))),
        mode=rng.choice(("grad",) * 30 + ("no_grad", "inference")),
        autocast=_rarely(rng, 0.15, "bfloat16", "bfloat16", "float16"),
        hooks=_rarely(rng, 0.12, "copy", "transposed", "step", "offset"),
        around=_rarely(rng, 0.2, "ours", "ours", "torch", "torch", "reentrant", "twice"),
        backward=rng.choice(
            ("grad",) * 8 + ("backward",) * 4 + ("grad_twice", "backward_twice", "double") * 2
        ),
        douts=tuple(_dout(rng) for _ in range(3)),
        experts=rng.choice((1, 2, 3, 5, 8)),
        top_k=rng.choice((1, 2, 2, 3)),
        is_transposed=rng.random() < 0.5,
        gate_rank=rng.choice((0, 0, 1, 2, 5)),
        down_rank=rng.choice((0, 0, 1, 2, 5)),
    )
    # what depends on which operands there are
    names = list(shapes_of(config))
    frozen = _subset(rng, names) if rng.random() < 0.4 else ()
    share = rng.choice((0, 0, 0.2, 0.5, 1))
    layouts = tuple((name, rng.choice([*LAYOUTS])) for name in names if rng.random() < share)
    value = (rng.choice([*names, "dout"]), rng.choice(VALUES))
    # scores of no features have no gradient in eager; ours, a sum over h, meets the weights
    has_value = rng.random() < 0.12 and (function != "experts" or config.out > 0)
    return config.but(frozen=frozen, layouts=layouts, values=(value,) if has_value else ())


def _sizes(rng: random.Random) -> dict[str, Any]:
    def size() -> int:
        return 0 if rng.random() < 0.02 else rng.choice(SMALL if rng.random() < 0.85 else MIDDLE)

    rows = tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.choice((0, 2, 2, 3, 4))))
    if rng.random() < 0.5:
        rows = (size(),)
    elif rng.random() < 0.04:
        rows = (*rows, 0)
    sizes = {"rows": rows, "d": size(), "f": size(), "out": size()}
    sizes["group"] = _rarely(rng, 0.15, 1, 2, 3, 5)
    if rng.random() < 0.03:
        # one long side, the others short
        short = {key: rng.choice((1, 2, 3, 5)) for key in ("d", "f", "out")}
        sizes |= short | {"rows": rows[:1], rng.choice(("d", "d", "f")): rng.choice(LONG)}
        if rng.random() < 0.2:
            sizes |= short | {"rows": (rng.choice(LONG),)}
    return sizes


def _dout(rng: random.Random) -> str:
    return "plain" if rng.random() < 0.5 else rng.choice((*LAYOUTS, "sparse", "none", "none"))


def _subset(rng: random.Random, names: Any) -> tuple[str, ...]:
    """Draw all, none, or any of them."""
    share = rng.choice((0.0, 0.5, 0.5, 1.0))
    return tuple(name for name in names if rng.random() < share)


def _rarely(rng: random.Random, chance: float, *values: Any) -> Any:
    return rng.choice(values) if rng.random() < chance else None
