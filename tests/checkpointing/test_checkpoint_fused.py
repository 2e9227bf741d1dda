"""Fused layers inside checkpoints, ours and torch's: equal gradients, and no GEMM run twice."""

from functools import partial

import pytest
import torch
from cases import CASES
from checkpoints import assert_same
from support import DEVICE, as_tuple, flops, gemm_flops, randn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt
from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.autograd.private import SavedTensor
from fusedckpt.functional import linear_act
from fusedckpt.memory import saved_tensors

D, F, ROWS = 12, 20, 6


def selective(policy: CheckpointPolicy):
    """Checkpoint as torch's selective form does, with one policy for the fused ops."""

    def of(ctx, op, *args, **kwargs):
        fused = op.namespace == "fusedckpt"
        return policy if fused else CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, of)
    return partial(stock_checkpoint, use_reentrant=False, context_fn=context_fn)


class Own(torch.autograd.Function):
    """A checkpoint as projects write it for themselves, by any name."""

    @staticmethod
    def forward(ctx, run, x, *rest):
        ctx.run, ctx.inputs = run, (x, *rest)
        with torch.no_grad():
            return run(x, *rest)

    @staticmethod
    def backward(ctx, *dys):
        needs = ctx.needs_input_grad[1:]
        inputs = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.inputs, needs, strict=True)
        ]
        with torch.enable_grad():
            ys = ctx.run(*inputs)
        torch.autograd.backward(ys, dys)
        return None, *(None if x is None else x.grad for x in inputs)


STOCK = {
    "own": lambda fn, *args: Own.apply(fn, *args),
    "non-reentrant": partial(stock_checkpoint, use_reentrant=False),
    "reentrant": partial(stock_checkpoint, use_reentrant=True),
    "late": partial(stock_checkpoint, use_reentrant=False, early_stop=False),
    "selective-recompute": selective(CheckpointPolicy.PREFER_RECOMPUTE),
    "selective-save": selective(CheckpointPolicy.MUST_SAVE),
}
OURS = {
    "ours": fusedckpt.checkpoint,
    "debug": partial(fusedckpt.checkpoint, debug=True),
    "ours-in-ours": lambda fn, *args: fusedckpt.checkpoint(fusedckpt.checkpoint, fn, *args),
    "ours-in-stock": lambda fn, *args: STOCK["non-reentrant"](fusedckpt.checkpoint, fn, *args),
    "ours-in-reentrant": lambda fn, *args: STOCK["reentrant"](
        partial(fusedckpt.checkpoint, fn), *args
    ),
    "stock-in-ours": lambda fn, *args: fusedckpt.checkpoint(STOCK["non-reentrant"], fn, *args),
    "reentrant-in-ours": lambda fn, *args: fusedckpt.checkpoint(STOCK["reentrant"], fn, *args),
}


@pytest.fixture(autouse=True)
def on_aten():
    with forced_path("aten"):
        yield


def gradients(call, inputs) -> list:
    """Return outputs and gradients of what `call` makes of activations and weights."""
    wanted = [x for x in inputs if x is not None]
    for x in wanted:
        x.grad = None
    # the first is an activation, as inside a model
    outputs = as_tuple(call(inputs[0] * 1, *inputs[1:]))
    torch.autograd.backward([y.float().square().sum() for y in outputs])
    return [*(y.detach() for y in outputs), *(x.grad for x in wanted)]


@pytest.mark.parametrize("name", ["selective-recompute", "selective-save"])
def test_a_call_that_only_the_recompute_settles(name):
    """As after another save level around the forward: no mode is to see how it is settled."""
    block, x = (
        fusedckpt.MLP(D, F, norm=fusedckpt.RMSNorm(D)).double(),
        torch.randn(ROWS, D).double(),
    )
    wanted = [*block.parameters()]
    expected = torch.autograd.grad(block(x).sum(), wanted)
    STOCK[name](block, x)
    y = STOCK[name](block, x)
    dispatch._remembered.cache_clear()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), wanted), expected)


