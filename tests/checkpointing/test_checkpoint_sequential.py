"""checkpoint_sequential cuts a chain anywhere, and checkpoints every segment."""

import copy
import math
import random
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from checkpoints import same, step
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedckpt import checkpoint_sequential
from fusedckpt.checkpointing.starts import ChainSizes, chain_sizes, least_starts, measured_starts
from fusedckpt.memory import peak_bytes, saved_tensors

sqrt_starts = partial(measured_starts, least_starts)


def chain(count=7):
    parts = [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU()]
    return nn.Sequential(*(copy.deepcopy(parts[i % 5]) for i in range(count))).to(DEVICE)


def reset(model):
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()


def assert_as_called(model, segments, x, **options):
    """Assert that segments change no bit: values, gradients, RNG states, buffers."""
    run = partial(checkpoint_sequential, model, segments, **options)
    found, expected = (
        [*step(call, x * 1, parameters=model.parameters()), *copy.deepcopy(model).buffers()]
        for call in (run, model)
        if reset(model) is None
    )
    assert all(map(same, found, expected))


@pytest.mark.parametrize(
    "segments",
    [
        1,
        2,
        3,
        7,
        "sqrt",
        "recursive",
        [],
        [2],
        [1, 2, 6],
        range(1, 7),
        (3,),
        np.int64(3),
        [np.int32(2), 5],
    ],
)
def test_sequential(segments):
    assert_as_called(chain(), segments, randn(4, 6))


@pytest.mark.parametrize("segments", [3, "sqrt", "recursive"])
def test_debug(segments):
    assert_as_called(chain(), segments, randn(4, 6), debug=True)


@pytest.mark.parametrize(
    ("segments", "lengths"), [(1, [7]), (3, [2, 2, 3]), ([1, 5], [1, 4, 2]), (7, [1] * 7)]
)
def test_checkpoints_every_segment(segments, lengths):
    x = randn(4, 6)
    with saved_tensors() as saved:
        checkpoint_sequential([lambda x: x.sin().sin()] * 7, segments, x * 1)
    assert saved.nbytes == len(lengths) * x.nbytes


@pytest.mark.parametrize("segments", ["sqrt", "recursive"])
def test_of_no_function(segments):
    x = randn(3)
    assert checkpoint_sequential([], segments, x) is x


class Wide(nn.Module):
    """It keeps four tensors, none of which is its input."""

    def forward(self, x):
        return x + x.sin().sin().sin().sin()


@pytest.mark.parametrize("exponent", range(1, 9))
@pytest.mark.parametrize(("function", "width"), [(torch.sin, 0), (Wide(), 3)])
def test_recursive_peaks_at_a_logarithm(exponent, function, width):
    """256 layers: 11 tensors, where sqrt takes 33; and 14, where sqrt takes 65."""
    count, x, calls = 2**exponent, randn(1 << 12), []

    def counted(x):
        calls.append(1)
        return function(x)

    def run(segments):
        x.grad = None
        y = checkpoint_sequential([counted] * count, segments, x, preserve_rng_state=False)
        y.backward(dy)

    dy = randn(1 << 12).detach()
    run(count)
    expected = x.grad
    run("recursive")
    assert torch.equal(x.grad, expected)
    calls.clear()
    rise = peak_bytes(lambda: run("recursive"), DEVICE)
    assert rise == (exponent + 3 + width) * x.nbytes
    assert len(calls) <= count * (1 + exponent / 2) + 1
    if count == 256:
        assert peak_bytes(lambda: run("sqrt"), DEVICE) == (65 if width else 33) * x.nbytes


def test_recursive_keeps_a_logarithm_of_inputs():
    x = randn(64)
    with saved_tensors() as saved:
        checkpoint_sequential([torch.sin] * 256, "recursive", x * 1, preserve_rng_state=False)
    assert saved.nbytes == 9 * x.nbytes


