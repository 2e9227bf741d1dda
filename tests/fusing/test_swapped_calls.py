"""A swapped module never fails where its class would not, and computes the same."""

import copy

import pytest
import torch
from support import DEVICE, randn
from swap_cases import D, F
from torch import Tensor, nn
from torch.fx import symbolic_trace
from zoo import GatedMLP, LlamaRMSNorm

from fusedckpt import checkpoint, fuse
from fusedckpt.memory import saved_tensors


class Scalable(GatedMLP):
    """A second argument, which has a default."""

    def __init__(self):
        super().__init__(D, F)

    def forward(self, hidden_states, scale=None):
        y = super().forward(hidden_states)
        return y if scale is None else y * scale


class Tagged(Tensor):
    """Every op on it is seen."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


MODULES = {
    "gated": Scalable,
    "norm": lambda: LlamaRMSNorm(D),
    "LayerNorm": lambda: nn.LayerNorm(D),
    "RMSNorm": lambda: nn.RMSNorm(D),
    "Sequential": lambda: nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=list(MODULES))


def pair_of(make):
    torch.manual_seed(0)
    eager = make().to(DEVICE)
    fused = copy.deepcopy(eager)
    assert fuse(fused, verify=False).swapped
    return eager, fused


def jagged() -> Tensor:
    parts = [torch.randn(n, D, device=DEVICE) for n in (2, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def assert_same_gradients(fused, eager):
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (fused, eager)))


@every_module
def test_jagged_input(make):
    eager, fused = pair_of(make)
    x = jagged()
    for model in (eager, fused):
        model(x).values().sum().backward()
    assert torch.equal(fused(x).values(), eager(x).values())
    assert_same_gradients(fused, eager)


@every_module
def test_input_of_a_class_with_ops_of_its_own(make):
    eager, fused = pair_of(make)
    x = randn(3, D).detach().as_subclass(Tagged)
    assert type(fused(x)) is Tagged
    for model in (eager, fused):
        model(x).as_subclass(Tensor).sum().backward()
    assert_same_gradients(fused, eager)


@every_module
def test_checkpoint_of_an_input_of_a_class_whose_loss_runs_backward(make):
    """Backward of a loss of that class runs where functions are seen by no class."""
    eager, fused = pair_of(make)
    x = randn(3, D).detach().as_subclass(Tagged)
    loss = eager(x * 2).square().sum()
    loss.backward()
    # the argument is one of the class anyway, a result in the recompute is not
    checkpoint(lambda x: fused(x * 2), x).square().sum().backward()
    assert type(loss) is Tagged
    assert_same_gradients(fused, eager)


@every_module
def test_symbolic_trace_of_the_module_itself(make):
    """fx takes names and number of inputs from the forward's signature."""
    eager, fused = pair_of(make)
    given = {"scale": None} if make is Scalable else None
    graphs = [symbolic_trace(model, given) for model in (fused, eager)]
    found = [[n.name for n in graph.graph.nodes if n.op == "placeholder"] for graph in graphs]
    assert [len(names) for names in found] == [1 + (make is Scalable)] * 2
    assert found[0] == found[1]
    x = randn(3, D)
    torch.testing.assert_close(graphs[0](x, *[None] * (len(found[0]) - 1)), eager(x))


@pytest.mark.parametrize("make", [Scalable, MODULES["norm"]], ids=["gated", "norm"])
def test_an_input_given_by_its_name_runs_fused(make):
    _, fused = pair_of(make)
    x = randn(3, D)
    with saved_tensors() as by_position:
        first = fused(x * 1)
    with saved_tensors() as by_name:
        second = fused(hidden_states=x * 1)
    assert torch.equal(first, second)
    assert by_name.nbytes == by_position.nbytes == 3 * D * 4
    with pytest.raises(TypeError, match="unexpected keyword"):
        fused(x=x)


def test_results_are_written_in_place():
    # Falcon adds attention's output to its MLP's, and both to the residual, in place
    for layer in (nn.LayerNorm(D), Scalable()):
        x, found = randn(2, 3, D), []
        for module in (layer, copy.deepcopy(layer)):
            if module is layer:
                fuse(module.to(DEVICE))
            y = module.to(DEVICE)(x)
            y += x
            found.append(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))
        torch.testing.assert_close(*found)
