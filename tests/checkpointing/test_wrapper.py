"""Checkpoint is its module to what reads, copies, wraps, shards or loads one (C27)."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
from checkpoints import assert_as_plain, same, step
from support import DEVICE, randn, run_ranks
from torch import nn

from fusedckpt import Checkpoint, checkpoint
from fusedckpt.memory import saved_tensors


class Block(nn.Module):
    kind = "block"

    def __init__(self, width=6):
        super().__init__()
        self.fc1, self.norm, self.fc2 = (
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, width),
        )
        self.note = "mine"

    def forward(self, x, *, scale=1.0):
        """Return x, changed."""
        return x + self.fc2(self.norm(self.fc1(x)).sin()) * scale


def names(model):
    """All names that a model gives to what it has."""
    found = model.named_parameters, model.named_buffers, model.state_dict().items
    return [[name for name, _ in named()] for named in found]


def test_equals_its_module():
    block = Block().to(DEVICE)
    x = randn(4, 6)
    expected = step(block, x, parameters=block.parameters())
    block.norm.reset_running_stats()
    found = step(Checkpoint(block), x, parameters=block.parameters())
    assert all(map(same, found, expected))
    assert block.norm.num_batches_tracked == 1


def test_keeps_its_input_alone():
    block, x = Block().to(DEVICE), randn(4, 6)
    with saved_tensors() as saved:
        Checkpoint(block)(x * 1)
    assert saved.nbytes == x.nbytes


def test_leaves_its_module_as_it_was():
    block = Block()
    before = dict(vars(block))
    wrapped = Checkpoint(block)
    assert wrapped._checkpoint_wrapped_module is block
    assert type(block) is Block
    assert vars(block) == before
    assert weakref.ref(block)() is block


@pytest.mark.parametrize("make", [Block, partial(nn.BatchNorm1d, 6)])
def test_names_are_those_without_the_wrapper(make):
    plain = nn.ModuleDict({"a": make(), "b": nn.Sequential(make(), nn.ReLU())})
    model = nn.ModuleDict({"a": Checkpoint(make()), "b": nn.Sequential(Checkpoint(make()))})
    assert names(model) == names(plain)
    assert names(model["a"]) == names(plain["a"])
    inner = model["b"][0]._checkpoint_wrapped_module
    assert dict(model.named_modules())["b.0"] is inner
    assert [m for name, m in model.named_modules() if name == "b.0"] == [model["b"][0], inner]
    found = {id(m) for _, m in model.named_modules(remove_duplicate=False)}
    assert found == set(map(id, model.modules()))
    for name, p in model.named_parameters():
        assert model.get_parameter(name) is p


def test_state_is_that_without_the_wrapper():
    plain = nn.Sequential(Block(), nn.BatchNorm1d(6))
    model = nn.Sequential(Checkpoint(Block()), Checkpoint(nn.BatchNorm1d(6)))
    state = plain.state_dict()
    model.load_state_dict(state)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    plain.load_state_dict(model.state_dict())


def test_attributes_are_those_of_the_module():
    block = Block()
    wrapped = Checkpoint(block)
    assert wrapped.kind == "block"
    assert wrapped.fc1 is block.fc1
    wrapped.fc1.weight = weight = nn.Parameter(torch.ones(6, 6))
    assert block.fc1.weight is weight
    wrapped.eval()
    assert not block.training
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'nothing'"):
        wrapped.nothing  # noqa: B018


def test_what_is_set_is_set_on_the_module():
    block = Block()
    model = nn.Sequential(Checkpoint(block))
    wrapped = model[0]
    wrapped.kind = "another"
    assert block.kind == "another"
    model.set_submodule("0.fc1", new := nn.Linear(6, 6))
    assert block.fc1 is new
    assert dict(model.named_modules())["0.fc1"] is new
    del wrapped.fc1
    assert not hasattr(block, "fc1")
    # what the module does not have is the wrapper's
    wrapped.extra = 1
    assert not hasattr(block, "extra")
    del wrapped.extra
    with pytest.raises(AttributeError, match="extra"):
        del wrapped.extra


def test_a_parameter_of_the_module_is_replaced_by_name():
    model, x = nn.Sequential(nn.Linear(6, 6), Checkpoint(nn.Linear(6, 6))).to(DEVICE), randn(4, 6)
    values = {name: p.detach() * 2 for name, p in model.named_parameters()}
    weight = model[1].weight
    y = torch.func.functional_call(model, values, (x,))
    expected = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DEVICE)
    expected.load_state_dict(values)
    assert torch.equal(y, expected(x))
    assert model[1].weight is weight


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self[:-1]:
            x = block(x)
        return self[-1](x)


def test_of_a_container():
    blocks = Blocks([nn.Linear(6, 6), nn.Linear(6, 6)]).to(DEVICE)
    wrapped = Checkpoint(blocks)
    assert_as_plain(wrapped, randn(2, 6), parameters=blocks.parameters())
    assert list(wrapped) == list(blocks)
    assert blocks[1] in wrapped
    assert wrapped[1] is blocks[1]
    assert len(wrapped) == len(wrapped[:]) == 2
    assert type(wrapped[:1]) is Blocks
    wrapped[1] = new = nn.Linear(6, 6)
    assert blocks[1] is new
    del wrapped[0]
    assert list(blocks) == [new]
    assert Checkpoint(Block())
    assert not Checkpoint(nn.ModuleList())
    assert list(Checkpoint(nn.ModuleDict({"a": Block()}))) == ["a"]


def test_of_a_lazy_module():
    wrapped = Checkpoint(nn.LazyLinear(3))
    y = wrapped(torch.ones(2, 5))
    y.sum().backward()
    assert wrapped.weight.grad.shape == (3, 5)
    assert isinstance(wrapped._checkpoint_wrapped_module, nn.Linear)


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load]
)
def test_copies(copied):
    block = Checkpoint(Block().to(DEVICE), preserve_rng_state=False)
    other = copied(block)
    assert type(other) is Checkpoint
    assert "preserve_rng_state=False" in repr(other)
    assert names(other) == names(block)
    x = randn(4, 6)
    assert all(map(same, step(other, x), step(block, x)))


def test_hooks_of_the_wrapper_run_once():
    calls = []
    block = Block().to(DEVICE)
    block.register_forward_pre_hook(lambda *_: calls.append("inner"))
    wrapped = Checkpoint(block)
    wrapped.register_forward_pre_hook(lambda *_: calls.append("pre"))
    wrapped.register_forward_hook(lambda *_: calls.append("post"))
    block.fc1.register_forward_hook(lambda *_: calls.append("child"))
    wrapped(randn(4, 6), scale=2.0).sum().backward()
    assert calls == ["pre", "inner", "child", "post", "inner", "child"]


def test_arguments_that_are_named_as_options():
    class Named(nn.Module):
        def forward(self, x, fn, debug, preserve_rng_state):
            return (fn(x) * debug).sin() if preserve_rng_state is None else x

    x = randn(3)
    scale = x.detach() * 2
    call = partial(Checkpoint(Named()), fn=torch.cos, debug=scale, preserve_rng_state=None)
    assert all(map(same, step(call, x), step(lambda x: (x.cos() * scale).sin(), x)))


def test_of_a_checkpoint_is_one():
    calls = []
    block = Block().to(DEVICE)
    block.fc1.register_forward_hook(lambda *_: calls.append(1))
    twice = Checkpoint(Checkpoint(block), debug=True)
    assert twice._checkpoint_wrapped_module is block
    twice(randn(4, 6)).sum().backward()
    assert len(calls) == 2
    assert "debug=True" in repr(twice)


def compiled_in_place():
    block = Block().eval()
    block.compile(backend="aot_eager")
    return Checkpoint(block)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: torch.compile(Checkpoint(Block().eval()), backend="aot_eager", fullgraph=True),
        lambda: Checkpoint(torch.compile(Block().eval(), backend="aot_eager")),
        compiled_in_place,
    ],
)
def test_compiles(compiled):
    torch._dynamo.reset()
    block, x = compiled().to(DEVICE), randn(4, 6)
    eager = Block().eval().to(DEVICE)
    eager.load_state_dict({n.removeprefix("_orig_mod."): t for n, t in block.state_dict().items()})
    for a, b in zip(step(block, x), step(eager, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_speaks_the_protocol_of_torch():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    model = nn.Sequential(Block(), nn.ReLU())
    torchs.apply_activation_checkpointing(model, Checkpoint, lambda m: isinstance(m, Block))
    assert type(model[0]) is Checkpoint
    assert isinstance(model[0], torchs.ActivationWrapper)


@pytest.mark.parametrize(
    ("module", "options", "match"),
    [
        (torch.sin, {}, "Checkpoint: expected an nn.Module"),
        (nn.ReLU(), {"debugs": 1, "a": 2}, r"unknown options a, debugs$"),
    ],
)
def test_refused(module, options, match):
    with pytest.raises(TypeError, match=match):
        Checkpoint(module, **options)


def test_gradient_accumulation():
    """Micro-batches through one checkpointed model add up to the gradient of the batch."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE), randn(8, 6)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    for part in x.split(2):
        checkpoint(model, part).square().sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert_as_plain(partial(checkpoint, model), x)


def test_data_parallel(tmp_path):
    """C27: DDP, FSDP1 and FSDP2, by one process per rank; see checkpoint_ranks.py."""
    import checkpoint_ranks

    run_ranks(checkpoint_ranks.main, tmp_path)
