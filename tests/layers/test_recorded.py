"""Layers in a program that is recorded: it consists of torch's own ops, and trains as layers do."""

from __future__ import annotations

import copy
import io
import itertools
import threading
import warnings
from functools import partial

import pytest
import torch
from cases import CASES
from own_classes import SwiGLU
from support import as_tuple, randn
from torch import nn
from torch.export import Dim
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fusedckpt
from fusedckpt import MLP, GatedMLP, LayerNorm, Linear, NormLinear, RMSNorm, Sequential
from fusedckpt.memory import saved_tensors

D, F = 8, 12


def in_order(cls, **options):
    parts = nn.LayerNorm(D), nn.Linear(D, F), nn.GELU(), nn.Linear(F, D), nn.RMSNorm(D)
    return cls(*parts, nn.Linear(D, 3), **options)


LAYERS = {
    "linear": lambda: Linear(D, F),
    "rms_norm": lambda: RMSNorm(D),
    "rms_norm-gemma": lambda: RMSNorm(D, 1e-6, offset=1.0, cast="gemma"),
    "layer_norm": lambda: LayerNorm(D),
    "norm_linear": lambda: NormLinear(RMSNorm(D), nn.Linear(D, 4), nn.Linear(D, 6)),
    "norm-gated_mlp": lambda: nn.Sequential(RMSNorm(D), GatedMLP(D, F)),
    **{
        f"linear-{save}": partial(Linear, D, F, activation="gelu", save=save)
        for save in ("inputs", "preact")
    },
    **{
        f"sequential-{save}": partial(in_order, Sequential, save=save)
        for save in ("inputs", "preact")
    },
    **{
        f"{name}-{save}{'-norm' if norm else ''}{'-residual' if residual else ''}": (
            lambda cls=cls, save=save, norm=norm, residual=residual: cls(
                D, F, norm=norm and norm(D), residual=residual, save=save
            )
        )
        for name, cls, levels in (
            ("mlp", MLP, ("inputs", "preact")),
            ("gated_mlp", GatedMLP, ("inputs", "gate", "preact")),
        )
        for save, norm, residual in itertools.product(levels, (None, LayerNorm), (False, True))
    },
}
STRICT = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="strict export cannot be told from torch.compile"
)
every_layer = pytest.mark.parametrize("name", LAYERS)
each_way = pytest.mark.parametrize(
    "how", ["export", pytest.param("strict", marks=STRICT), "trace", "fx"]
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def layer_of(name):
    return LAYERS[name]().double()


def trained(model, x, layer):
    """Return outputs and gradients, of x and of the parameters that `layer` names."""
    x = x.detach().clone().requires_grad_()
    ys = as_tuple(model(x))
    parameters = dict(model.named_parameters())
    wanted = [x, *(parameters[key] for key, _ in layer.named_parameters())]
    return [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), wanted)]


def rows(*leading):
    return randn(*leading, D, dtype=torch.float64, requires_grad=False)


def is_ours(graph: torch.fx.Graph) -> bool:
    return any("fusedckpt" in str(node.target) for node in graph.nodes)


