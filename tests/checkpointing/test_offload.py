"""Offload on a CPU whose memory counts as a device's: values, bytes, lives, and order."""

import gc
import re
import weakref
from functools import partial

import pytest
import torch
from checkpoints import DroppingBlock, assert_same, grads, no_gc, run
from fake_streams import RaceError, fake_device
from torch import nn
from torch.autograd.graph import save_on_cpu

import fusedckpt
from fusedckpt import checkpoint, checkpoint_sequential
from fusedckpt.checkpointing import offload
from fusedckpt.checkpointing.offload import OffloadedInputs
from fusedckpt.memory import peak_bytes, saved_tensors

T, D, N = 64, 32, 6
# bytes of an input
X = T * D * 4
offloading = partial(checkpoint, offload=True)


@pytest.fixture
def blocks():
    torch.manual_seed(1)
    return nn.Sequential(*[DroppingBlock(D, 4 * D) for _ in range(N)])


@pytest.fixture
def x():
    torch.manual_seed(2)
    return torch.randn(T, D, requires_grad=True)


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as device:
        yield device


def both(blocks, x, call, **options):
    y = run(blocks, x, call, **options)
    return [y.detach(), *grads(blocks, x, y)]


@pytest.mark.parametrize("kept", [0, 1, 2, 9])
def test_bits_and_copies(monkeypatch, blocks, x, kept):
    expected = both(blocks, x, checkpoint)
    with fake_device(monkeypatch, kept=kept) as device:
        assert_same(both(blocks, x, offloading), expected)
    # those that leave last are needed before they are gone
    leave = max(0, N - kept)
    assert (device.to_host, device.to_device) == (leave * X, max(0, leave - 1) * X)


FORWARD_OF_FIVE = """\
compute: record event 1
compute: record event 2
copies: wait for event 1
copies: copy to the host
copies: record event 3
compute: record event 4
compute: wait for event 3
copies: wait for event 2
copies: copy to the host
copies: record event 5
compute: record event 6
compute: wait for event 5
copies: wait for event 4
copies: copy to the host
copies: record event 7
compute: record event 8
compute: wait for event 7
copies: wait for event 6
copies: copy to the host
copies: record event 9"""

# the inputs of the fifth segment stayed, those of the fourth are still on the device
BACKWARD_OF_FIVE = """\
compute: wait for event 9
compute: record event 10
copies: wait for event 10
copies: copy to the device
copies: record event 11
compute: wait for event 11
compute: record event 12
copies: wait for event 12
copies: copy to the device
copies: record event 13
compute: wait for event 13
compute: record event 14
copies: wait for event 14
copies: copy to the device
copies: record event 15
compute: wait for event 15"""


def test_order_of_copies(device, blocks, x):
    """An input leaves when its segment has run; its memory is freed a segment later."""
    y = run(blocks[:5], x, offloading)
    assert device.log == FORWARD_OF_FIVE.split("\n")
    del device.log[:]
    grads(blocks[:5], x, y)
    assert device.log == BACKWARD_OF_FIVE.split("\n")