@pytest.mark.parametrize("save", ["inputs", "preact"])
@pytest.mark.parametrize("name", ["non-reentrant", "selective-recompute", "selective-save"])
def test_a_layer_behind_the_block(name, save):
    """A recompute goes on behind the block, whose saved op has made no products."""
    mlp, norm = fusedckpt.GatedMLP(D, F, save=save).double(), fusedckpt.LayerNorm(D).double()
    x = torch.randn(ROWS, D, dtype=torch.float64, requires_grad=True)
    wanted = [x, *mlp.parameters(), *norm.parameters()]

    def run(wrap):
        y = wrap(lambda x: norm(mlp(x)).sin(), x * 1)
        return torch.autograd.grad(y.square().sum(), wanted)

    torch.testing.assert_close(run(STOCK[name]), run(lambda fn, x: fn(x)))


@pytest.mark.parametrize("name", [*STOCK, *OURS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_no_checkpoint(case, name):
    wrap = (STOCK | OURS)[name]
    inputs = case.inputs((ROWS,), D, F)
    plain = gradients(case.fused, inputs)
    assert_same(gradients(lambda *args: wrap(case.fused, *args), inputs), plain)


def counted(call, inputs, count=flops) -> tuple[float, list]:
    """Return how often a step multiplies as much as one GEMM of a block does, and `gradients`."""
    found = []
    total = count(lambda: found.extend(gradients(call, inputs)))
    return total / (2 * ROWS * D * F), found


def blocks(cls, save: str) -> nn.ModuleList:
    return nn.ModuleList(cls(D, F, save=save) for _ in range(4)).to(DEVICE)


def in_one(checkpoint, layers, x):
    return checkpoint(nn.Sequential(*layers), x)


def in_each(checkpoint, layers, x):
    for layer in layers:
        x = checkpoint(layer, x)
    return x


# of one GEMM of the first layer: the step's, where the whole is cut how and checkpointed by what
GEMMS = [
    (None, "preact", lambda _, layers, x: nn.Sequential(*layers)(x), 24, 36),
    (None, "inputs", lambda _, layers, x: nn.Sequential(*layers)(x), 28, 44),
    *[
        (name, save, cut, 32, 48)
        for name in ("reentrant", "own")
        for save in ("preact", "inputs")
        for cut in (in_one, in_each)
    ],
    *[
        (name, save, cut, *counts)
        for name in ("ours", "non-reentrant", "selective-recompute")
        for save in ("preact", "inputs")
        for cut, counts in ((in_one, (31, 47)), (in_each, (28, 44)))
    ],
    ("late", "inputs", in_one, 32, 48),
    ("debug", "inputs", in_one, 32, 48),
]


@pytest.mark.parametrize(("name", "save", "cut", "mlp", "gated"), GEMMS)
@pytest.mark.parametrize("cls", [fusedckpt.MLP, fusedckpt.GatedMLP])
def test_gemms_of_a_step(cls, name, save, cut, mlp, gated):
    wrap = (STOCK | OURS).get(name)
    layers, reference = blocks(cls, save), blocks(cls, "preact")
    reference.load_state_dict(layers.state_dict())
    x = randn(ROWS, D)
    expected = gradients(nn.Sequential(*reference), [x])
    gemms, found = counted(partial(cut, wrap, layers), [x])
    assert gemms == (gated if cls is fusedckpt.GatedMLP else mlp)
    expected += [p.grad for p in reference.parameters()]
    assert_same([*found, *(p.grad for p in layers.parameters())], expected)


@pytest.mark.parametrize(
    ("name", "cut", "count"),
    [
        *[(name, in_each, 28) for name in ("ours", "non-reentrant")],
        *[(name, in_one, 31) for name in ("ours", "non-reentrant")],
        *[("reentrant", cut, 32) for cut in (in_each, in_one)],
    ],
)
def test_gemms_of_eager_layers(name, cut, count):
    layers = [nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)) for _ in range(4)]
    layers = nn.ModuleList(layers).to(DEVICE)
    gemms, _ = counted(partial(cut, (STOCK | OURS)[name], layers), [randn(ROWS, D)])
    assert gemms == count


def test_gemms_under_compile():
    torch._dynamo.reset()
    layers, x = blocks(fusedckpt.MLP, "inputs"), randn(ROWS, D)
    expected = gradients(nn.Sequential(*layers), [x])
    compiled = torch.compile(
        partial(in_each, fusedckpt.checkpoint, layers), backend="aot_eager", fullgraph=True
    )
    gradients(compiled, [x])
    gemms, found = counted(compiled, [x], gemm_flops)
    # forward, all but the last layer's last GEMM again, and two GEMMs for each in backward
    assert gemms == 28
    torch.testing.assert_close(list(found), list(expected))


