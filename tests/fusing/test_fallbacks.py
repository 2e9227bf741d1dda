"""What the reports say of fused modules that run as their classes would."""

import copy
import pickle
from functools import partial

import pytest
import torch
from support import DEVICE, needs_inductor, randn
from swap_cases import D, F, assert_equal
from test_swapped_calls import Scalable, Tagged
from torch import nn
from torch.utils.checkpoint import checkpoint as stock
from zoo import MLP, LlamaRMSNorm, LoraLinear, OwnLinear

import fusedckpt
from fusedckpt import fuse, report, unfuse
from fusedckpt.autograd import phases

BYTES, LORA = 4, "zoo.LoraLinear"


class Untagged(nn.Parameter):
    """A weight with ops of its own, which give plain tensors, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class DropsBeforeGELU(MLP):
    def __init__(self):
        super().__init__(D, F)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.drop(self.fc1(x))))


def adapt(model):
    model[0].gate_proj = LoraLinear(model[0].gate_proj).requires_grad_()


def hook(model):
    model[0].up_proj.register_forward_hook(lambda *_: None)


def replace_forward(model):
    forward = model[0].up_proj.forward
    model[0].up_proj.forward = lambda x: forward(x) * 2


def replace(model):
    model[0].act_fn = nn.GELU()


def replace_linear(model):
    model[0].up_proj = nn.Sequential(model[0].up_proj)


def change_class(model):
    model[0].down_proj.__class__ = OwnLinear


def tag(model):
    model[0].down_proj.weight = Untagged(model[0].down_proj.weight.detach())


REASONS = {
    "adapter": (adapt, ("adapter", f"gate_proj is a {LORA}")),
    "hook": (hook, ("hook", "up_proj")),
    "forward": (replace_forward, ("hook", "up_proj")),
    "linear": (replace_linear, ("child", "up_proj")),
    "class": (change_class, ("linear", ("down_proj", "OwnLinear"))),
    "weight": (
        tag,
        ("weight", "down_proj.weight is a Untagged of layout torch.strided"),
    ),
}


def stack():
    torch.manual_seed(0)
    return nn.Sequential(Scalable(), LlamaRMSNorm(D), Scalable()).to(DEVICE)


@pytest.mark.parametrize(("alter", "reason"), REASONS.values(), ids=list(REASONS))
def test_a_changed_child_is_named_with_its_cost(alter, reason):
    model, eager = stack(), stack()
    fused = fuse(model, verify=False)
    model(randn(3, D)).sum().backward()
    assert fused.fallbacks == {}
    for each in (model, eager):
        torch.manual_seed(1)
        alter(each)
    assert_equal(model, eager, randn(3, D), tol=1e-5)
    assert fused.fallbacks == {"0": reason}
    more, words = BYTES * 4 * F, str(fused.fallbacks["0"])
    assert str(fused).endswith(
        "not run fused: 1 of 3\n"
        f"  1 x Scalable -> gated_mlp (silu): {words}; {fused.fallbacks['0'].remedy} (0): up to "
        f"{more:,} bytes per token more\n"
        "print(fusedckpt.report(model, **batch)) measures what a step saves, and where, "
        "also with recompute_elementwise=True"
    )
    # a step of one's own, which changes nothing
    found = {one.name: one for one in report(model, randn(3, D)).fused}
    assert {name: one.reason for name, one in found.items()} == {"0": words, "1": None, "2": None}
    assert (found["0"].extra_bytes, found["2"].extra_bytes) == (3 * more, 0)
    assert all(one.calls == 1 for one in found.values())
    assert fused.fallbacks == {"0": reason}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_input_of_another_class_is_named(index):
    model = stack()
    fused = fuse(model, verify=False)
    model[index](randn(3, D).detach().as_subclass(Tagged))
    assert fused.fallbacks == {str(index): ("input", "Tagged")}


def test_other_arguments_are_named():
    model = stack()
    fused = fuse(model, verify=False)
    model[0](randn(3, D), 2.0)
    assert fused.fallbacks == {"0": ("arguments", "")}


def test_dropout_counts_while_training_alone():
    model = nn.Sequential(DropsBeforeGELU()).to(DEVICE)
    # at this level nothing is recomputed
    fused = fuse(model.eval(), save="preact", verify=False)
    model(randn(3, D))
    with torch.no_grad():
        model.train()(randn(3, D))
    # nothing is kept without gradients
    assert fused.fallbacks == {}
    model(randn(3, D))
    assert fused.fallbacks == {"0": ("dropout", "drop")}
    assert [one.reason for one in report(model, randn(3, D)).fused] == [
        "drop applies dropout between its linears in training"
    ]


def test_a_block_of_a_sequential_is_named_as_it_is_now():
    layers = (nn.Linear(D, F), nn.GELU(), nn.Linear(F, D), nn.Linear(D, D), nn.Tanh())
    model = nn.Sequential(*layers).to(DEVICE)
    fused = fuse(model, verify=False)
    assert fused.fallbacks == {}
    model[3].register_forward_hook(lambda *_: None)
    assert fused.fallbacks == {"3": ("hook", "3")}
    found = {one.name: one for one in report(model, randn(2, D)).fused}
    assert found["0"].reason is None
    assert found["3"].reason == str(fused.fallbacks["3"])
    # between two linears alone no activation follows
    del model[1]
    assert fused.fallbacks["0"] == ("apart now", "0")


def test_fuse_again_begins_anew():
    model = stack()
    fused = fuse(model, verify=False)
    model[0](randn(3, D), 2.0)
    assert list(fused.fallbacks) == ["0"]
    again = fuse(model, verify=False)
    model(randn(3, D))
    assert again.swapped == again.left == again.fallbacks == {}
    assert again.already == fused.swapped
    assert again.saved == fused.saved
    assert str(again).startswith("fused 0 modules, left 0, 3 fused before\n")
    assert "     2 x Scalable -> gated_mlp (silu) (before)" in str(again)


def test_a_report_outlives_its_model():
    model = stack()
    fused = fuse(model, verify=False)
    model[0](randn(3, D), 2.0)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert copied == fused
        assert copied.fallbacks == {}
    del model
    assert fused.fallbacks == {}


def test_unfuse_leaves_no_note():
    model = stack()
    before = [module.__dict__.keys() for module in model.modules()]
    fuse(model, verify=False)
    model[0](randn(3, D), 2.0)
    unfuse(model)
    assert [module.__dict__.keys() for module in model.modules()] == before


def test_a_checkpoint_drops_what_a_fallback_would_keep():
    model = stack()
    fuse(model, verify=False)
    hook(model)
    found = report(fusedckpt.checkpoint_module(model), randn(3, D)).fused
    assert [one.extra_bytes for one in found] == [0, 0, 0]
    assert found[0].reason is not None


@needs_inductor
def test_compiled_code_notes_it_without_breaks_or_recompiles():
    from torch._dynamo.testing import CompileCounter

    model = nn.Sequential(stack(), DropsBeforeGELU().to(DEVICE))
    fused = fuse(model, save="preact", verify=False)
    hook(model[0])
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(randn(3, D)).sum().backward()
    assert counter.frame_count == 1
    assert sorted(fused.fallbacks) == ["0.0", "1"]


@pytest.mark.parametrize("kind", [Tagged, type("Plain", (torch.Tensor,), {})])
@pytest.mark.parametrize("run", [fusedckpt.checkpoint, partial(stock, use_reentrant=False)])
def test_a_recompute_runs_the_forwards_that_ran(run, kind, monkeypatch):
    # as before in other tests, which count calls
    monkeypatch.setattr(phases.OF_OTHERS, "is_used", phases.OF_OTHERS.is_used)
    torch.manual_seed(0)
    own = nn.Sequential(LlamaRMSNorm(D), nn.RMSNorm(D), nn.LayerNorm(D), MLP(D, F))
    model = nn.Sequential(own, nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))).to(DEVICE)
    eager = copy.deepcopy(model)
    fuse(model)
    x = randn(2, 3, D)
    # a tensor of another class, and then a plain one again
    for cls in (kind, torch.Tensor):
        grads = []
        for net in (eager, model):
            leaf = x.detach().requires_grad_()
            y = run(net, leaf.as_subclass(cls))
            assert type(y) is cls
            (grad,) = torch.autograd.grad(y.as_subclass(torch.Tensor).square().sum(), leaf)
            grads.append(grad)
        torch.testing.assert_close(*grads)
