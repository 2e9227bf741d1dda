"""Dropout from a seed: kernel and ATen give the same bits, chunks and checkpoints the same mask."""

import math
from functools import partial

import pytest
import torch
from support import DEVICE, as_tuple, compare, randn, results, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import LoRA, NormSpec, functional, reference
from fusedckpt.kernels import dropout as kernels
from fusedckpt.kernels.runtime import HAS_TRITON, row_blocks

T, D, F, R = 12, 21, 33, 4
FIRST, LAST = [(F, D), (R, D), (F, R)], [(D, F), (R, F), (D, R)]


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor(number, device=DEVICE)


def philox(seed: int, counter: int) -> list[int]:
    """Philox4x64-10 as Salmon et al. print it."""
    word = 2**64 - 1
    c, (k0, k1) = [counter, 0, 0, 0], (seed, 0)
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [b >> 64 ^ c[1] ^ k0, b & word, a >> 64 ^ c[3] ^ k1, a & word]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & word, (k1 + 0xBB67AE8584CAA73B) & word
    return c


def test_bits_are_philox():
    seed = 2**63 - 12345
    # the paper's first known answer
    assert philox(0, 0)[0] == 0x16554D9ECA36314C
    found = kernels.drawn_words(seed, 11, 40).tolist()
    for place, drawn in enumerate(found, 11):
        word = philox(seed, place // 8 + 1)[place % 8 // 2] >> (32 * (place % 2))
        assert drawn % 2**32 == word % 2**32


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first_row", [0, 5, 2**33])
@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_kernel_and_aten_agree(dtype, first_row, p):
    x, seed = randn(70, 45, dtype=dtype, requires_grad=False), seed_of(2**62 + 17)
    x[0, :3] = torch.tensor([math.inf, math.nan, -math.inf])
    ours, twin = (kernels.dropout(x, p, seed, first_row, kernel) for kernel in ("split", "aten"))
    torch.testing.assert_close(ours, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_probability(path, p):
    x = torch.ones(500, 40, device=DEVICE)
    y = reference.dropout(x, p, seed_of(3))
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / x.numel())
    assert torch.equal(y[y != 0], (x / (1 - p))[y != 0])
    # of neighbours, rows and seeds alike
    for other in (y.roll(1, 1), y.roll(1, 0), reference.dropout(x, p, seed_of(4))):
        both = ((y == 0) & (other == 0)).double().mean().item()
        assert abs(both - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / x.numel())


def test_layouts_and_parts(path):
    x, seed = randn(4, 3, D, requires_grad=False), seed_of(9)
    whole = reference.dropout(x, 0.3, seed)
    assert torch.equal(whole.flatten(0, 1), reference.dropout(x.flatten(0, 1), 0.3, seed))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(whole, reference.dropout(strided, 0.3, seed))


def test_blocks_of_rows_draw_on():
    x, seed = torch.ones(2**12, 2**8), torch.tensor(9)
    assert len(row_blocks(x)) > 1
    whole, part = (kernels.dropout(t, 0.3, seed, n, "aten") for t, n in ((x, 0), (x[-9:], 4087)))
    assert torch.equal(whole[-9:], part)


@pytest.mark.parametrize("device", [DEVICE, torch.device("meta")])
def test_no_rows_and_no_data(path, device):
    x, w, a, b = (torch.ones(s, device=device, requires_grad=True) for s in ((0, D), *FIRST))
    for rows in (0, 3):
        y = functional.linear_act(x.new_ones(rows, D), lora(w, a, b, 0.3), activation=None)
        torch.autograd.grad(y.sum(), (a, b))
        assert y.shape == (rows, F)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("d", "f"), [(0, F), (D, 0), (0, 0)])
def test_no_columns(path, d, f, rows, residual):
    """Dropout of x, of the hidden layer or of the result, of no columns."""
    shapes = (rows, d), (f, d), (R, d), (f, R), (d, f), (R, f), (d, R)
    given, dy = [randn(*shape) for shape in shapes], torch.randn(rows, d, device=DEVICE)
    drops = {"dropout": 0.3, "output_dropout": 0.2}
    found = []
    for module in (functional, reference):
        torch.manual_seed(5)
        x, w, a, b, v, c, e = given
        fc1, fc2 = lora(w, a, b, 0.3), lora(v, c, e, 0.1)
        y = module.mlp(x, fc1, None, fc2, None, residual=residual, **drops)
        grads = torch.autograd.grad(y, given, dy, retain_graph=True)
        batch = torch.stack([dy, 2 * dy])
        found.append([y, *grads, *torch.autograd.grad(y, given, batch, is_grads_batched=True)])
    torch.testing.assert_close(*found)


