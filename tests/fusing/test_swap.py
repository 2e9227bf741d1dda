"""fuse: what is swapped, and that nothing else changes."""

import copy

import pytest
import torch
import zoo
from support import DEVICE, randn
from swap_cases import (
    NET_CLASSES,
    NET_SWAPS,
    D,
    F,
    assert_eager_equal_after_fuse,
    assert_equal,
    kinds,
    net,
    rows,
)
from torch import nn

import fusedckpt
from fusedckpt import checkpoint_module, fuse, plan, unfuse
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.memory import saved_tensors


def test_swaps_classes_and_reports_each():
    model = net()
    report = fuse(model)
    assert report.swapped == NET_SWAPS
    assert report.left == {}
    before = dict(net().named_modules())
    for name, module in model.named_modules():
        kind = type(module)
        if name in NET_CLASSES:
            assert (kind.__name__, kind.__module__[:10]) == (NET_CLASSES[name], "fusedckpt.")
        else:
            assert kind is type(before[name])
    assert (model[1].save, model[2].save) == ("inputs", "inputs")


def test_report_reads_well():
    model = nn.Sequential(net(), nn.Linear(D, D), nn.Softmax(-1), nn.Linear(D, D), nn.Softmax(-1))
    assert str(fuse(model)) == (
        "fused 5 modules, left 2\n"
        "  kind    matched  swapped  left  saved bytes per token\n"
        "  norm          2        2     0  168 -> 96\n"
        "  mlp           1        1     0  208 -> 48\n"
        "  linear        4        2     2  248 -> 96\n"
        "     1 x nn.LayerNorm -> LayerNorm\n"
        "     1 x nn.RMSNorm -> RMSNorm\n"
        "     1 x nn.Linear + gelu + nn.Linear -> mlp\n"
        "     1 x nn.Linear + tanh -> linear_act\n"
        "     1 x nn.RMSNorm + nn.Linear -> norm_linear\n"
        "     2 x Linear -> saves the input of a norm or linear before it\n"
        "  left 2 x Sequential: it cannot be fused with Softmax(dim=-1), the layer after it; "
        "fuse(model, recompute_elementwise=True) recomputes its cheap functions, "
        "fusedckpt.checkpoint all of it (1 and 1 more)\n"
        "print(fusedckpt.report(model, **batch)) measures what a step saves, and where, "
        "also with recompute_elementwise=True"
    )


@pytest.mark.parametrize(
    ("name", "act"), [(name, act) for name, act in ACTIVATIONS.items() if act.module]
)
def test_every_activation_module(name, act):
    model = net(act.module(**act.module_state))
    report = assert_eager_equal_after_fuse(model)
    assert report.swapped == NET_SWAPS | {"1.0": f"nn.Linear + {name} + nn.Linear -> mlp"}


@pytest.mark.parametrize(("save", "kept"), [("inputs", 0), ("preact", F)])
def test_saved_bytes(save, kept):
    model, x = net()[:2], rows().detach()
    with saved_tensors(exclude=[x]) as before:
        expected = model(x)
    fuse(model, save=save)
    with saved_tensors(exclude=[x]) as after:
        y = model(x)
    torch.testing.assert_close(y, expected)
    # z; eager keeps the norm's output, h, mean and rstd, too
    assert before.nbytes == 8 * len(x) * (D + F + F + 2)
    assert after.nbytes == 8 * len(x) * kept


def test_root_is_a_sequential():
    model = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, F), nn.SiLU(), nn.Linear(F, D))
    report = assert_eager_equal_after_fuse(model)
    assert report.swapped == {
        "0": "nn.LayerNorm -> LayerNorm",
        "1": "nn.LayerNorm + nn.Linear + silu + nn.Linear -> mlp",
    }


def test_several_blocks_and_layers_between():
    layers = (nn.Linear(D, F), nn.ReLU(), nn.Dropout(0.0), nn.Linear(F, D), nn.Linear(D, D))
    model = nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(D, D), nn.Softmax(-1))
    report = assert_eager_equal_after_fuse(model)
    assert report.swapped == {
        "0": "nn.Linear + relu + nn.Dropout + nn.Linear -> mlp",
        "4": "nn.Linear + sigmoid + nn.Linear -> mlp",
    }
    assert report.left == {}


def test_nothing_to_swap():
    for model in (nn.Linear(D, D), nn.Module(), nn.Sequential(), nn.Sequential(nn.GELU())):
        report = fuse(model)
        assert report == fusedckpt.FuseReport()
        assert str(report).startswith("fused 0 modules, left 0\nfound no norm, MLP, attention")
        assert f"looked at 1 x {type(model).__name__}" in str(report)
        assert unfuse(model) is model


def test_tied_weights_stay_tied():
    model = net()
    model[1][2].weight = nn.Parameter(model[1][2].weight[:, :D].clone())
    model[1].insert(2, nn.Linear(F, D, bias=False))
    model[2].fc.weight = model[1][3].weight
    model.to(DEVICE, torch.float64)
    assert_eager_equal_after_fuse(model)
    fuse(model)
    assert model[2].fc.weight is model[1][3].weight
    assert "2.fc.weight" not in dict(model.named_parameters())


def test_linear_in_several_places():
    linear = nn.Linear(D, D)
    model = nn.Sequential(nn.Sequential(linear, nn.GELU()), linear, nn.SiLU(), linear)
    report = assert_eager_equal_after_fuse(model)
    assert report.swapped == {
        "0.0": "nn.Linear + gelu -> linear_act",
        "1": "nn.Linear + silu + nn.Linear -> mlp",
    }


