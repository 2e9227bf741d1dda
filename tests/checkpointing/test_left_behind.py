"""Tensors that a recompute leaves in attributes keep none of the tensors that it saved."""

import weakref

import pytest
import torch
from support import DEVICE, randn
from torch import nn

from fusedckpt import checkpoint


class LeavesLoss(nn.Module):
    """Leaves its loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.saved = nn.Linear(8, 8), []

    def forward(self, x):
        y = self.body(x).exp()
        self.saved.append(weakref.ref(y.untyped_storage()))
        self.loss = y.square().mean()
        return y.sin()


def test_a_recompute_frees_what_it_saved():
    model, plain, x = LeavesLoss().to(DEVICE), LeavesLoss().to(DEVICE), randn(64, 8)
    plain.load_state_dict(model.state_dict())
    (checkpoint(model, x).sum() + model.loss).backward()
    (plain(x).sum() + plain.loss).backward()
    assert torch.equal(model.body.weight.grad, plain.body.weight.grad)
    first, second = model.saved
    assert first() is None
    assert second() is None
    saved = r"The recompute of LeavesLoss \(it saved .* \[64, 8\]\)"
    told = rf"graph is freed. {saved}.*tensor\.detach\(\)"
    with pytest.raises(RuntimeError, match=told):
        model.loss.backward()


def test_a_gradient_inside_a_recompute_finds_its_tensors():
    def penalized(x, weight):
        y = (x @ weight).exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square() @ weight

    results = []
    for call in (lambda *args: checkpoint(penalized, *args), penalized):
        x, weight = (t.detach().double().requires_grad_() for t in (torch.ones(4, 8), torch.eye(8)))
        call(x, weight).sum().backward()
        results.append((x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
