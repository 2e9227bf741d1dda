"""Regions: run once, with the values, gradients and random numbers of eager, and exact bytes."""

from __future__ import annotations

import copy
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, assert_same, no_gc, step
from support import DEVICE, gemms, randn, run_ranks
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as stock

import fusedckpt
from fusedckpt import checkpoint, region
from fusedckpt.memory import saved_tensors, storage_ref

B, L, D, H = 2, 32, 16, 4
# bytes of D values a token, and of the log-sum-exp
UNIT, LSE = 4 * B * L * D, 4 * B * L * H
SDPA = F.scaled_dot_product_attention
on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="which kernels save what is a CPU's")


class CountedAttention(nn.Module):
    """Attention as models write it; counts its calls."""

    def __init__(self, attend=None, **options):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.out, self.attend, self.options = nn.Linear(D, D), attend, options
        self.calls = 0

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        attend = self.attend or F.scaled_dot_product_attention
        y = attend(q * 1.5, k + q, v, **self.options)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def counted(self, *args, **kwargs):
        self.calls += 1
        return SDPA(*args, **kwargs)


def block(**options):
    torch.manual_seed(0)
    made = CountedAttention(**options).to(DEVICE)
    made.attend = region(made.counted, "attention")
    return made


ask = {"save_regions": ["att*"]}
inner = partial(checkpoint, **ask)
# how a block runs, how often its attention does, and the bytes saved beside x
WAYS = {
    "checkpoint": (lambda m, x: checkpoint(m, x), 2, 0),
    "region": (lambda m, x: checkpoint(m, x, **ask), 1, UNIT + LSE),
    "no early stop": (lambda m, x: checkpoint(m, x, early_stop=False, **ask), 1, UNIT + LSE),
    "in place": (lambda m, x: fusedckpt.checkpoint_module(copy.copy(m), **ask)(x), 1, UNIT + LSE),
    "sequential": (lambda m, x: fusedckpt.checkpoint_sequential([m], 1, x, **ask), 1, UNIT + LSE),
    "outer asks": (lambda m, x: checkpoint(checkpoint, m, x, **ask), 1, UNIT + LSE),
    "both ask": (lambda m, x: checkpoint(inner, m, x, **ask), 1, UNIT + LSE),
    "inner asks": (lambda m, x: checkpoint(inner, m, x), 2, 0),
    "in torch's": (lambda m, x: stock(inner, m, x, use_reentrant=False), 2, 0),
    "other name": (lambda m, x: checkpoint(m, x, save_regions="mlp"), 2, 0),
    "debug": (lambda m, x: checkpoint(m, x, debug=True, **ask), 1, UNIT + LSE),
}


@on_cpu
@pytest.mark.parametrize("way", WAYS)
def test_attention_runs_once(way):
    run, calls, nbytes = WAYS[way]
    m, x = block(), randn(B, L, D)
    expected = step(m, x, parameters=m.parameters())
    m.calls = 0
    found = step(partial(run, m), x, parameters=m.parameters())
    assert_same(found, expected)
    assert m.calls == calls
    with saved_tensors(exclude=[x]) as saved:
        y = run(m, x)
    assert saved.nbytes == nbytes
    del y


OPTIONS = [{}, {"is_causal": True}, {"attn_mask": 1}, {"enable_gqa": True}, {"dropout_p": 0.5}]


@on_cpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention_of_models(options, backend):
    """Every backend of a CPU; math saves more than four times its output, and runs again."""
    if options == {"attn_mask": 1}:
        options = {"attn_mask": randn(1, 1, L, L, requires_grad=False)}
    backend = SDPBackend.MATH if options.get("dropout_p") else backend
    m, x = CountedAttention(**options).to(DEVICE), randn(B, L, D)
    with sdpa_kernel(backend):
        assert_as_plain(m, x, parameters=m.parameters(), **ask)
        with saved_tensors(exclude=[x]) as saved:
            y = checkpoint(m, x, **ask)
        assert saved.nbytes == (UNIT + LSE if backend == SDPBackend.FLASH_ATTENTION else 0)
        y.sum().backward()
    assert F.scaled_dot_product_attention is SDPA


def test_retained_and_partial_backward():
    m, x = block(), randn(B, L, D)
    wanted = [x, *m.parameters()]
    expected = torch.autograd.grad(m(x).sum(), wanted)
    y = checkpoint(m, x, **ask).sum()
    m.calls = 0
    for _ in range(2):
        found = torch.autograd.grad(y, wanted, retain_graph=True)
        assert_same(found, expected)
    # the last linear's weight needs the region's output alone
    (grad,) = torch.autograd.grad(y, [m.out.weight], retain_graph=True)
    assert torch.equal(grad, expected[3])
    assert fusedckpt.prefetch_recompute(y) == 1
    assert torch.equal(torch.autograd.grad(y, [x])[0], expected[0])
    assert m.calls == 0


