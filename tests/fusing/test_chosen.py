"""fuse: which of a model's modules a call chooses."""

import pytest
import torch
from own_mlps import D, Gated, H, Plain
from own_norms import Llama
from support import DEVICE
from swap_cases import kinds
from torch import nn

import fusedckpt
from fusedckpt import FuseReport, fuse, unfuse
from fusedckpt.fusing.swap import original_of


def sequential():
    return nn.Sequential(nn.Linear(D, H), nn.SiLU(), nn.Linear(H, D))


def layers():
    return nn.ModuleDict(
        {
            "a": nn.ModuleDict({"norm": nn.LayerNorm(D), "mlp": Plain()}),
            "b": nn.ModuleDict({"norm": Llama(), "mlp": Gated(), "seq": sequential()}),
        }
    ).to(DEVICE)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["a.mlp", "a.norm", "b.mlp", "b.norm", "b.seq.0"]),
        ({"only": "a.*"}, ["a.mlp", "a.norm"]),
        ({"only": ["a.mlp", "b.seq.*"]}, ["a.mlp", "b.seq.0"]),
        ({"skip": "*.mlp"}, ["a.norm", "b.norm", "b.seq.0"]),
        ({"only": "a.*", "skip": ("a.norm",)}, ["a.mlp"]),
        ({"norm": False}, ["a.mlp", "b.mlp", "b.seq.0"]),
        ({"mlp": False}, ["a.norm", "b.norm"]),
        ({"norm": False, "mlp": False}, []),
        ({"only": []}, []),
    ],
    ids=str,
)
def test_what_a_call_chooses(options, expected):
    model = layers()
    report = fuse(model, verify=False, **options)
    assert sorted(report.swapped) == expected
    assert report.left == {}
    marks = [original_of(m) for m in model.modules()]
    # linears that may read what a norm made are no parts
    assert len([one for one in marks if one is not None and one.parts]) == len(expected)
    skipped = {"a.mlp.first", "b.mlp.w1"} if options.get("skip") == "*.mlp" else set()
    assert not skipped & report.shared.keys()


def test_linear_is_chosen_apart():
    model = nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.SiLU()), sequential()).to(DEVICE)
    assert list(fuse(model, linear=False, verify=False).swapped) == ["1.0"]
    unfuse(model)
    assert list(fuse(model, mlp=False, verify=False).swapped) == ["0.0"]
    mixed = nn.Sequential(*sequential(), nn.Dropout(0.0), nn.Linear(D, D), nn.SiLU())
    report = fuse(mixed, linear=False, verify=False)
    assert report.left == {"0": ("neighbor", "")}


@pytest.mark.parametrize("names", [3, [3], ["a", None]], ids=str)
def test_bad_names(names):
    for key in ("only", "skip"):
        with pytest.raises(TypeError, match=f"fuse: {key} must be names or patterns, got"):
            fuse(layers(), **{key: names})


def test_default_dtype_and_device_do_not_matter():
    model = layers()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert len(fuse(model).swapped) == 5
    finally:
        torch.set_default_dtype(before)


def test_a_pattern_that_matches_nothing_is_an_error():
    for pattern in ("a.mlps", "layers.*.mlp", "b.seq", "a.mlp.first", ""):
        model = layers()
        before = kinds(model)
        for only in (pattern, ["a.norm", pattern]):
            with pytest.raises(ValueError, match=r"fuse: only=.* matches no norm, MLP,"):
                fuse(model, only=only, verify=False)
            assert kinds(model) == before


def test_a_pattern_that_matches_something():
    model = layers()
    # modules fused before, left and skipped, and kinds that are off count, too
    fuse(model, verify=False)
    assert fuse(model, only="a.norm").already == {"a.norm": "nn.LayerNorm -> LayerNorm"}
    assert list(fuse(nn.ModuleList([nn.BatchNorm1d(D)]), only="0").left) == ["0"]
    assert fuse(layers(), only="a.norm", skip="a.norm") == FuseReport()
    assert fuse(layers(), only="a.norm", norm=False) == FuseReport()


def test_a_printed_model_shows_what_is_fused():
    model = layers()
    model["rms"] = nn.RMSNorm(D)
    fuse(model, save="preact", verify=False)
    shown = repr(model)
    for line in (
        f"(norm): fusedckpt.LayerNorm({nn.LayerNorm(D).extra_repr()})\n",
        f"(rms): fusedckpt.RMSNorm(({D},), eps=None, elementwise_affine=True)\n",
        "(mlp): FusedGated(\n      fused as gated_mlp, activation=silu, save=preact\n",
        "(seq): fusedckpt.Sequential(\n      save=preact, fused: 0-2 as mlp\n",
    ):
        assert line in shown


def test_a_sequential_says_that_it_fuses_nothing():
    nothing = fusedckpt.Sequential(nn.Linear(D, D), nn.ELU())
    assert "save=inputs, fused: nothing\n" in repr(nothing)
    nothing.append(nn.Linear(D, H)).append(nn.GELU())
    assert "save=inputs, fused: 2-3 as linear_act\n" in repr(nothing)
