"""A recompute ends no later than torch's: no operation more runs in a backward, no byte more."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, stock
from support import DEVICE, Watched, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

from fusedckpt import checkpoint
from fusedckpt.memory import nbytes_of, peak_bytes

LINEAR = nn.Linear(8, 8).to(DEVICE)
EMBEDDING = nn.Embedding(8, 8).to(DEVICE)
LAYERS = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()).to(DEVICE)
CONV = nn.Conv1d(2, 2, 3, padding=1).to(DEVICE)
MODULES = nn.ModuleList([LINEAR, EMBEDDING, LAYERS, CONV])
INDEX = torch.tensor([0, 4, 4, 1, 7, 2, 0, 0]).to(DEVICE)
OTHER = torch.linspace(0.5, 1.5, 64).view(8, 8).to(DEVICE)
# operations that allocate and compute nothing
FREE = "aten.detach.default", "aten.as_strided.default"


class Signed(torch.autograd.Function):
    """Saves integers behind its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, (x > 0).int())
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        x, sign = ctx.saved_tensors
        return grad * (2 * sign - 1) * (x != 0)


def in_place(x):
    y = LINEAR(x).sin()[INDEX]
    return (y * 2).add_(1).mul_(3)


def several_outputs(x):
    y = LINEAR(x).sin()
    return y * OTHER, LINEAR(y).sum(), y


# functions of x [8, 8], by the kind of the tensor that autograd saves last
ENDS: dict[str, Callable[..., Any]] = {
    "the weight of a loss": lambda x: F.cross_entropy(LINEAR(x), INDEX),
    "a mask": lambda x: F.dropout(LINEAR(x), 0.5),
    "a mask of a result in place": lambda x: F.dropout(LINEAR(x), 0.5, inplace=True),
    "indices": lambda x: LINEAR(x)[INDEX],
    "indices of a gather": lambda x: LINEAR(x).gather(0, INDEX.view(1, 8)),
    "indices of an embedding": lambda x: x.sin() * EMBEDDING(INDEX),
    "indices of a maximum": lambda x: LINEAR(x).max(dim=0)[0],
    "indices of top-k": lambda x: LINEAR(x).topk(2)[0],
    "indices of a pooling": lambda x: F.max_pool1d(LINEAR(x), 2),
    "a condition": lambda x: torch.where(OTHER > 1, LINEAR(x), OTHER),
    "a condition of a fill": lambda x: LINEAR(x).masked_fill(OTHER > 1, 0),
    "a target": lambda x: F.mse_loss(LINEAR(x), OTHER),
    "a weight of a target": lambda x: F.binary_cross_entropy_with_logits(LINEAR(x), OTHER, OTHER),
    # as rrelu, they save a constant before a tensor of its shape
    "an input behind a constant": lambda x: torch.atan2(LINEAR(x), OTHER),
    "an input behind another constant": lambda x: torch.xlogy(LINEAR(x), OTHER),
    "a result behind a constant": lambda x: LINEAR(x).abs() ** OTHER,
    "a constant": lambda x: LINEAR(x) * OTHER,
    "a parameter": lambda x: LINEAR(x) * LINEAR.weight,
    "an input": lambda x: LINEAR(x.sin()),
    "an argument": lambda x: LINEAR(x),
    "an argument of another node": lambda x: LINEAR(x) * x,
    "a view of an argument": lambda x: LINEAR(x) @ x[:, 2:],
    "a result": lambda x: LINEAR(x).exp(),
    "a result in place": lambda x: LINEAR(x).exp_(),
    "statistics": lambda x: F.batch_norm(LINEAR(x), None, None, training=True),
    "a mask behind statistics": LAYERS,
    "an input of a convolution": lambda x: CONV(x.sin().view(4, 2, 8)),
    "a state of attention": lambda x: F.scaled_dot_product_attention(
        *LINEAR(x).expand(3, 1, 1, 8, 8)
    ),
    "integers of a function": lambda x: Signed.apply(LINEAR(x)),
    "nothing": lambda x: x + 1,
    "an input of a sum": lambda x: LINEAR(x).sin().sum(),
    "indices before writes": in_place,
    "one for another output": several_outputs,
    "one in a checkpoint": lambda x: checkpoint(lambda y: F.dropout(LINEAR(y)), LINEAR(x).sin()),
    "one in torch's checkpoint": lambda x: stock(lambda y: F.dropout(LINEAR(y)), LINEAR(x).sin()),
}
# a policy may not save a tensor that is written before the recompute ends, in torch's either
WRITTEN = "a mask of a result in place", "a result in place"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "to the end": {"early_stop": False},
    "selective": {"context_fn": functools.partial(selective, [torch.ops.aten.addmm.default])},
}


