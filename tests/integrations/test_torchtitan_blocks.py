"""The checkpoint of torchtitan's blocks, in both forms of its activation checkpointing."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from little_titan import D, Dropping, F, Model, Registering, TransformerBlock, installed
from support import DEVICE, flops, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError

import fusedckpt
from fusedckpt.checkpointing.wrapper import checkpoint_module
from fusedckpt.memory import saved_tensors

ROWS, BLOCKS = 5, 2
GEMM = 2 * ROWS * D * F


@pytest.fixture(params=[Registering, Dropping])
def titan(request):
    with installed(request.param) as titan:
        yield titan


def plain(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(TransformerBlock.Config(dropout=dropout), BLOCKS).to(DEVICE)


def applied(titan, model):
    titan.ours.full_checkpoint(titan.config()).build().apply(model)
    return model


def step(model, seed: int = 1):
    torch.manual_seed(seed)
    model.zero_grad()
    x = randn(ROWS, D)
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def equal(found, expected) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def gemms(model) -> float:
    return flops(lambda: step(model)) / GEMM


# of a block: two in the forward, four for its gradients, and one of the two that ran again, as the
# recompute ends before the last
PLAIN, CHECKPOINTED = 6 * BLOCKS, 7 * BLOCKS


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_blocks_are_checkpointed(titan, dropout):
    model = applied(titan, plain(dropout))
    assert equal(step(model), step(plain(dropout)))
    assert gemms(model) == CHECKPOINTED
    with saved_tensors() as saved:
        model(randn(ROWS, D) * 1)
    assert saved.nbytes == BLOCKS * ROWS * D * 4


def test_names_and_classes_stay(titan):
    model, reference = plain(), plain()
    names = [list(dict(model.named_modules())), list(model.state_dict())]
    applied(titan, model)
    assert [list(dict(model.named_modules())), list(model.state_dict())] == names
    assert all(type(block) is TransformerBlock for block in model.layers.values())
    assert repr(model) == repr(reference)
    signature = inspect.signature(reference.layers["0"].forward)
    assert inspect.signature(model.layers["0"].forward) == signature
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(2)
    model.load_state_dict(reference.state_dict())
    assert equal(step(model), step(reference))


def test_twice_and_undone(titan):
    model = applied(titan, applied(titan, plain()))
    assert equal(step(model), step(plain()))
    assert gemms(model) == CHECKPOINTED
    for block in model.layers.values():
        del block.forward
    assert gemms(model) == PLAIN
    applied(titan, model)
    for block in model.layers.values():
        block.forward = block.forward.__wrapped__
    assert gemms(model) == PLAIN


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_checkpointed_on_their_own(titan, copied):
    model = applied(titan, plain())
    expected, other = step(model), copied(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert equal(step(other), expected)
    assert gemms(other) == CHECKPOINTED
    # what refers to the block from its forward on
    forward = copied(other.layers["0"].forward)
    assert forward.__self__.forward is forward


def test_a_forward_that_was_set_before_is_checkpointed(titan):
    model = plain()
    for block in model.layers.values():
        block.forward = lambda x, block=block: TransformerBlock.forward(block, x, scale=2.0)
    expected = step(model)
    applied(titan, applied(titan, model))
    assert equal(step(model), expected)
    assert gemms(model) == CHECKPOINTED


def test_hooks_run_once_and_arguments_are_passed(titan):
    model, calls = applied(titan, plain()), []
    block, x = model.layers["0"], randn(ROWS, D)
    block.register_forward_hook(lambda *_: calls.append(1))
    y = block(x, scale=3.0)
    y.sum().backward()
    assert len(calls) == 1
    assert torch.equal(y, plain().layers["0"](x, 3.0))


def test_fused_before_and_after(titan):
    """A forward looks for the class's as it is called: that of a fused block is another one."""
    model = applied(titan, plain())
    report = fusedckpt.fuse(model)
    assert report.swapped
    found, expected = step(model), step(plain())
    torch.testing.assert_close(found, expected)
    assert gemms(model) == CHECKPOINTED
    fusedckpt.unfuse(model)
    assert equal(step(model), expected)
    mlps = nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, D)).to(DEVICE)
    expected = step(mlps)
    fusedckpt.fuse(mlps)
    checkpoint_module(mlps)
    fusedckpt.unfuse(mlps)
    assert equal(step(mlps), expected)


def test_compiled(titan):
    torch._dynamo.reset()
    model, graphs = applied(titan, plain()), []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(step(model), step(plain()))
    assert graphs
    assert all("tag_activation_checkpoint" in code for code in graphs)


def test_regions_are_given_to_the_checkpoint(titan):
    """Not even the first linear of a block runs again, where it is a region."""
    ac = titan.ours.full_checkpoint(titan.config(), save_regions=["w1"]).build()
    model = plain()
    for block in model.layers.values():
        block.w1.forward = fusedckpt.region(block.w1.forward, "w1")
    ac.apply(model)
    assert equal(step(model), step(plain()))
    assert gemms(model) == PLAIN


def test_debug_names_the_layer_that_differs(titan):
    ac = titan.ours.full_checkpoint(titan.config()).build()
    ac.config.debug = True
    model, calls = plain(), []
    ac.apply(model)
    model.layers["0"].w1.register_forward_hook(lambda _, __, y: y * (calls.append(1) or len(calls)))
    with pytest.raises(CheckpointError, match=r"the output of w1 \(Linear\)"):
        step(model)


def test_fused_blocks(titan):
    config = titan.ours.fused_block(TransformerBlock.Config(), save="preact")
    torch.manual_seed(0)
    model = applied(titan, Model(config, BLOCKS).to(DEVICE))
    torch.testing.assert_close(step(model), step(plain()))
    assert gemms(model) == CHECKPOINTED
