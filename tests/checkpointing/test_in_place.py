"""A module that is checkpointed in place is the same to code that reads, copies, shards it."""

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

from fusedckpt import checkpoint_module
from fusedckpt.memory import saved_tensors


class BatchNormBlock(nn.Module):
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


class BlockList(nn.ModuleList):
    def forward(self, x):
        for block in self[:-1]:
            x = block(x)
        return self[-1](x)


def recompiled():
    wrapped = checkpoint_module(torch.fx.symbolic_trace(nn.Linear(6, 6)))
    wrapped.recompile()
    return wrapped


KINDS = {
    "block": lambda: checkpoint_module(BatchNormBlock(), preserve_rng_state=False),
    "container": lambda: checkpoint_module(BlockList([nn.Linear(6, 6), nn.Linear(6, 6)])),
    "locked": lambda: checkpoint_module(Locked(6, 6)),
    "weight_norm": lambda: checkpoint_module(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    ),
    "fx": recompiled,
    "script": lambda: checkpoint_module(torch.jit.script(nn.Linear(6, 6))),
}


def reset(module):
    for child in module.modules():
        getattr(child, "reset_running_stats", int)()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_of_any_kind(kind):
    module, x = KINDS[kind]().to(DEVICE), randn(4, 6)
    checkpointed = vars(module).pop("forward")
    expected = step(module, x, parameters=module.parameters())
    buffers = [b.clone() for b in module.buffers()]
    module.forward = checkpointed
    reset(module)
    assert_same(step(module, x, parameters=module.parameters()), expected)
    assert_same(module.buffers(), buffers)
    with saved_tensors() as saved:
        module(argument := x * 1)
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
    module = KINDS[kind]().to(DEVICE)
    other = copied(module)
    assert type(other) is type(module)
    assert repr(other) == repr(module)
    assert names(other) == names(module)
    x = randn(4, 6)
    assert_same(step(other, x), step(module, x))
    with saved_tensors() as saved:
        other(argument := x * 1)
    assert saved.nbytes == argument.nbytes
    if copied is not copy.copy:
        # its forward is of the copy
        for p in other.parameters():
            p.data.zero_()
        assert not torch.equal(other(x), module(x))


def names(model):
    """All names that a model gives to what it has."""
    found = model.named_parameters, model.named_buffers, model.state_dict().items
    return [[name for name, _ in named()] for named in found]


def test_is_the_module():
    block = BatchNormBlock()
    before, found = {**vars(block)}, names(block)
    assert checkpoint_module(block) is block
    assert {**vars(block)}.keys() == {*before, "forward"}
    assert type(block) is BatchNormBlock
    assert names(block) == found
    assert list(dict(block.named_modules())) == ["", "fc1", "norm", "fc2"]
    del block.forward
    assert {**vars(block)} == before


def test_a_second_call_replaces_the_options():
    block, calls = BatchNormBlock().to(DEVICE), []
    block.fc1.register_forward_hook(lambda *_: calls.append(1))
    checkpoint_module(checkpoint_module(block, early_stop=False), debug=True)
    assert block.forward.options == {"debug": True}
    block(randn(4, 6)).sum().backward()
    # not one checkpoint in another
    assert len(calls) == 2
    del block.forward
    assert "forward" not in vars(block)


def test_a_forward_that_was_set_on_the_module():
    block, x = BatchNormBlock().to(DEVICE), randn(4, 6)
    block.forward = lambda x: x.sin().cos()
    checkpoint_module(checkpoint_module(block))
    assert_same(step(block, x), step(lambda x: x.sin().cos(), x))
    assert block.forward.__wrapped__ is block.forward.set_forward


def test_a_parameter_of_the_module_is_replaced_by_name():
    model, x = (
        nn.Sequential(nn.Linear(6, 6), checkpoint_module(nn.Linear(6, 6))).to(DEVICE),
        randn(4, 6),
    )
    values = {name: p.detach() * 2 for name, p in model.named_parameters()}
    weight = model[1].weight
    y = torch.func.functional_call(model, values, (x,))
    expected = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DEVICE)
    expected.load_state_dict(values)
    assert torch.equal(y, expected(x))
    assert model[1].weight is weight


