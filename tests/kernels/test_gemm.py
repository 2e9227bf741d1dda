"""GEMMs and their epilogues with several tiles each way; grouped GEMMs; sums over rows.

Real tiles: those of the chip under test, or in the interpreter those of sm_90. Grouped GEMMs are
compared with a loop over experts, in all layouts of weights, on the interpreter's own tiles.
"""

from __future__ import annotations

import pytest
import quick_interpreter
import torch
from support import DEVICE, HALF, assert_near, launches
from torch import Tensor

from fusedckpt.kernels.runtime import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("kernels need Triton", allow_module_level=True)

from fusedckpt.kernels import gemm, linear, partials
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.gemm import SHORT_K, TILES
from fusedckpt.kernels.grouped_gemm import grouped_gemm, grouped_grad
from fusedckpt.kernels.linear import HiddenGrad, hybrid_grad
from fusedckpt.kernels.norm import NormRule, norm_grad
from fusedckpt.kernels.partials import sum_partials

DTYPES = (torch.float32, *HALF)
# rows of each expert, K, N: several tiles, none, one expert, one row; 4 last rows are of no expert
SIZES = [((40, 0, 33, 1, 0), 45, 70), ((0, 0, 0), 3, 5), ((17,), 64, 130), ((0, 1), 1, 1)]
# m, n, k
SHAPES = {"short": (300, 520, 200), "long": (300, 264, 1064), "pointers": (300, 265, 203)}


@pytest.fixture
def real_tiles(monkeypatch):
    """Give the interpreter the tiles of sm_90; a chip has its own."""
    for size in (2, 4):
        monkeypatch.setitem(TILES, ("interpreter", size), TILES["sm_90", size])


@pytest.fixture
def covered(monkeypatch, real_tiles):
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
    """Hold the rule of support.assert_near."""
    assert ours is not None
    # few elements of one product: the roundings of a dot, a bias and a sum
    floor = 2.0 if ours.dtype in HALF else 8.0
    assert_near(ours, theirs.to(ours.dtype), truth, floor=floor)


def eager_linear(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> list[Tensor]:
    z = torch.nn.functional.linear(x, w, b).detach().requires_grad_()
    h = ACTIVATIONS["gelu"].eager(z)
    (dz,) = torch.autograd.grad(h, z, dy)
    return [h.detach(), z.detach(), dz, dz.sum(0)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*zip(SHAPES, DTYPES, strict=True), ("pointers", torch.float32), ("long", torch.float32)],
    ids=str,
)
def test_fused_linear(kind, dtype, covered):
    m, n, k = SHAPES[kind]
    x, w, b, dy = (draw(*s, dtype=dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    assert kind_of(x, w) == kind
    theirs = eager_linear(x, w, b, dy)
    truth = eager_linear(*(t.double() for t in (x, w, b, dy)))
    h, z = linear.linear_then_act(x, w, b, "gelu", True)
    dz, db = linear.linear_act_dz(dy, x, w, b, "gelu", True)
    for results in zip((h, z, dz, db), theirs, truth, strict=True):
        agree(*results)
    # w as the transpose of what lies in memory
    turned, _ = linear.linear_then_act(x, w.t().contiguous().t(), b, "gelu", False)
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


@pytest.mark.parametrize(
    ("kind", "gated", "dtype"),
    [
        ("short", False, torch.float32),
        ("short", True, torch.bfloat16),
        ("long", False, torch.float16),
        ("long", True, torch.float32),
        ("pointers", False, torch.bfloat16),
        ("pointers", True, torch.float16),
    ],
    ids=str,
)
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
    for results in zip(ours, theirs, truth, strict=True):
        agree(*results)
    assert len(covered) == 1
    assert all(count > 1 for counts in covered for count in counts)


def parts(counts: tuple[int, ...]) -> tuple[Tensor, list[slice]]:
    ends = torch.tensor(counts).cumsum(0).int().to(DEVICE)
    return ends, [slice(e - c, e) for e, c in zip(ends.tolist(), counts, strict=True)]


def products(rows, x, w, y, bias=None, scores=None):
    """Write what grouped_gemm adds to y in a loop."""
    for e, part in enumerate(rows):
        z = x[part] @ w[e]
        if bias is not None:
            z = z + (bias[e] if scores is None else scores[part, None] * bias[e])
        y[part] = (y[part] + z).to(y.dtype)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes, turned, dtype):
    counts, k, n = sizes
    ends, rows = parts(counts)
    shape = (len(counts), k, n) if turned else (len(counts), n, k)
    w, bias = draw(*shape, dtype=dtype), draw(len(counts), n, dtype=dtype)
    x, total = (draw(sum(counts) + 4, width, dtype=dtype) for width in (k, n))
    scores = torch.rand(len(x), device=DEVICE)
    w = w if turned else w.mT
    for extra, adds in (((), False), ((bias,), False), ((bias, scores), True)):
        first = total if adds else torch.zeros_like(total)
        theirs = products(rows, x, w, first.clone(), *extra)
        truth = products(rows, *(t.double() for t in (x, w, first, *extra)))
        ours = total.clone() if adds else torch.empty_like(total)
        grouped_gemm(x, w, ends, ours, *extra, adds=adds)
        routed = slice(0, sum(counts))
        agree(ours[routed], theirs[routed], truth[routed])
        # rows of no expert are not written
        assert not adds or torch.equal(ours[routed.stop :], total[routed.stop :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_weights(sizes, dtype):
    counts, m, n = sizes
    ends, rows = parts(counts)
    x, dy = (draw(sum(counts) + 4, width, dtype=dtype) for width in (m, n))

    def grads(x, dy, start, dtype):
        return torch.stack([start + x[part].t() @ dy[part] for part in rows]).to(dtype)

    for wide, start in ((dtype, 0.0), (torch.float32, 0.5)):
        dw = torch.full((len(counts), m, n), start, dtype=wide, device=DEVICE)
        grouped_grad(x, dy, ends, dw, adds=bool(start))
        theirs = grads(x.to(wide), dy.to(wide), start, wide)
        agree(dw, theirs, grads(x.double(), dy.double(), start, torch.float64))
        again = torch.full_like(dw, start)
        grouped_grad(x, dy, ends, again, adds=bool(start))
        assert torch.equal(again, dw)


@pytest.mark.parametrize("shape", [(1, 1), (7, 45), (300, 70)], ids=str)
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("is_users", [False, True])
def test_sums_over_rows(shape, given, is_users, monkeypatch):
    if is_users and quick_interpreter.USERS_SUM_TILE:
        monkeypatch.setattr(partials, "SUM_TILE", quick_interpreter.USERS_SUM_TILE)
    pair = [torch.randn(shape, device=DEVICE) if there else None for there in given]
    with launches() as count:
        sums = sum_partials(*pair)
    assert count == {"sum_partials_kernel": 1}
    for total, partial in zip(sums, pair, strict=True):
        assert (total is None) == (partial is None)
        if total is not None:
            torch.testing.assert_close(total, partial.double().sum(0).float())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_norm_writes_the_dtype_that_is_asked_for(dtype):
    x, w, dy = (torch.randn(s, device=DEVICE).to(dtype) for s in ((70, 40), (40,), (70, 40)))
    operands = (dy, None, x, w, NormRule("layer", 1e-5), (True, True, True))
    wide, narrow = norm_grad(*operands), norm_grad(*operands, dtype)
    assert torch.equal(wide[0], narrow[0])
    for full, rounded in zip(wide[1:], narrow[1:], strict=True):
        assert full.dtype == torch.float32
        assert torch.equal(full.to(dtype), rounded)