# torch's own, where it has one, and what stands for it
@pytest.mark.parametrize("make_saved", dict.fromkeys([private.make_saved, SavedTensor]))
def test_saved_bytes_in_a_checkpoint_are_its_input(monkeypatch, make_saved):
    monkeypatch.setattr(private, "make_saved", make_saved)
    layers = nn.Sequential(*blocks(fusedckpt.MLP, "preact"))
    x = randn(ROWS, D)
    for wrap in (fusedckpt.checkpoint, STOCK["non-reentrant"]):
        with saved_tensors() as saved:
            y = wrap(layers, x * 1)
        assert saved.nbytes == x.nbytes
        del y


@pytest.mark.parametrize("wrap", [fusedckpt.checkpoint, STOCK["non-reentrant"]])
def test_frozen_layers(wrap):
    """A frozen block in the middle: its weights get no gradient, what is before it does."""
    layers = blocks(fusedckpt.MLP, "inputs")
    layers[1].requires_grad_(False)
    layers[2].fc1.requires_grad_(False)
    x = randn(ROWS, D)
    found = []
    for call in (nn.Sequential(*layers), partial(in_one, wrap, layers)):
        layers.zero_grad()
        found.append([*gradients(call, [x]), *(p.grad for p in layers.parameters())])
    assert all(p.grad is None for p in layers[1].parameters())
    assert_same(*found)


@pytest.mark.parametrize(
    "name", ["ours", "non-reentrant", "reentrant", "ours-in-ours", "ours-in-stock"]
)
def test_without_torchs_private_hooks(monkeypatch, name):
    """Layers then keep what their level says: recomputed more often, with equal gradients."""
    layers, x = blocks(fusedckpt.MLP, "inputs"), randn(ROWS, D)
    expected = gradients(nn.Sequential(*layers), [x])
    monkeypatch.setattr(private, "SEES_HOOKS", False)
    monkeypatch.setattr(private, "top_hooks", lambda: None)
    monkeypatch.setattr(private, "make_saved", SavedTensor)
    gemms, found = counted(partial(in_one, (STOCK | OURS)[name], layers), [x])
    assert gemms >= 35
    assert_same(found, expected)


def test_a_recompute_ends_before_a_layer_whose_last_tensor_has_no_gradient():
    """A weight made for the call, as of a quantized one: backward runs the GEMM of dx alone."""
    packed, x = randn(D, D, requires_grad=False), randn(ROWS, D)
    y = fusedckpt.checkpoint(lambda x: linear_act(x.sin(), packed * 1, activation="identity"), x)
    assert gemm_flops(lambda: y.sum().backward()) == 2 * ROWS * D * D


@pytest.mark.parametrize(
    ("cls", "save", "again"),
    [
        (fusedckpt.MLP, "inputs", 1),
        (fusedckpt.GatedMLP, "gate", 1),
        (fusedckpt.GatedMLP, "preact", 0),
    ],
)
def test_a_region_that_another_library_saves(cls, save, again):
    """As torch_remat does: hooks of its own keep what a layer saves, and the recompute skips it."""
    layers, x, kept, outputs = blocks(cls, save), randn(ROWS, D), [], []
    number = sum(p.dim() == 2 for p in layers[0].parameters())

    def saved(x):
        if fusedckpt.is_recomputing():
            return outputs[0].detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            outputs.append(layers[1](x))
        return outputs[0]

    def run(x):
        return layers[2](saved(layers[0](x))).sin()

    wrap = partial(stock_checkpoint, use_reentrant=False, early_stop=False)
    expected = gradients(lambda x: nn.Sequential(*layers[:3])(x).sin(), [x])
    gemms, found = counted(partial(wrap, run), [x])
    assert_same(found, expected)
    # gradients of three layers, and forwards of all in the forward, of two in the recompute
    assert gemms == 6 * number + 5 * number + again
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}
    shapes = [t.shape for t in kept if t.untyped_storage().data_ptr() not in weights]
    # its input, and GEMM outputs of the level but for the last, which is never needed
    assert shapes == [(ROWS, D)] + [(ROWS, F)] * (number - 1 - again)