def lora(w, a, b, p):
    return LoRA(w, a, b, 1.5, p)


def _linear_act(module, options, x, w, a, b):
    return module.linear_act(x, lora(w, a, b, 0.3), **options)


def _norm_linear(module, options, x, n, w, a, b, v, c, d):
    norm, weights = NormSpec("rms", n), [lora(w, a, b, 0.3), lora(v, c, d, 0.1)]
    return module.norm_linear(x, norm, weights, **options)


def _mlp(module, options, x, n, w, a, b, v):
    fc1 = lora(w, a, b, 0.3)
    drops = {"dropout": 0.2, "output_dropout": 0.1}
    norm = NormSpec("rms", n)
    return module.mlp(x, fc1, None, v, None, norm=norm, residual=True, **drops, **options)


def _gated(module, options, x, g, a, b, u, c, d, v, e, f):
    gate, up = lora(g, a, b, 0.3), lora(u, c, d, 0.1)
    return module.gated_mlp(x, gate, up, lora(v, e, f, 0.2), dropout=0.4, **options)


def _packed(module, options, x, w, a, b, v):
    return module.gated_mlp(x, lora(w, a, b, 0.3), None, v, **options)


CALLS = {
    "linear_act": (_linear_act, FIRST, {}),
    "linear_act-preact": (_linear_act, FIRST, {"save": "preact"}),
    "norm_linear": (_norm_linear, [(D,), *FIRST, *FIRST], {}),
    "mlp": (_mlp, [(D,), *FIRST, (D, F)], {}),
    "mlp-chunks": (_mlp, [(D,), *FIRST, (D, F)], {"chunks": 3}),
    "mlp-preact": (_mlp, [(D,), *FIRST, (D, F)], {"save": "preact"}),
    "gated_mlp": (_gated, [*FIRST, *FIRST, *LAST], {}),
    "gated_mlp-gate-chunks": (_gated, [*FIRST, *FIRST, *LAST], {"save": "gate", "chunks": 2}),
    "packed": (_packed, [(2 * F, D), (R, D), (2 * F, R), (D, F)], {}),
}


@pytest.fixture(params=CALLS)
def call(request):
    """The function, its reference, and a maker of inputs; both draw the same seeds."""
    fn, shapes, options = CALLS[request.param]

    def seeded(module, given, *inputs):
        torch.manual_seed(5)
        return fn(module, given, *inputs)

    def inputs(dtype=torch.float32):
        tensors = [randn(T, D, dtype=dtype)]
        for shape in shapes:
            w = randn(*shape, dtype=torch.float64, requires_grad=False) / shape[-1] ** 0.5
            tensors.append(w.to(dtype).requires_grad_())
        return tensors

    return partial(seeded, functional, options), partial(seeded, reference, {}), inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_of_the_same_seed(call, path, dtype):
    fused, eager, inputs = call
    y = as_tuple(fused(*inputs()))[0]
    assert "Block" in type(y.grad_fn).__name__ or "Add" in type(y.grad_fn).__name__
    compare(fused, eager, partial(inputs, dtype))


