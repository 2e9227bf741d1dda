"""The printed schedules of a call: its lines, its bytes beside those that are measured, errors."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from support import DEVICE, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

D, F, ROWS = 8, 12, 4
ROOT = Path(__file__).parents[2]


def block(**options):
    return fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True, **options).to(DEVICE)


def test_the_page_of_layers_shows_what_is_printed():
    """The lines of code run as they stand, and print the lines below them."""
    text = (ROOT / "fusedckpt/layers/README.md").read_text(encoding="utf-8")
    (code, shown), *_ = re.findall(
        r"```python\n([^`]*?explain\([^`]*)```\n+```\n(.*?)```", text, re.S
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
    (layer,) = fusedckpt.explain(module, x).layers
    assert sum(layer.saves.values()) == saved_bytes(module, [x])
    assert layer.chunks == chunks
    assert list(layer.saves) == {"inputs": ["x"], "gate": ["x", "gate"]}.get(
        save, ["x", "gate", "up"]
    )


@pytest.mark.parametrize("rates", [(0.5, 0.0), (0.5, 0.25)])
def test_seeds_of_dropouts_are_saved(rates):
    module, x = block(dropout=rates[0], output_dropout=rates[1]), randn(ROWS, D)
    (layer,) = fusedckpt.explain(module, x).layers
    assert layer.saves["seeds"] == 8 * sum(rate > 0 for rate in rates)
    assert sum(layer.saves.values()) == saved_bytes(module, [x])


def test_a_recipe_has_no_bytes():
    """An MLP that reads a norm's result saves no tensor of its own."""
    model, x = nn.Sequential(fusedckpt.RMSNorm(D), fusedckpt.MLP(D, F)).to(DEVICE), randn(ROWS, D)
    norm, mlp = fusedckpt.explain(model, x).layers
    assert (norm.recipes, mlp.recipes, mlp.saves) == ((), ("x",), {"x": 0})
    assert sum(norm.saves.values()) == saved_bytes(model, [x])
    assert "mlp saves a recipe of x\n" in str(mlp)


LORA = fusedckpt.LoRA(randn(F, D).detach(), randn(2, D), randn(F, 2), 2.0, 0.5)
LAYERS = {
    "gated": block(),
    "dropouts": block(dropout=0.5, output_dropout=0.5),
    "chunks": block(save="preact", chunks=2),
    "gate": fusedckpt.GatedMLP(D, F, save="gate"),
    "mlp": fusedckpt.MLP(D, F),
    "linear": fusedckpt.Linear(D, F),
    "projections": fusedckpt.NormLinear(fusedckpt.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, F)),
    "experts": fusedckpt.Experts(3, D, F),
    "head": fusedckpt.LinearCrossEntropy(D, F),
}
PLACES = torch.zeros(ROWS, 2, dtype=torch.int64, device=DEVICE)
ARGUMENTS = {
    "experts": (PLACES, torch.rand(ROWS, 2, device=DEVICE, requires_grad=True)),
    "head": (torch.arange(ROWS, device=DEVICE),),
}


@pytest.mark.parametrize("name", [*LAYERS, "lora"])
def test_lines_name_tensors_that_exist(name):
    """A freed tensor was made before, is not written over, and is not read later."""
    if name == "lora":
        fn = partial(fusedckpt.functional.linear_act, weight=LORA)
    else:
        fn = LAYERS[name].to(DEVICE)
    with forced_path("aten"):
        (layer,) = fusedckpt.explain(fn, randn(ROWS, D), *ARGUMENTS.get(name, ())).layers
    for text in (layer.forward, layer.backward):
        assert not re.search(r"getitem|\bt_\d|\bt =|_(?!\w)", text)
        lines = [line.partition(" frees ") for line in text.splitlines()]
        made = set[str]()
        for place, (call, _, freed) in enumerate(lines):
            results, is_named, read = call.partition(" = ")
            later = " ".join(line for line, *_ in lines[place + 1 :])
            for tensor in filter(None, freed.strip().split(", ")):
                assert tensor in made
                assert re.search(rf"\b{tensor}\b", read)
                assert not re.search(rf"={tensor}\b", read)
                assert not re.search(rf"\b{tensor}\b(?! =)", later)
            made |= set(results.strip().split(", ")) if is_named else set()


def test_experts_save_what_they_are_given():
    module = fusedckpt.Experts(3, D, F).to(DEVICE)
    index = torch.randint(0, 3, (ROWS, 2), device=DEVICE)
    x, scores = randn(ROWS, D), torch.rand(ROWS, 2, device=DEVICE, requires_grad=True)
    (layer,) = fusedckpt.explain(module, x, index=index, scores=scores).layers
    assert sum(layer.saves.values()) == saved_bytes(module, [x, index, scores])


def test_only_wanted_gradients():
    """A frozen layer makes the gradient of its input alone."""
    module = block().requires_grad_(False)
    (layer,) = fusedckpt.explain(module, randn(ROWS, D)).layers
    made = [line.split(" = ")[0].strip() for line in layer.backward.splitlines()[:-1]]
    assert not [name for name in made if "weight" in name]
    assert layer.backward.splitlines()[-1].startswith("return d_x, None")


def test_layers_come_in_the_order_of_their_forwards():
    first, last = fusedckpt.Linear(D, D, activation="gelu"), fusedckpt.RMSNorm(D)
    model = nn.Sequential(nn.Linear(D, D), first, nn.Linear(D, D), block(), last).to(DEVICE)
    shown = fusedckpt.explain(model, randn(ROWS, D, requires_grad=False))
    assert [layer.name for layer in shown.layers] == ["linear_act", "gated_mlp", "rms_norm"]
    assert str(shown) == "\n\n".join(map(str, shown.layers))


def test_refusals():
    x = randn(ROWS, D)
    with pytest.raises(TypeError, match="explain: fn must be a function or a module, got Tensor"):
        fusedckpt.explain(x)
    for fn in (nn.Linear(D, D).to(DEVICE), block().requires_grad_(False), lambda x: None):
        with pytest.raises(ValueError, match="explain: fn must return the result of a fused layer"):
            fusedckpt.explain(fn, x.detach())