@every_layer
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=STRICT)])
def test_an_exported_layer_trains(name, strict):
    layer, x = layer_of(name), rows(5, 4)
    program = torch.export.export(
        layer, (x,), strict=strict, dynamic_shapes=({0: Dim("batch"), 1: Dim("tokens")},)
    )
    assert not is_ours(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for found in (program, torch.export.load(file)):
        x = rows(3, 7)
        torch.testing.assert_close(trained(found.module(), x, layer), trained(layer, x, layer))


@every_layer
def test_a_traced_layer_trains(name):
    layer, x = layer_of(name), rows(5, 4)
    with warnings.catch_warnings():
        # a shape that is taken for a constant
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, (x,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for found in (traced, torch.jit.load(file)):
        x = rows(3, 7)
        torch.testing.assert_close(trained(found, x, layer), trained(layer, x, layer))


@every_layer
@pytest.mark.parametrize("inside", [False, True])
def test_a_symbolically_traced_layer_trains(name, inside):
    layer, x = layer_of(name), rows(5, 4)
    layer = nn.Sequential(layer) if inside else layer
    traced = torch.fx.symbolic_trace(layer)
    torch.testing.assert_close(trained(traced, x, layer), trained(layer, x, layer))


@every_layer
def test_a_recorded_step_runs(name):
    layer, x = layer_of(name), rows(5, 4)

    def step(x, parameters):
        ys = as_tuple(functional_call(layer, parameters, (x,)))
        loss = sum(y.square().sum() for y in ys)
        return [*ys, *torch.autograd.grad(loss, [x, *parameters.values()])]

    parameters = dict(layer.named_parameters())
    recorded = make_fx(step)(rows(5, 4).requires_grad_(), parameters)
    assert not is_ours(recorded.graph)
    found = recorded(x.clone().requires_grad_(), parameters)
    torch.testing.assert_close(found, trained(layer, x, layer))


@every_layer
def test_a_layer_becomes_onnx(name):
    pytest.importorskip("onnxscript")
    layer = LAYERS[name]().eval()
    program = torch.onnx.export(layer, (torch.randn(5, 4, D),), dynamo=True, verbose=False)
    assert program is not None
    assert {node.domain for node in program.model.graph} == {""}


class Call(nn.Module):
    """A function as a user's module calls it, weights as its parameters."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        _, *weights = case.inputs(dtype=torch.float64)
        self.weights = nn.ParameterList([nn.Parameter(w) for w in weights if w is not None])
        self.given = [w is not None for w in weights]

    def forward(self, x):
        weights = iter(self.weights)
        return self.case.fused(x, *(next(weights) if given else None for given in self.given))


@every_case
@each_way
def test_recorded_functions_train(case, how):
    if how == "fx" and case.name in ("rms_norm-llama", "rms_norm-gemma"):
        pytest.skip("over how many dimensions x.shape[-1:] is, symbolic tracing cannot tell")
    if how == "fx" and case.name.startswith("experts"):
        pytest.skip("how many tokens the case's routing is for, symbolic tracing cannot tell")
    call = Call(case)
    x = case.inputs(dtype=torch.float64)[0].detach()
    record = {
        "export": lambda: torch.export.export(call, (x,)).module(),
        "strict": lambda: torch.export.export(call, (x,), strict=True).module(),
        "trace": lambda: torch.jit.trace(call, (x,)),
        "fx": lambda: torch.fx.symbolic_trace(call),
    }
    torch.testing.assert_close(trained(record[how](), x, call), trained(call, x, call))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(D)), 1e-6

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@each_way
def test_recorded_models_that_were_fused_train(how):
    model, x = nn.Sequential(Norm(), SwiGLU(D, F)), torch.randn(5, 4, D)
    assert list(fusedckpt.fuse(model).swapped) == ["0", "1"]
    model, x = model.double(), x.double()
    record = {
        "export": lambda: torch.export.export(model, (x,)).module(),
        "strict": lambda: torch.export.export(model, (x,), strict=True).module(),
        "trace": lambda: torch.jit.trace(model, (x,)),
        "fx": lambda: torch.fx.symbolic_trace(model),
    }
    found = record[how]()
    assert not hasattr(found, "graph") or "fusedckpt::" not in str(found.graph)
    torch.testing.assert_close(trained(found, x, model), trained(model, x, model))


def test_what_another_thread_records_changes_nothing():
    """A layer whose forward and recompute were to differ would save other tensors."""
    layer, x = layer_of("mlp-preact"), rows(5, 4)
    inside, outside = threading.Event(), threading.Event()

    def slow(x):
        inside.set()
        assert outside.wait(600)
        return x.sin()

    thread = threading.Thread(target=make_fx(slow), args=(torch.randn(3),))
    thread.start()
    try:
        assert inside.wait(600)
        with saved_tensors() as meanwhile:
            trained(layer, x, layer)
    finally:
        outside.set()
        thread.join()
    with saved_tensors() as alone:
        trained(layer, x, layer)
    assert meanwhile.nbytes == alone.nbytes


def test_recording_leaves_the_layer_as_it_was():
    layer, x = layer_of("mlp-inputs-norm"), rows(5, 4)
    with saved_tensors() as before:
        kept = layer(x)
    torch.export.export(copy.deepcopy(layer), (x,))
    torch.jit.trace(layer, (x,))
    torch.fx.symbolic_trace(layer)
    with saved_tensors() as after:
        again = layer(x)
    assert before.nbytes == after.nbytes
    assert torch.equal(kept, again)
