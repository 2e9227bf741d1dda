"""fuse: which of a model's modules a call chooses."""

import pytest
import torch
from support import DEVICE
from test_swap_mlps import D, Gated, H, Plain
from test_swap_norms import Llama
from torch import nn

from fusedckpt import fuse, unfuse


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
    marks = [m.__dict__.get("_fusedckpt_original") for m in model.modules()]
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
    assert report.left == {"0": "another block of its Sequential is not to be fused"}


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


def test_report_of_a_model():
    assert str(fuse(layers(), skip="b.seq.*", verify=False)) == (
        "fused 4 modules, left 0\n"
        "  kind    matched  swapped  left  saved bytes per token\n"
        "  norm          2        2     0  156 -> 96\n"
        "  mlp           2        2     0  576 -> 96\n"
        "     1 x nn.LayerNorm -> LayerNorm\n"
        "     1 x Llama -> rms_norm (llama cast)\n"
        "     1 x Plain -> mlp (gelu)\n"
        "     1 x Gated -> gated_mlp (silu)"
    )