def test_peak_of_twelve_layers(monkeypatch):
    """At most 0.7 of the checkpoint's, of a step of 12 MLPs; in units of an input."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(12)]
    rows = 2048
    x, nbytes = torch.randn(rows, D, requires_grad=True), rows * D * 4
    for parameter in [x, *nn.ModuleList(layers).parameters()]:
        parameter.grad = torch.zeros_like(parameter)

    def step(call):
        h = x * 1
        for layer in layers:
            h = call(layer, h)
        h.backward(torch.ones_like(h))

    peaks = {}
    for name, call in (("checkpoint", checkpoint), ("offload", offloading)):
        with fake_device(monkeypatch) as device:
            step(call)
            peaks[name] = peak_bytes(lambda call=call: step(call)) / nbytes
    assert (device.to_host, device.to_device) == (2 * 11 * nbytes, 2 * 10 * nbytes)
    # as README says
    assert {name: round(peak, 1) for name, peak in peaks.items()} == {
        "checkpoint": 20.3,
        "offload": 11.2,
    }
    assert peaks["offload"] < 0.7 * peaks["checkpoint"]


def test_device_bytes_after_forward(device, blocks, x):
    y = run(blocks, x, offloading)
    assert device.num_on_device() == offload.KEPT + 1
    y.sum().backward()
    assert not device.known


def test_retained_graph(device, blocks, x):
    expected = grads(blocks, x, run(blocks, x, checkpoint))
    y = run(blocks, x, offloading)
    for retain in (True, True, False):
        assert_same(grads(blocks, x, y, retain_graph=retain), expected)
        assert device.num_on_device() <= offload.BACK + offload.KEPT + 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_forwards(device, blocks, order):
    xs = [torch.randn(T, D, requires_grad=True) for _ in range(3)]
    expected = [grads(blocks, x, run(blocks, x, checkpoint)) for x in xs]
    ys = [run(blocks, x, offloading) for x in xs]
    for i in order:
        assert_same(grads(blocks, xs[i], ys[i]), expected[i])
    assert not device.known


def test_two_chains_in_turns(device, blocks, x):
    others = nn.Sequential(*[DroppingBlock(D, 4 * D) for _ in range(N)])

    def step(call):
        torch.manual_seed(0)
        a, b = x * 1, x * 2
        for first, second in zip(blocks, others, strict=True):
            a, b = call(first, a), call(second, b)
        return [*grads(blocks, x, a), *grads(others, x, b)]

    assert_same(step(offloading), step(checkpoint))
    assert (device.to_host, device.to_device) == ((2 * N - 1) * X, (2 * N - 2) * X)


@pytest.mark.parametrize("is_run", [False, True])
def test_nothing_lives_after(device, blocks, x, is_run):
    with no_gc():
        y = run(blocks, x, offloading)
        storages = [weakref.ref(storage) for storage in device.known.values()]
        inputs = [*device.kept, *device.leaving]
        assert len(storages) == N
        assert len(inputs) == 2
        host = weakref.ref(next(s.on_host for s in device.known.values() if s.on_host is not None))
        if is_run:
            grads(blocks, x, y)
        del y
        assert not [ref for ref in (*storages, *inputs, host) if ref() is not None]
        assert device.memory.pinned == device.memory.pageable == 0
        device.look()


def test_abandoned_while_copies_run(device, blocks, x):
    """A forward's last copy, and those of a backward that ends early, are waited for."""
    for count in (0, 2):
        middles = []
        h = x * 1
        for block in blocks:
            middles.append(h)
            h = offloading(block, h)
        target = middles[-1 - count]
        middles.clear()
        if count:
            torch.autograd.grad(h.sum(), target)
        del h, target
        device.look()
    assert not device.known


