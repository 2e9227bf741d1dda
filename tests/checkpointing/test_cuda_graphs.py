"""Checkpoints and fused modules in captured CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE
from torch import nn
from zoo import Attention, Checkpointed

import fusedckpt

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="captures need a GPU")
D = 32


def made(way, p):
    model = nn.Sequential(nn.LayerNorm(D), Attention(D, 4), nn.Dropout(p)).to(DEVICE)
    if way == "checkpoint":
        return Checkpointed(model, fusedckpt.checkpoint)
    report = fusedckpt.fuse(model, recompute_elementwise=way == "recipes")
    assert "1" in report.swapped
    return model


def steps(model, x):
    """Return gradients of a step that is captured, and replayed twice."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    found = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        found.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters())])
    return found


@needs_gpu
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("way", ["fuse", "recipes", "checkpoint"])
def test_a_whole_step_is_captured(way, p):
    torch.manual_seed(0)
    model, x = made(way, p), torch.randn(2, 5, D, device=DEVICE).requires_grad_()
    first, second = steps(model, x)
    if p == 0.0:
        torch.testing.assert_close(first, second)


@needs_gpu
@pytest.mark.parametrize("way", ["fuse", "recipes", "checkpoint"])
def test_graphed_callables(way):
    torch.manual_seed(0)
    model, x = made(way, 0.0), torch.randn(2, 5, D, device=DEVICE).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    found = torch.autograd.grad(graphed(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected)


@needs_gpu
@pytest.mark.parametrize("way", ["fuse", "checkpoint"])
def test_numbers_that_a_graph_of_its_own_drew_raise(way):
    """A replay of the backward's graph draws from where the forward's has ended."""
    model, x = made(way, 0.5), torch.randn(2, 5, D, device=DEVICE).requires_grad_()
    with pytest.raises(RuntimeError, match="capture the whole step in one"):
        torch.cuda.make_graphed_callables(model, (x,))
