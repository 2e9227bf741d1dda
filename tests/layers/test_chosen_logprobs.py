"""Log-probabilities of chosen ids: `tests/cases.py` has a row of theirs for all contracts."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, HALF, compare, flops, gemm_flops, randn, saved_bytes
from torch import Tensor, nn

import fusedckpt
from fusedckpt import functional
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels import chosen

T, D, V, K = 45, 17, 70, 6


def draw(k: int = K, classes: int = V) -> Tensor:
    """Draw ids of which some are equal, and some ignored."""
    ids = torch.randint(classes, (T, k), device=DEVICE)
    ids[::3, -1] = ids[::3, 0]
    ids[1::4, k // 2] = -100
    return ids


def targets() -> Tensor:
    found = torch.randint(V, (T,), device=DEVICE)
    found[3::4] = -100
    return found


def inputs(dtype=torch.float32, mask=(True, True, True), classes=V):
    shapes = (T, D), (classes, D), (classes,)
    x, w, b = [randn(*s, dtype=dtype, requires_grad=m) for s, m in zip(shapes, mask, strict=True)]
    return [x, (w.detach() / D**0.5).requires_grad_(mask[1]), b]


def eager(ids, x, w, b=None, temperature=1.0):
    z = F.linear(x, w, b)
    logp = F.log_softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / temperature, -1)
    return torch.where(ids < 0, 0.0, logp.gather(-1, ids.clamp(min=0)))


def ours(ids, x, w, b=None, **options):
    return functional.token_logprobs(x, w, None, b, ids=ids, **options)


@pytest.mark.parametrize(("k", "classes"), [(1, V), (K, V), (300, 17), (2, 1)])
def test_classes(k, classes, path):
    """More ids than classes, too; dtypes change nothing in kernels, which read no ids."""
    ids = draw(k, classes)
    pair = [partial(fn, ids, temperature=0.7) for fn in (ours, eager)]
    for dtype in (torch.float32, *HALF) if path == "aten" else (torch.float32,):
        compare(*pair, partial(inputs, dtype, classes=classes))


def test_one_id_is_the_target(path):
    target, tensors = targets(), inputs()
    logp, entropy, of_ids = functional.token_logprobs(
        *tensors[:2], target, tensors[2], ids=target[:, None], entropy=True
    )
    torch.testing.assert_close(of_ids[:, 0], logp)
    alone = functional.token_logprobs(*tensors[:2], target, tensors[2], entropy=True)
    assert torch.equal(torch.stack((logp, entropy)), torch.stack(alone))


@pytest.mark.parametrize("dtype", HALF)
def test_the_gradient_of_a_student_near_its_teacher(dtype, path):
    """It is a difference of probabilities, which is to be rounded once."""
    # logits are exact
    x, w = (torch.randint(-1, 2, (n, D), device=DEVICE).to(dtype) for n in (T, V))
    z = F.linear(x, w).double()
    best, ids = F.log_softmax(z + 1e-3 * torch.randn_like(z), -1).topk(V)

    def loss(fn, x, w):
        return -(best.exp().to(torch.promote_types(x.dtype, torch.float32)) * fn(ids, x, w)).sum()

    pair = [partial(loss, fn) for fn in (ours, eager)]
    compare(*pair, lambda: [t.clone().requires_grad_() for t in (x, w)])


@pytest.mark.parametrize(("save", "chunks"), [("inputs", 1), ("inputs", 3), ("preact", None)])
def test_saved_bytes_and_gemms_of_every_mask(save, chunks):
    """Beside those of a target: 8 bytes for an id, 4 for its log-probability."""
    ids, gemm = draw(), 2 * T * D * V
    for mask in product((False, True), repeat=3):
        x, *weights = inputs(mask=mask)
        given = [x, *(nn.Parameter(w, w.requires_grad) for w in weights)]
        call = lambda *t: ours(ids * 1, *t, save=save, chunks=chunks)  # noqa: E731
        rows = 4 * T * (D if save == "inputs" else V + D * mask[1])
        assert saved_bytes(call, given) == any(mask) * ((24 + 12 * K) * T + rows), mask
        wanted = [t for t in given if t.requires_grad]
        run = lambda: torch.autograd.grad(call(*given).sum(), wanted) if wanted else call(*given)  # noqa: E731, B023
        count = 1 + any(mask) * (save == "inputs") + mask[0] + mask[1]
        if DEVICE.type == "cpu":
            with forced_path("aten"):
                assert gemm_flops(run) == count * gemm, mask
        assert flops(run) == count * gemm, mask


def test_rows_without_ids_count_for_nothing(path):
    ids, (x, w, b) = draw(), inputs()
    ids[5] = -100
    entropy, logp = ours(ids, x, w, b, entropy=True)
    (dx,) = torch.autograd.grad((logp * logp).sum() + entropy.sum(), x)
    assert all(t[4].any() and not t[5].any() for t in (logp, entropy, dx))


def test_results_may_be_changed_in_place(path):
    ids = draw()
    pair = [lambda *t, fn=fn: fn(ids, *t).mul_(2).square() for fn in (ours, eager)]
    compare(*pair, inputs)


def test_sums_at_places_by_sorting():
    """What a GPU computes, where scatter_add_ adds in any order."""
    places, values = torch.randint(K, (T, K)), torch.randn(T, K, dtype=torch.float64)
    by_row, by_sorting = (chosen.sum_at(places, values, sorts) for sorts in (False, True))
    torch.testing.assert_close(by_sorting, by_row)


def test_a_module():
    head, x, ids = fusedckpt.TokenLogprobs(D, V, bias=False, device=DEVICE), randn(2, T, D), draw()
    both = torch.stack([ids, ids])
    assert torch.equal(head(x, ids=both), functional.token_logprobs(x, head.weight, None, ids=both))
    logp, of_ids = head(x, both[..., 0], both)
    assert logp.shape == of_ids.shape[:-1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": [1]}, TypeError, "ids must be a tensor"),
        ({"ids": None}, TypeError, "target must be a tensor"),
        ({"ids": torch.zeros(T, 2)}, TypeError, "ids must be int64"),
        ({"ids": torch.zeros(T, dtype=torch.int64)}, ValueError, r"ids must be \[45, 'k'\]"),
        ({"ids": torch.zeros(T, 0, dtype=torch.int64)}, ValueError, "ids must be .* with k >= 1"),
        ({"ids": torch.full((T, 2), V)}, ValueError, f"ids must be from 0 to {V - 1}.*, got {V}"),
        ({"ids": torch.full((T, 2), -1)}, ValueError, "ids must be from 0.*, got -1"),
    ],
)
@pytest.mark.parametrize("target", [None, torch.zeros(T, dtype=torch.int64)])
def test_bad_input(changes, error, message, target):
    if changes["ids"] is None and target is not None:
        target = "none"
    given = {"x": torch.zeros(T, D), "weight": torch.zeros(V, D), "target": target}
    with pytest.raises(error, match=f"token_logprobs: {message}"):
        functional.token_logprobs(**given | changes)