@pytest.mark.parametrize("place", range(N))
@pytest.mark.parametrize(
    "write", [lambda h: h.mul_(2), lambda h: h.view(-1)[:3].zero_(), lambda h: h.detach().add_(1)]
)
def test_write_in_place_raises(device, blocks, x, write, place):
    h, kept = x * 1, None
    for i, block in enumerate(blocks):
        kept = h if i == place else kept
        h = offloading(block, h)
    with torch.no_grad():
        write(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_tensors_that_stay(device, blocks, x):
    # of two segments, a leaf, a view of a larger storage, below the bound; another dtype's view
    mask = x.detach() * 2
    assert_same(both(blocks, x, offloading, mask=mask), both(blocks, x, checkpoint, mask=mask))
    assert device.to_host == (N - 1) * X
    device.to_host = 0

    def step(call, h):
        torch.manual_seed(0)
        y = [call(block, tensor) for block, tensor in zip(blocks, h, strict=False)]
        return torch.autograd.grad(sum(y).square().sum(), x)

    for make in (lambda: [x] * 4, lambda: (torch.cat([x * 1] * 4)).split(T)):
        assert_same(step(offloading, make()), step(checkpoint, make()))
    assert device.to_host == 0
    y = x[:2] * 1
    for block in blocks:
        y = offloading(block.norm, y)
    assert device.to_host == 0
    assert not device.known


def test_tensors_that_the_caller_has(device, blocks, x):
    def step(call):
        torch.manual_seed(0)
        h, states = x * 1, []
        for block in blocks:
            states.append(h)
            h = call(block, h)
        return torch.autograd.grad(h.square().sum() + sum(state.sum() for state in states), [x])

    assert_same(step(offloading), step(checkpoint))
    assert (device.to_host, device.to_device) == ((N - 1) * X, 0)


def test_replaced_memory(device, blocks, x):
    """The caller's tensor got other memory by `.data`: that of the forward comes back."""
    h, states = x * 1, []
    for block in blocks.eval():
        states.append(h)
        h = offloading(block, h)
    for state in states:
        state.data = torch.zeros_like(state)
    assert_same(grads(blocks, x, h), grads(blocks, x, run(blocks, x, checkpoint)))


@pytest.mark.parametrize(
    "make",
    [
        lambda h: (h.t() * 1).t(),
        lambda h: h.t() * 1,
        lambda h: (h * 1)[:, ::1],
        lambda h: torch.cat([h, h])[:T],
        lambda h: (h * 1).view(T // 2, 2 * D).view(T, D),
    ],
)
def test_layouts(device, x, make):
    layer = nn.Linear(D, D)

    def function(h):
        h = h.t() if h.shape[0] == D else h
        return make(torch.tanh(layer(h)))

    assert_same(
        *(grads(layer, x, run([function] * 4, make(x), call)) for call in (offloading, checkpoint))
    )


def test_one_storage_twice_in_a_segment(device, x):
    layer = nn.Linear(T, T)

    def function(h, transposed):
        return torch.tanh(layer(transposed)).t() + h * 2

    def step(call):
        h = x * 1
        for _ in range(4):
            h = call(function, h, h.t())
        return grads(layer, x, h)

    assert_same(step(offloading), step(checkpoint))
    assert device.to_host == 3 * X


def test_saved_regions_leave_too(device, x):
    torch.manual_seed(1)
    blocks = nn.Sequential(*[DroppingBlock(D, 4 * D, attends=True) for _ in range(N)])
    options = {"save_regions": ("attention",)}
    expected = both(blocks, x, checkpoint, **options)
    assert_same(both(blocks, x, offloading, **options), expected)
    # the input, attention's output, and its log-sum-exp for four heads
    nbytes = 2 * X + 4 * T * 4
    assert (device.to_host, device.to_device) == ((N - 1) * nbytes, (N - 2) * nbytes)


@pytest.mark.parametrize("segments", [N, [2, 4], "sqrt"])
def test_sequential_and_modules(device, blocks, x, segments):
    call = partial(checkpoint_sequential, blocks, segments)

    def step(function):
        torch.manual_seed(0)
        return grads(blocks, x, function(x * 1))

    expected = step(call)
    assert_same(step(partial(call, offload=True)), expected)
    if segments == N:
        assert device.to_host == (N - 1) * X
        device.to_host = 0
        for block in blocks:
            fusedckpt.checkpoint_module(block, offload=True)
        assert_same(step(blocks), expected)
        assert device.to_host == (N - 1) * X


def test_fused_layers(device, blocks, x):
    fusedckpt.fuse(blocks)
    assert_same(both(blocks, x, offloading), both(blocks, x, checkpoint))
    assert device.to_host == (N - 1) * X


def test_prefetched_recompute(device, blocks, x):
    y = run(blocks, x, offloading)
    assert fusedckpt.prefetch_recompute(y, 3) == 3
    assert_same(grads(blocks, x, y), grads(blocks, x, run(blocks, x, checkpoint)))


def test_beyond_the_pinned_limit(monkeypatch, blocks, x):
    with fake_device(monkeypatch, pinned=2 * X) as device:
        y = run(blocks, x, offloading)
        assert (device.memory.pinned, device.memory.pageable) == (2 * X, (N - 3) * X)
        assert_same(grads(blocks, x, y), grads(blocks, x, run(blocks, x, checkpoint)))


@pytest.mark.parametrize("around", ["hooks", "checkpoint"])
def test_declines_inside(device, blocks, x, around):
    offload.stays.clear()

    def step(call):
        torch.manual_seed(0)
        if around == "checkpoint":
            return grads(blocks, x, checkpoint(partial(run, blocks, call=call), x))
        with save_on_cpu():
            return grads(blocks, x, run(blocks, x, call))

    assert_same(step(offloading), step(checkpoint))
    assert device.to_host == 0
    assert {*offload.stays} == {
        "saved-tensor hooks of other code or an outer checkpoint were active"
    }


def test_does_nothing_on_a_cpu(monkeypatch, blocks, x):
    monkeypatch.setattr(offload, "LEAST_NBYTES", 1)
    offload.stays.clear()
    assert_same(both(blocks, x, offloading), both(blocks, x, checkpoint))
    assert offload.stays == {"tensors of a CPU are in host memory already": N}


def test_the_report_says_what_became_of_inputs(monkeypatch, blocks, x):
    class OffloadedModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            return run(self.blocks, x, offloading)

    told = str(fusedckpt.report(OffloadedModel(), x))
    assert f"0 B  {N} inputs stay: tensors of a CPU are in host memory already" in told
    with fake_device(monkeypatch):
        report = fusedckpt.report(OffloadedModel(), x)
    assert report.offloaded_bytes == (N - 1) * X
    assert re.search(r"\n  offloaded +40.0 KiB\n", str(report))
    assert "offloaded" not in str(fusedckpt.report(blocks, x))


def test_counting_hooks_see_the_rest(device, blocks, x):
    with saved_tensors() as saved:
        y = run(blocks, x, offloading)
    assert saved.nbytes < X
    assert device.to_host == (N - 1) * X
    del y


def test_bad_flags(x):
    with pytest.raises(TypeError, match="offload"):
        checkpoint(torch.tanh, x, offload="host")
    with pytest.raises(ValueError, match="offload"):
        checkpoint(offload=2)


# each takes one wait or event away


def _unsettled(self):
    self._pending = None


def _freed_at_once(self):
    for storage in self._tensors:
        if storage.on_host is not None and not storage.stays:
            storage.on_device = None


def _not_ready(copy):
    def run(self, pairs, ready):
        return copy(self, pairs, type(ready)("none", {}))

    return run


def _not_ready_back(copy):
    def run(self, pairs, ready):
        is_back = pairs[0][1].untyped_storage().data_ptr() in self.hosts()
        return copy(self, pairs, type(ready)("none", {}) if is_back else ready)

    return run


def _read_at_once(unpack):
    def run(self, place):
        pending, self._pending = self._pending, None
        settle, self._settle = self._settle, lambda: None
        try:
            self._pending = pending
            return unpack(self, place)
        finally:
            self._settle = settle

    return run


MUTATIONS = {
    "no wait": (OffloadedInputs, "_settle", lambda _: _unsettled),
    "freed without a wait": (OffloadedInputs, "free", lambda _: _freed_at_once),
    "dropped without a wait": (OffloadedInputs, "__del__", lambda _: lambda self: None),
    "copied before it is made": (offload.CopyStream, "copy", _not_ready),
    "copied back before memory is free": (offload.CopyStream, "copy", _not_ready_back),
    "read without a wait": (OffloadedInputs, "_unpack", _read_at_once),
}


class NotingBlock(DroppingBlock):
    """Tells the fake device of reads and writes of the stream that computes."""

    def __init__(self, device):
        super().__init__(D, 4 * D)
        self.device = [device]

    def forward(self, x):
        (device,) = self.device
        return device.made(super().forward(device.read(x)))


def noted_steps(device, x):
    """Run steps that end in all ways: whole, twice, out of order, early, and never."""
    blocks = nn.Sequential(*[NotingBlock(device) for _ in range(N)])

    def forward():
        h = device.made(x * 1)
        for block in blocks:
            h = offloading(block, h)
        return h

    y = forward()
    for retain in (True, False):
        grads(blocks, x, y, retain_graph=retain)
    first, second = forward(), forward()
    grads(blocks, x, first)
    grads(blocks, x, second)
    del first, second, y
    device.look()
    dropped = forward()
    del dropped
    device.look()
    # the end of a backward that reaches the last segments alone
    h = device.made(x * 1)
    for i, block in enumerate(blocks):
        middle = h if i == N - 2 else None if i < N - 2 else middle  # noqa: F821
        h = offloading(block, h)
    torch.autograd.grad(h.sum(), middle)
    del h, middle
    device.look()


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_each_wait_is_needed(monkeypatch, x, name):
    with monkeypatch.context() as patch:
        if name is not None:
            owner, attribute, mutate = MUTATIONS[name]
            patch.setattr(owner, attribute, mutate(getattr(owner, attribute)))
        error = None
        try:
            with fake_device(patch) as device:
                noted_steps(device, x)
        except RaceError as raised:
            error = raised
    gc.collect()
    assert (error is None) == (name is None)
