"""The printed schedules of a call: its lines, its bytes beside those that are measured, errors."""

import re
from pathlib import Path

import pytest
import torch
from support import randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

D, F, ROWS = 8, 12, 4
ROOT = Path(__file__).parents[2]


def block(**options):
    return fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True, **options)


@pytest.mark.parametrize("page", ["README.md", "fusedckpt/layers/README.md"])
def test_pages_show_what_is_printed(page):
    """The lines of code run as they stand, and print the lines below them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (code, shown), *_ = re.findall(
        r"```python\n([^`]*?schedule\([^`]*)```\n+```\n(.*?)```", text, re.S
    )
    printed = []
    with forced_path("aten"):
        exec(
            code,
            {"torch": torch, "fusedckpt": fusedckpt, "print": lambda x: printed.append(f"{x}\n")},
        )
    assert printed == [shown]


@pytest.mark.parametrize("save", ["inputs", "gate", "preact"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_bytes_are_those_that_are_saved(save, chunks):
    module, x = block(save=save, chunks=chunks), randn(ROWS, D)
    (layer,) = fusedckpt.schedule(module, x).layers
    assert sum(layer.saves.values()) == saved_bytes(module, [x])
    assert layer.chunks == chunks
    assert list(layer.saves) == {"inputs": ["x"], "gate": ["x", "gate"]}.get(
        save, ["x", "gate", "up"]
    )


def test_experts_save_what_they_are_given():
    module, index = fusedckpt.Experts(3, D, F), torch.randint(0, 3, (ROWS, 2))
    x, scores = randn(ROWS, D), torch.rand(ROWS, 2, requires_grad=True)
    (layer,) = fusedckpt.schedule(module, x, index=index, scores=scores).layers
    assert sum(layer.saves.values()) == saved_bytes(module, [x, index, scores])


def test_only_wanted_gradients():
    """A frozen layer makes the gradient of its input alone."""
    module = block().requires_grad_(False)
    (layer,) = fusedckpt.schedule(module, randn(ROWS, D)).layers
    made = [line.split(" = ")[0].strip() for line in layer.backward.splitlines()[:-1]]
    assert not [name for name in made if "weight" in name]
    assert layer.backward.splitlines()[-1].startswith("return d_x, None")


def test_layers_come_in_the_order_of_their_forwards():
    first, last = fusedckpt.Linear(D, D, activation="gelu"), fusedckpt.RMSNorm(D)
    model = nn.Sequential(nn.Linear(D, D), first, nn.Linear(D, D), block(), last)
    shown = fusedckpt.schedule(model, randn(ROWS, D, requires_grad=False))
    assert [layer.name for layer in shown.layers] == ["linear_act", "gated_mlp", "norm"]
    assert str(shown) == "\n\n".join(map(str, shown.layers))


def test_refusals():
    x = randn(ROWS, D)
    with pytest.raises(TypeError, match="schedule: fn must be a function or a module, got Tensor"):
        fusedckpt.schedule(x)
    for fn in (nn.Linear(D, D), block().requires_grad_(False), lambda x: None):
        with pytest.raises(
            ValueError, match="schedule: fn must return the result of a fused layer"
        ):
            fusedckpt.schedule(fn, x.detach())