def test_of_a_lazy_module():
    wrapped = checkpoint_module(nn.LazyLinear(3))
    wrapped(torch.ones(2, 5)).sum().backward()
    assert wrapped.weight.grad.shape == (3, 5)
    assert type(wrapped) is nn.Linear


def test_its_hooks_run_once():
    calls, block = [], checkpoint_module(BatchNormBlock().to(DEVICE))
    block.register_forward_pre_hook(lambda *_: calls.append("pre"))
    block.register_forward_hook(lambda *_: calls.append("post"))
    block.fc1.register_forward_hook(lambda *_: calls.append("child"))
    block(randn(4, 6), scale=2.0).sum().backward()
    assert calls == ["pre", "child", "post", "child"]


def test_arguments_that_are_named_as_options():
    class NamedArguments(nn.Module):
        def forward(self, x, fn, debug, preserve_rng_state):
            return (fn(x) * debug).sin() if preserve_rng_state is None else x

    scale = randn(3, requires_grad=False)
    call = partial(
        checkpoint_module(NamedArguments()), fn=torch.cos, debug=scale, preserve_rng_state=None
    )
    assert_as_plain(lambda x: (x.cos() * scale).sin(), randn(3), wrap=lambda _, x: call(x))


def compiled_in_place():
    block = BatchNormBlock().eval()
    block.compile(backend="aot_eager")
    return checkpoint_module(block)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: torch.compile(
            checkpoint_module(BatchNormBlock().eval()), backend="aot_eager", fullgraph=True
        ),
        compiled_in_place,
    ],
)
def test_compiles(compiled):
    torch._dynamo.reset()
    block, x = compiled().to(DEVICE), randn(4, 6)
    eager = BatchNormBlock().eval().to(DEVICE)
    eager.load_state_dict({n.removeprefix("_orig_mod."): t for n, t in block.state_dict().items()})
    torch.testing.assert_close(step(block, x), step(eager, x))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_torch_applies_it():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    model = nn.Sequential(BatchNormBlock(), nn.ReLU())
    torchs.apply_activation_checkpointing(
        model, checkpoint_module, lambda m: isinstance(m, BatchNormBlock)
    )
    assert [type(module) for module in model] == [BatchNormBlock, nn.ReLU]
    assert ["forward" in vars(module) for module in model] == [True, False]


@pytest.mark.parametrize(
    ("module", "options", "match"),
    [
        (torch.sin, {}, "checkpoint_module: module must be a module, got"),
        (
            nn.ReLU(),
            {"debugs": 1, "a": 2},
            "unknown options a, debugs: pass options of",
        ),
    ],
)
def test_refused(module, options, match):
    with pytest.raises(TypeError, match=match):
        checkpoint_module(module, **options)


def test_data_parallel(tmp_path):
    """DDP, FSDP1 and FSDP2, by one process per rank: checkpoint_ranks.py."""
    import checkpoint_ranks

    run_ranks(checkpoint_ranks.main, tmp_path)


@pytest.mark.parametrize("copied", [copy.copy, nn.Module._replicate_for_data_parallel])
def test_a_shallow_copy_runs_its_own_forward(copied):
    """Such as a replica of DataParallel, whose parameters are on another device."""

    class ScaledByClass(nn.Module):
        scale = 2.0

        def forward(self, x):
            return (x * self.scale).sin()

    module, x = checkpoint_module(ScaledByClass()), torch.randn(3, requires_grad=True)
    replica = copied(module)
    replica.scale = 3.0
    for called, scale in ((replica, 3.0), (module, 2.0)):
        y = called(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y, (scale * x).sin(), rtol=0, atol=0)
        torch.testing.assert_close(dx, scale * (scale * x).cos())
