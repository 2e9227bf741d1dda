"""fuse names every module that holds a norm, or an activation beside linears, and was left."""

import math

import pytest
import torch
import torch.nn.functional as F
from swap_cases import D
from torch import nn

import fusedckpt
from fusedckpt import FuseReport, fuse

H = 2 * D


class ResNet(nn.Module):
    """Its activation follows a convolution; its linear is the classifier."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, D, 3), nn.BatchNorm2d(D), nn.ReLU()
        self.fc = nn.Linear(D, 10)

    def forward(self, x):
        return self.fc(self.relu(self.bn1(self.conv1(x))).mean((-1, -2)))


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.activation = nn.Linear(D, D), nn.Tanh()

    def forward(self, x):
        return self.activation(self.dense(x[:, 0]))


class GEGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, 2 * H)

    def gelu(self, gate):
        return F.gelu(gate)

    def forward(self, x, *args):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.gelu(gate)


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(D, H)), nn.Parameter(torch.randn(H, D))

    def forward(self, x, mask=None):
        return F.gelu(x @ self.w1).cumsum(-1) @ self.w2


class Mixer(nn.Module):
    """An activation in the code, beside a convolution and more linears than a block has."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(D, D, 1)
        self.in_proj, self.x_proj, self.out_proj = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        x = F.silu(self.conv1d(self.in_proj(x).mT).mT)
        return self.out_proj(x * self.x_proj(x).cumsum(-1))


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.g * math.sqrt(D)


OTHER = "it does not normalise over the last dimensions, as LayerNorm and RMSNorm do"
LEFT = {
    "pooler": (Pooler, {"": "its result has the shape [2, 6] for an input of [2, 3, 6]"}),
    "convolutional": (ResNet, {"bn1": OTHER}),
    "gate without its linear": (GEGLU, {"": ""}),
    "raw weights": (Raw, {"": "its forward computes cumsum"}),
    "mixer": (Mixer, {"": "conv1d"}),
    "norm": (ScaleNorm, {"": "ScaleNorm"}),
    "group norm": (lambda: nn.GroupNorm(2, D), {"": OTHER}),
}


@pytest.mark.parametrize(("make", "left"), LEFT.values(), ids=list(LEFT))
def test_named_with_a_reason(make, left):
    model = make()
    # at this level nothing is recomputed
    report = fuse(model, only=list(left), save="preact")
    assert report.left.keys() == left.keys()
    for name, reason in left.items():
        assert reason in report.left[name]
        assert report.classes[name] == type(model.get_submodule(name)).__name__


def test_no_root_of_a_convolutional_net():
    assert list(fuse(ResNet()).left) == ["bn1"]


def test_attention_and_containers_are_not_mentioned():
    for model in (nn.MultiheadAttention(D, 2), nn.ModuleList([nn.Linear(D, D), nn.ReLU()])):
        assert fuse(model) == FuseReport()


def test_grouped_by_class_and_reason():
    model = nn.ModuleList([Pooler(), Pooler(), nn.BatchNorm1d(D), nn.GroupNorm(1, D)])
    lines = [line for line in str(fuse(model)).splitlines() if line.startswith("  left ")]
    assert [line.partition(":")[0] for line in lines] == [
        "  left 2 x Pooler",
        "  left 1 x BatchNorm1d",
        "  left 1 x GroupNorm",
    ]
    assert lines[0].endswith(" (0 and 1 more)")


def test_what_a_dropout_parts_is_named():
    model = nn.Sequential(nn.Linear(D, H), nn.Dropout(0.1), nn.ELU(), nn.Linear(H, D))
    assert list(fuse(model).left) == ["0"]


def test_lazy_modules_are_named():
    why = "its parameters are not initialised: call the model once before"
    assert fuse(nn.LazyBatchNorm1d()).left == {"": why}


