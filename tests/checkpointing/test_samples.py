"""checkpoint(..., debug="samples"): a recompute that brings back other tensors raises."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError

from fusedckpt import Checkpoint, checkpoint, checkpoint_sequential, prefetch_recompute
from fusedckpt.autograd import private
from fusedckpt.checkpointing import samples
from fusedckpt.checkpointing.segment import segment_of

D = 96


def grads(y, x, model):
    torch.manual_seed(0)
    return torch.autograd.grad(y(x).square().sum(), [x, *model.parameters()])


LAYERS = {
    "linears": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)),
    "dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D)),
    "noise": lambda: nn.Sequential(nn.Linear(D, D), nn.RReLU(), nn.Linear(D, D)),
    "statistics": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)),
    "indices": lambda: nn.Sequential(nn.Linear(D, D), nn.Unflatten(1, (8, 12)), nn.MaxPool1d(3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_no_false_alarm(name, dtype):
    torch.manual_seed(0)
    model = LAYERS[name]().to(DEVICE, dtype)
    twin, x = copy.deepcopy(model), randn(40, D).to(dtype).requires_grad_()
    torch.testing.assert_close(
        grads(lambda x: checkpoint(model, x, debug="samples"), x, model),
        grads(lambda x: checkpoint(twin, x), x, twin),
        rtol=0,
        atol=0,
    )


def changing(model, scale):
    return lambda x: model(x * scale[0]).sin()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_changed_global_raises_at_the_end_of_backward(dtype):
    model, scale, seen = nn.Linear(D, D).to(DEVICE, dtype), [1.0], []
    x = randn(40, D).to(dtype).requires_grad_()
    x.register_hook(seen.append)
    y = checkpoint(changing(model, scale), x, debug="samples").abs().sum()
    scale[0] = 1.1
    with pytest.raises(
        CheckpointError, match=r"checkpoint: changing.<locals>.<lambda>: its recomp"
    ):
        y.backward()
    assert len(seen) == 1
    # and nothing is left for the next backward
    scale[0] = 1.0
    checkpoint(changing(model, scale), x, debug="samples").abs().sum().backward()
    assert not any(samples._of_backwards.values())


def test_other_indices_raise():
    kept = torch.arange(40, device=DEVICE)
    x = randn(40, D)
    y = checkpoint(lambda x: x[kept + 0].sin(), x, debug="samples")
    kept += 1
    kept %= 40
    with pytest.raises(CheckpointError, match="other values"):
        y.sum().backward()


def test_no_number_is_compared_beyond_rounding():
    """NaN and inf are equal to themselves; a last bit in float32 is rounding, a bool is not."""
    fill, model = [float("nan"), 0.0], nn.Linear(D, D).to(DEVICE)

    def fn(x):
        return model((x * (1 + fill[1])).masked_fill(x > 2, fill[0])).relu().sin()

    for value in (float("nan"), float("inf")):
        fill[:] = value, 0.0
        y = checkpoint(fn, randn(40, D), debug="samples").sum()
        fill[1] = 1e-6
        y.backward()


class Called(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.parametrize("run", ["twice", "prefetched", "sequential", "wrapper", "nested"])
def test_every_recompute_compares(run):
    model, scale = nn.Linear(D, D).to(DEVICE), [1.0]
    fn, x = changing(model, scale), randn(8, D)
    y = {
        "sequential": lambda: checkpoint_sequential([fn, fn], 2, x, debug="samples"),
        "wrapper": lambda: Checkpoint(Called(fn), debug="samples")(x),
        "nested": lambda: checkpoint(partial(checkpoint, debug="samples"), fn, x),
    }.get(run, lambda: checkpoint(fn, x, debug="samples"))()
    if run == "twice":
        y.sum().backward(retain_graph=True)
    scale[0] = 2.0
    if run == "prefetched":
        assert prefetch_recompute(y) == 1
    with pytest.raises(CheckpointError, match="other values"):
        y.sum().backward()


def test_one_kernel_a_dropped_tensor():
    """And 64 elements; none for arguments, parameters, and the results of a region."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).to(DEVICE)
    x = randn(1, 2, 8, D)

    def fn(x):
        y = model(x)
        return F.scaled_dot_product_attention(y, y + 1, y + 2)

    run = partial(checkpoint, fn, x, debug="samples", save_regions="attention")
    run()
    with torch.profiler.profile() as events:
        y = run()
    segment = segment_of(y.grad_fn)
    # tanh's result, which the linear behind it saves, too, and q, k and v
    assert len(segment.samples._of) == 5
    assert all(sample.numel() == 64 for sample in segment.samples._of.values())
    # the region's result and log-sum-exp are known for such when it returns
    # and for the state of a GPU's generator
    assert len(segment.staying) == (2 if DEVICE.type == "cpu" else 4)
    taken = sum(e.count for e in events.key_averages() if e.key == "aten::take")
    assert taken == 5 + len(segment.staying)
    with torch.profiler.profile() as events:
        y.sum().backward()
    assert sum(e.count for e in events.key_averages() if e.key == "aten::take") == 5


@pytest.mark.parametrize("numel", [1, 5, 63, 64, 65, 4096, (1 << 33) + 7])
def test_places_are_spread(numel):
    for number in range(3):
        places = samples._places(numel, number, torch.device("cpu")).tolist()
        assert len(places) == 64
        assert min(places) >= 0
        assert max(places) < numel
        for part, place in enumerate(places):
            assert part * numel // 64 <= place <= (part + 1) * numel // 64


def test_at_once_where_the_end_cannot_raise(monkeypatch):
    monkeypatch.setattr(private, "ends_backward", lambda: False)
    scale, x = [1.0], randn(8, D)
    y = checkpoint(changing(nn.Linear(D, D).to(DEVICE), scale), x, debug="samples").sum()
    scale[0] = 2.0
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


def test_an_error_of_the_device_where_nothing_may_be_waited_for(monkeypatch):
    """A CPU raises it at once."""
    monkeypatch.setattr(samples, "_may_wait", lambda device: False)
    before, now = torch.zeros(3), torch.ones(3)
    samples.compare([samples.Pair("f", before, before)])
    with pytest.raises(RuntimeError, match="f: its recompute brings back other values"):
        samples.compare([samples.Pair("f", before, now)])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU waits for nothing")
def test_nothing_is_waited_for_where_that_is_an_error():
    fn, x = changing(nn.Linear(D, D).to(DEVICE), [1.0]), randn(8, D)
    y = checkpoint(fn, x, debug="samples").sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_hooks_that_change_values():
    """Those of other code may compress; torch's keep values, and are compared."""
    model, scale, x = nn.Linear(D, D).to(DEVICE), [1.0], randn(8, D)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
    with hooks:
        y = checkpoint(changing(model, scale), x * 1, debug="samples").sum()
    y.backward()
    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(changing(model, scale), x * 1, debug="samples").sum()
    scale[0] = 2.0
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


def test_options():
    x = randn(2, 2)
    with pytest.raises(ValueError, match="debug must be True, False or 'samples', got 'all'"):
        checkpoint(torch.sin, x, debug="all")
    with pytest.raises(ValueError, match="debug takes no context_fn"):
        checkpoint(torch.sin, x, debug="samples", context_fn=lambda: None)
    compiled = torch.compile(lambda x: checkpoint(torch.sin, x, debug="samples"), backend="eager")
    torch.testing.assert_close(compiled(x), x.sin())
