"""Functions that activations are made of, for kernels: float32, and no digit lost on the way.

EXACT: to the last digits; else as well as half precision shows, in fewer registers.
"""

from __future__ import annotations

from .runtime import exp, tl, triton


@triton.jit
def sigmoids(z, EXACT: tl.constexpr):
    """Return the sigmoids of z and of -z."""
    # together one, but one minus the larger has lost the smaller's digits
    e = exp(-z, EXACT)
    s = 1.0 / (1.0 + e)
    return s, tl.where(z > 0.0, e * s, 1.0 - s) if EXACT else 1.0 - s


@triton.jit
def normal_cdf(z):
    """Return how much of the normal distribution lies below z."""
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
def log1p(e):
    """Return log(1 + e)."""
    # Kahan: the rounding of 1 + e cancels in the quotient
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
