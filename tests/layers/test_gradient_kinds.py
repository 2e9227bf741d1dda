"""Every function at every level: batches of gradients, and those differentiated again."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from adapted_cases import ALL
from cases import Case
from support import DEVICE, as_tuple, leaves_of

import fusedckpt
from fusedckpt.autograd.levels import LEVELS

# how gradients are batched, and whether they are differentiated again
KINDS = {
    "batched": ("is_grads_batched", False),
    "batched twice": ("is_grads_batched", True),
    "vmap": ("vmap", False),
}


def masks(case: Case) -> list[tuple[bool, ...]]:
    """Which inputs require grad: all, all but the matrices behind x, and some."""
    count, draw = case.num_inputs, random.Random(case.name)
    shapes = [shape for shape in case.shapes((2,), 3, 4) if shape is not None]
    frozen = tuple(not index or len(shape) == 1 for index, shape in enumerate(shapes))
    drawn = [tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(4)]
    return [(True,) * count, frozen, *drawn, tuple(not flag for flag in drawn[0])]


def inputs_of(case: Case, mask: tuple[bool, ...]):
    """Draw inputs, of which some may be None, with a mask over the others."""
    flags = iter(mask)
    full = tuple(shape is not None and next(flags) for shape in case.shapes((2,), 3, 4))
    return case.inputs((3,), 4, 5, torch.float64, full)


def gradients_of(ys, wanted, dys, batches: str | None, is_twice: bool):
    """Return torch.autograd.grad of one dy each, or of several at once."""
    if batches != "vmap":
        options = {"create_graph": is_twice, "is_grads_batched": batches is not None}
        return torch.autograd.grad(ys, wanted, dys, **options, allow_unused=True)

    def one(*dys):
        found = torch.autograd.grad(ys, wanted, dys, retain_graph=True, allow_unused=True)
        # vmap takes no None
        pairs = zip(found, wanted, strict=True)
        return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in pairs)

    return torch.vmap(one)(*dys)


def gradients(fn, inputs, batches: str | None, is_twice: bool):
    """Return gradients, and with `is_twice` those of their sines' sum, by the first's too."""
    ys = [y for y in as_tuple(fn(*inputs)) if y.requires_grad]
    if not ys:
        return ()
    generator, lead = torch.Generator().manual_seed(1), (2,) if batches else ()
    dys = [torch.randn(*lead, *y.shape, generator=generator, dtype=y.dtype) for y in ys]
    dys = [dy.to(DEVICE).requires_grad_(is_twice) for dy in dys]
    wanted = leaves_of(inputs)
    found = gradients_of(ys, wanted, dys, batches, is_twice)
    total = sum(grad.sin().sum() for grad in found if grad is not None and grad.requires_grad)
    if not isinstance(total, torch.Tensor):
        return found
    return *found, *torch.autograd.grad(total, [*wanted, *dys], allow_unused=True)


def assert_alike(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            # what nothing depends on
            assert all(t is None or not t.any() for t in (a, b))
        else:
            torch.testing.assert_close(a, b)


def unless_refused(fn, may_be: bool):
    """Return what fn does; None for second derivatives of what a level does not save."""
    try:
        return fn()
    except RuntimeError as error:
        if may_be and "create_graph=True needs x" in str(error) and "save='preact'" in str(error):
            return None
        raise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_equals_eager(case, kind):
    batches, is_twice = KINDS[kind]
    count = 0
    for index, mask in enumerate(masks(case)):
        level, inputs = LEVELS[index % 3], inputs_of(case, mask)
        wanted = gradients(case.eager, inputs, batches, is_twice)
        with fusedckpt.saving(level):
            # the limit that README names
            may_be = is_twice and (level == "preact" or "preact" in case.name)
            fused = partial(gradients, case.fused, inputs, batches, is_twice)
            found = unless_refused(fused, may_be)
        if found is not None:
            assert_alike(found, wanted)
            count += 1
    assert count >= 2


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_batches_on_the_kernels(case):
    inputs = case.inputs((3,), 4, 5)
    ys = as_tuple(case.eager(*inputs))
    dys = [torch.randn(2, *y.shape, dtype=y.dtype, device=DEVICE) for y in ys]
    found = [
        torch.autograd.grad(as_tuple(fn(*inputs)), leaves_of(inputs), dys, is_grads_batched=True)
        for fn in (case.fused, case.eager)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Constant(torch.autograd.Function):
    """Passes on a gradient that does not depend on its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.ones(ctx.shape, dtype=ctx.dtype, device=DEVICE)


SEVERAL = [case for case in ALL if "norm_linear" in case.name or "add_" in case.name]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
def test_one_gradient_that_is_no_batch(case, which):
    inputs = inputs_of(case, (True,) * case.num_inputs)
    found = []
    for fn in (case.fused, case.eager):
        ys = list(as_tuple(fn(*inputs)))
        ys[which] = Constant.apply(ys[which])
        torch.manual_seed(3)
        dys = [torch.randn(2, *y.shape, dtype=y.dtype, device=DEVICE) for y in ys]
        options = {"is_grads_batched": True, "allow_unused": True}
        found.append(torch.autograd.grad(ys, leaves_of(inputs), dys, **options))
    assert_alike(*found)
