"""use_checkpoint on models whose own function calls torch's checkpoint, as those of diffusers."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from fake_streams import fake_device
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fusedckpt
from fusedckpt.integrations.transformers import use_checkpoint

pytest.importorskip("transformers")
D = 8


class FourLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x, scale):
        q, k, v = (linear(x)[:, None] for linear in self.linears[:3])
        return x + scale * self.linears[3](F.scaled_dot_product_attention(q, k, v)[:, 0])


class DiffusersModel(nn.Module):
    """Sets gradient checkpointing as diffusers' ModelMixin does: a function closes over nothing."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(FourLinears() for _ in range(2))

    def enable_gradient_checkpointing(self, function=None):
        def _gradient_checkpointing_func(module, *args):
            return torch.utils.checkpoint.checkpoint(module.__call__, *args, use_reentrant=False)

        self._gradient_checkpointing_func = function or _gradient_checkpointing_func
        self.gradient_checkpointing = True

    def forward(self, x, scale):
        for block in self.blocks:
            if self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, scale)
            else:
                x = block(x, scale)
        return x


def build():
    torch.manual_seed(0)
    return DiffusersModel(), torch.randn(2, 3, D, requires_grad=True), torch.ones(3, 1) * 2


def step(model, x, scale):
    y = model(x, scale)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.fixture
def segments(monkeypatch):
    """A list with an entry for each call of our checkpoints."""
    made, run = [], fusedckpt.checkpointing.segment.Segment.run
    monkeypatch.setattr(
        fusedckpt.checkpointing.segment.Segment,
        "run",
        lambda self, *args: made.append(1) or run(self, *args),
    )
    return made


def test_a_model_of_diffusers(segments):
    model, x, scale = build()
    expected = step(model, x, scale)
    model.enable_gradient_checkpointing()
    torch.testing.assert_close(step(model, x, scale), expected, rtol=0, atol=0)
    assert not segments
    counts = []
    for regions in ((), "attention", "attention"):
        use_checkpoint(model, regions)
        with torch.profiler.profile() as events:
            torch.testing.assert_close(step(model, x, scale), expected, rtol=0, atol=0)
        names = [event.name for event in events.events()]
        counts.append(names.count("aten::scaled_dot_product_attention"))
    assert len(segments) == 6
    # attention is run again, or is not
    assert counts == [4, 2, 2]


CONTEXTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
stock = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def offloading(module, *args):
    with torch.autograd.graph.save_on_cpu():
        return stock(module, *args)


def offloading_twice(module, *args):
    with torch.autograd.graph.save_on_cpu():
        return offloading(module, *args)


def casting(module, *args):
    with torch.autocast("cpu", torch.bfloat16):
        return stock(module, *args)


OTHERS = {
    "offloading twice": offloading_twice,
    "casting": casting,
    "reentrant": lambda m, *args: stock(m, *args, use_reentrant=True),
    "selective": lambda m, *args: stock(m, *args, context_fn=CONTEXTS),
    "to the end": lambda m, *args: stock(m, *args, early_stop=False),
    "unchecked": lambda m, *args: stock(m, *args, determinism_check="none"),
    "without random states": lambda m, *args: stock(m, *args, preserve_rng_state=False),
    "plain": lambda m, *args: m(*args),
    "copies": lambda m, *args: stock(m, *(x.clone() for x in args)),
    "of the result": lambda m, *args: stock(m, *args).clone(),
    "twice": lambda m, *args: stock(m, *args) + 0 * stock(m, *args),
    "other arguments": lambda m: stock(m),
    "a number": 3,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_function_is_left(name):
    model, *_ = build()
    model.enable_gradient_checkpointing(OTHERS[name])
    with pytest.raises(ValueError, match="where torch's checkpoint was expected"):
        use_checkpoint(model)
    assert model._gradient_checkpointing_func is OTHERS[name]


@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": False}])
def test_offload_becomes_ours(segments, monkeypatch, options):
    """With offload=True transformers calls a function with options, in save_on_cpu."""
    model, x, scale = build()
    expected = step(model, x, scale)

    def run(function, *args, **kwargs):
        with torch.autograd.graph.save_on_cpu(pin_memory=False, device_type="cpu"):
            return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)

    model.enable_gradient_checkpointing(partial(run, use_reentrant=False, **options))
    for _ in range(2):
        use_checkpoint(model)
        keywords = model._gradient_checkpointing_func.keywords
        assert keywords == {"offload": True, "save_regions": (), **keywords, **options}
        with fake_device(monkeypatch, small=100, kept=0) as device:
            torch.testing.assert_close(step(model, x, scale), expected, rtol=0, atol=0)
        # the first block's input is a leaf, the scale is small
        assert device.to_host == x.nbytes
    assert len(segments) == 4


@pytest.mark.parametrize("offloads", [False, True])
def test_torchs_wrappers(segments, monkeypatch, offloads):
    """As accelerate wraps modules for FSDP2."""
    model, x, scale = build()
    expected = step(model, x, scale)
    for i, block in enumerate(model.blocks):
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        model.blocks[i] = offload_wrapper(wrapped) if offloads else wrapped
    names = [*model.state_dict()]
    for _ in range(2):
        use_checkpoint(model)
        with fake_device(monkeypatch, small=100, kept=0) as device:
            torch.testing.assert_close(step(model, x, scale), expected, rtol=0, atol=0)
        assert device.to_host == offloads * x.nbytes
    assert len(segments) == 4
    assert [*model.state_dict()] == names
    step(copy.deepcopy(model), x, scale)
    assert len(segments) == 6


def test_torchs_wrappers_of_another_checkpoint_stay():
    model, *_ = build()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], checkpoint_fn=lambda f, *args: f(*args))
    with pytest.raises(ValueError, match="where torch's checkpoint was expected"):
        use_checkpoint(model)
