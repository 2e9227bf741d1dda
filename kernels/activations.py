"""Every activation, one row each: its Triton value and derivative, its ATen form, its names.

To add one, write `<name>` and `<name>_grad` below and add a row to ACTIVATIONS; everything else
(functions, modules, fusing, tests) reads the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .runtime import exp, tl, triton
from .special import log1p, mills, normal_cdf, sigmoids

aten = torch.ops.aten

# device functions: `<name>(z, EXACT) -> h` and `<name>_grad(z, dh, EXACT) -> (h, dz)`, in float32.
# EXACT: to the last digits, for results that stay in float32; else as well as half precision shows,
# in fewer registers. Selections are written so that NaN and inf go where torch sends them (a zero
# derivative stops an inf in dh).


@triton.jit
def sigmoid(z, EXACT: tl.constexpr):
    return 1.0 / (1.0 + exp(-z, EXACT))


@triton.jit
def sigmoid_grad(z, dh, EXACT: tl.constexpr):
    h, rest = sigmoids(z, EXACT)
    return h, dh * rest * h


@triton.jit
def identity(z, EXACT: tl.constexpr):
    return z


@triton.jit
def identity_grad(z, dh, EXACT: tl.constexpr):
    return z, dh


@triton.jit
def relu(z, EXACT: tl.constexpr):
    return tl.where(z < 0.0, 0.0, z)


@triton.jit
def relu_grad(z, dh, EXACT: tl.constexpr):
    return relu(z, EXACT), tl.where(z <= 0.0, 0.0, dh)


@triton.jit
def relu2(z, EXACT: tl.constexpr):
    h = relu(z, EXACT)
    return h * h


@triton.jit
def relu2_grad(z, dh, EXACT: tl.constexpr):
    h = relu(z, EXACT)
    return h * h, tl.where(z <= 0.0, 0.0, dh * (2.0 * h))


@triton.jit
def leaky_relu(z, EXACT: tl.constexpr):
    return tl.where(z > 0.0, z, z * 0.01)


@triton.jit
def leaky_relu_grad(z, dh, EXACT: tl.constexpr):
    return leaky_relu(z, EXACT), tl.where(z > 0.0, dh, dh * 0.01)


@triton.jit
def gelu(z, EXACT: tl.constexpr):
    if EXACT:
        cdf = normal_cdf(z)
    else:
        r, e = mills(tl.abs(z))
        cdf = tl.where(z < 0.0, r * e, 1.0 - r * e)
    return z * cdf


@triton.jit
def gelu_grad(z, dh, EXACT: tl.constexpr):
    if EXACT:
        cdf = normal_cdf(z)
        slope = cdf + z * (0.3989422804014327 * exp(-0.5 * z * z, EXACT))
    else:
        a = tl.abs(z)
        r, e = mills(a)
        # of a negative z; of a positive one both are one minus that
        cdf, slope = r * e, (r - 0.3989422804014327 * a) * e
        cdf = tl.where(z < 0.0, cdf, 1.0 - cdf)
        slope = tl.where(z < 0.0, slope, 1.0 - slope)
    return z * cdf, dh * slope


@triton.jit
def gelu_tanh(z, EXACT: tl.constexpr):
    # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3)
    return z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), EXACT)


@triton.jit
def gelu_tanh_grad(z, dh, EXACT: tl.constexpr):
    s, rest = sigmoids(1.5957691216057308 * (z + 0.044715 * z * z * z), EXACT)
    slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    return z * s, dh * (s + z * s * rest * slope)


@triton.jit
def quick_gelu(z, EXACT: tl.constexpr):
    return z * sigmoid(1.702 * z, EXACT)


@triton.jit
def quick_gelu_grad(z, dh, EXACT: tl.constexpr):
    s, rest = sigmoids(1.702 * z, EXACT)
    return z * s, dh * (s + 1.702 * (z * s) * rest)


@triton.jit
def silu(z, EXACT: tl.constexpr):
    return z / (1.0 + exp(-z, EXACT))


@triton.jit
def silu_grad(z, dh, EXACT: tl.constexpr):
    s, rest = sigmoids(z, EXACT)
    return z * s, dh * s * (1.0 + z * rest)


@triton.jit
def tanh(z, EXACT: tl.constexpr):
    # exp of a negative argument cannot overflow
    e = exp(-2.0 * tl.abs(z), EXACT)
    h = (1.0 - e) / (1.0 + e)
    # 1 - e loses the digits of a small z: there an odd polynomial, fitted to 3e-9 relative on 0.42
    s = z * z
    p = -0.33333284 + s * (0.13330565 + s * (0.018466265 * s - 0.053483798))
    return tl.where(tl.abs(z) < 0.4, z + z * (s * p), tl.where(z < 0.0, -h, h))


@triton.jit
def tanh_grad(z, dh, EXACT: tl.constexpr):
    h = tanh(z, EXACT)
    slope = 1.0 - h * h
    if EXACT:
        # the same, but nothing cancels
        e = exp(-2.0 * tl.abs(z), EXACT)
        r = 1.0 / (1.0 + e)
        slope = 4.0 * e * r * r
    return h, dh * slope


@triton.jit
def softplus(z, EXACT: tl.constexpr):
    return tl.where(z > 20.0, z, log1p(exp(tl.where(z > 20.0, 0.0, z), EXACT)))


@triton.jit
def softplus_grad(z, dh, EXACT: tl.constexpr):
    return softplus(z, EXACT), tl.where(z > 20.0, dh, dh * sigmoid(z, EXACT))


@triton.jit
def tanh_of_softplus(z, EXACT: tl.constexpr):
    # tanh(log(1 + e)) = n / (n + 2), n = e (e + 2); 1 in float32 from z = 20 on, if e is a power
    # of two: only those have an exact quotient on a GPU, and mish_grad multiplies what is left by z
    e = tl.where(z > 20.0, 1073741824.0, exp(z, EXACT))
    n = e * (e + 2.0)
    return n / (n + 2.0)


@triton.jit
def mish(z, EXACT: tl.constexpr):
    return z * tanh_of_softplus(z, EXACT)


@triton.jit
def mish_grad(z, dh, EXACT: tl.constexpr):
    t = tanh_of_softplus(z, EXACT)
    return z * t, dh * (t + z * sigmoid(z, EXACT) * (1.0 - t * t))


# ATen forms where one call does not do


def _write_relu2_grad(dh: Tensor, z: Tensor, grad_input: Tensor) -> Tensor:
    slope = torch.clamp_min(z, 0).mul_(2)
    return aten.threshold_backward.grad_input(slope.mul_(dh), z, 0, grad_input=grad_input)


def _write_quick_gelu_grad(dh: Tensor, z: Tensor, grad_input: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * z)
    # z enters last: 1.702 z overflows float16 from 38500 on
    slope = (1 - s).mul_(s).mul_(1.702).mul_(z).add_(s)
    return torch.mul(slope, dh, out=grad_input)


@dataclass(frozen=True)
class Activation:
    """One activation for every path.

    `write(z, out=)` and `write_grad(dh, z, grad_input=)` are the ATen form of `value` and the
    gradient half of `value_and_grad`; what they write may be z or dh itself.
    """

    value: Any
    value_and_grad: Any
    eager: Callable[[Tensor], Tensor]
    write: Callable[..., Tensor]
    write_grad: Callable[..., Tensor]
    aliases: tuple[str, ...] = ()
    module: type[nn.Module] | None = None
    # what the module's attributes must be for it to be this activation
    module_state: dict[str, Any] = field(default_factory=dict)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(
        identity,
        identity_grad,
        lambda z: z,
        lambda z, out: out.copy_(z),
        lambda dh, z, grad_input: grad_input.copy_(dh),
        aliases=("linear", "none"),
    ),
    "relu": Activation(
        relu,
        relu_grad,
        F.relu,
        partial(torch.clamp_min, min=0),
        partial(aten.threshold_backward.grad_input, threshold=0),
        module=nn.ReLU,
    ),
    "relu2": Activation(
        relu2,
        relu2_grad,
        lambda z: F.relu(z).square(),
        lambda z, out: torch.clamp_min(z, 0, out=out).square_(),
        _write_relu2_grad,
        aliases=("relu_squared", "squared_relu"),
    ),
    "leaky_relu": Activation(
        leaky_relu,
        leaky_relu_grad,
        F.leaky_relu,
        aten.leaky_relu.out,
        partial(aten.leaky_relu_backward.grad_input, negative_slope=0.01, self_is_result=False),
        module=nn.LeakyReLU,
        module_state={"negative_slope": 0.01},
    ),
    "gelu": Activation(
        gelu,
        gelu_grad,
        F.gelu,
        aten.gelu.out,
        aten.gelu_backward.grad_input,
        aliases=("gelu_python",),
        module=nn.GELU,
        module_state={"approximate": "none"},
    ),
    "gelu_tanh": Activation(
        gelu_tanh,
        gelu_tanh_grad,
        lambda z: F.gelu(z, approximate="tanh"),
        partial(aten.gelu.out, approximate="tanh"),
        partial(aten.gelu_backward.grad_input, approximate="tanh"),
        aliases=("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
        module=nn.GELU,
        module_state={"approximate": "tanh"},
    ),
    "quick_gelu": Activation(
        quick_gelu,
        quick_gelu_grad,
        lambda z: z * torch.sigmoid(1.702 * z),
        lambda z, out: torch.mul(z, torch.sigmoid(1.702 * z), out=out),
        _write_quick_gelu_grad,
    ),
    "silu": Activation(
        silu,
        silu_grad,
        F.silu,
        aten.silu.out,
        aten.silu_backward.grad_input,
        aliases=("swish",),
        module=nn.SiLU,
    ),
    "sigmoid": Activation(
        sigmoid,
        sigmoid_grad,
        torch.sigmoid,
        torch.sigmoid,
        lambda dh, z, **to: aten.sigmoid_backward.grad_input(dh, torch.sigmoid(z), **to),
        module=nn.Sigmoid,
    ),
    "tanh": Activation(
        tanh,
        tanh_grad,
        torch.tanh,
        torch.tanh,
        lambda dh, z, **to: aten.tanh_backward.grad_input(dh, torch.tanh(z), **to),
        module=nn.Tanh,
    ),
    "softplus": Activation(
        softplus,
        softplus_grad,
        F.softplus,
        aten.softplus.out,
        partial(aten.softplus_backward.grad_input, beta=1, threshold=20),
        module=nn.Softplus,
        module_state={"beta": 1.0, "threshold": 20.0},
    ),
    "mish": Activation(
        mish,
        mish_grad,
        F.mish,
        aten.mish.out,
        lambda dh, z, grad_input: grad_input.copy_(aten.mish_backward(dh, z)),
        module=nn.Mish,
    ),
}

CANONICAL: dict[str, str] = {
    name: row for row, act in ACTIVATIONS.items() for name in (row, *act.aliases)
}


def name_of(module: nn.Module) -> str | None:
    """Return the activation that `module` computes, None if it is not one of the table's."""
    for name, act in ACTIVATIONS.items():
        if type(module) is act.module and all(
            getattr(module, key) == value for key, value in act.module_state.items()
        ):
            return name
    return None
