"""checkpoint(..., debug="samples"): a recompute that brings back other tensors raises."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError
from zoo import Attention, Lambda

from fusedckpt import checkpoint, checkpoint_module, checkpoint_sequential, fuse, prefetch_recompute
from fusedckpt.autograd import private
from fusedckpt.checkpointing import samples
from fusedckpt.checkpointing.calls import Options
from fusedckpt.checkpointing.entry import run_checkpoint
from fusedckpt.checkpointing.segment import segment_of

D = 96
# torch makes a class of this module
MEMORY: Any = torch.utils.deterministic


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
        CheckpointError, match=r"checkpoint: changing.<locals>.<lambda>: the recomp"
    ):
        y.backward()
    assert len(seen) == 1
    # and nothing is left for the next backward
    scale[0] = 1.0
    checkpoint(changing(model, scale), x, debug="samples").abs().sum().backward()
    assert not any(pairs() for pairs in samples._of_backwards.values())


def test_a_call_that_raises_keeps_no_tensor():
    seen = []

    def fail(x):
        y = x * x
        seen.append(weakref.ref(y))
        y.sin()
        raise ValueError

    with suppress(ValueError):
        checkpoint(fail, randn(40, D), debug="samples")
    assert [reference() for reference in seen] == [None]


def test_other_indices_raise():
    kept = torch.arange(40, device=DEVICE)
    x = randn(40, D)
    y = checkpoint(lambda x: x[kept + 0].sin(), x, debug="samples")
    kept += 1
    kept %= 40
    with pytest.raises(CheckpointError, match="other values"):
        y.sum().backward()


class SavesConstants(torch.autograd.Function):
    """Saves two tensors that require no grad; its result depends on none of them."""

    @staticmethod
    def forward(ctx, x, *constants):
        ctx.save_for_backward(*constants)
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        first, second = ctx.saved_tensors
        return grads[0] * first * second, None, None


def test_constants_of_one_operation_are_all_compared():
    """As keys and values of frozen weights, which have one shape; none is noise."""
    kept = [0.5]

    def fn(x):
        constant = x.detach()
        return SavesConstants.apply(x, constant * kept[0], constant + 1)

    y = checkpoint(fn, randn(40, D).requires_grad_(), debug="samples").sum()
    kept[0] = 0.6
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


def test_a_mask_is_no_noise_of_the_next_operation():
    """rrelu saves its noise, which it has yet to draw, and then a tensor like it."""
    kept = [0.5]

    def fn(x):
        return x * torch.full_like(x, kept[0]) + (x + 1).sin()

    y = checkpoint(fn, randn(40, D).requires_grad_(), debug="samples").sum()
    kept[0] = 0.6
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


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


@pytest.mark.parametrize("run", ["twice", "prefetched", "sequential", "wrapper", "nested"])
def test_every_recompute_compares(run):
    model, scale = nn.Linear(D, D).to(DEVICE), [1.0]
    fn, x = changing(model, scale), randn(8, D)
    y = {
        "sequential": lambda: checkpoint_sequential([fn, fn], 2, x, debug="samples"),
        "wrapper": lambda: checkpoint_module(Lambda(fn), debug="samples")(x),
        "nested": lambda: checkpoint(partial(checkpoint, debug="samples"), fn, x),
    }.get(run, lambda: checkpoint(fn, x, debug="samples"))()
    if run == "twice":
        y.sum().backward(retain_graph=True)
    scale[0] = 2.0
    if run == "prefetched":
        assert prefetch_recompute(y) == 1
    with pytest.raises(CheckpointError, match="other values"):
        y.sum().backward()


def test_one_kernel_takes_the_elements_of_all_tensors():
    """And 64 of each; none of arguments, parameters, and the results of a region."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).to(DEVICE)
    x = randn(1, 2, 8, D)

    def fn(x):
        y = model(x)
        return F.scaled_dot_product_attention(y, y + 1, y + 2)

    def kernels(call):
        with torch.profiler.profile() as events:
            result = call()
        counts = {e.key: e.count for e in events.key_averages()}
        return result, [counts.get(f"aten::{name}", 0) for name in ("cat", "take", "eq")]

    run = partial(checkpoint, fn, x, debug="samples", save_regions="attention")
    run()
    y, taken = kernels(run)
    # tanh's result, which the linear behind it saves, too, and q, k and v
    (block,) = segment_of(y.grad_fn).samples._gather.blocks
    assert len(block.indices) == 5
    assert len(block.elements) == 5 * 64
    assert taken == [1, 0, 0]
    # and one comparison
    assert kernels(y.sum().backward)[1] == [1, 0, 1]