def test_lazy_linears_of_a_list_are_named():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.fcs, self.act = nn.ModuleList([nn.LazyLinear(D), nn.LazyLinear(D)]), nn.GELU()

        def forward(self, x):
            return self.fcs[1](self.act(self.fcs[0](x)))

    why = "its parameters are not initialised: call the model once before"
    assert fuse(Mine()).left == {"": why}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_what_torchscript_compiled_is_named():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)
            self.act = torch.jit.script(self.act)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)))
    model = nn.Sequential(scripted, nn.LayerNorm(D), Mine())
    report = fuse(model)
    assert list(report.swapped) == ["1"]
    assert report.left == {
        "0": "TorchScript compiled it: fuse before scripting",
        "2": "TorchScript compiled act: fuse before scripting",
    }
    assert report.classes == {"0": "Sequential", "2": "Mine"}
    assert model(torch.randn(2, D)).shape == (2, D)


ONLY = {
    "mpl": "matches no module: names are those of named_modules(), such as 'mlp'",
    "layers.*.mlp": "matches no module: names are",
    "head": "matches head, a Linear, and no norm, MLP, attention, experts or linear with an",
    "mlp": "matches mlp, a Sequential, and no norm, MLP, attention, experts or linear with an "
    "activation; 'mlp.*'",
    "": "matches the model, a ModuleDict, and no norm",
}


def model_of_names():
    mlp = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    return nn.ModuleDict({"norm": nn.LayerNorm(D), "mlp": mlp, "head": nn.Linear(D, D)})


@pytest.mark.parametrize(("pattern", "message"), ONLY.items(), ids=list(ONLY))
def test_a_pattern_that_matches_nothing_is_an_error(pattern, message):
    model = model_of_names()
    before = [type(module) for module in model.modules()]
    for only in (pattern, ["norm", pattern]):
        with pytest.raises(ValueError, match="fuse: only=") as error:
            fuse(model, only=only, verify=False)
        assert str(error.value).startswith(f"fuse: only={pattern!r} {message}")
        assert [type(module) for module in model.modules()] == before


def test_a_pattern_that_matches_something():
    assert list(fuse(model_of_names(), only=["mlp.*", "n*"], verify=False).swapped) == [
        "norm",
        "mlp.0",
    ]
    # what was fused before, what is left, what is skipped, and kinds that are off count, too
    model = model_of_names()
    fuse(model, verify=False)
    assert fuse(model, only="norm").already == {"norm": "nn.LayerNorm -> LayerNorm"}
    assert list(fuse(ResNet(), only="bn1").left) == ["bn1"]
    assert fuse(model_of_names(), only="norm", skip="norm") == FuseReport()
    assert fuse(model_of_names(), only="norm", norm=False) == FuseReport()


def test_a_printed_model_shows_what_is_fused():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

        def extra_repr(self):
            return "mine"

    model = model_of_names()
    model["mine"], model["rms"] = Mine(), nn.RMSNorm(D)
    fuse(model, save="preact", verify=False)
    shown = repr(model)
    for line in (
        f"(norm): fusedckpt.LayerNorm({nn.LayerNorm(D).extra_repr()})\n",
        "(rms): fusedckpt.RMSNorm((6,), eps=None, elementwise_affine=True)\n",
        "(mine): FusedMine(\n    mine, fused as mlp, activation=gelu, save=preact\n",
        "(mlp): fusedckpt.Sequential(\n    save=preact, fused: 0-2 as mlp\n",
    ):
        assert line in shown


def test_a_sequential_says_that_it_fuses_nothing():
    nothing = fusedckpt.Sequential(nn.Linear(D, D), nn.ELU())
    assert "save=inputs, fused: nothing\n" in repr(nothing)
    nothing.append(nn.Linear(D, H)).append(nn.GELU())
    assert "save=inputs, fused: 2-3 as linear_act\n" in repr(nothing)
    assert repr(fusedckpt.Sequential()) == "fusedckpt.Sequential(save=inputs, fused: nothing)"
