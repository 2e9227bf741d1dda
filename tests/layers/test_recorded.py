"""Layers in a program that is recorded: it consists of torch's own ops, and trains as layers do."""

from __future__ import annotations

import copy
import io
import threading
import warnings

import pytest
import torch
from cases import CASES
from support import DEVICE, as_tuple, randn
from torch import nn
from torch.export import Dim
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import LlamaRMSNorm, SwiGLU

import fusedckpt
from fusedckpt import MLP, GatedMLP, LayerNorm, Linear, NormLinear, RMSNorm, Sequential
from fusedckpt.memory import saved_tensors

D, F = 8, 12


def fused() -> nn.Module:
    model = nn.Sequential(LlamaRMSNorm(D), SwiGLU(D, F))
    assert list(fusedckpt.fuse(model).swapped) == ["0", "1"]
    return model


LAYERS = {
    "linear": lambda: Linear(D, F),
    "linear_act": lambda: Linear(D, F, activation="gelu", save="preact"),
    "rms_norm": lambda: RMSNorm(D, 1e-6, offset=1.0, cast="gemma"),
    "layer_norm": lambda: LayerNorm(D),
    "norm_linear": lambda: NormLinear(RMSNorm(D), nn.Linear(D, 4), nn.Linear(D, 6)),
    "norm-gated_mlp": lambda: nn.Sequential(RMSNorm(D), GatedMLP(D, F, save="gate")),
    "mlp": lambda: MLP(D, F, norm=LayerNorm(D), residual=True),
    "mlp-preact": lambda: MLP(D, F, save="preact"),
    "sequential": lambda: Sequential(
        *(nn.LayerNorm(D), nn.Linear(D, F), nn.GELU(), nn.Linear(F, D), nn.RMSNorm(D)),
        nn.Linear(D, 3),
    ),
    "fused": fused,
}
# one of both by layer; strict export cannot be told from torch.compile before
STRICT = (False, True) if torch.__version__ >= "2.13" else (False,)
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name):
    return LAYERS[name]().to(DEVICE, torch.float64)


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


def reloaded(save, load, program):
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    return load(file)


@every_layer
def test_an_exported_layer_trains(name):
    layer, x = layer_of(name), rows(5, 4)
    for strict in STRICT[[*LAYERS].index(name) % 2 :][:1] or STRICT:
        shapes = ({0: Dim("batch"), 1: Dim("tokens")},)
        program = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=shapes)
        assert not is_ours(program.graph)
        loaded = reloaded(torch.export.save, torch.export.load, program)
        for found in (program, loaded):
            x = rows(3, 7)
            torch.testing.assert_close(trained(found.module(), x, layer), trained(layer, x, layer))


@every_layer
def test_a_traced_layer_trains(name):
    layer, x = layer_of(name), rows(5, 4)
    with warnings.catch_warnings():
        # a shape that is taken for a constant
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, (x,))
    for found in (traced, reloaded(torch.jit.save, torch.jit.load, traced)):
        x = rows(3, 7)
        torch.testing.assert_close(trained(found, x, layer), trained(layer, x, layer))
    for module in (layer, nn.Sequential(layer)):
        found = torch.fx.symbolic_trace(module)
        torch.testing.assert_close(trained(found, x, module), trained(module, x, module))


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


@pytest.mark.parametrize("name", ["norm_linear", "norm-gated_mlp", "mlp"])
def test_a_layer_becomes_onnx(name):
    pytest.importorskip("onnxscript")
    x = torch.randn(5, 4, D)
    program = torch.onnx.export(LAYERS[name]().eval(), (x,), dynamo=True, verbose=False)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_functions_train(case):
    call = Call(case)
    x = case.inputs(dtype=torch.float64)[0].detach()
    for found in (torch.export.export(call, (x,)).module(), torch.jit.trace(call, (x,))):
        torch.testing.assert_close(trained(found, x, call), trained(call, x, call))


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
    # and nor does recording the layer
    torch.export.export(copy.deepcopy(layer), (x,))
    torch.fx.symbolic_trace(layer)
    with saved_tensors() as alone:
        trained(layer, x, layer)
    assert meanwhile.nbytes == alone.nbytes