def test_tensors_wait_for_the_kernel_within_bounds():
    """Those of a long segment are not held until its end."""
    kept = []

    def fn(x):
        for _ in range(40):
            x = x.sin()
            kept.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in kept))
        return x

    alive = []
    x = randn(8, D)
    checkpoint(fn, x, debug="samples").sum().backward()
    assert alive[0] < 12


@pytest.mark.parametrize("layout", ["dense", "permuted", "expanded", "slice", "small", "none"])
def test_other_values_raise_in_any_layout(layout):
    views = {
        "permuted": lambda x: x.unflatten(1, (4, -1)).transpose(0, 1),
        "expanded": lambda x: x[:, :1].expand(-1, D),
        "slice": lambda x: x[:, 3:-5],
        "small": lambda x: x[:2, :7] * 1,
        "none": lambda x: x[0, 0],
    }
    scale = [1.0]

    def fn(x):
        return views.get(layout, lambda x: x)(x * scale[0]).sin()

    checkpoint(fn, randn(40, D), debug="samples").sum().backward()
    y = checkpoint(fn, randn(40, D), debug="samples").sum()
    scale[0] = 1.1
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


def test_a_recompute_with_other_strides():
    """Elements are compared, not places in memory."""
    is_first, scale = [True], [1.0]

    def fn(x):
        y = (x * scale[0]).unflatten(1, (4, -1)).transpose(0, 2)
        y = y.clone(memory_format=torch.preserve_format if is_first[0] else torch.contiguous_format)
        is_first[0] = False
        return y.sin()

    for scale[0] in (1.0, 1.1):
        is_first[0] = True
        y = checkpoint(fn, randn(40, D), debug="samples").sum()
        if scale[0] == 1.0:
            y.backward()
    scale[0] = 1.0
    with pytest.raises(CheckpointError, match="other values"):
        y.backward()


def test_a_tensor_written_before_its_elements_are_taken_has_none():
    """Its recompute brings it back as it was saved."""

    def fn(x):
        y = x.exp()
        z = y.sin()
        with torch.no_grad():
            y.zero_()
        return z

    x = randn(8, D)
    checkpoint(fn, x, debug="samples").sum().backward()
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())


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
    monkeypatch.setattr(samples, "may_wait", lambda device: False)
    before, now = torch.zeros(3), torch.ones(3)
    samples.compare([samples.Pair("f", before, before)])
    with pytest.raises(RuntimeError, match="f: the recompute gives other values"):
        samples.compare([samples.Pair("f", before, now)])


class Passed:
    """An event of a device."""

    def __init__(self):
        self.is_passed = False
        self.num_waits = 0

    def query(self):
        return self.is_passed

    def synchronize(self):
        self.num_waits += not self.is_passed