def with_more_behind(fn, x):
    """Run a function, and code behind it that no gradient needs."""
    outputs = fn(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with torch.no_grad():
        row = outputs[0].reshape(1, -1)
        side = row.expand(256, -1) @ row.t()
    return *outputs, side


def backward(wrap, fn, is_partial, **options):
    """Return the gradients of a step, the operations of its backward with shapes, and its peak."""
    x = randn(8, 8)

    def loss():
        torch.manual_seed(5)
        outputs = wrap(functools.partial(with_more_behind, fn), x, **options)
        outputs = [y for y in outputs if y.requires_grad]
        return sum(y.sum() for y in (outputs[:1] if is_partial else outputs))

    def gradients(loss):
        return torch.autograd.grad(loss, [x, *MODULES.parameters()], allow_unused=True)

    losses = [loss() for _ in range(2)]
    with Watched() as watched:
        grads = gradients(losses[0])
    operations = Counter(
        (str(op), *(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)))
        for op, args in watched.seen
        if str(op) not in FREE
    )
    return grads, operations, peak_bytes(lambda: gradients(losses[1]), x.device)


def assert_no_more_than_torchs(fn, is_partial, copies=0, **options):
    with torch.no_grad():
        LINEAR.weight.copy_((torch.eye(8, device=DEVICE) + OTHER / 8) / 4)
    torch.manual_seed(1)
    grads, operations, peak = backward(checkpoint, fn, is_partial, **options)
    torch.manual_seed(1)
    expected = backward(stock, fn, is_partial, **options)
    assert_same(grads, expected[0])
    assert not operations - expected[1]
    assert peak <= expected[2] + copies


CASES = [
    pytest.param(name, options, id=f"{name}-{options}")
    for name in ENDS
    for options in OPTIONS
    if options != "selective" or name not in WRITTEN
]


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_recompute_runs_no_more_than_torchs(name, options, is_partial):
    # of the buffers, which are put back
    copies = nbytes_of(LAYERS.buffers()) if ENDS[name] is LAYERS else 0
    assert_no_more_than_torchs(ENDS[name], is_partial, copies, **OPTIONS[options])


def program(names):
    """Return a function that calls some of the functions above, and drops results of others."""

    def fn(x):
        h = x
        for name in names:
            y = ENDS[name](h)
            y = y[0] if isinstance(y, tuple) else y
            if y.shape == h.shape:
                h = y
            elif name != names[0]:
                h = h * y.sum()
        return h

    return fn


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_run_no_more_than_torchs(seed):
    names = random.Random(seed).sample([*ENDS], 4)
    copies = nbytes_of(LAYERS.buffers()) if "a mask behind statistics" in names else 0
    assert_no_more_than_torchs(program(names), False, copies)


INPLACE_OPERATIONS = {
    "a dropout": (lambda x: F.dropout(x * 1.0, 0.5, True, True) * 1.5, torch.ops.aten.mul_.Tensor),
    "an assignment": (
        lambda x: (x * 1.0).index_put_((INDEX[:2],), x[:2] * 2) * 1.5,
        torch.ops.aten.index_put_.default,
    ),
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", INPLACE_OPERATIONS)
def test_a_policy_may_save_what_is_written_behind_the_last_saved_tensor(name, is_nested):
    fn, operation = INPLACE_OPERATIONS[name]
    x = randn(8, 8)
    grads = []
    for wrap in (checkpoint, stock):
        run = functools.partial(wrap, fn, context_fn=functools.partial(selective, [operation]))
        torch.manual_seed(0)
        y = wrap(run, x) if is_nested else run(x)
        grads.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*grads)


def test_an_error_names_the_operation_whose_saved_result_is_written():
    fn = lambda x: (x * 2.0).add_(1).sin()  # noqa: E731
    options = functools.partial(selective, [torch.ops.aten.mul.Tensor])
    y = checkpoint(fn, randn(4), context_fn=options)
    with pytest.raises(CheckpointError, match=r"aten\.mul\.Tensor, and the function writes it"):
        y.sum().backward()


def test_noise_is_drawn_before_a_recompute_ends():
    """rrelu is the one operation that saves a tensor first and fills it then."""
    x = randn(8, 8)
    fn = functools.partial(with_more_behind, lambda x: F.rrelu(LINEAR(x), training=True))
    grads = []
    for call in (functools.partial(checkpoint, fn), fn):
        torch.manual_seed(0)
        y, _ = call(x)
        # also where the node that asks first is not that of the last saved tensor
        partial = torch.autograd.grad(y.sum(), x, retain_graph=True)
        grads.append([*partial, *torch.autograd.grad(y.sum(), [x, LINEAR.weight])])
    assert_same(*grads)