def test_double_backward():
    w = randn(D, D)

    def fn(x):
        y = region(lambda a, b: (a @ b).sin(), "r")(x.cos(), w)
        return (y * x).sum()

    def twice(x, call=lambda fn, x: fn(x)):
        return torch.autograd.grad(call(fn, x), [x], create_graph=True)

    x, call = randn(L, D), partial(checkpoint, save_regions="r")
    assert_same(step(partial(twice, call=call), x), step(twice, x))


def _written(x):
    return x.mul_(2).sin()


def _complex(x):
    return torch.view_as_real((z := torch.view_as_complex(x.unflatten(-1, (-1, 2)))).exp() * z)


def _several(x, more=None):
    with torch.no_grad():
        top = x.argmax(-1)
    return {"y": x.exp(), "top": top, "n": (3, more["w"] * x)}


CASES = {
    "random": lambda x, w: F.dropout(region(F.dropout, "r")(x * w)) * torch.rand_like(x),
    "written input": lambda x, w: region(_written, "r")(x * w) * w,
    "several": lambda x, w: (
        (out := region(_several, "r")(x.sin(), more={"w": w}))["y"] * out["n"][1] + out["top"].sum()
    ),
    "no input": lambda x, w: region(lambda: w.sin() * w.cos(), "r")() * x.exp(),
    "leaf": lambda x, w: region(lambda y: y @ w.t(), "r")(x.exp()).exp(),
    "argument": lambda x, w: region(lambda y: y.t() @ y, "r")(x).exp() @ w,
    "views": lambda x, w: region(lambda y: y[:, 1:] @ y[3:, 1:].t(), "r")((x @ w)[:, 2:]).sin(),
    "other dtype": lambda x, w: region(_complex, "r")(x * w).flatten(1) * w,
    "no gradient": lambda x, w: region(lambda y: y * 2, "r")(x.detach()) * w,
    "nested": lambda x, w: region(lambda y: region(torch.exp, "r")(y).sin(), "r")(x * w),
    "checkpoint inside": lambda x, w: region(lambda y: checkpoint(torch.sin, y.exp()), "r")(x * w),
    "again": lambda x, w: region(torch.exp, "r", recompute=True)(x * w).sin(),
    "grad mode": lambda x, w: torch.no_grad()(region(torch.exp, "r"))(x) * w.exp(),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outer", [False, True], ids=["", "outer"])
def test_as_eager(case, outer):
    x, w = randn(D, D), randn(D, D)
    fn = CASES[case]
    if outer:
        fn = partial(checkpoint, fn)
    assert_as_plain(fn, x, w, save_regions="r*")


_calls = list[int]()


class NotedLinear(nn.Linear):
    """A linear that notes its calls."""

    def forward(self, x):
        _calls.append(0)
        return super().forward(x)


@pytest.mark.parametrize("is_fused", [False, True], ids=["checkpoint", "fuse"])
def test_a_recompute_ends_with_attention(is_fused):
    """The layer behind it saves a view of its result, which is saved."""
    model, x = nn.Sequential(nn.RMSNorm(D), CountedAttention()).to(DEVICE), randn(B, L, D)
    model[1].out.__class__ = NotedLinear
    if is_fused:
        fusedckpt.fuse(model)
    for _ in range(3):
        y = model(x) if is_fused else checkpoint(model, x, save_regions="attention")
        _calls.clear()
        y.sum().backward()
        assert not _calls


def test_outputs_that_hooks_copy():
    """Their memory is free for other tensors of the forward."""

    def run(x):
        for _ in range(3):
            x = region(lambda a: a.tanh() * 2, "r")(x) * x
        return x.sin()

    x = randn(16, 16)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = checkpoint(run, x, save_regions="r")
        (dx,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(dx, torch.autograd.grad(run(x).sum(), [x])[0])


def test_an_output_that_hooks_hold_is_written():
    x = randn(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = checkpoint(lambda x: region(torch.tanh, "r")(x).mul_(2).sin(), x, save_regions="r")
    with pytest.raises(RuntimeError, match=r"an output of a region .* modified by an inplace"):
        y.sum().backward()


def test_views_of_tensors_in_containers_are_not_recomputed():
    calls = []

    def scaled(x, pair):
        calls.append(0)
        return x * pair[0].unsqueeze(1) + pair[1]

    x, scale, shift = randn(4, 2), randn(2)[None].detach().expand(4, 2)[:, 0], randn(2)
    pair = scale.contiguous(), shift
    (dx,) = torch.autograd.grad(checkpoint(scaled, x, pair).sum(), [x])
    assert torch.equal(dx, pair[0].unsqueeze(1).expand(4, 2))
    assert len(calls) == 1
    y = checkpoint(scaled, x, pair)
    pair[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("save", "count"), [("preact", 6), ("inputs", 7)])
def test_a_fused_layer_in_a_region_saves_its_level(save, count):
    """The outputs of two linears, or of the second alone, are not computed again."""
    mlp, x = fusedckpt.MLP(D, 2 * D, save=save).to(DEVICE), randn(L, D)

    def run():
        checkpoint(lambda x: region(mlp, "mlp")(x.sin()), x, save_regions="mlp").sum().backward()

    with fusedckpt.autograd.dispatch.forced_path("aten"):
        assert len(gemms(run)) == count


def test_nothing_stays_alive():
    """Neither the graph nor the segment is part of a cycle."""
    with no_gc():
        (m, x), made = (block(), randn(B, L, D)), []
        m.attend = region(lambda *a: made.append(y := SDPA(*a)) or y, "attention")
        y = checkpoint(m, x, **ask)
        output = weakref.ref(made.pop())
        y.sum().backward()
        del y
        assert output() is None


def test_outputs_are_freed_with_their_segment():
    """And not at the end of the backward, as the recompute is."""
    m, x, made, found = block(), randn(B, L, D) * 1, [], []
    attend = m.attend
    m.attend = lambda *args: made.append(storage_ref(y := attend(*args))) or y
    x.register_hook(lambda grad: found.append(made[0].expired()))
    y = checkpoint(m, x, **ask)
    y.sum().backward()
    assert found == [True]


def test_offloaded():
    """Hooks around a checkpoint see the tensors that its regions save."""
    m, x = block(), randn(B, L, D)

    def run(m, x):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(m, x, **ask)

    assert_as_plain(m, x, parameters=m.parameters(), wrap=run)


def test_other_threads_call_attention_as_ever():
    m, x, found = CountedAttention().to(DEVICE), randn(B, L, D), []
    expected = m(x)

    def attend(*args):
        thread = threading.Thread(target=lambda: found.append(m(x)))
        thread.start()
        thread.join()
        return F.scaled_dot_product_attention(*args)

    other = CountedAttention(attend).to(DEVICE)
    checkpoint(other, x, **ask).sum().backward()
    # in the forward, and in the recompute
    assert len(found) == 2
    assert all(torch.equal(y, expected) for y in found)
    assert F.scaled_dot_product_attention is SDPA


def test_transformers_functions():
    interface = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    runs, m, x = [], CountedAttention().to(DEVICE), randn(B, L, D)

    def own(*args):
        runs.append(0)
        return SDPA(*args)

    interface.register("own", own)
    try:
        m.attend = lambda *args: interface["own"](*args)
        assert_as_plain(m, x, parameters=m.parameters(), **ask)
        # plain, and in the checkpoint
        assert len(runs) == 2
        assert interface["own"] is own
    finally:
        del type(interface)._global_mapping["own"]


def test_compiled():
    m, x = CountedAttention().to(DEVICE), randn(B, L, D)
    expected = torch.autograd.grad(m(x).sum(), [x])

    def run(x):
        return checkpoint(m, x, save_regions="attention")

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    with saved_tensors(exclude=[x]) as saved:
        y = compiled(x)
    if DEVICE.type == "cpu":
        assert saved.nbytes == UNIT + LSE
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x]), expected)


def test_arguments_that_hooks_lay_out_anew():
    """A view of an argument that comes back contiguous."""
    cut = region(lambda q: q[:, 1:].sin() * q[:, :-1], "attention")
    leaf, hooks = (
        randn(5, 4),
        (lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t),
    )
    found = []
    for run in (lambda fn, x: fn(x), partial(checkpoint, save_regions="attention")):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = run(lambda q: cut(q).exp(), leaf.t() * 1)
        found += torch.autograd.grad(y.sum(), [leaf])
    assert torch.equal(*found)


@on_cpu
def test_context_parallelism_sends_no_keys_again(tmp_path):
    """Two ranks: context_parallel_ranks.py."""
    import context_parallel_ranks

    run_ranks(context_parallel_ranks.main, tmp_path)
