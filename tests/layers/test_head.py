"""Losses and log-probabilities of a linear without its logits: `tests/cases.py` has the contracts.

Here is what targets alone bring: classes of every count, ignored and invalid ones, reductions.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, HALF, compare, flops, gemm_flops, randn, saved_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fusedckpt
from fusedckpt import LoRA, functional
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.layers.head import head_chunks_for
from fusedckpt.memory import peak_bytes

T, D, V = 45, 17, 70


def targets(rows: int, classes: int) -> Tensor:
    """Every fourth is ignored."""
    found = torch.randint(classes, (rows,), device=DEVICE)
    found[3::4] = -100
    return found


def inputs(rows=T, classes=V, dtype=torch.float32, mask=(True, True, True)):
    shapes = (rows, D), (classes, D), (classes,)
    x, w, b = [randn(*s, dtype=dtype, requires_grad=m) for s, m in zip(shapes, mask, strict=True)]
    return [x, (w.detach() / D**0.5).requires_grad_(mask[1]), b]


def eager(target, x, w, b=None, **options):
    """F.cross_entropy of logits, in at least float32 as models compute it."""
    z = F.linear(x, w, b)
    return F.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), target, **options)


def ours(target, x, w, b=None, **options):
    return functional.linear_cross_entropy(x, w, target, b, **options)


SHAPES = [(5, 1), (45, 2), (17, 17), (33, 1000), (2, 50257)]
DTYPES = (torch.float32, *HALF)


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_classes(index, path):
    """Each with one dtype on the kernels, with all of them on ATen."""
    rows, classes = SHAPES[index]
    target = targets(rows, classes)
    pair = [partial(fn, target, reduction="sum") for fn in (ours, eager)]
    for dtype in DTYPES if path == "aten" else DTYPES[index % 3 :][:1]:
        if classes < 50000 or dtype == torch.bfloat16 or path == "triton":
            compare(*pair, lambda dtype=dtype: inputs(rows, classes, dtype))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reductions(reduction, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 5}
    target = targets(T, V).clamp(min=5)
    with forced_path("aten"):
        compare(partial(ours, target, **options), partial(eager, target, **options), inputs)


@pytest.mark.parametrize("shift", [-500.0, 500.0])
def test_large_logits(shift, path):
    target, (x, w, b) = targets(T, V), inputs()
    b = (b.detach() + shift).requires_grad_()
    found, expected = (torch.autograd.grad(fn(target, x, w, b), (x, w, b)) for fn in (ours, eager))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_reference_of_classes_that_are_nearly_equal():
    """The gradient of a log-sum-exp is a softmax, also of ties that rounding makes and breaks."""
    target, (x, w, _) = targets(T, V), inputs(dtype=torch.float64)
    w = w.detach()[:1].expand(V, D)
    options = {"z_loss": 1.0, "reduction": "sum"}
    found = torch.func.grad(lambda w: ours(target, x, w, **options))(w)
    w = w.clone().requires_grad_()
    loss = F.linear(x, w).logsumexp(-1).square()[target >= 0].sum()
    (expected,) = torch.autograd.grad(loss + eager(target, x, w, reduction="sum"), w)
    torch.testing.assert_close(found, expected)


def test_num_items_divides():
    target, tensors = targets(T, V), inputs()
    total = ours(target, *tensors, reduction="sum")
    for number in (7, 2.5, torch.tensor(9)):
        torch.testing.assert_close(ours(target, *tensors, num_items=number), total / number)


def test_no_target_counts(path):
    """Torch's mean of none is NaN, with zeros for gradients."""
    given, target = inputs(), torch.full((T,), -100, device=DEVICE)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        loss = ours(target, *given, reduction=reduction, z_loss=0.1)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)
        assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, given))


@pytest.mark.parametrize("target", [V, -1, -101])
def test_a_target_out_of_range(target):
    given = torch.zeros(T, dtype=torch.int64)
    given[4] = target
    with pytest.raises(ValueError, match=rf"target must be from 0 to {V - 1}.*, got {target}"):
        ours(given, *[t.detach().cpu() for t in inputs()])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.zeros(T)}, TypeError, "target must be int64"),
        ({"target": torch.zeros(T - 1, dtype=torch.int64)}, ValueError, "target must be"),
        ({"target": None}, TypeError, "target must be a tensor"),
        ({"weight": torch.zeros(V, D + 1)}, ValueError, "weight expects 18 input features"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items needs reduction='mean'"),
        ({"num_items": torch.ones(2)}, ValueError, r"num_items must be one number, got \[2\]"),
        ({"save": "gate"}, ValueError, "save must be one of inputs, preact, got 'gate'"),
    ],
)
def test_bad_input(changes, error, message):
    given = {"x": torch.zeros(T, D), "weight": torch.zeros(V, D)}
    given["target"] = torch.zeros(T, dtype=torch.int64)
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        functional.linear_cross_entropy(**given | changes)


