"""What `fuse` keeps on a module is one attribute, of which copies have their own."""

import copy
import pickle

import pytest
import torch
from support import DEVICE
from torch import nn

import fusedckpt
from fusedckpt.layers.notes import NO_NOTES, clear_notes, notes_of, set_notes

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "replica": lambda module: module._replicate_for_data_parallel(),
}


def test_a_fused_model_has_one_attribute_more():
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(DEVICE)
    model = nn.ModuleDict({"norm": nn.LayerNorm(8, device=DEVICE), "mlp": mlp})
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    fusedckpt.fuse(model)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    model["mlp"](model["norm"](x)).sum().backward()
    for name, module in model.named_modules():
        more = vars(module).keys() - before[name]
        assert not [attribute for attribute in more if attribute.startswith("_fusedckpt_")]
    assert "_fusedckpt" in vars(model["mlp"])
    fusedckpt.unfuse(model)
    assert before == {name: {*vars(module)} for name, module in model.named_modules()}


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_notes_of_their_own(name):
    module = nn.Linear(2, 2)
    set_notes(module, writes="gain", readers="code")
    copied = COPIES[name](module)
    assert vars(notes_of(copied)) == {"writes": "gain", "readers": "code"}
    set_notes(module, writes="bias")
    clear_notes(copied, "readers")
    assert vars(notes_of(module)) == {"writes": "bias", "readers": "code"}
    assert vars(notes_of(copied)) == {"writes": "gain"}


def test_the_last_field_takes_the_attribute_with_it():
    module = nn.Linear(2, 2)
    set_notes(module, always=True)
    clear_notes(module, "always", "writes")
    clear_notes(module, "always")
    assert notes_of(module) is NO_NOTES
