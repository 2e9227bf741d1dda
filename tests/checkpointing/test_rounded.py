"""Inputs kept in nine bits: bits, bytes, what stays as it is, and what composes."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from checkpoints import DroppingBlock, assert_same, grads, no_gc, run, stock
from fake_streams import fake_device
from support import DEVICE
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import fusedckpt
from fusedckpt import checkpoint, checkpoint_sequential
from fusedckpt.autograd import rounded
from fusedckpt.kernels import int8
from fusedckpt.memory import saved_tensors

T, D, N = 64, 48, 4
rounding = partial(checkpoint, store="int8")


@pytest.fixture
def blocks():
    torch.manual_seed(1)
    return nn.Sequential(*[DroppingBlock(D, 2 * D) for _ in range(N)]).to(DEVICE)


@pytest.fixture
def x():
    torch.manual_seed(2)
    return torch.randn(T, D, device=DEVICE, requires_grad=True)


def counting(name):
    """Count the calls of a function of `kernels/int8.py`."""
    return patch.object(int8, name, wraps=getattr(int8, name))


def roundtrip(x):
    """Return x as it comes back from nine bits, in its layout."""
    if not rounded.is_rounded(x):
        return x.detach()
    out = torch.empty_like(x, memory_format=torch.preserve_format)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    rows = x.detach().permute(order)
    n = rows.shape[-1] if rows.shape[-1] >= 16 else rows.numel()
    same = int8.unpack_int8(
        int8.pack_int8(rows.reshape(-1, n), "aten"), rows.new_empty(rows.numel() // n, n), "aten"
    )
    out.permute(order).copy_(same.view(rows.shape))
    return out


def reference(fn, *args, **options):
    """Checkpoint a function whose recompute gets rounded arguments, by hooks of the caller's."""
    with saved_tensors_hooks(roundtrip, lambda saved: saved):
        return checkpoint(fn, *args, **options)


def pairs_of(found, expected):
    return list(zip(found, expected, strict=True))