@pytest.mark.parametrize(("save", "chunks"), [("inputs", 1), ("inputs", 3), ("preact", None)])
def test_saved_bytes_and_gemms_of_every_mask(save, chunks):
    """A mask drops what no gradient reads; targets are 8 bytes, the divisor of a mean 8 more."""
    target = targets(T, V)
    gemm = 2 * T * D * V
    for mask in product((False, True), repeat=3):
        x, *weights = inputs(mask=mask)
        given = [x, *(nn.Parameter(w, w.requires_grad) for w in weights)]
        call = partial(ours, target * 1, save=save, chunks=chunks)
        rows = 4 * T * (D if save == "inputs" else V + D * mask[1])
        assert saved_bytes(call, given) == any(mask) * (24 * T + 8 + rows), mask
        wanted = [t for t in given if t.requires_grad]
        run = lambda: torch.autograd.grad(call(*given), wanted) if wanted else call(*given)  # noqa: E731, B023
        count = 1 + any(mask) * (save == "inputs") + mask[0] + mask[1]
        if DEVICE.type == "cpu":
            with forced_path("aten"):
                assert gemm_flops(run) == count * gemm, mask
        assert flops(run) == count * gemm, mask


@pytest.mark.parametrize(("reduction", "count"), [("sum", 4), ("mean", 5)])
@pytest.mark.parametrize("checkpoint", [fusedckpt.checkpoint, torch_checkpoint])
@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_checkpoints(save, checkpoint, reduction, count):
    """A recompute stops before the logits, unless the division of a mean follows them."""
    call, (x, w, b) = partial(ours, targets(T, V), reduction=reduction), inputs()

    def run():
        with fusedckpt.saving(save):
            loss = checkpoint(call, x, w, b, use_reentrant=False)
        return torch.autograd.grad(loss, (x, w, b))

    torch.testing.assert_close(run(), torch.autograd.grad(call(x, w, b), (x, w, b)))
    with forced_path("aten"):
        assert gemm_flops(run) == count * 2 * T * D * V


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the profiler's peak")
def test_peak():
    """One chunk of logits, the weight's gradient, and little else; eager holds three logits."""
    rows, d, classes = 512, 32, 8000
    x, w = randn(rows, d), randn(classes, d)
    target = targets(rows, classes)

    def peak(fn, **options):
        run = partial(fn, target, x, w, **options)
        return peak_bytes(lambda: torch.autograd.grad(run(), (x, w)))

    logits, dw = 4 * rows * classes, 4 * d * classes
    with forced_path("aten"):
        assert peak(eager) >= 2.5 * logits
        # the ATen path computes 2 MiB of rows at a time
        least = logits / 8 + dw + 3 * (2 << 20)
        assert peak(ours, chunks=8) <= least
        assert peak(ours) > least


def test_chunks_from_shapes():
    assert head_chunks_for(2048, 32000, 512, torch.float32) == 4
    assert head_chunks_for(8192, 128256, 4096, torch.bfloat16) == 8
    assert head_chunks_for(0, 7, 7, torch.float32) == 1


def test_an_adapted_head():
    target = targets(T, V)

    def adapted(x, w, a, b):
        return functional.linear_cross_entropy(x, LoRA(w, a, b, 2.0), target, chunks=2)

    def twin(x, w, a, b):
        return F.cross_entropy(F.linear(x, w) + F.linear(F.linear(x, a), b) * 2, target)

    def make():
        return [*inputs(mask=(True, False, True))[:2], randn(2, D), randn(V, 2)]

    with forced_path("aten"):
        compare(adapted, twin, make)


def test_modules():
    target, x = targets(T, V), randn(2, T, D)
    head = fusedckpt.LinearCrossEntropy(D, V, label_smoothing=0.1, device=DEVICE)
    twin = nn.Linear(D, V, device=DEVICE)
    twin.load_state_dict(head.state_dict())
    both = torch.stack([target, target])
    expected = F.cross_entropy(twin(x).flatten(0, 1), both.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, both), expected)
    assert "label_smoothing=0.1" in repr(head)
    words = fusedckpt.TokenLogprobs(D, V, entropy=True, device=DEVICE)
    logp, entropy = words(x, both)
    assert logp.shape == entropy.shape == both.shape


def test_log_probabilities_may_be_changed_in_place(path):
    """Backward reads the saved statistics, which they are not."""
    target = targets(T, V)

    def changed(x, w):
        logp, entropy = functional.token_logprobs(x, w, target, entropy=True)
        return logp.mul_(2).sum() + entropy.add_(1).square().sum()

    def eager_changed(x, w):
        logp = F.log_softmax(F.linear(x, w), -1)
        counted = target != -100
        own = logp.gather(-1, (target * counted)[..., None])[..., 0] * counted
        return (own * 2).sum() + ((-(logp.exp() * logp).sum(-1) * counted) + 1).square().sum()

    compare(changed, eager_changed, lambda: inputs()[:2])
