"""The report names attributes in which a recompute leaves tensors with their graph."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt


class LeavesAll(nn.Module):
    """Leaves its loss in an attribute, its scores in a list, and a detached count."""

    def __init__(self, checkpoint, is_detached):
        super().__init__()
        self.linear, self.checkpoint, self.is_detached = nn.Linear(8, 8), checkpoint, is_detached
        self.scores, self.loss, self.count = [], None, None

    def run(self, x):
        y = self.linear(x).exp()
        self.scores[:] = [y.detach() if self.is_detached else y]
        loss = y.square().mean()
        self.loss = loss.detach() if self.is_detached else loss
        self.count = y.detach().sum()
        return y.sin()

    def forward(self, x):
        return self.checkpoint(self.run, x)


CHECKPOINTS = {
    "ours": fusedckpt.checkpoint,
    "torch's": lambda fn, *args: stock_checkpoint(fn, *args, use_reentrant=False),
    "none": lambda fn, *args: fn(*args),
}


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_attributes_that_keep_a_graph_are_named(name, is_detached):
    routers = (LeavesAll(CHECKPOINTS[name], is_detached) for _ in range(2))
    report = fusedckpt.report(nn.Sequential(*routers), torch.randn(16, 8))
    expected = () if is_detached or name == "none" else ("0.scores", "0.loss", "1.scores", "1.loss")
    assert report.left_graphs == expected
    assert report.to_dict()["left_graphs"] == expected
    line = "  graphs left in      0.scores, 0.loss and 2 more, by a recompute"
    assert (line in str(report).splitlines()) == bool(expected)
