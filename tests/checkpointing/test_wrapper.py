"""Checkpoint is its module to what reads, copies, wraps, shards or loads one (C27)."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from functools import partial

import pytest
import torch
from checkpoints import assert_as_plain, assert_same, step
from support import DEVICE, randn, run_ranks
from torch import nn

from fusedckpt import Checkpoint
from fusedckpt.memory import saved_tensors


class Block(nn.Module):
    kind = "block"

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x, *, scale=1.0):
        """Return x, changed."""
        return x + self.fc2(self.norm(self.fc1(x)).sin()) * scale


class Locked(nn.Linear):
    """It copies without its lock."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock = threading.Lock()


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self[:-1]:
            x = block(x)
        return self[-1](x)


def recompiled():
    wrapped = Checkpoint(torch.fx.symbolic_trace(nn.Linear(6, 6)))
    wrapped.recompile()
    return wrapped


KINDS = {
    "block": lambda: Checkpoint(Block(), preserve_rng_state=False),
    "container": lambda: Checkpoint(Blocks([nn.Linear(6, 6), nn.Linear(6, 6)])),
    "locked": lambda: Checkpoint(Locked(6, 6)),
    "weight_norm": lambda: Checkpoint(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    "fx": recompiled,
    "script": lambda: Checkpoint(torch.jit.script(nn.Linear(6, 6))),
}


def reset(module):
    for child in module.modules():
        getattr(child, "reset_running_stats", int)()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_of_any_kind(kind):
    wrapped, x = KINDS[kind]().to(DEVICE), randn(4, 6)
    inner = wrapped._checkpoint_wrapped_module
    expected = step(inner, x, parameters=inner.parameters())
    buffers = [b.clone() for b in inner.buffers()]
    for module in (wrapped, wrapped._replicate_for_data_parallel()):
        reset(wrapped)
        assert_same(step(module, x, parameters=inner.parameters()), expected)
        assert_same(inner.buffers(), buffers)
    with saved_tensors() as saved:
        wrapped(argument := x * 1)
    assert saved.nbytes in (0, argument.nbytes)


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load]
)
@pytest.mark.parametrize("kind", ["block", "container", "locked"])
def test_copies(copied, kind):
    wrapped = KINDS[kind]().to(DEVICE)
    other = copied(wrapped)
    assert type(other) is Checkpoint
    assert repr(other) == repr(wrapped)
    assert type(other._checkpoint_wrapped_module) is type(wrapped._checkpoint_wrapped_module)
    assert names(other) == names(wrapped)
    x = randn(4, 6)
    assert_same(step(other, x), step(wrapped, x))


def names(model):
    """All names that a model gives to what it has."""
    found = model.named_parameters, model.named_buffers, model.state_dict().items
    return [[name for name, _ in named()] for named in found]


@pytest.mark.parametrize("make", [Block, partial(nn.BatchNorm1d, 6)])
def test_names_and_state_are_those_without_the_wrapper(make):
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
    state = plain.state_dict()
    model.load_state_dict(state)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    plain.load_state_dict(model.state_dict())


def test_attributes_are_those_of_the_module():
    block = Block()
    before = dict(vars(block))
    wrapped = Checkpoint(block)
    assert wrapped._checkpoint_wrapped_module is block
    assert vars(block) == before
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


def test_items_are_those_of_a_container():
    blocks = Blocks([nn.Linear(6, 6), nn.Linear(6, 6)])
    wrapped = Checkpoint(blocks)
    assert list(wrapped) == list(blocks)
    assert blocks[1] in wrapped
    assert wrapped[1] is blocks[1]
    assert len(wrapped) == len(wrapped[:]) == 2
    assert type(wrapped[:1]) is Blocks
    wrapped[1] = new = nn.Linear(6, 6)
    del wrapped[0]
    assert list(blocks) == [new]
    assert Checkpoint(Block())
    assert not Checkpoint(nn.ModuleList())
    assert list(Checkpoint(nn.ModuleDict({"a": Block()}))) == ["a"]


def test_of_a_lazy_module():
    wrapped = Checkpoint(nn.LazyLinear(3))
    wrapped(torch.ones(2, 5)).sum().backward()
    assert wrapped.weight.grad.shape == (3, 5)
    assert isinstance(wrapped._checkpoint_wrapped_module, nn.Linear)


def test_hooks_of_the_wrapper_run_once():
    calls, block = [], Block().to(DEVICE)
    block.register_forward_pre_hook(lambda *_: calls.append("inner"))
    wrapped = Checkpoint(Checkpoint(block), debug=True)
    assert wrapped._checkpoint_wrapped_module is block
    assert "debug=True" in repr(wrapped)
    wrapped.register_forward_pre_hook(lambda *_: calls.append("pre"))
    wrapped.register_forward_hook(lambda *_: calls.append("post"))
    block.fc1.register_forward_hook(lambda *_: calls.append("child"))
    wrapped(randn(4, 6), scale=2.0).sum().backward()
    assert calls == ["pre", "inner", "child", "post", "inner", "child"]


def test_arguments_that_are_named_as_options():
    class Named(nn.Module):
        def forward(self, x, fn, debug, preserve_rng_state):
            return (fn(x) * debug).sin() if preserve_rng_state is None else x

    scale = randn(3, requires_grad=False)
    call = partial(Checkpoint(Named()), fn=torch.cos, debug=scale, preserve_rng_state=None)
    assert_as_plain(lambda x: (x.cos() * scale).sin(), randn(3), wrap=lambda _, x: call(x))


def compiled_in_place():
    block = Block().eval()
    block.compile(backend="aot_eager")
    return Checkpoint(block)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: torch.compile(Checkpoint(Block().eval()), backend="aot_eager", fullgraph=True),
        compiled_in_place,
    ],
)
def test_compiles(compiled):
    torch._dynamo.reset()
    block, x = compiled().to(DEVICE), randn(4, 6)
    eager = Block().eval().to(DEVICE)
    eager.load_state_dict({n.removeprefix("_orig_mod."): t for n, t in block.state_dict().items()})
    torch.testing.assert_close(step(block, x), step(eager, x))


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
        (torch.sin, {}, "Checkpoint: module must be an nn.Module"),
        (nn.ReLU(), {"debugs": 1, "a": 2}, r"unknown options a, debugs$"),
    ],
)
def test_refused(module, options, match):
    with pytest.raises(TypeError, match=match):
        Checkpoint(module, **options)


def test_data_parallel(tmp_path):
    """C27: DDP, FSDP1 and FSDP2, by one process per rank; see checkpoint_ranks.py."""
    import checkpoint_ranks

    run_ranks(checkpoint_ranks.main, tmp_path)
