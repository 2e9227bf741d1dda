"""Fit piecewise-constant derivatives of activations, in two ways.

relu: the sum of a relu(x - c) that is nearest to the activation h, weights adding up to 1 and
a c to 0, so that it meets h at both ends: the constants of arXiv 2406.16282, by least squares.

steps: slopes and boundaries nearest to the derivative h', by dynamic programming over a grid: the
best of all piecewise-constant derivatives, as in Novikov et al., "Few-bit Backward: Quantized
Gradients of Activation Functions for Memory Footprint Reduction", arXiv 2202.00441.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from bench.options import Options
from bench.tables import Columns, show
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.codes import APPROXIMATE

Array = Any
# beyond it GELU and SiLU are 0 or x to the last digits of float64
REACH = 40.0
STARTS = {"silu": (-6.0, 0.0, 6.0)}
COLUMNS: Columns = {
    "activation": lambda row: row["name"],
    "fit": lambda row: row["fit"],
    "boundaries": lambda row: "  ".join(f"{x:+.6f}" for x in row["boundaries"]),
    "slopes": lambda row: "  ".join(f"{x:+.6f}" for x in row["slopes"]),
    "error\nof h": lambda row: f"{row['value_error']:.3e}",
    "error\nof h'": lambda row: f"{row['slope_error']:.3e}",
    "most apart from\nthe paper's": lambda row: row.get("apart", "-"),
}


def sampled(name: str, points: int, reach: float = REACH) -> tuple[Array, Array, Array]:
    """Return a grid of midpoints, and an activation and its derivative there."""
    x = (np.arange(points) + 0.5) * (2 * reach / points) - reach
    z = torch.from_numpy(x).requires_grad_()
    h = ACTIVATIONS[name].eager(z)
    (slope,) = torch.autograd.grad(h.sum(), z)
    return x, h.detach().numpy(), slope.numpy()


def relus(x: Array, free: Array) -> tuple[Array, Array, Array]:
    """Return weights, boundaries and the sum of relus; free: a_0, a_2, c_0 and c_2."""
    a0, a2, c0, c2 = free
    a1 = 1 - a0 - a2
    a, c = np.array([a0, a1, a2]), np.array([c0, -(a0 * c0 + a2 * c2) / a1, c2])
    return a, c, np.maximum(x[:, None] - c, 0) @ a


def fit_relus(name: str, points: int = 160_001) -> tuple[Array, Array]:
    """Return weights and boundaries of the nearest sum of three relus, in the square norm."""
    x, h, _ = sampled(name, points)
    low, _, high = STARTS.get(name, (-3.0, 0.0, 3.0))
    start = (-0.04, -0.04, low, high)
    found = least_squares(lambda free: relus(x, free)[2] - h, start, method="lm", xtol=1e-15)
    return relus(x, found.x)[:2]


def fit_steps(name: str, count: int, points: int = 1600, reach: float = 8.0) -> tuple[Array, Array]:
    """Return boundaries and slopes of the nearest derivative of `count` steps."""
    x, _, slope = sampled(name, points, reach)
    sums, squares = (np.concatenate([[0], np.cumsum(one)]) for one in (slope, slope**2))
    ends = np.arange(points + 1)
    lengths = ends[None, :] - ends[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = squares[None, :] - squares[:, None] - (sums[None, :] - sums[:, None]) ** 2 / lengths
    cost = np.where(lengths > 0, cost, np.inf)
    best, cuts = cost[0], []
    for _ in range(count - 1):
        # the last step from every start, after the best of the steps before
        totals = best[:, None] + cost
        cuts.append(totals.argmin(0))
        best = totals.min(0)
    places = [points]
    for cut in reversed(cuts):
        places.insert(0, int(cut[places[0]]))
    edges = [0, *places]
    slopes = [(sums[b] - sums[a]) / (b - a) for a, b in pairwise(edges)]
    return (x[np.array(places[:-1])] - reach / points), np.array(slopes)


def errors(name: str, boundaries: Array, slopes: Array) -> tuple[float, float]:
    """Return the integrals of the squared errors of h and h'."""
    x, h, slope = sampled(name, 400_000, 20.0)
    width = x[1] - x[0]
    found = np.asarray(slopes)[(x[:, None] > np.asarray(boundaries)).sum(1)]
    value = np.cumsum(found) * width + h[0]
    return float(np.square(value - h).sum() * width), float(np.square(found - slope).sum() * width)


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    """Return the fits of an activation; relus only to one that is 0 or x at the ends."""
    x, h, _ = (ends[[0, -1]] for ends in sampled(name, 100))
    fits: dict[str, tuple[Any, Any]] = {}
    if np.allclose(h, np.maximum(x, 0)):
        weights, boundaries = fit_relus(name)
        fits["relus"] = boundaries, np.concatenate([[0], np.cumsum(weights)])
    if name in APPROXIMATE:
        fits["paper"] = APPROXIMATE[name]
    fits[f"{count} steps"] = fit_steps(name, count)
    found = []
    for fit, (c, s) in fits.items():
        value, slope = errors(name, c, s)
        row = {"name": name, "fit": fit, "boundaries": c, "slopes": s}
        if fit == "relus" and name in APPROXIMATE:
            mine, theirs = (np.concatenate(pair) for pair in (fits["relus"], fits["paper"]))
            row["apart"] = f"{np.abs(mine - theirs).max():.1e}"
        found.append(row | {"value_error": value, "slope_error": slope})
    return found


def options(add: Options) -> None:
    """Add the options."""
    add.many("activations", "activations to fit, by names of linear_act", ("gelu", "silu"))
    add.count("steps", "slopes of the best derivative", 4)


def prepare(chosen: Namespace) -> Namespace:
    """Raise ValueError for an activation that is unknown."""
    for name in chosen.activations:
        if name not in ACTIVATIONS:
            raise ValueError(f"--activations expects one of {', '.join(ACTIVATIONS)}, got {name}")
    return chosen


def run(chosen: Namespace) -> int:
    """Fit and print."""
    rows = [row for name in chosen.activations for row in rows_of(name, chosen.steps)]
    show("Piecewise-constant derivatives", COLUMNS, rows, words=2)
    return 0
