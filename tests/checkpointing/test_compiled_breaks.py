"""A checkpoint whose function torch.compile cannot compile whole: it runs in eager."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, counted, stock
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fusedckpt
from fusedckpt import checkpoint, checkpoint_sequential, region

LAYER = fusedckpt.MLP(6, 8).to(DEVICE)


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        y = self.norm(self.linear(x)).sin()
        torch._dynamo.graph_break()
        return y.cos()


def broken(x):
    y = F.dropout(x.sin())
    torch._dynamo.graph_break()
    return y.cos()


def of_data(x):
    y = x.sin()
    return (y * 2 if y.sum() > 0 else y).cos()


def attending(x):
    y = F.scaled_dot_product_attention(x[None].sin(), x[None].cos(), x[None])[0]
    torch._dynamo.graph_break()
    return y.cos()


def fused(x):
    y = LAYER(x.sin())
    torch._dynamo.graph_break()
    return LAYER(y).cos()


def in_a_region(fn, x):
    return checkpoint(lambda a: region(fn, "r")(a.sin()).sin(), x, save_regions="r")


FUNCTIONS = {
    "module": Breaking().to(DEVICE),
    "break": broken,
    "data": of_data,
    "attention": attending,
    "fused": fused,
}
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
WRAPS = {
    "plain": checkpoint,
    "selective": partial(checkpoint, context_fn=SELECTIVE),
    "attention": partial(checkpoint, save_regions="attention"),
    "region": in_a_region,
    "sequential": lambda fn, x: checkpoint_sequential([fn, torch.sin], 2, x),
    "in itself": lambda fn, x: checkpoint(lambda a: checkpoint(fn, a.sin()).sin(), x),
    "in torch's": lambda fn, x: stock(lambda a: checkpoint(fn, a.sin()).sin(), x),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_in_eager(name, wrap):
    fn, x = FUNCTIONS[name], randn(6, 6)

    def run(x):
        return WRAPS[wrap](fn, x * 2).cos()

    def step(call):
        torch.manual_seed(2)
        if isinstance(fn, Breaking):
            fn.norm.reset_running_stats()
        y = call(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return [y.detach(), grad, *(buffer.clone() for buffer in FUNCTIONS["module"].buffers())]

    torch._dynamo.reset()
    assert_same(step(torch.compile(run, backend="eager")), step(run))


def test_is_not_compiled_in_pieces():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    fn, calls = counted(broken)
    x = randn(4, 6)
    torch.compile(lambda x: checkpoint(fn, x * 2).cos(), backend=backend)(x).sum().backward()
    # what comes before the checkpoint, and after it
    assert [[n.name for n in g.graph.nodes if n.op == "call_method"] for g in graphs] == [
        [],
        ["cos"],
    ]
    assert len(calls) == 2


def test_a_full_graph_is_refused_as_ever():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: checkpoint(broken, x), backend="eager", fullgraph=True)(randn(4, 6))