def test_flags_are_read_where_the_device_has_passed_them(monkeypatch):
    """And waited for from the third backward on."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    name, before, now = "f", torch.zeros(3), torch.ones(3)
    events = [Passed() for _ in range(4)]
    for event in events[:2]:
        pairs = [samples.Pair(name, before, now)]
        samples._unread.append(samples._Unread(torch.tensor(False), event, pairs))
    try:
        samples.read_passed(2)
        assert len(samples._unread) == 2
        events[0].is_passed = True
        # a call of a fused module
        with pytest.raises(CheckpointError, match="f: the recompute gives other values"):
            samples.Samples("g").begin([])
        assert len(samples._unread) == 1
        free = deque()
        for event in events[2:]:
            samples._unread.append(samples._Unread(torch.tensor(True), event, [], free))
        with pytest.raises(CheckpointError, match="perhaps of one or two before"):
            samples.compare([])
        assert [event.num_waits for event in events] == [0, 1, 0, 0]
        samples.compare([])
        assert len(samples._unread) == 2
        events[2].is_passed = True
        samples.read_passed()
        # a flag that the device has not passed is written yet
        assert [event for _, event in free] == [events[2]]
    finally:
        samples._unread.clear()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU raises at once")
def test_fused_modules_wait_for_nothing():
    model = nn.Sequential(nn.LayerNorm(D), Attention(D, 4)).to(DEVICE)
    fuse(model)
    x = randn(2, 8, D)
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    samples.read_passed()
    assert not samples._unread


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
    with pytest.raises(ValueError, match="debug and context_fn exclude each other"):
        checkpoint(torch.sin, x, debug="samples", context_fn=lambda: None)
    compiled = torch.compile(lambda x: checkpoint(torch.sin, x, debug="samples"), backend="eager")
    torch.testing.assert_close(compiled(x), x.sin())


def test_samples_are_taken_under_autocast_of_another_half_precision():
    gather = samples.Gather(1 << 20)
    gather.add(0, randn(100).bfloat16())
    gather.add(1, randn(100).bfloat16())
    with torch.autocast(DEVICE.type, torch.float16):
        gather.take()
    assert [block.elements.dtype for block in gather.blocks] == [torch.bfloat16]
    assert gather.blocks[0].elements.isfinite().all()


def ctc(x, scale=1.0):
    targets = torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    lengths = torch.tensor([20, 12]), torch.tensor([9, 3])
    return F.ctc_loss((x * scale).log_softmax(-1), targets, *lengths)


class Unwritten(torch.autograd.Function):
    """A product that saves integers of which it writes half, as ctc_loss does of numbers."""

    @staticmethod
    def forward(ctx, x, w):
        places = torch.empty(64, dtype=torch.int64, device=x.device)
        places[:32] = torch.arange(32)
        ctx.save_for_backward(x * 1, w, places)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w, places = ctx.saved_tensors
        assert places[:32].equal(torch.arange(32, device=x.device))
        return dy * w, dy * x


@contextmanager
def garbage():
    """Fill memory that is not written with what was there: with zeros, for a forward with NaN."""
    MEMORY.fill_uninitialized_memory = False
    freed = [torch.zeros(2 * 20 * 19 + n) for n in range(-64, 64) for _ in range(8)]
    freed += [torch.zeros(64, dtype=torch.int64) for _ in range(64)]
    del freed
    try:
        yield
    finally:
        MEMORY.fill_uninitialized_memory = True


@pytest.mark.parametrize("kind", ["ctc_loss", "integers", "fused"])
def test_memory_that_nothing_has_written_is_not_compared(kind):
    x = randn(20, 2, 5).requires_grad_()
    w = randn(20, 2, 5).requires_grad_()
    fn = (lambda x: Unwritten.apply(x, w).sum()) if kind == "integers" else ctc
    options = Options(samples=True, reads_samples_late=kind == "fused")
    num_calls = []

    def counted(x):
        num_calls.append(1)
        return fn(x)

    expected = torch.autograd.grad(fn(x), x)
    y = run_checkpoint(options, counted, (x,), {})
    with garbage():
        torch.testing.assert_close(torch.autograd.grad(y, x), expected, rtol=0, atol=0)
    assert len(num_calls) == 3
    assert MEMORY.fill_uninitialized_memory


def test_a_difference_beside_unwritten_memory_raises():
    x, scale = randn(20, 2, 5).requires_grad_(), [1.0]
    y = checkpoint(lambda x: ctc(x, scale[0]), x, debug="samples")
    scale[0] = 1.1
    with garbage(), pytest.raises(CheckpointError, match="the recompute gives other values"):
        y.backward()


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: torch.randint_like(x, 1 << 20)])
def test_random_numbers_raise_whatever_memory_holds(draw):
    x = randn(20, 4).requires_grad_()
    y = checkpoint(lambda x: (x * draw(x)).sum(), x, debug="samples", preserve_rng_state=False)
    with garbage(), pytest.raises(CheckpointError, match="the recompute gives other values"):
        y.backward()


def test_a_result_is_compared_once_for_all_its_readers(monkeypatch):
    """Another result, as of a second backward, and one that was written are compared again."""
    compared: list[Any] = []
    monkeypatch.setattr(samples, "compare_at_end", compared.extend)
    x = randn(2, D)
    made = samples._MadeSamples("norm", [x], 0.0)
    value = x.clone()
    for _ in range(2):
        made.see(0, value)
    assert len(compared) == 1
    other = x + 1
    assert other._version == value._version
    made.see(0, other)
    value.mul_(2)
    made.see(0, value)
    made.see(0, x.clone())
    are_same = [bool((pair.before == pair.now).all()) for pair in compared]
    assert are_same == [True, False, False, True]
