"""Dropout from a seed: kernel and ATen give the same bits, chunks and checkpoints the same mask."""

import math
from functools import partial

import pytest
import torch
from adapted_cases import ADAPTED, adapted
from support import DEVICE, as_tuple, leaves_of, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import LoRA, functional, reference
from fusedckpt.kernels import dropout as kernels
from fusedckpt.kernels.runtime import HAS_TRITON, row_blocks

T, D, F, R = 12, 21, 33, 4


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
    # of neighbors, rows and seeds alike
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


def test_no_data():
    w, x = adapted(F, D, dropout=0.3), torch.ones(3, D, device="meta")
    w = LoRA(*(t.to("meta") for t in w[:3]), *w[3:])
    y = functional.linear_act(x, w, activation=None)
    torch.autograd.grad(y.sum(), w.A)
    assert y.shape == (3, F)


CASES = [case for case in ADAPTED if case.name.startswith(("dropout", "both"))]
CHECKPOINTS = {
    "ours": fusedckpt.checkpoint,
    "torch": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "twice": lambda fn, *args: fusedckpt.checkpoint(partial(fusedckpt.checkpoint, fn), *args),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_checkpoints_replay_it(case, name, monkeypatch):
    """They bring the generator back, behind other draws and before some."""
    given, seed = case.inputs((T,), D, F), torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: None)

    def fn(*tensors):
        return tuple(y + torch.rand_like(y) for y in as_tuple(case.fused(*tensors)))

    found = []
    for wrap in (lambda fn, *args: fn(*args), CHECKPOINTS[name]):
        seed(11)
        ys = wrap(fn, *given)
        torch.autograd.backward([y.sum() for y in ys])
        found.append([*ys, *(x.grad for x in leaves_of(given))])
        for x in given:
            if x is not None:
                x.grad = None
    torch.testing.assert_close(*found)


def test_as_many_draws_at_every_level():
    """What a layer keeps does not change what later layers draw."""
    x, states = randn(T, D), []
    weights = adapted(F, D, dropout=0.3), adapted(F, D, dropout=0.1), adapted(D, F, dropout=0.2)
    for level in ("inputs", "gate", "preact", None):
        with torch.set_grad_enabled(level is not None):
            torch.manual_seed(1)
            functional.gated_mlp(x, *weights, dropout=0.4, save=level)
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
