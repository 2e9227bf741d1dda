"""Layers in the tools that torch puts around modules: they work as torch's own layers do."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support import as_tuple
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Doubled, Residual, SwiGLU

from fusedckpt import MLP, GatedMLP, LayerNorm, Linear, NormLinear, RMSNorm, Sequential
from fusedckpt.autograd.dispatch import forced_path

D, H = 8, 12


class EagerLinear(nn.Linear):
    def forward(self, x):
        return F.gelu(super().forward(x))


class Fan(nn.ModuleList):
    """A norm and the linears that read it."""

    def forward(self, x):
        n = self[0](x)
        return tuple(linear(n) for linear in list(self)[1:])


def in_order():
    return nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)


LAYERS = {
    "linear": (lambda: Linear(D, H, activation="gelu", save="preact"), lambda: EagerLinear(D, H)),
    "layer_norm": (lambda: LayerNorm(D), lambda: nn.LayerNorm(D)),
    "norm_linear": (
        lambda: NormLinear(RMSNorm(D), nn.Linear(D, 4), nn.Linear(D, 6)),
        lambda: Fan([nn.RMSNorm(D), nn.Linear(D, 4), nn.Linear(D, 6)]),
    ),
    "mlp": (lambda: MLP(D, H, norm=LayerNorm(D), residual=True), lambda: Residual(*in_order())),
    "norm-gated_mlp": (
        lambda: nn.Sequential(RMSNorm(D), GatedMLP(D, H, save="gate")),
        lambda: nn.Sequential(nn.RMSNorm(D), SwiGLU(D, H)),
    ),
    "sequential": (lambda: Sequential(*in_order()), lambda: nn.Sequential(*in_order())),
}


@pytest.fixture(params=LAYERS)
def alike(request):
    """Our layer and the eager one with the same weights, and an input."""
    ours, eager = (make().double() for make in LAYERS[request.param])
    # parameters of both are in one order
    ours.load_state_dict(dict(zip(ours.state_dict(), eager.state_dict().values(), strict=True)))
    with forced_path("aten"):
        yield ours, eager, torch.randn(5, 4, D, dtype=torch.float64)


def loss_of(ys):
    return sum(y.square().sum() for y in as_tuple(ys))


def trained(layer, x, parameters=None):
    """Return outputs and gradients, of x and of the parameters."""
    x = x.detach().clone().requires_grad_()
    ys = layer(x)
    wanted = [x, *(layer.parameters() if parameters is None else parameters)]
    return [*as_tuple(ys), *torch.autograd.grad(loss_of(ys), wanted)]


def assert_alike(alike, act):
    ours, eager, x = alike
    torch.testing.assert_close(act(ours, x), act(eager, x))


def weighted(layer):
    """Return the modules with a weight of their own."""
    return [m for m in layer.modules() if isinstance(m._parameters.get("weight"), nn.Parameter)]


def parametrized(layer):
    for module in weighted(layer):
        parametrize.register_parametrization(module, "weight", Doubled())


def normed(apply):
    def change(layer):
        for module in weighted(layer):
            if module.weight.dim() == 2:
                torch.manual_seed(0)
                apply(module)
        layer.eval()

    return change


def pruned(layer):
    for module in weighted(layer):
        torch.manual_seed(0)
        prune.random_unstructured(module, "weight", 0.5)


CHANGES = {
    "parametrized": parametrized,
    "weight_norm, as hooks": normed(nn.utils.weight_norm),
    "spectral_norm": normed(parametrizations.spectral_norm),
    "pruned": pruned,
    "shared memory": nn.Module.share_memory,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_are_computed(alike, name):
    def act(layer, x):
        CHANGES[name](layer)
        return trained(layer, x)

    assert_alike(alike, act)


def after_meta(layer):
    values = {key: value.clone() for key, value in layer.state_dict().items()}
    layer = layer.to("meta")
    layer(torch.empty(3, D, dtype=torch.float64, device="meta"))
    layer.load_state_dict(values, assign=True)
    return layer


def after_use(layer):
    layer(torch.randn(3, D, dtype=torch.float64, requires_grad=True))
    return copy.deepcopy(layer)


COPIES = {
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "meta": after_meta,
    "used": after_use,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(alike, name):
    assert_alike(alike, lambda layer, x: trained(COPIES[name](layer), x))


def replica(module):
    """Copy a module as nn.DataParallel does: its tensors are no Parameters."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else replica(child)
    for name, parameter in module._parameters.items():
        made._parameters.pop(name, None)
        setattr(made, name, None if parameter is None else parameter * 1)
    return made


def test_replicas(alike):
    assert_alike(alike, lambda layer, x: trained(replica(layer), x, layer.parameters()))


def passed_on(mode, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


class PassOn(TorchFunctionMode):
    __torch_function__ = passed_on


class PassBelow(TorchDispatchMode):
    __torch_dispatch__ = passed_on


MODES = {
    "function mode": PassOn,
    "dispatch mode": PassBelow,
    "default device": lambda: torch.device("cpu"),
    "another default device": lambda: torch.device("meta"),
    "anomalies": torch.autograd.detect_anomaly,
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "saved on the CPU": save_on_cpu,
    "mutation": allow_mutation_on_saved_tensors,
    "profiler": torch.profiler.profile,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", MODES)
def test_modes(alike, name):
    def act(layer, x):
        with MODES[name]():
            return trained(layer, x)

    assert_alike(alike, act)


def test_fake_tensors(alike):
    def act(layer, x):
        mode = FakeTensorMode()
        values = {key: mode.from_tensor(value) for key, value in layer.named_parameters()}
        with mode:
            x = mode.from_tensor(x).requires_grad_()
            ys = functional_call(layer, values, (x,))
            grads = torch.autograd.grad(loss_of(ys), [x, *values.values()])
        return [(t.shape, t.dtype, t.stride()) for t in (*as_tuple(ys), *grads)]

    ours, eager, x = alike
    assert act(ours, x) == act(eager, x)


def test_threads_that_train_at_once(alike):
    layer, _, x = alike
    expected = trained(layer, x)

    def work(layer):
        return [trained(layer, x) for _ in range(20)]

    for layers in ([layer] * 4, [copy.deepcopy(layer) for _ in range(4)]):
        with ThreadPoolExecutor(4) as pool:
            for steps in pool.map(work, layers):
                for found in steps:
                    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("same", [True, False])
def test_a_backward_inside_a_backward(alike, same):
    """Of the graph that runs, which is then read twice, or of another of the same layer."""

    def act(layer, x):
        x, found = x.clone().requires_grad_(), []
        loss = loss_of(layer(x))

        def again(grad):
            if same:
                wanted = [x, *layer.parameters()]
                found.extend(torch.autograd.grad(loss, wanted, retain_graph=True))
            else:
                with torch.enable_grad():
                    found.extend(trained(layer, 2 * x))

        after = loss * 1
        after.register_hook(again)
        return [*torch.autograd.grad(after, [x, *layer.parameters()]), *found]

    assert_alike(alike, act)
