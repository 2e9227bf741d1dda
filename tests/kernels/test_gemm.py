"""The GEMM's main loop and epilogues with several tiles each way, and several steps along K.

Real tiles: those of the chip under test, or in the interpreter those of sm_90.
"""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, HALF, squared
from torch import Tensor

from fusedckpt.kernels.runtime import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("kernels need Triton", allow_module_level=True)

from fusedckpt.kernels import gemm, linear
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.gemm import SHORT_K, TILES
from fusedckpt.kernels.linear import HiddenGrad, hybrid_grad

DTYPES = (torch.float32, *HALF)
# m, n, k
SHAPES = {"short": (300, 520, 200), "long": (300, 264, 1064), "pointers": (300, 265, 203)}


@pytest.fixture(autouse=True)
def real_tiles(monkeypatch):
    """Give the interpreter the tiles of sm_90; a chip has its own."""
    for size in (2, 4):
        monkeypatch.setitem(TILES, ("interpreter", size), TILES["sm_90", size])


@pytest.fixture
def covered(monkeypatch):
    """Collect how many tiles along M and N and steps along K every launch takes."""
    found = []
    launch, choose = gemm.gemm, gemm.tile_for

    def recorded(x, w, *args, **options):
        found.append((x.shape[0], w.shape[0], x.shape[1]))
        return launch(x, w, *args, **options)

    def chosen(*args):
        tile = choose(*args)
        found[-1] = [-(-size // block) for size, block in zip(found[-1], tile, strict=False)]
        return tile

    monkeypatch.setattr(linear, "gemm", recorded)
    monkeypatch.setattr(gemm, "tile_for", chosen)
    return found


def kind_of(x: Tensor, w: Tensor) -> str:
    if not gemm.fits_descriptors(x, w):
        return "pointers"
    return "short" if x.shape[1] <= SHORT_K else "long"


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """Draw a matrix of order one, scaled so that a product over its columns stays so."""
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(DEVICE, dtype)


def agree(ours: Tensor | None, theirs: Tensor, truth: Tensor) -> None:
    """Hold the rule of support.compare."""
    assert ours is not None
    assert ours.isfinite().all()
    mine, eager = (squared(t.double() - truth) ** 0.5 for t in (ours, theirs))
    count, scale = truth.numel() ** 0.5, squared(truth) ** 0.5
    assert mine <= 2 * eager + 8 * torch.finfo(torch.float32).eps * max(count, scale)


def eager_linear(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> list[Tensor]:
    z = torch.nn.functional.linear(x, w, b).detach().requires_grad_()
    h = ACTIVATIONS["gelu"].eager(z)
    (dz,) = torch.autograd.grad(h, z, dy)
    return [h.detach(), z.detach(), dz, dz.sum(0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_fused_linear(kind, dtype, covered):
    m, n, k = SHAPES[kind]
    x, w, b, dy = (draw(*s, dtype=dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    assert kind_of(x, w) == kind
    theirs = eager_linear(x, w, b, dy)
    truth = eager_linear(*(t.double() for t in (x, w, b, dy)))
    h, z = linear.linear_act(x, w, b, "gelu", True)
    dz, db = linear.linear_act_dz(dy, x, w, b, "gelu", True)
    for found in zip((h, z, dz, db), theirs, truth, strict=True):
        agree(*found)
    # w as the transpose of what lies in memory
    turned, _ = linear.linear_act(x, w.t().contiguous().t(), b, "gelu", False)
    agree(turned, theirs[0], truth[0])
    assert len(covered) == 3
    assert all(count > 1 for counts in covered for count in counts)


def eager_hidden(dy: Tensor, down: Tensor, z: Tensor, up: Tensor | None) -> list[Tensor]:
    z, dh = z.detach().requires_grad_(), dy @ down
    up = None if up is None else up.detach().requires_grad_()
    h = ACTIVATIONS["silu"].eager(z)
    h = h if up is None else h * up
    inputs = [z] if up is None else [z, up]
    grads = torch.autograd.grad(h, inputs, dh)
    return [h.detach(), *grads, *(grad.sum(0) for grad in grads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", SHAPES)
def test_hybrid(kind, gated, dtype, covered):
    m, n, k = SHAPES[kind]
    dy, down, z, up = (draw(*s, dtype=dtype) for s in ((m, k), (k, n), (m, n), (m, n)))
    assert kind_of(dy, down.t()) == kind
    up = up if gated else None
    theirs = eager_hidden(dy, down, z, up)
    truth = eager_hidden(*(None if t is None else t.double() for t in (dy, down, z, up)))
    h, dz, dup = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z) if gated else None
    grads = HiddenGrad(z, up, h, dz, dup)
    db = hybrid_grad(dy, down, grads, "silu", (True, gated))
    ours = (h, dz, dup, *db) if gated else (h, dz, db[0])
    for found in zip(ours, theirs, truth, strict=True):
        agree(*found)
    assert len(covered) == 1
    assert all(count > 1 for counts in covered for count in counts)