def test_options_are_those_of_checkpoint():
    model, x = chain(), randn(4, 6)
    assert_as_called(model, 3, x, use_reentrant=False, preserve_rng_state=True)
    assert torch.is_tensor(checkpoint_sequential(model, 3, x, False))
    with pytest.raises(ValueError, match="use_reentrant=True"):
        checkpoint_sequential(model, 3, x, use_reentrant=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: chunks, debugs"):
        checkpoint_sequential(model, 3, x, debugs=True, chunks=2)


def total(sizes, starts):
    """Bytes that are handed on, and those that the largest segment saves besides its input."""
    segments = zip(starts, [*starts[1:], len(sizes.own)], strict=True)
    saved = [sum(sizes.own[a:b]) + sum(sizes.inputs[a + 1 : b]) for a, b in segments]
    return max(saved) + sum(sizes.handed[start] for start in starts[1:])


def test_sqrt_is_the_least_of_all():
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randint(1, 8)
        inputs, own, handed = ([draw.randint(0, 9) for _ in range(count)] for _ in range(3))
        sizes = ChainSizes(inputs, own, [*(draw.choice([h, h, math.inf]) for h in handed), 1])
        starts = (c for k in range(count) for c in combinations(range(1, count), k))
        assert total(sizes, least_starts(sizes)) == min(total(sizes, [0, *c]) for c in starts)


def test_sqrt_of_equal_functions():
    starts = least_starts(ChainSizes([8] * 16, [0] * 16, [8] * 17))
    assert starts == [0, 4, 8, 12]


def test_sqrt_of_what_keeps_much_and_hands_on_little():
    """A pyramid: cuts where tensors are small, short segments where they are large."""
    model = [nn.Conv2d(4, 4, 3, 2 if i % 6 == 5 else 1, 1) for i in range(24)]
    x = randn(1, 4, 64, 64).cpu()
    sizes = chain_sizes(model, x)
    assert sizes.handed[:7] == [x.nbytes] * 6 + [x.nbytes // 4]
    starts = sqrt_starts(model, x)
    even = min(total(sizes, [24 * i // k for i in range(k)]) for k in range(1, 25))
    assert total(sizes, starts) < even
    with saved_tensors() as saved:
        checkpoint_sequential(model, "sqrt", x * 1)
    assert saved.nbytes == sum(sizes.handed[start] for start in starts)


def test_what_each_function_saves():
    """Each tensor counts once, whether its writer or its reader saves it."""
    x = randn(2, 6)
    model = [torch.sin, torch.tanh, torch.sin, lambda x: x.sin().cos(), torch.neg, torch.tanh]
    b = x.nbytes
    # the last one's output counts as its own
    assert chain_sizes(model, x) == ChainSizes([b, 0, b, b, 0, 0], [0, 0, 0, b, 0, b], [b] * 7)


class Counting(nn.Module):
    """It counts calls, and fills a buffer at the first, which a flag remembers."""

    def __init__(self):
        super().__init__()
        self.calls, self.cached = 0, False
        self.register_buffer("table", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        if not self.cached:
            self.table, self.cached = torch.rand(6, device=x.device), True
        return (x * self.table).sin()


def test_sqrt_measures_once():
    calls = []
    model, x = chain(9), randn(4, 6)
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        checkpoint_sequential(model, "sqrt", x)
    assert len(calls) == 1
    for expected in (4, 6):
        y = checkpoint_sequential(model, "sqrt", x[: expected // 2])
        assert len(calls) == expected - 1
        y.sum().backward()
        assert len(calls) == expected


def test_sqrt_measures_anew_in_another_mode():
    """In training the dropout writes its input in place, in evaluation it does nothing."""
    model, x = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))).to(DEVICE), randn(4, 6)
    for i in range(1, 18, 2):
        model.insert(i, nn.Dropout(0.5, inplace=True))
    model.eval()
    assert_as_called(model, "sqrt", x)
    assert_as_called(model.train(), "sqrt", x)


def test_sqrt_leaves_no_trace_of_measuring():
    module, norm = Counting().to(DEVICE), nn.BatchNorm1d(6).to(DEVICE)
    functions = [module, nn.Dropout(), lambda x: norm(x), torch.tanh, nn.Dropout()]
    x = randn(4, 6)
    states = random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(1)
    y = checkpoint_sequential(functions, "sqrt", x)
    assert module.calls == 1
    assert module.cached
    assert norm.num_batches_tracked == 1
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    plain, other = Counting().to(DEVICE), nn.BatchNorm1d(6).to(DEVICE)
    torch.manual_seed(1)
    for function in (plain, nn.Dropout(), other, torch.tanh, nn.Dropout()):
        x = function(x)
    assert torch.equal(y, x)
    assert torch.equal(module.table, plain.table)
    assert all(map(torch.equal, norm.buffers(), other.buffers()))


def test_sqrt_leaves_the_input_as_it_was():
    x = randn(4, 6).detach()
    before = x.clone()
    chain_sizes([lambda x: x.mul_(2), torch.sin], x)
    assert torch.equal(x, before)


def test_sqrt_of_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh())
    sqrt_starts(list(model), torch.ones(4, 5))
    assert model[0].weight.shape == (6, 5)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(6))


def test_sqrt_of_bound_methods_and_others():
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(DEVICE)
    calls = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))

    class Unknowable:
        __slots__ = ()
        __hash__ = None

        def __call__(self, x):
            return block(x)

    x = randn(4, 6)
    for functions, count in (([block.__call__] * 4, 12), ([Unknowable()] * 4, 16)):
        calls.clear()
        for _ in range(2):
            checkpoint_sequential(functions, "sqrt", x)
        assert len(calls) == count


def conv_net():
    """VGG-11, whose ReLUs write in place what BatchNorm saves."""
    layers, width = [], 3
    for out in (8, 0, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0):
        if not out:
            layers.append(nn.MaxPool2d(2))
            continue
        conv = nn.Conv2d(width, out, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        width = out
    return nn.Sequential(*layers)


def test_sqrt_starts_before_nothing_that_writes_its_input():
    model = conv_net()
    starts = sqrt_starts(list(model), randn(2, 3, 32, 32).cpu())
    assert len(starts) > 2
    assert not any(isinstance(model[start], nn.ReLU) for start in starts)
    assert_as_called(model, "sqrt", randn(2, 3, 32, 32).cpu())


def test_recursive_halves_before_nothing_that_writes_its_input():
    """The ReLUs write what BatchNorm saves: no half starts with one, and gradients are exact."""
    assert_as_called(conv_net(), "recursive", randn(2, 3, 32, 32).cpu())


def test_sqrt_starts_before_no_view_that_is_written():
    """A cut before flatten would keep the tensor that ReLU writes through its view."""
    blocks = [[nn.Conv1d(6, 6, 1), nn.Unflatten(1, (2, 3)), nn.Flatten(1, 2)] for _ in range(6)]
    model = nn.Sequential(*(m for block in blocks for m in (*block, nn.ReLU(inplace=True))))
    starts = sqrt_starts(list(model), randn(4, 6, 8).cpu())
    assert len(starts) > 1
    assert all(isinstance(model[start], nn.Conv1d) for start in starts)
    assert_as_called(model, "sqrt", randn(4, 6, 8).cpu())


def test_sqrt_inside_selective_checkpointing():
    """What is measured, in the forward alone, does not go into the count of ops."""

    def run(x):
        return checkpoint_sequential([torch.sin, torch.exp, torch.sin, torch.exp], "sqrt", x)

    contexts = partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    x = randn(4)
    call = partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False, context_fn=contexts)
    assert all(map(same, step(call, x), step(lambda x: x.sin().exp().sin().exp(), x)))


@pytest.mark.parametrize("segments", [9, 4, "sqrt", "recursive"])
def test_compiles(segments):
    torch._dynamo.reset()
    model, x = conv_net()[:9].eval().to(DEVICE), randn(2, 3, 8, 8)
    run = partial(checkpoint_sequential, model, segments)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    expected = step(model, x, parameters=model.parameters())
    for a, b in zip(step(compiled, x, parameters=model.parameters()), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_hands_on_anything():
    def split(x):
        return {"a": x.sin(), "b": (x.cos(), None, "s")}

    def merge(parts):
        assert parts["b"][1:] == (None, "s")
        return (parts["a"] * parts["b"][0]).sin()

    def run(x, segments):
        return checkpoint_sequential([split, merge, split, merge], segments, x)

    x = randn(4)
    expected = step(lambda x: merge(split(merge(split(x)))), x)
    for segments in (4, "sqrt", "recursive"):
        assert all(map(same, step(partial(run, segments=segments), x), expected))


def test_cut_before_what_writes_its_input():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)).to(DEVICE)
    checkpoint_sequential(model, [2], randn(4, 6)).sum().backward()
    y = checkpoint_sequential(model, [1], randn(4, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("segments", [3, "sqrt", "recursive"])
def test_without_gradients(segments):
    model, x = chain(), randn(4, 6)
    with torch.no_grad():
        y = checkpoint_sequential(model.eval(), segments, x)
    assert torch.equal(y, model(x))
    found = torch.func.vmap(partial(checkpoint_sequential, model, segments))(x[:, None])
    torch.testing.assert_close(found[:, 0], model(x))


@pytest.mark.parametrize(
    "segments", [0, 8, -1, 2.0, "cubic", [0, 2], [3, 2], [7], [False], None, ["1"]]
)
def test_refuses(segments):
    with pytest.raises(ValueError, match="checkpoint_sequential: segments must be 1 to 7"):
        checkpoint_sequential(chain(), segments, randn(4, 6))


def test_refuses_what_cannot_be_called():
    with pytest.raises(
        TypeError, match="checkpoint_sequential: expected something to call, got int"
    ):
        checkpoint_sequential([torch.sin, 3], 1, randn(4))