def test_child_replaced_after_fuse():
    model, eager, x = net(), net(), rows()
    eager.load_state_dict(model.state_dict())
    fuse(model)
    for each in (model, eager):
        each[1][1], each[2].act = nn.Softmax(-1), nn.SiLU()
    assert_equal(model, eager, x)
    assert_equal(unfuse(model), eager, x)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    eager = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    eager.to(DEVICE, torch.float64)
    model = copy.deepcopy(eager)
    assert len(fuse(model).swapped) == 9
    x = randn(2, 3, 8, dtype=torch.float64)
    assert_equal(model, eager, x)
    # torch's fast path reads the norms' attributes instead of calling them
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), eager.eval()(x))


def test_parameters_and_state_dict_stay():
    model = net()
    parameters, before = dict(model.named_parameters()), model.state_dict()
    values = {key: value.clone() for key, value in before.items()}

    def assert_same_keys():
        after = model.state_dict()
        assert list(after) == list(before)
        assert after._metadata == before._metadata
        found = dict(model.named_parameters())
        assert list(found) == list(parameters)
        assert all(found[name] is parameters[name] for name in found)
        return after

    fuse(model)
    fused = assert_same_keys()
    assert all(torch.equal(fused[key], values[key]) for key in values)
    model(rows()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = {key: value.clone() for key, value in assert_same_keys().items()}
    assert not torch.equal(trained["1.0.weight"], values["1.0.weight"])
    unfuse(model)
    restored = assert_same_keys()
    assert all(torch.equal(restored[key], trained[key]) for key in trained)
    fuse(model)
    model.load_state_dict(values, strict=True)


@pytest.mark.parametrize("when", ["before fuse", "after fuse"])
def test_hooks_still_fire(when):
    model, seen = net(), []
    if when == "after fuse":
        fuse(model)
    names = ("0", "1", "1.1", "2.norm")
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: seen.append((name, "pre")))
        module.register_forward_hook(lambda *_, name=name: seen.append((name, "forward")))
        module.register_full_backward_hook(lambda *_, name=name: seen.append((name, "backward")))
    if when == "before fuse":
        swapped = fuse(model).swapped
        assert {name: swapped.get(name) for name in NET_SWAPS} == NET_SWAPS | {
            "1.0": None,
            "2.head": None,
        }
    model(rows()).sum().backward()
    assert seen == [
        ("0", "pre"),
        ("0", "forward"),
        ("1", "pre"),
        ("1.1", "pre"),
        ("1.1", "forward"),
        ("1", "forward"),
        ("2.norm", "pre"),
        ("2.norm", "forward"),
        ("2.norm", "backward"),
        ("1.1", "backward"),
        ("1", "backward"),
        ("0", "backward"),
    ]


def test_hooks_on_all_modules_see_and_change_every_call():
    layer = nn.TransformerEncoderLayer(D, 2, F, 0.0, batch_first=True)
    model, names = nn.Sequential(net(), layer).to(DEVICE, torch.float64), []
    eager = copy.deepcopy(model)
    fuse(model)
    hook = nn.modules.module.register_module_forward_hook(
        lambda m, _, y: names.append(type(m)) or (y * 1.5 if isinstance(m, nn.Linear) else None)
    )
    try:
        assert_equal(model, eager, rows().unsqueeze(0))
    finally:
        hook.remove()
    assert len(names) % 2 == 0
    assert names.count(nn.GELU) == 2
    assert_equal(model, eager, rows().unsqueeze(0))


@pytest.mark.parametrize("save", ["all", None])
def test_bad_level_swaps_nothing(save):
    model = net()
    with pytest.raises(
        (TypeError, ValueError), match="fuse: save must be one of inputs, gate, preact"
    ):
        fuse(model, save=save)
    assert kinds(model) == kinds(net())


def test_classes_that_ask_their_subclasses_for_arguments():
    names = []

    class Registered(nn.Module):
        """Asks each subclass for a name."""

        def __init_subclass__(cls, *, name, **kwargs):
            names.append(name)

    class Named(Registered, name="named"):
        """Attention and an MLP, and no text."""

        __repr__ = None

        def __init__(self):
            super().__init__()
            self.attention = zoo.Attention(D)
            self.fc, self.out = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

        def forward(self, x):
            return self.out(nn.functional.gelu(self.fc(self.attention(x))))

    torch.manual_seed(0)
    model = nn.Sequential(Named()).to(DEVICE)
    before = copy.deepcopy(model)
    report = fuse(model, recompute_elementwise=True)
    assert report.swapped
    plan(model, randn(2, 3, D), policy="memory", progress=False).apply(model)
    x = randn(2, 3, D)
    torch.testing.assert_close(model(x), before(x))
    assert names == ["named"]
    # code that makes a class of ours its base still passes arguments
    type("Other", (type(model[0]),), {}, name="other")
    assert names == ["named", "other"]
    with pytest.raises(TypeError):
        type("Nameless", (type(model[0]),), {})


class Incomparable(nn.Sequential):
    """A class with a `==` that raises."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        raise TypeError("no ==")


def test_classes_that_do_not_compare():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(2)]
    model = nn.Sequential(*[Incomparable(nn.LayerNorm(D), *part) for part in parts]).to(DEVICE)
    before = copy.deepcopy(model)
    assert fuse(model).swapped
    chosen = plan(model, randn(2, 3, D), policy="all", progress=False)
    chosen.apply(model)
    chosen.undo()
    for unit in model:
        checkpoint_module(unit)
    x = randn(2, 3, D)
    y, expected = model(x), before(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
