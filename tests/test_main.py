"""`python -m fusedckpt`: the paths of functions here, and what `fuse` finds in a model."""

import pytest
import torch
from torch import nn

import fusedckpt
from fusedckpt.__main__ import main
from fusedckpt.autograd.dispatch import forced_path


def net():
    return nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def pair():
    """As `python -m bench ways` takes it."""
    return net(), torch.randn(2, 8)


def number():
    return 3


def test_names_versions_and_every_path(capsys):
    assert main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"fusedckpt {fusedckpt.__version__}, Python 3.")
    assert f"torch {torch.__version__}" in first
    row = next(line for line in lines if "float32" in line)
    for name, path in fusedckpt.backends("cpu", torch.float32).items():
        assert path in row
        assert name in row or "for all" in row


def test_dtypes_with_the_same_paths_are_one_line(capsys):
    with forced_path("aten"):
        main([])
    _, device, paths, hint = capsys.readouterr().out.splitlines()[:4]
    assert (device, paths) == ("cpu:", "  float32, bfloat16, float16, float64: aten for all")
    assert "MODULE:FACTORY" in hint or hint == "cuda:0:"


@pytest.mark.parametrize("factory", ["net", "pair"])
def test_reports_what_fuse_swaps(factory, capsys):
    assert main([f"{__name__}:{factory}"]) == 0
    assert "1 x nn.RMSNorm + nn.Linear + gelu + nn.Linear -> mlp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("net", "net: expected module:factory"),
        ("no_such_module:net", "No module named 'no_such_module'"),
        (f"{__name__}:other", "no attribute 'other'"),
        (f"{__name__}:number", "expected an nn.Module from it, got int"),
    ],
)
def test_bad_factories(spec, message, capsys):
    with pytest.raises(SystemExit):
        main([spec])
    printed = capsys.readouterr()
    assert message in printed.err
    # a factory that is not there is named before anything is printed
    assert not printed.out or spec.endswith(":number")
