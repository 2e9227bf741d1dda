"""A head that returns deferred logits: any code that reads them finds what eager's have."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.fusing.deferred import DeferredLogits

B, T, D, V = 2, 7, 12, 30


class Words(nn.Module):
    """A language model of the least kind."""

    def __init__(self, bias=True):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=bias)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        return self.lm_head(self.embed(ids).tanh())


def pair(bias=True):
    torch.manual_seed(0)
    eager = Words(bias).to(DEVICE)
    fused = copy.deepcopy(eager)
    report = fuse(fused, head=True)
    assert report.swapped == {"lm_head": "Linear -> deferred logits"}
    assert "1 x Linear -> deferred logits" in str(report)
    return eager, fused


def ids():
    return torch.arange(B * T, device=DEVICE).view(B, T) * 3 % V


def loss_of(z, labels):
    return F.cross_entropy(z.view(-1, V), labels.view(-1))


def shifted(z, labels):
    part = z[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(part.view(-1, V), labels[..., 1:].flatten())


def capped(z, labels):
    return loss_of(3.0 * torch.tanh(z / 3.0) * 0.5, labels)


def scaled(z, labels):
    return F.cross_entropy(
        (z * 2).to(torch.float32).flatten(0, 1), labels.view(-1), reduction="sum"
    )


def rows(z, labels):
    return F.cross_entropy(z.reshape(-1, V), labels.view(-1), reduction="none").square().sum()


def cut(z, labels):
    last = F.cross_entropy(z[:, -1], labels[:, -1]) + loss_of(z[1:, ..., :], labels[1])
    return shifted(z[:, :-1], labels[:, :-1]) + F.cross_entropy(z[0], labels[0]) + last


def none(z, labels):
    z, labels = z[..., :0, :][..., :-1, :], labels[..., :0]
    return F.cross_entropy(z.reshape(-1, V), labels.flatten(), reduction="sum")


def twice(z, labels):
    return loss_of(z, labels) + loss_of(z.float() / 2, labels)


def weighted(z, labels):
    return F.cross_entropy(
        z.view(-1, V), labels.view(-1), weight=torch.arange(1.0, V + 1, device=DEVICE)
    )


def over_dimensions(z, labels):
    return F.cross_entropy(z.transpose(1, 2), labels)


def likely(z, labels):
    return -z.log_softmax(-1).gather(-1, labels[..., None]).sum()


def written(z, labels):
    later, flat = z * 2, z.view(-1, V)
    flat[0] = 0.0
    z.mul_(0.5)
    return loss_of(flat, labels) + likely(later, labels)


def rectified(z, labels):
    later = z * 2
    return loss_of(F.relu(z, inplace=True), labels) + likely(later, labels)


def in_classes(z, labels):
    return F.cross_entropy(z[..., : V - 1].reshape(-1, V - 1), labels.view(-1) % (V - 1))


def inferred(z, labels):
    with torch.inference_mode():
        z.argmax(-1)
    return loss_of(z, labels) + likely(z, labels)


def infinite(z, labels):
    return loss_of(torch.tanh(z) / math.inf, labels)


def negative(z, labels):
    return loss_of(z * -2.0, labels)


class Square(torch.autograd.Function):
    """Reads its argument below torch's functions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


def by_function(z, labels):
    return Square.apply(z * 0.5).sum() + loss_of(z, labels)


NOTED = [loss_of, shifted, capped, scaled, rows, cut, none, twice]
READ = [weighted, over_dimensions, likely, written, rectified, negative, by_function, in_classes]
READ += [inferred, infinite]


