"""Every activation: its Triton value and gradient, its ATen form, its names.

To add an activation, write its device function `<name>(z, dh, EXACT) -> (h, dz)` in float32, and
add a row to ACTIVATIONS; functions, modules, fusing and tests read the table. A kernel that reads
only h compiles without the derivative. EXACT: to the last digits, for results that stay in float32;
else to the digits of half precision, in fewer registers. Selections treat NaN and inf as torch
does: a zero derivative stops an inf in dh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .runtime import INTERPRETED, libdevice, tl, triton

aten = torch.ops.aten


@triton.jit
def exp(z, EXACT: tl.constexpr):
    """Exponentiate float32; EXACT: to about its last digit."""
    # tl.exp compiles to exp2 of a rounded product, which is off by six epsilons at -12
    return libdevice.exp(z) if EXACT and not INTERPRETED else tl.exp(z)


@triton.jit
def sigmoids(z, EXACT: tl.constexpr):
    """Return the sigmoids of z and of -z."""
    # their sum is 1, but 1 minus the larger has lost the digits of the smaller
    e = exp(-z, EXACT)
    s = 1.0 / (1.0 + e)
    return s, tl.where(z > 0.0, e * s, 1.0 - s) if EXACT else 1.0 - s


@triton.jit
def normal_cdf(z):
    """Return the distribution function of the standard normal distribution at z."""
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def mills(a):
    """Return R(a) and exp(-a^2 / 2), a >= 0: their product is normal_cdf(-a)."""
    # below float32 one exponential serves both cdf and density. R = t P(t), t = 1 / (1 + p a), has
    # the form of Abramowitz and Stegun 7.1.26; p and P are fitted anew to least relative error,
    # 3.7e-6, so that the tail keeps its digits until the exponential underflows
    t = 1.0 / (1.0 + 0.3077 * a)
    p = 0.1913706 - 0.07577838 * t
    p = 0.1372274 + t * (0.005570812 + t * p)
    p = 0.1230173 + t * (0.1185905 + t * p)
    # exp(-a^2 / 2) is a power of two
    return t * p, tl.exp2(-0.7213475 * a * a)


@triton.jit
def sigmoid(z, dh, EXACT: tl.constexpr):
    h, rest = sigmoids(z, EXACT)
    return h, dh * rest * h


@triton.jit
def identity(z, dh, EXACT: tl.constexpr):
    return z, dh


@triton.jit
def relu(z, dh, EXACT: tl.constexpr):
    return tl.where(z < 0.0, 0.0, z), tl.where(z <= 0.0, 0.0, dh)


@triton.jit
def relu2(z, dh, EXACT: tl.constexpr):
    h = tl.where(z < 0.0, 0.0, z)
    return h * h, tl.where(z <= 0.0, 0.0, dh * (2.0 * h))


@triton.jit
def leaky_relu(z, dh, EXACT: tl.constexpr):
    return tl.where(z > 0.0, z, z * 0.01), tl.where(z > 0.0, dh, dh * 0.01)


@triton.jit
def gelu(z, dh, EXACT: tl.constexpr):
    if EXACT:
        cdf = normal_cdf(z)
        slope = cdf + z * (0.3989422804014327 * exp(-0.5 * z * z, EXACT))
    else:
        a = tl.abs(z)
        r, e = mills(a)
        # for a negative z; for a positive z both are 1 minus this
        cdf = r * e
        slope = (r - 0.3989422804014327 * a) * e
        cdf = tl.where(z < 0.0, cdf, 1.0 - cdf)
        slope = tl.where(z < 0.0, slope, 1.0 - slope)
    return z * cdf, dh * slope


@triton.jit
def gelu_tanh(z, dh, EXACT: tl.constexpr):
    # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3)
    s, rest = sigmoids(1.5957691216057308 * (z + 0.044715 * z * z * z), EXACT)
    slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    return z * s, dh * (s + z * s * rest * slope)


@triton.jit
def quick_gelu(z, dh, EXACT: tl.constexpr):
    s, rest = sigmoids(1.702 * z, EXACT)
    return z * s, dh * (s + 1.702 * (z * s) * rest)


@triton.jit
def silu(z, dh, EXACT: tl.constexpr):
    s, rest = sigmoids(z, EXACT)
    # z s would be rounded once more
    return z / (1.0 + exp(-z, EXACT)), dh * s * (1.0 + z * rest)


@triton.jit
def tanh(z, dh, EXACT: tl.constexpr):
    # exp of a negative argument cannot overflow
    e = exp(-2.0 * tl.abs(z), EXACT)
    r = 1.0 / (1.0 + e)
    h = (1.0 - e) / (1.0 + e)
    # 1 - e loses the digits of a small z: there an odd polynomial, fitted to 3e-9 relative on 0.42
    s = z * z
    p = -0.33333284 + s * (0.13330565 + s * (0.018466265 * s - 0.053483798))
    h = tl.where(tl.abs(z) < 0.4, z + z * (s * p), tl.where(z < 0.0, -h, h))
    # of exact slopes nothing cancels
    return h, dh * (4.0 * e * r * r if EXACT else 1.0 - h * h)


@triton.jit
def softplus(z, dh, EXACT: tl.constexpr):
    e = exp(tl.where(z > 20.0, 0.0, z), EXACT)
    # log(1 + e) by Kahan: the rounding of 1 + e cancels in the quotient
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    slope = 1.0 / (1.0 + exp(-z, EXACT))
    return tl.where(z > 20.0, z, log1p), tl.where(z > 20.0, dh, dh * slope)


@triton.jit
def mish(z, dh, EXACT: tl.constexpr):
    # t = tanh(log(1 + e)) = n / (n + 2), n = e (e + 2); 1 in float32 from z = 20 on, if e is a
    # power of two: only those have an exact quotient on a GPU, and 1 - t^2 is multiplied by z
    e = tl.where(z > 20.0, 1073741824.0, exp(z, EXACT))
    n = e * (e + 2.0)
    t = n / (n + 2.0)
    slope = t + z * (1.0 / (1.0 + exp(-z, EXACT))) * (1.0 - t * t)
    return z * t, dh * slope


# ATen forms that take several calls


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
    """One activation for every path."""

    # the device function (z, dh, EXACT) -> (h, dz), in float32
    value_and_grad: Any
    # h of z, by differentiable torch code
    eager: Callable[[Tensor], Tensor]
    # the ATen form of the device function: (z, out=) writes h, over z perhaps
    write: Callable[..., Tensor]
    # (dh, z, grad_input=) writes dz, over dh or z perhaps
    write_grad: Callable[..., Tensor]
    # other names, as torch and transformers spell it
    aliases: tuple[str, ...] = ()
    # the module that computes it, where its attributes have these values
    module: type[nn.Module] | None = None
    # the attributes of that module, by name
    module_state: dict[str, Any] = field(default_factory=dict)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(
        value_and_grad=identity,
        eager=lambda z: z,
        write=lambda z, out: out.copy_(z),
        write_grad=lambda dh, z, grad_input: grad_input.copy_(dh),
        aliases=("linear", "none"),
    ),
    "relu": Activation(
        value_and_grad=relu,
        eager=F.relu,
        write=partial(torch.clamp_min, min=0),
        write_grad=partial(aten.threshold_backward.grad_input, threshold=0),
        module=nn.ReLU,
    ),
    "relu2": Activation(
        value_and_grad=relu2,
        eager=lambda z: F.relu(z).square(),
        write=lambda z, out: torch.clamp_min(z, 0, out=out).square_(),
        write_grad=_write_relu2_grad,
        aliases=("relu_squared", "squared_relu"),
    ),
    "leaky_relu": Activation(
        value_and_grad=leaky_relu,
        eager=F.leaky_relu,
        write=aten.leaky_relu.out,
        write_grad=partial(
            aten.leaky_relu_backward.grad_input, negative_slope=0.01, self_is_result=False
        ),
        module=nn.LeakyReLU,
        module_state={"negative_slope": 0.01},
    ),
    "gelu": Activation(
        value_and_grad=gelu,
        eager=F.gelu,
        write=aten.gelu.out,
        write_grad=aten.gelu_backward.grad_input,
        aliases=("gelu_python",),
        module=nn.GELU,
        module_state={"approximate": "none"},
    ),
    "gelu_tanh": Activation(
        value_and_grad=gelu_tanh,
        eager=lambda z: F.gelu(z, approximate="tanh"),
        write=partial(aten.gelu.out, approximate="tanh"),
        write_grad=partial(aten.gelu_backward.grad_input, approximate="tanh"),
        aliases=("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
        module=nn.GELU,
        module_state={"approximate": "tanh"},
    ),
    "quick_gelu": Activation(
        value_and_grad=quick_gelu,
        eager=lambda z: z * torch.sigmoid(1.702 * z),
        write=lambda z, out: torch.mul(z, torch.sigmoid(1.702 * z), out=out),
        write_grad=_write_quick_gelu_grad,
    ),
    "silu": Activation(
        value_and_grad=silu,
        eager=F.silu,
        write=aten.silu.out,
        write_grad=aten.silu_backward.grad_input,
        aliases=("swish",),
        module=nn.SiLU,
    ),
    "sigmoid": Activation(
        value_and_grad=sigmoid,
        eager=torch.sigmoid,
        write=torch.sigmoid,
        write_grad=lambda dh, z, **to: aten.sigmoid_backward.grad_input(dh, torch.sigmoid(z), **to),
        module=nn.Sigmoid,
    ),
    "tanh": Activation(
        value_and_grad=tanh,
        eager=torch.tanh,
        write=torch.tanh,
        write_grad=lambda dh, z, **to: aten.tanh_backward.grad_input(dh, torch.tanh(z), **to),
        module=nn.Tanh,
    ),
    "softplus": Activation(
        value_and_grad=softplus,
        eager=F.softplus,
        write=aten.softplus.out,
        write_grad=partial(aten.softplus_backward.grad_input, beta=1, threshold=20),
        module=nn.Softplus,
        module_state={"beta": 1.0, "threshold": 20.0},
    ),
    "mish": Activation(
        value_and_grad=mish,
        eager=F.mish,
        write=aten.mish.out,
        write_grad=lambda dh, z, grad_input: grad_input.copy_(aten.mish_backward(dh, z)),
        module=nn.Mish,
    ),
}

CANONICAL: dict[str, str] = {
    name: row for row, act in ACTIVATIONS.items() for name in (row, *act.aliases)
}


def activation_name_of(module: nn.Module) -> str | None:
    """Return the name of the activation that `module` computes, None if the table lacks it."""
    for name, act in ACTIVATIONS.items():
        if type(module) is act.module and all(
            getattr(module, key) == value for key, value in act.module_state.items()
        ):
            return name
    return None
