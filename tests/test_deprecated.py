"""Names of the version before work, and warn where they are used."""

import pytest
from torch import nn

import fusedckpt
from fusedckpt.deprecated import RENAMED


@pytest.mark.parametrize("old", RENAMED)
def test_former_names_warn_in_the_caller(old):
    with pytest.warns(DeprecationWarning, match=f"fusedckpt.{old} has become") as caught:
        value = getattr(fusedckpt, old)
    assert value is getattr(fusedckpt, RENAMED[old])
    assert RENAMED[old] in fusedckpt.__all__
    assert old not in fusedckpt.__all__
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("former", "new"),
    [({"recipes": True}, "recompute_elementwise"), ({"batch": None}, "example_inputs")],
    ids=str,
)
def test_former_arguments_warn_in_the_caller(former, new):
    with pytest.warns(DeprecationWarning, match=f"has become fuse\\({new}=\\)") as caught:
        fusedckpt.fuse(nn.ReLU(), **former)
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match=f"is the former name of {new}, pass one"):
        fusedckpt.fuse(nn.ReLU(), **former, **{new: None})


def test_unknown_names_raise():
    with pytest.raises(AttributeError, match="no attribute 'Chekpoint'"):
        _ = fusedckpt.Chekpoint
    with pytest.raises(TypeError, match="receipes"):
        fusedckpt.fuse(nn.ReLU(), receipes=True)