@pytest.mark.parametrize("loss", [*NOTED, *READ], ids=lambda f: f.__name__)
def test_losses(loss):
    """Equal losses and gradients; no logits where the code of losses alone reads them."""
    eager, fused = pair()
    found = []
    for model in (eager, fused):
        z = model(ids())
        value = loss(z, ids())
        found.append([value, *torch.autograd.grad(value, [*model.parameters()])])
    torch.testing.assert_close(found[1], found[0])
    if loss in NOTED:
        assert type(z) is DeferredLogits
        assert (z.shape, z.size(-1), z.dim(), z.dtype) == ((B, T, V), V, 3, torch.float32)
        assert z.requires_grad
        assert z.float() is z.to(z.device) is z
        assert z.deferred.made is None
    if loss not in (written, rectified):
        assert torch.equal(z.detach(), eager(ids()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(dtype, autocast):
    eager, fused = (model.to(dtype) for model in pair(bias=False))
    found = []
    for model in (eager, fused):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            z = model(ids())
            value = loss_of(z if dtype == torch.float32 else z.float(), ids())
        found.append([value, *torch.autograd.grad(value, [*model.parameters()])])
        assert z.dtype == (torch.bfloat16 if autocast and dtype != torch.float64 else dtype)
    assert found[0][0].dtype == found[1][0].dtype
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("of", [lambda z: z, lambda z: z.view(-1, V) * 2], ids=["z", "later"])
def test_hooks_of_results(of):
    """They get the gradient of the logits, and may change it."""
    found = []
    for model in pair():
        z, seen = model(ids()), []
        later = of(z)
        z.register_hook(lambda grad, seen=seen: (seen.append(grad), grad * 0.5)[1])
        loss_of(later, ids()).backward()
        assert len(seen) == 1
        found.append([*seen, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_hooks_after_the_loss():
    """They would not run."""
    _, model = pair()
    z = model(ids())
    loss = loss_of(z * 2, ids())
    grad = partial(torch.autograd.grad, loss, allow_unused=True)
    for watch in (z.retain_grad, partial(z.register_hook, print), partial(grad, z)):
        with pytest.raises(RuntimeError, match="hooks before the loss"):
            watch()
    assert grad(model.lm_head.weight)[0] is not None


def test_hooks_of_sharded_modules():
    """They run before a backward through the logits, which they do not make, or the loss."""
    _, model = pair()
    for loss in (loss_of, likely):
        z, seen = model(ids()), []

        def gather(grad, of, seen=seen, model=model):
            seen.append([of, *(p.grad for p in model.parameters())])

        gather.__module__ = "torch.distributed.fsdp"
        z.register_hook(partial(gather, of="z"))
        assert z.deferred.made is None
        loss(z, ids()).backward()
        assert seen
        assert all(one == ["z", None, None, None] for one in seen)
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()


def test_calls_that_run_as_before():
    eager, model = pair()
    hooked = copy.deepcopy(model)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert type(hooked(ids())) is torch.Tensor
    with torch.no_grad():
        assert type(model(ids())) is torch.Tensor
    assert type(model.eval()(ids())) is torch.Tensor
    frozen = copy.deepcopy(model).train().requires_grad_(False)
    assert type(frozen(ids())) is torch.Tensor
    torch.testing.assert_close(
        torch.func.grad(lambda x: model.train().lm_head(x).sum())(torch.ones(D, device=DEVICE)),
        eager.lm_head.weight.sum(0),
    )


def test_compiled():
    _, model = pair()

    def step(given):
        return loss_of(model(given), given)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids()), step(ids()))


def test_logits_of_modified_weights():
    """They are read before the step, or not at all."""
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    early, late = model(ids()), model(ids())
    expected = early.detach()
    (loss_of(early, ids()) + loss_of(late, ids())).backward()
    optimizer.step()
    assert torch.equal(early.detach(), expected)
    with pytest.raises(RuntimeError, match="read them before backward"):
        late.argmax(-1)


def test_logits_of_weights_without_versions():
    """As optimizers write them that know of no versions, and as a module casts them."""
    new = (lambda w: w.mul_(2.0), lambda w: w * 2.0, torch.Tensor.bfloat16, lambda w: w[:0, 0])
    for change in new:
        _, model = pair()
        z = model(ids())
        loss_of(z, ids()).backward()
        model.lm_head.weight.data = change(model.lm_head.weight.data)
        with pytest.raises(RuntimeError, match="read them before backward"):
            z.argmax(-1)


def test_loss_of_modified_operands():
    """Eager's does not read them again."""
    _, model = pair()
    hidden = model.embed(ids()).detach().clone()
    late = model.lm_head(hidden)
    hidden.mul_(2.0)
    with pytest.raises(RuntimeError, match="read them before backward"):
        loss_of(late, ids())


def test_undone_copied_and_again():
    eager, model = pair()
    again = pickle.loads(pickle.dumps(model))
    assert type(again.lm_head) is type(model.lm_head) is not nn.Linear
    assert fuse(model, head=True).already == {"lm_head": "Linear -> deferred logits"}
    assert type(unfuse(model).lm_head) is nn.Linear
    assert torch.equal(model(ids()), eager(ids()))


def test_left():
    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = Words()
    model.lm_head = Head(D, V)
    assert "is no nn.Linear" in fuse(model, head=True).left["lm_head"]
    assert "lm_head" not in fuse(Words(), head=True, skip="lm_head").swapped
    assert not fuse(Words()).swapped


def test_frees_logits_without_gc():
    """Logits that were read are held by no cycle, and those before a softcap by nothing."""
    _, model = pair()
    z = torch.tanh(model(ids()) / 3.0) * 3.0
    z.sum().backward()
    assert [one.made is None for one in z.deferred.line] == [False, True, True, True]
    gc.disable()
    try:
        z = model(ids())
        z.sum().backward()
        made, hidden = (weakref.ref(t) for t in (z.deferred.made, z.deferred.operands.hidden))
        del z
        assert made() is None
        assert hidden() is None
    finally:
        gc.enable()


def test_saves_no_logits():
    eager, model = pair()
    found = []
    for one in (eager, model):
        x = one.embed(ids()).detach().requires_grad_()
        with fusedckpt.memory.saved_tensors() as saved:
            loss = loss_of(one.lm_head(x * 1), ids())
        found.append(saved.nbytes)
        del loss
    logits = 4 * B * T * V
    assert found[0] > logits
    # x, and the divisor of the mean; targets are the caller's
    assert found[1] == 4 * B * T * D + 8 + 8 * B * T