def test_reruns_are_bit_equal(call):
    fused, _, inputs = call
    given = inputs()
    douts = [torch.randn_like(y) for y in as_tuple(fused(*given))]
    first, second = (results(fused, given, douts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["fusedckpt", "torch", "reentrant", "module"])
def test_checkpoints_replay_it(call, name):
    fused, _, inputs = call
    given = inputs()

    def fn(*tensors):
        # behind other draws, and before some
        return tuple(y + torch.rand_like(y) for y in as_tuple(fused(*tensors)))

    fn = partial(_unseeded, fn)
    ys = _seeded(fn, *given)
    wanted = [*ys, *torch.autograd.grad([y.sum() for y in ys], given)]
    wrap = {
        "fusedckpt": partial(fusedckpt.checkpoint, fn),
        "torch": partial(checkpoint, fn, use_reentrant=False),
        "reentrant": partial(checkpoint, fn, use_reentrant=True),
        "module": partial(fusedckpt.checkpoint, partial(fusedckpt.checkpoint, fn)),
    }[name]
    ys = _seeded(wrap, *given)
    torch.autograd.backward([y.sum() for y in ys])
    for a, b in zip([*ys, *(x.grad for x in given)], wanted, strict=True):
        torch.testing.assert_close(a, b)


def _seeded(fn, *given):
    torch.manual_seed(11)
    return fn(*given)


def _unseeded(fn, *given):
    """Leave it to the checkpoint to bring the generator back."""
    before, torch.manual_seed = torch.manual_seed, lambda _: None
    try:
        return fn(*given)
    finally:
        torch.manual_seed = before


def test_double_backward(call):
    fused, eager, inputs = call

    def gradients(fn):
        @torch.enable_grad()
        def of(*given):
            total = sum(y.tanh().mean() for y in as_tuple(fn(*given)))
            found = torch.autograd.grad(total, given, create_graph=True)
            return tuple(grad.sin() for grad in found)

        return of

    compare(gradients(fused), gradients(eager), inputs)


def test_as_many_draws_at_every_level():
    """What a layer keeps does not change what later layers draw."""
    fn, shapes, _ = CALLS["gated_mlp"]
    given, states = [randn(T, D), *(randn(*shape) for shape in shapes)], []
    for level in ("inputs", "gate", "preact"):
        torch.manual_seed(1)
        fn(functional, {"save": level}, *given)
        states.append(torch.rand(3))
    with torch.no_grad():
        torch.manual_seed(1)
        fn(functional, {}, *given)
        states.append(torch.rand(3))
    assert all(torch.equal(states[0], state) for state in states)


def test_seeds_can_be_given():
    x, fc1, fc2 = randn(T, D), randn(F, D), randn(D, F)
    drops = {"dropout": 0.3, "output_dropout": 0.2}
    torch.manual_seed(2)
    y = functional.mlp(x, fc1, None, fc2, None, **drops)
    torch.manual_seed(2)
    seeds = torch.randint(2**63 - 1, (2,), device=DEVICE)
    wanted = reference.mlp(x, fc1, None, fc2, None, **drops, seeds=seeds)
    torch.testing.assert_close(y, wanted)
    assert torch.equal(y == 0, wanted == 0)


@pytest.mark.parametrize("kind", [fusedckpt.MLP, fusedckpt.GatedMLP])
def test_modules_drop_in_training_alone(kind):
    torch.manual_seed(0)
    module = kind(D, F, norm=fusedckpt.RMSNorm(D), residual=True, dropout=0.4, output_dropout=0.2)
    module = module.to(DEVICE)
    x = randn(T, D)
    plain = kind(D, F, norm=fusedckpt.RMSNorm(D), residual=True).to(DEVICE)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), plain(x))
    assert not torch.equal(module.train()(x), plain(x))
    assert "dropout=0.4" in repr(module)
    assert "dropout" not in repr(plain)
    # children are called one by one, and the dropout is torch's
    linear = next(child for child in module.children() if isinstance(child, nn.Linear))
    linear.register_forward_hook(lambda *_: None)
    torch.manual_seed(3)
    y = module(x)
    assert not torch.allclose(y, plain(x))
    torch.testing.assert_close(module.eval()(x), plain.eval()(x))


def test_compiled_and_transformed_draw_torchs_own():
    w = LoRA(randn(F, D), randn(R, D), randn(F, R), 1.0, 0.5)
    x = randn(T, D)
    compiled = torch.compile(functional.linear_act, fullgraph=True, backend="aot_eager")
    y = compiled(x, w, activation=None)
    y.sum().backward()
    assert y.shape == (T, F)
    assert w.A.grad is not None
    grad = torch.func.grad(lambda x: functional.linear_act(x, w).sum())(x.detach())
    assert grad.shape == x.shape
    given = torch.stack([x.detach()] * 2)
    mapped = torch.func.vmap(lambda x: functional.linear_act(x, w), randomness="different")
    first, second = mapped(given)
    assert not torch.equal(first, second)


def test_cheaper_than_a_mask():
    """What is saved for a dropout is eight bytes, whatever the size."""

    def fn(x):
        return functional.mlp(x, fc1, None, fc2, None, dropout=0.3)

    fc1, fc2 = nn.Parameter(randn(F, D)), nn.Parameter(randn(D, F))
    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * D + 8
