"""unfuse, and fused models after copying, loading, compiling and editing."""

import copy
import io
import pickle

import pytest
import torch
from swap_cases import D, assert_equal, kinds, net, rows
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.memory import saved_tensors


def test_unfuse_restores_every_attribute():
    model, untouched = net(), net()
    act = model[1][1]
    fuse(model)
    assert unfuse(model) is model
    assert kinds(model) == kinds(untouched)
    assert model[1][1] is act
    assert repr(model) == repr(untouched)
    for ours, theirs in zip(model.modules(), untouched.modules(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys()


def test_own_layers_are_left_alone():
    model = nn.Sequential(
        fusedckpt.Linear(D, D, activation="silu"),
        nn.Tanh(),
        fusedckpt.RMSNorm(D, offset=1.0),
        fusedckpt.LayerNorm(D),
        fusedckpt.Sequential(nn.Linear(D, D), nn.GELU(), save="preact"),
    )
    before = kinds(model)
    assert fuse(model) == fusedckpt.FuseReport()
    unfuse(model)
    assert kinds(model) == before
    assert (model[0].activation, model[2].offset, model[4].save) == ("silu", 1.0, "preact")


@pytest.mark.parametrize("model", [None, nn.Linear, [nn.LayerNorm(D)]], ids=str)
def test_not_a_module(model):
    for function in (fuse, unfuse):
        with pytest.raises(TypeError, match=f"{function.__name__}: model must be an nn.Module"):
            function(model)


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=list(COPIES))
def test_unfuse_after_copying(duplicate):
    model, x = net(), rows()
    eager = copy.deepcopy(model)
    fuse(model)
    other = duplicate(model)
    assert kinds(other) == kinds(model)
    assert_equal(other, eager, x)
    unfuse(other)
    assert kinds(other) == kinds(eager)
    assert_equal(other, eager, x)
    # the first is as it was
    assert type(model[1]) is fusedckpt.Sequential
    assert_equal(model, eager, x)


def test_compile():
    torch._dynamo.reset()
    model, x = net(), rows()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(compiled, eager, x)
    # what was compiled before is compiled anew
    fuse(model)
    assert_equal(compiled, eager, x)
    with saved_tensors(exclude=[x]) as ours:
        y = compiled(x)
    with saved_tensors(exclude=[x]) as theirs:
        expected = eager(x)
    torch.testing.assert_close(y, expected)
    assert ours.nbytes < theirs.nbytes
    unfuse(model)
    assert_equal(compiled, eager, x)


def test_parametrized_after_fuse():
    model, eager, x = net(), net(), rows()
    eager.load_state_dict(model.state_dict())
    fuse(model)
    for each in (model, eager):
        torch.manual_seed(1)
        parametrizations.orthogonal(each[2].fc)
    assert_equal(model, eager, x)
    # the Sequential around it was swapped, not the linear
    unfuse(model)
    assert type(model[2]) is nn.Sequential
    assert parametrize.is_parametrized(model[2].fc)
    assert_equal(model, eager, x)


def test_a_norm_parametrized_after_fuse_must_be_undone_first():
    model, untouched = net(), net()
    fuse(model)
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    before = kinds(model)
    with pytest.raises(ValueError, match=r"unfuse: other code made 0 a ParametrizedLayerNorm"):
        unfuse(model)
    assert kinds(model) == before
    parametrize.remove_parametrizations(model[0], "weight")
    assert kinds(unfuse(model)) == kinds(untouched)


def test_a_slice_computes_the_same_after_unfuse():
    model, x = net(), rows()
    eager = copy.deepcopy(model)
    fuse(model)
    part = model[1][:2]
    unfuse(part)
    assert_equal(part, eager[1][:2], x)
    # it is another module than the one that was swapped
    assert type(model[1]) is fusedckpt.Sequential
    unfuse(model)
    assert_equal(part, eager[1][:2], x)


def test_torch_script_refuses_by_name():
    class HalfFused(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.mlp = nn.LayerNorm(D), nn.Linear(D, D), net()[1]

        def forward(self, x):
            return self.q(self.norm(x)) + self.mlp(x)

    model = HalfFused()
    fuse(model)
    with pytest.raises(TypeError, match=r"torch.jit.script: the model was fused, call fusedckpt"):
        torch.jit.script(model)


def test_unfuse_says_that_nothing_is_fused():
    with pytest.warns(UserWarning, match="unfuse: no module of the model is fused"):
        unfuse(nn.Linear(D, D))
