"""Adapters of other libraries: weights laid out and back, and modules that read them late."""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import cases, peers
from bench.measure import Implementation, Truth, Work

(SIZE,) = cases.SIZES["tiny"]
CPU = torch.device("cpu")


def work_of(name: str, dtype: torch.dtype = torch.float32) -> Work:
    case = cases.CASES[name]
    inputs = cases.draw(case, SIZE, 8, CPU, dtype)
    work = Work(inputs, (), CPU, case.num_inputs)
    return work._replace(douts=[torch.randn_like(y) for y in work.forward(case.eager(SIZE))])


def failure_of(found: Implementation, work: Work, name: str) -> str | None:
    """Hold an implementation of a case to eager's numbers."""
    found.attempt(Truth(work, cases.CASES[name].eager(SIZE)).check)
    return found.failure


PACKED = [peer for peer in peers.PEERS if peer.pack is not None]


@pytest.mark.parametrize("peer", PACKED, ids=lambda peer: f"{peer.name}-{peer.case}")
def test_what_is_packed_is_unpacked(peer):
    inputs = work_of(peer.case).inputs
    packed = peer.pack(inputs)
    assert len(packed) < len(inputs)
    assert all(x.is_leaf and x.requires_grad for x in packed)
    # x aside these are weights: what a module takes, and what is not counted as saved
    assert all(isinstance(x, nn.Parameter) for x in packed[1:])
    assert all(torch.equal(a, b) for a, b in zip(peer.unpack(packed), inputs, strict=True))


class Late(torch.autograd.Function):
    """A module's result; backward reads the parameters that the module has by then."""

    @staticmethod
    def forward(ctx, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module.compute(x, *parameters)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        inputs = [*ctx.saved_tensors, *ctx.module.parameters()]
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = ctx.module.compute(*inputs)
        return None, *torch.autograd.grad(y, inputs, dy)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def mlp(x: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor, eps: float) -> Tensor:
    gate, up = F.linear(rms(x, norm, eps), fc1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, fc2)


# Transformer Engine's modules: parameters by name, and the result of x and them
ENGINE = {
    "RMSNorm": (lambda d: {"weight": (d,)}, rms),
    "LayerNorm": (
        lambda d: {"weight": (d,), "bias": (d,)},
        lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    ),
    "LayerNormLinear": (
        lambda d, n: {"layer_norm_weight": (d,), "weight": (n, d)},
        lambda x, norm, w, eps: F.linear(rms(x, norm, eps), w),
    ),
    "LayerNormMLP": (
        lambda d, f: {"layer_norm_weight": (d,), "fc1_weight": (2 * f, d), "fc2_weight": (d, f)},
        mlp,
    ),
}


class StandIn(nn.Module):
    """Takes the arguments of Transformer Engine's modules, and names parameters as they do."""

    def __init__(self, kind: str, *widths: int, eps: float, params_dtype: torch.dtype, **options):
        super().__init__()
        shapes, compute = ENGINE[kind]
        self.compute = partial(compute, eps=eps)
        for name, shape in shapes(*widths).items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=params_dtype)))
        expected = {"bias": False, "normalization": "RMSNorm", "activation": "swiglu"}
        assert options.items() <= (expected | {"checkpoint": True}).items()

    def forward(self, x: Tensor) -> Tensor:
        return Late.apply(self, x, *self.parameters())


@pytest.fixture
def engine(monkeypatch):
    """Put stand-ins for Transformer Engine's modules where it would be imported from."""
    package, pytorch = ModuleType(peers.TE), ModuleType(f"{peers.TE}.pytorch")
    for kind in ENGINE:
        setattr(pytorch, kind, partial(StandIn, kind))
    for module in (package, pytorch):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer.package == peers.TE])
def test_backward_of_a_module_sees_our_weights(engine, peer):
    case = peer.case
    found = {one.name: one for one in peers.peers_of(case, SIZE)}[peer.name]
    work = work_of(case)
    assert failure_of(found, work, case) is None
    # other weights than those that the module was first called with, then another dtype
    weights = [nn.Parameter(x.detach() * 0.5) for x in work.inputs[1:]]
    assert failure_of(found, work._replace(inputs=[work.inputs[0], *weights]), case) is None
    assert failure_of(found, work_of(case, torch.bfloat16), case) is None


class Doubled(torch.autograd.Function):
    """Returns its input; backward doubles the gradient in place."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy.mul_(2) / 2


def test_an_implementation_that_writes_to_shared_tensors_is_wrong():
    work, eager = work_of("rms_norm"), cases.CASES["rms_norm"].eager(SIZE)

    def shifted(x: Tensor, weight: Tensor) -> Tensor:
        y = eager(x, weight)
        weight.data.add_(1)
        return y

    def crashed(x: Tensor, weight: Tensor) -> Tensor:
        x.data.zero_()
        raise RuntimeError("no such kernel")

    given = [x.detach().clone() for x in (*work.inputs, *work.douts)]
    truth = Truth(work, eager)
    fns = {
        "wrong: it overwrites gradient 0": lambda *inputs: Doubled.apply(eager(*inputs)),
        "wrong: it overwrites input 1": shifted,
        "RuntimeError: no such kernel": crashed,
        None: eager,
    }
    for failure, fn in fns.items():
        found = Implementation("peer", fn)
        found.attempt(truth.check)
        assert found.failure == failure
        assert found.is_wrong == str(failure).startswith("wrong")
        pairs = zip((*work.inputs, *work.douts), given, strict=True)
        assert all(torch.equal(x, old) for x, old in pairs)


@pytest.mark.parametrize(("by", "is_wrong"), [(3e-5, False), (0.5, True)])
def test_a_loss_is_not_judged_by_a_ratio(by, is_wrong):
    """Of one number eager may be exact by luck: a loss is held to a bound of the inputs' dtype."""
    x = torch.randn(4, 8, dtype=torch.bfloat16).requires_grad_()
    work = Work([x], [torch.ones(())], torch.device("cpu"))

    def loss(x: Tensor) -> Tensor:
        return 5 + 0 * x.float().sum()

    found = Implementation("peer", lambda x: loss(x) + by)
    truth = Truth(work, loss)
    assert truth.eager_errors[0] == 0
    found.attempt(truth.check)
    assert found.is_wrong == is_wrong


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch >= 2.13")
def test_the_head_of_torch_is_ours():
    (head,) = [peer for peer in peers.peers_of("head", SIZE) if peer.name == "torch's"]
    assert failure_of(head, work_of("head"), "head") is None