def both(blocks, x, call, **options):
    y = run(blocks, x, call, **options)
    return [y.detach(), *grads(blocks, x, y)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_backward_is_that_of_the_rounded_input(blocks, dtype):
    blocks.to(dtype)
    x = torch.randn(T, D, device=DEVICE, dtype=dtype, requires_grad=True)
    found = both(blocks, x, rounding)
    assert_same(found, both(blocks, x, reference))
    exact = both(blocks, x, checkpoint)
    # the forward is exact, the gradients are not
    assert torch.equal(found[0], exact[0])
    errors = [((a - b).norm() / b.norm()).item() for a, b in pairs_of(found[1:], exact[1:])]
    assert 0 < max(errors) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_bytes(blocks, dtype):
    blocks.to(dtype)
    x = torch.randn(T, D, device=DEVICE, dtype=dtype, requires_grad=True)
    nbytes = {}
    for name, call in (("as it is", checkpoint), ("int8", rounding)):
        with saved_tensors() as saved:
            run(blocks, x, call)
        nbytes[name] = saved.nbytes
    assert nbytes == {"as it is": N * T * D * dtype.itemsize, "int8": N * T * D * 9 // 8}


def edges(x, make, function=torch.tanh):
    """Return the bytes that a checkpoint saves of a tensor, and whether its gradient is exact."""
    found = []
    for call in (checkpoint, rounding):
        h = make(x)
        with saved_tensors([h]) as saved:
            y = call(function, h)
        found.append((saved.nbytes, torch.autograd.grad(y.float().square().sum(), [x])[0]))
    return found[1][0], torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda x: x * 1, T * D * 9 // 8),
        (lambda x: (x * 1).t(), T * D * 9 // 8),
        (lambda x: (x * 1).view(4, 16, D).transpose(0, 1), T * D * 9 // 8),
        (lambda x: (x.view(2, 32, 6, 8) * 1).contiguous(memory_format=torch.channels_last), 3456),
        # rows of three: groups go through them
        (lambda x: (x * 1).view(-1, 3), T * D * 9 // 8),
        # rows of 40 + 5, padded to three groups
        (lambda x: F.pad(x[:, :45], (0, 0)) * 1, T * 45 + 2 * T * 3),
        (lambda x: (x * 1)[:, None], T * D * 9 // 8),
    ],
)
def test_layouts(x, make, nbytes):
    assert edges(x, make) == (nbytes, False)
    call = lambda wrap: torch.autograd.grad(wrap(torch.tanh, make(x)).square().sum(), [x])  # noqa: E731
    assert_same(call(rounding), call(reference))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[:, :D],
        lambda x: x.view(-1),
        # a view of a larger storage, others small, overlapping, of too many digits
        lambda x: (x * 1)[:, 1:],
        lambda x: (x * 1).split(16, 1)[0],
        lambda x: x[:16, :16] * 1,
        lambda x: (x[:1] * 1).expand(T, D),
        lambda x: x.double() * 1,
    ],
)
def test_tensors_that_stay_as_they_are(x, make):
    assert edges(x, make)[1]


def test_no_tensor_without_a_gradient_is_rounded(blocks, x):
    ids, mask = torch.arange(T, device=DEVICE), torch.rand(T, D, device=DEVICE) > 0.5
    table = torch.randn(T, D, device=DEVICE) * 1

    def function(h, ids, mask, table):
        return torch.where(mask, h[ids], table)

    with counting("pack_int8") as packs:
        y = rounding(function, x * 1, ids, mask, table)
    assert packs.call_count == 1
    # it has the arguments of its calls
    packs.reset_mock()
    y.sum().backward()
    assert torch.equal(x.grad, mask.to(x.dtype))


def test_a_tensor_of_several_segments_is_packed_once(x):
    def function(h, memory):
        return torch.tanh(h) * memory

    def step(call):
        h, memory = x * 1, torch.cat([x, x], 1)[:, :D] * 1
        with saved_tensors() as saved:
            for _ in range(N):
                h = call(function, h, memory)
        return saved.nbytes, torch.autograd.grad(h.square().sum(), [x])

    nbytes, found = step(rounding)
    assert nbytes == (N + 1) * T * D * 9 // 8
    assert_same(found, step(reference)[1])
    assert not rounded._known


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("write", [lambda h: h.mul_(2), lambda h: h.detach()[0].zero_()])
def test_write_in_place_raises(blocks, x, write, ahead):
    h = x * 1
    y = rounding(blocks[0], h)
    if ahead:
        assert fusedckpt.prefetch_recompute(y) == 1
    with torch.no_grad():
        write(h)
    with pytest.raises(RuntimeError, match=rf"\[{T}, {D}\].*modified by an inplace operation"):
        y.sum().backward()


def test_nothing_lives_after(blocks, x):
    with no_gc():
        y = run(blocks, x, rounding)
        assert len(rounded._known) == N
        del y
        assert not rounded._known
        both(blocks, x, rounding)
        assert not rounded._known


def test_one_unpack_a_backward(blocks, x):
    y = run(blocks, x, rounding)
    for retain in (True, True, False):
        with counting("unpack_int8") as unpacks:
            found = grads(blocks, x, y, retain_graph=retain)
        assert unpacks.call_count == N
        assert_same(found, both(blocks, x, reference)[1:])


def test_double_backward(blocks, x):
    blocks.eval()

    def penalty(call):
        y = run(blocks, x, call)
        (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *blocks.parameters()], allow_unused=True)

    for a, b in pairs_of(penalty(rounding), penalty(checkpoint)):
        if b is None:
            assert a is None
        else:
            # a bias of the last layer has none
            assert (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.parametrize("around", [checkpoint, stock, rounding])
def test_inside_a_checkpoint(blocks, x, around):
    """The one around saves no bytes of those within; they round in its recompute."""
    whole = partial(run, blocks, call=rounding)
    h = x * 1
    with saved_tensors([h]) as saved:
        y = around(whole, h)
    assert saved.nbytes == (T * D * 9 // 8 if around is rounding else 0)
    found = grads(blocks, x, y)
    if around is not rounding:
        assert_same(found, both(blocks, x, reference)[1:])


def test_hooks_around_get_the_bytes(blocks, x):
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    h = x * 1
    with saved_tensors_hooks(pack, lambda saved: saved):
        y = rounding(blocks[0], h)
    assert [(t.dtype, t.nbytes) for t in seen] == [(torch.int8, T * D * 9 // 8)]
    y.sum().backward()
    with save_on_cpu():
        y = run(blocks, x, rounding)
    assert_same(grads(blocks, x, y), both(blocks, x, reference)[1:])


def test_autocast(blocks, x):
    def step(call):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return both(blocks, x, call)

    assert_same(step(rounding), step(reference))


def test_saved_regions_stay_exact():
    torch.manual_seed(1)
    block = DroppingBlock(D, 2 * D, attends=True).to(DEVICE)
    x = torch.randn(T, D, device=DEVICE, requires_grad=True)
    with saved_tensors() as exact:
        rounding(block, x, save_regions="attention")
    h = x * 1
    with saved_tensors([h]) as saved:
        y = rounding(block, h, save_regions="attention")
    # attention's output, and its log-sum-exp
    assert saved.nbytes == exact.nbytes + T * D * 9 // 8
    assert exact.nbytes == T * D * 4 + 4 * T * 4
    grads(block, x, y)


def test_sequential_and_modules(blocks, x):
    expected = both(blocks, x, reference)
    chain = partial(checkpoint_sequential, blocks, N, store="int8")
    torch.manual_seed(0)
    y = chain(x * 1)
    assert_same([y.detach(), *grads(blocks, x, y)], expected)
    for block in blocks:
        fusedckpt.checkpoint_module(block, store="int8")
    assert_same(both(blocks, x, lambda block, h: block(h)), expected)


@pytest.mark.parametrize("debug", [True, "samples"])
def test_debugging_compares_with_the_input_itself(blocks, x, debug):
    assert_same(both(blocks, x, rounding, debug=debug), both(blocks, x, checkpoint))
    count = [0]

    def changes(h):
        count[0] += 1
        return torch.tanh(h * count[0])

    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        rounding(changes, x * 1, debug=debug).sum().backward()


def test_inner_comparisons_of_other_inputs(blocks, x):
    """Samples of a checkpoint within, whose recompute begins with rounded values."""
    blocks.eval()
    results = []
    for debug in ("samples", True):

        def inner(h, debug=debug):
            return checkpoint(blocks[1], blocks[0](h), debug=debug)

        results.append(grads(blocks[:2], x, rounding(inner, x * 1)))
    plain = reference(lambda h: blocks[1](blocks[0](h)), x * 1)
    results.append(grads(blocks[:2], x, plain))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_fused_modules(blocks, x):
    fusedckpt.fuse(blocks)
    found = both(blocks, x, rounding)
    exact = both(blocks, x, checkpoint)
    assert torch.equal(found[0], exact[0])
    for a, b in pairs_of(found[1:], exact[1:]):
        assert (a - b).norm() <= 0.02 * b.norm()


def test_offloaded_bytes(monkeypatch, blocks, x):
    expected = both(blocks, x, rounding)
    with fake_device(monkeypatch) as device:
        assert_same(both(blocks, x, rounding, offload=True), expected)
        packed = T * D * 9 // 8
        assert (device.to_host, device.to_device) == ((N - 1) * packed, (N - 2) * packed)
    h = x * 1
    with fake_device(monkeypatch):
        y = rounding(blocks[0], h, offload=True)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_exact_under_compile(blocks, x):
    block = blocks[0].eval()
    compiled = torch.compile(lambda h: rounding(block, h), backend="eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(x * 1).square().sum(), [x]) for f in (compiled, block))
    torch.testing.assert_close(found, expected)


def test_plain_calls_pack_nothing(blocks, x):
    with counting("pack_int8") as packs, torch.no_grad():
        rounding(blocks[0], x * 1)
    assert not packs.called


def test_bad_options(x):
    for store, error in (("int4", ValueError), (8, TypeError), (True, TypeError)):
        with pytest.raises(error, match="store"):
            rounding(torch.tanh, x, store=store)


def test_a_tensor_written_between_segments_is_packed_anew(x):
    """Another version of the same memory is another tensor."""
    h = x * 1
    first = rounding(torch.tanh, h)
    with torch.no_grad():
        h.mul_(2)
    second = rounding(torch.tanh, h)
    (found,) = torch.autograd.grad(second.sum(), [h])
    (expected,) = torch.autograd.grad(reference(torch.tanh, h).sum(), [h])
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="inplace"):
        first.sum().backward()


class RowRouter(nn.Module):
    """Each token goes through 32 of 64 rows of weights, which a router orders."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(D, 64), nn.Parameter(torch.randn(64, D))

    def route(self, x):
        return self.router(x).softmax(-1).topk(32)

    def forward(self, x, as_region=False):
        route = fusedckpt.region(self.route, "router") if as_region else self.route
        scores, index = route(x)
        return x + (torch.sin(x[:, None] * self.weight[index]) * scores[..., None]).sum(1)


def test_a_router_that_chooses_otherwise_raises(x):
    torch.manual_seed(4)
    mixture = RowRouter().to(DEVICE)

    def step(call, **options):
        y = call(mixture, x * 1, **options)
        return torch.autograd.grad(y.square().sum(), [x, *mixture.parameters()])

    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"RowRouter.*other indices"):
        step(rounding)
    # unless it is not asked for, or the router is a region
    step(rounding, determinism_check="none")
    found = step(rounding, as_region=True, save_regions="router")
    for a, b in pairs_of(found, step(checkpoint)):
        assert (a - b).norm() < 0.02 * b.norm()


def test_estimates_count_the_bytes(blocks, x):
    h = torch.randn(64 * T, D, device=DEVICE)

    def peak(store):
        model = nn.Sequential(*blocks)
        for block in model:
            fusedckpt.checkpoint_module(block, store=store)
        return fusedckpt.estimate(model, h).peak_bytes

    # the model's input stays as it is; at the peak a rounded one exists beside its bytes
    assert peak(None) - peak("int8") == (N - 1) * h.nbytes * 23 // 32 - h.nbytes
