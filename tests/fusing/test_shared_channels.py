"""Convolutions, batch and group norms, activations and pools save recipes of their inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import DEVICE, calls, peak_of_step, saved_bytes
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F_
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointError, checkpoint

import fusedckpt
from fusedckpt.autograd import private_nodes, recipes
from fusedckpt.autograd.private_nodes import LACKS_EPS
from fusedckpt.checkpointing import samples
from fusedckpt.memory import saved_tensors
from fusedckpt.recipes import node_recipes, recipe_mode
from fusedckpt.recipes.shared_channels import SharedChannels

pytestmark = pytest.mark.usefixtures("any_size")

C, SIDE, N = 4, 6, 3
# bytes of one value of each channel, of a picture of these channels, in float64
VECTOR, PICTURE = 8 * C, 8 * N * C * SIDE * SIDE


def conv(inner: int = C, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inner, C, size, padding=size // 2, bias=False)


def bn(**options: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(C, **options)


class SummedConvs(nn.Module):
    """As a ResNet's block: a ReLU of three calls, or of one, and a sum in place, or not."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(), bn(), conv(), bn()
        self.relu = nn.ReLU(inplace=in_place)
        self.in_place = in_place

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.in_place:
            y += x
        else:
            y = y + x
        return self.relu(y)


class CallsRelu(nn.Module):
    """A function between two layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = conv(), bn(), conv()

    def forward(self, x):
        return self.conv2(F_.relu(self.bn(self.conv1(x))))


def chain(norm: Any, act: nn.Module) -> list[nn.Module]:
    return [conv(), norm(), act, conv(), norm(), act, conv()]


def group_norm() -> nn.GroupNorm:
    return nn.GroupNorm(2, C)


# a net -> its saved bytes, eager and fused: its input, inputs of norms, and their statistics remain
NETS: dict[str, tuple[Any, int, int]] = {
    "batch norm, in place": (
        lambda: nn.Sequential(*chain(bn, nn.ReLU(inplace=True))),
        5 * PICTURE + 8 * VECTOR,
        3 * PICTURE + 8 * VECTOR,
    ),
    "group norm, SiLU": (
        lambda: nn.Sequential(*chain(group_norm, nn.SiLU())),
        7 * PICTURE + 8 * N * 8,
        3 * PICTURE + 8 * N * 8,
    ),
    "no norm, GELU": (
        lambda: nn.Sequential(*chain(nn.Identity, nn.GELU())),
        5 * PICTURE,
        3 * PICTURE,
    ),
    "residual blocks": (
        lambda: nn.Sequential(
            conv(), bn(), nn.ReLU(), SummedConvs(True), SummedConvs(False), conv()
        ),
        11 * PICTURE + 20 * VECTOR,
        6 * PICTURE + 20 * VECTOR,
    ),
    "pools": (
        lambda: nn.Sequential(
            *(conv(), bn(), nn.ReLU(), nn.AvgPool2d(2), conv(), nn.SiLU(inplace=True)),
            *(nn.Dropout2d(0.5), nn.MaxPool2d(3, 1, 1), conv()),
        ),
        0,
        0,
    ),
}


def net(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = NETS[name][0]().to(DEVICE, dtype)
    return model, torch.randn(N, C, SIDE, SIDE, dtype=dtype, device=DEVICE)


def fused(model: nn.Module) -> Any:
    ours = copy.deepcopy(model)
    fusedckpt.fuse(ours)
    assert any(isinstance(module, SharedChannels) for module in ours.modules())
    return ours


def trained(model: nn.Module, x: torch.Tensor, num_steps: int = 3) -> list[Any]:
    """Return the results and gradients of some steps, and the state after them."""
    values: list[Any] = []
    model.zero_grad()
    for i in range(num_steps):
        torch.manual_seed(i)
        inputs = (x * (1 + i)).requires_grad_()
        y = model(inputs)
        y.square().mean().backward()
        values += [y.detach(), inputs.grad]
        for p in model.parameters():
            if p.grad is not None:
                values.append(p.grad.clone())
                p.data -= 0.1 * p.grad
                p.grad = None
    return [*values, *(b.clone() for b in model.buffers())]


def same(ours: list[Any], eager: list[Any]) -> None:
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", NETS)
def test_values_state_bytes_and_peak(name):
    """The same kernels on the same numbers: all of three steps has the bits of eager's."""
    eager, x = net(name)
    ours = fused(eager)
    _, *expected = NETS[name]
    if all(expected):
        assert [saved_bytes(m, [x.requires_grad_()]) for m in (eager, ours)] == expected
    assert peak_of_step(ours, x) <= peak_of_step(eager, x)
    same(trained(ours, x.detach()), trained(eager, x.detach()))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_autocast(name, dtype):
    eager, x = net(name, torch.float32)
    eager = eager.to(memory_format=torch.channels_last)
    ours = fused(eager)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        same(trained(ours, x.contiguous(memory_format=torch.channels_last)), trained(eager, x))


@pytest.mark.parametrize("name", NETS)
def test_frozen_parameters(name):
    """Whatever parameters are trained, eager's are the gradients."""
    for trained_every in (2, 3):
        eager, x = net(name)
        for i, p in enumerate(eager.parameters()):
            p.requires_grad_(i % trained_every == 0)
        same(trained(fused(eager), x, 1), trained(eager, x, 1))


def test_graphs_that_run_again():
    eager, x = net("residual blocks")
    ours = fused(eager)
    for model in (eager, ours):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        # accumulated, and differentiated once more
        gradient = torch.autograd.grad(model(x).square().mean(), model[0].weight, create_graph=True)
        gradient[0].square().sum().backward()
    same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


def test_modes_that_change_between_steps():
    eager, x = net("residual blocks")
    ours = fused(eager)
    for step in range(4):
        for model in (eager, ours):
            model.train(step != 1)
            model[1].eval()
        same(trained(ours, x, 1), trained(eager, x, 1))


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {}])
def test_running_statistics_are_read_as_they_were(options):
    """A forward in training between forward and backward writes them without a version."""
    torch.manual_seed(0)
    eager = nn.Sequential(conv(), bn(**options), nn.ReLU(), conv()).to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    gradients = []
    for model in (eager, fused(eager)):
        y = model.eval()(x)
        model.train()(3 * x + 1)
        y.square().mean().backward()
        gradients.append(model[3].weight.grad)
    same(gradients[1:], gradients[:1])


@pytest.mark.parametrize("write", ["+=", "no_grad", ".data"])
@pytest.mark.parametrize("at", ["norm", "act"])
def test_results_that_are_written(write, at):
    """Later readers save a result as it is; a write without a version is an error."""

    class WritesAfterLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn, self.act, self.conv2 = conv(), bn(), nn.SiLU(), conv()

        def written(self, h):
            if write == "+=":
                h += 1
            elif write == ".data":
                h.data.mul_(2)
            else:
                with torch.no_grad():
                    h.mul_(2)
            return h

        def forward(self, x):
            h = self.bn(self.conv1(x))
            if at == "norm":
                h = self.written(h)
            h = self.act(h)
            if at == "act":
                h = self.written(h)
            return self.conv2(h)

    torch.manual_seed(0)
    eager = WritesAfterLayer().to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    ours = fused(eager)
    if write == ".data":
        with pytest.raises(CheckpointError, match="without a version"):
            trained(ours, x, 1)
        return
    same(trained(ours, x), trained(eager, x))


def test_part_of_a_sum_that_was_written():
    class WritesPart(SummedConvs):
        def forward(self, x):
            h = self.relu(self.conv1(x))
            y = self.bn2(self.conv2(h))
            with torch.no_grad():
                y.mul_(2)
            return self.conv1(self.relu(y + h))

    torch.manual_seed(0)
    eager = WritesPart(False).to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(fused(eager), x), trained(eager, x))


def test_sum_that_is_written_without_a_version():
    class WritesSum(SummedConvs):
        def forward(self, x):
            h = self.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(h)) + h
            y.data.mul_(2)
            return self.conv1(y)

    torch.manual_seed(0)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    with pytest.raises(CheckpointError, match="result of a add, if code writes there without"):
        trained(fused(WritesSum(False).to(DEVICE)), x, 1)


def test_results_that_code_keeps():
    """A result that is alive in backward is read, not made again."""
    _, x = net("batch norm, in place")
    eager: Any = nn.Sequential(*chain(bn, nn.ReLU())).to(DEVICE, torch.float64)
    ours = fused(eager)
    results: list[torch.Tensor] = []
    for model in (eager, ours):
        for layer in model:
            layer.register_forward_hook(lambda _, __, y: results.append(y))
    with torch.profiler.profile() as profile:
        ours(x).square().mean().backward()
    names = [event.name for event in profile.events() or ()]
    assert names.count("aten::batch_norm") == 2
    eager(x).square().mean().backward()
    same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


def test_weights_that_hooks_make():
    def build() -> Any:
        torch.manual_seed(0)
        layers = conv(), bn(), nn.ReLU(), conv(), nn.LeakyReLU(), conv(), nn.SiLU(), conv()
        model: Any = nn.Sequential(*layers).to(DEVICE)
        nn.utils.parametrizations.weight_norm(model[3])
        nn.utils.spectral_norm(model[5])
        model[1].register_forward_hook(lambda *call: 2 * call[-1])
        model[2].register_full_backward_hook(lambda _, dx, dy: (3 * dx[0],))
        return model

    eager, ours = build(), build()
    fusedckpt.fuse(ours)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(ours, x), trained(eager, x))


@pytest.mark.parametrize("norm", [bn, group_norm])
@pytest.mark.parametrize("is_training", [True, False])
def test_vectors_of_norms_that_code_computes(norm, is_training):
    """Pruned and parametrized weights are no parameters."""
    for change in (
        lambda layer: prune.l1_unstructured(layer, "weight", amount=2),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh()),
        lambda layer: nn.utils.weight_norm(layer),
    ):
        torch.manual_seed(0)
        eager: Any = nn.Sequential(conv(), norm(), nn.SiLU(), conv()).to(DEVICE)
        ours = fused(eager)
        for model in (eager, ours):
            change(model.train(is_training)[1])
        x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
        same(trained(ours, x), trained(eager, x))


def test_statistics_that_are_replaced():
    """The recipe of a norm in evaluation reads those of its call, in whatever order they are."""

    class Replaces(SumOfLayers):
        def forward(self, x):
            self.bn1.eval()
            y = self.bn1(self.conv1(x))
            self.bn1.running_mean = torch.ones_like(self.bn1.weight)
            return self.conv2(y)

    torch.manual_seed(0)
    eager = Replaces(None).to(DEVICE)
    mean = eager.bn1.running_mean
    del eager.bn1.running_mean
    eager.bn1.register_buffer("running_mean", mean)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(fused(eager), x), trained(eager, x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_around(use_reentrant):
    eager, x = net("residual blocks")
    ours = fused(eager)

    def around(model):
        return lambda x: checkpoint(model, x, use_reentrant=use_reentrant)

    gradients = []
    for model in (ours, eager):
        y = x.clone().requires_grad_()
        around(model)(y).square().mean().backward()
        gradients.append([y.grad, *(p.grad for p in model.parameters())])
    same(*gradients)


def test_layers_that_are_left():
    """Small tensors, other calls, and nets without a cheap layer between run as they did."""
    model = nn.Sequential(conv(), bn(), nn.ReLU(), conv()).to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    eager = saved_bytes(copy.deepcopy(model), [x])
    fusedckpt.fuse(model)
    assert saved_bytes(model, [x]) < eager
    recipe_mode.FLOOR_BYTES = 1 << 20
    assert saved_bytes(model, [x]) == eager
    recipe_mode.FLOOR_BYTES = 0
    with torch.no_grad():
        assert not model(x).requires_grad
    # the result of a ReLU alone is saved by its readers
    relu = nn.Sequential(*chain(nn.Identity, nn.ReLU()))
    for left in (relu, nn.Sequential(conv(), nn.Flatten(), nn.SyncBatchNorm(C))):
        fusedckpt.fuse(left)
        assert not any(isinstance(module, SharedChannels) for module in left.modules())
    fusedckpt.unfuse(model)
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]


def test_function_between_two_layers():
    """A ReLU that the code calls saves the recipe of its result, as the layer behind it does."""

    torch.manual_seed(0)
    eager = CallsRelu().to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    ours, by_function = copy.deepcopy(eager), copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    fusedckpt.fuse(by_function, recompute_elementwise=True)
    expected = trained(eager, x)
    same(trained(ours, x), expected)
    same(trained(by_function, x), expected)
    sizes = [saved_bytes(m, [x.requires_grad_()]) for m in (eager, ours, by_function)]
    assert sizes == [3 * PICTURE + 4 * VECTOR, 2 * PICTURE + 4 * VECTOR, 2 * PICTURE + 5 * VECTOR]


class NormWithAct(nn.BatchNorm2d):
    """Calls torch's function itself, and an activation."""

    def __init__(self):
        super().__init__(C)
        self.act = nn.ReLU(inplace=True)

    def forward(self, input):
        weights = self.weight, self.bias
        return self.act(F_.batch_norm(input, self.running_mean, self.running_var, *weights, True))


class NormThenRelu(nn.GroupNorm):
    def __init__(self):
        super().__init__(2, C)

    def forward(self, input):
        return F_.relu(super().forward(input))


class CallsSilu(nn.Module):
    def forward(self, x):
        return F_.silu(x)


class WritesSilu(nn.Module):
    def forward(self, x):
        return doubled(F_.silu(x))


@pytest.mark.parametrize(
    ("layer", "num_gone"), [(NormWithAct, 1), (NormThenRelu, 1), (CallsSilu, 1), (WritesSilu, 0)]
)
def test_own_code_makes_the_only_result(layer, num_gone):
    """A norm or an activation in code of a model's own is found by its node, whatever its class."""
    torch.manual_seed(0)
    eager = nn.Sequential(conv(), layer(), conv()).to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    ours = fused(eager)
    same(trained(ours, x), trained(eager, x))
    sizes = [saved_bytes(model, [x.requires_grad_()]) for model in (eager, ours)]
    assert sizes[0] - sizes[1] == num_gone * PICTURE


class MixMLP(nn.Module):
    """Linears around a convolution of the rows, as pictures that are views of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(C), nn.Linear(C, 2 * C)
        self.conv = nn.Conv2d(2 * C, 2 * C, 3, padding=1, groups=2 * C)
        self.act, self.fc2 = nn.GELU(), nn.Linear(2 * C, C)

    def forward(self, x):
        rows = x.flatten(2).transpose(1, 2)
        h = self.fc1(self.norm(rows))
        pictures = h.transpose(1, 2).view(N, 2 * C, SIDE, SIDE)
        h = self.act(self.conv(pictures).flatten(2).transpose(1, 2))
        return rows + self.fc2(h)


class MLPBesideConv(nn.Module):
    """An activation behind a linear, beside a convolution."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(SIDE), nn.Linear(SIDE, SIDE)
        self.act, self.fc2, self.conv = nn.GELU(), nn.Linear(SIDE, SIDE), conv()

    def forward(self, x):
        return x + self.conv(self.fc2(self.act(self.fc1(self.norm(x)))))


class SeriesMLP(nn.Module):
    """Convolutions of size 1 on transposed views, and a function that is an attribute."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(C), F_.gelu
        self.conv1, self.conv2 = nn.Conv1d(C, 2 * C, 1), nn.Conv1d(2 * C, C, 1)

    def forward(self, x):
        rows = self.norm(x.flatten(2).transpose(1, 2))
        h = self.act(self.conv1(rows.transpose(1, 2)))
        return rows + self.conv2(h).transpose(1, 2)


# eager's pictures: rows behind the norm, those of 2 C behind fc1, the convolution and GELU
@pytest.mark.parametrize(
    ("block", "num_gone", "num_rows"),
    [
        (MixMLP, 1 + 2 + 2, SIDE * SIDE),
        (MLPBesideConv, 1 + 1 + 1, C * SIDE),
        (SeriesMLP, 1 + 2, SIDE * SIDE),
    ],
)
def test_blocks_with_linears_and_convolutions(block, num_gone, num_rows):
    torch.manual_seed(0)
    eager = nn.Sequential(conv(), block()).to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    ours = fused(eager)
    for _ in range(2):
        trained_alike(ours, eager, x)
    sizes = [saved_bytes(model, [x.requires_grad_()]) for model in (eager, ours)]
    # and statistics of the norm
    assert sizes[0] - sizes[1] == num_gone * PICTURE + 2 * 8 * N * num_rows


def trained_alike(ours: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    """Compare three steps: a norm of ours rounds otherwise than torch's."""
    for a, b in zip(trained(ours, x), trained(eager, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def written_in_between(model, h):
    with torch.no_grad():
        h.mul_(2)
    return F_.silu(h)


def written_and_freed(model, h):
    return F_.relu(doubled(h))


def written_result(model, h):
    return doubled(F_.silu(h))


def written_behind_two(model, h):
    return doubled(F_.silu(F_.silu(h)))


def written_sum(model, h):
    return doubled(F_.silu(h) + F_.silu(2 * h))


def with_a_hook_on_a_result(model, h):
    y = F_.relu(h)
    y.register_hook(lambda dy: 2 * dy)
    return y


def kept_by_code(model, h):
    model.part = F_.relu(h)
    return model.part


def vectors(model):
    return model.bn.weight, model.bn.bias


def running(model):
    return model.bn.running_mean, model.bn.running_var


# what code calls between a norm and a convolution, and how many pictures less are saved
FUNCTIONS: dict[str, tuple[Any, int]] = {
    "relu": (lambda model, h: F_.relu(h), 1),
    "in place": (lambda model, h: F_.relu(h, inplace=True), 1),
    "silu": (lambda model, h: F_.silu(h), 2),
    "silu in place": (lambda model, h: F_.silu(h, inplace=True), 2),
    "gelu": (lambda model, h: F_.gelu(h, approximate="tanh"), 2),
    "leaky relu in place": (lambda model, h: F_.leaky_relu(h, 0.3, inplace=True), 1),
    "elu": (lambda model, h: F_.elu(h, 0.3), 2),
    "tanh of silu": (lambda model, h: F_.silu(h).tanh(), 2),
    "relu of a sum": (lambda model, h: F_.relu(F_.relu(h) + h), 2),
    "relu of a sum in place": (lambda model, h: F_.relu_(h.add_(h)), 1),
    "written": (written_in_between, 1),
    "written and freed": (written_and_freed, 0),
    "result written": (written_result, 1),
    # conv2 saves the result
    "written behind two": (written_behind_two, 2),
    "written sum": (written_sum, 2),
    "hook": (with_a_hook_on_a_result, 0),
    "kept": (kept_by_code, 1),
    "pool": (lambda model, h: F_.avg_pool2d(F_.relu(h), 3, 1, 1), 0),
    "product": (lambda model, h: F_.relu(h) * 2, 2),
    "behind a product": (lambda model, h: F_.relu(h * 2), 1),
    "silu behind a product": (lambda model, h: F_.silu(h * 2), 2),
    "part": (lambda model, h: F_.relu(h[:, :2]).repeat(1, 2, 1, 1), 0),
    # the sum is saved, and the recipe of the second ReLU
    "detached": (lambda model, h: F_.relu(h.detach()) + F_.relu(h), 1),
    # a factor [N, C, 1, 1] is small
    "gate": (lambda model, h: F_.silu(h) * h.mean((2, 3), keepdim=True).sigmoid(), 3),
    "gate in place": (lambda model, h: F_.silu(h).mul_(h.mean((2, 3), keepdim=True).sigmoid()), 3),
    "scale and shift": (lambda model, h: F_.silu(h * model.conv1.weight[0, 0, 0, 0] + h), 3),
    "square": (lambda model, h: h * h, 2),
    # of one picture, with the strides of all
    "product of others": (lambda model, h: F_.silu(h) * (h[:1].sigmoid() * h[1:2].tanh()), 3),
    "noise": (lambda model, h: F_.dropout(F_.relu(h), 0.5), 2),
    "batch norm": (
        lambda model, h: F_.relu(F_.batch_norm(h, None, None, *vectors(model), True)),
        2,
    ),
    "running": (lambda model, h: F_.relu(F_.batch_norm(h, *running(model), *vectors(model))), 2),
    "frozen bias": (
        lambda model, h: F_.relu(F_.group_norm(h, 2, vectors(model)[0], h[0, :, 0, 0])),
        0 if LACKS_EPS else 1,
    ),
    "group norm": (
        lambda model, h: F_.silu(F_.group_norm(h, 2, *vectors(model))),
        1 if LACKS_EPS else 3,
    ),
    "group norm alone": (lambda model, h: F_.relu(F_.group_norm(h, 2)), 0 if LACKS_EPS else 2),
}


class CallsFunctions(nn.Module):
    def __init__(self, run: Any):
        super().__init__()
        self.conv1, self.bn, self.conv2, self.run = conv(), bn(), conv(), run

    def forward(self, x):
        return self.conv2(self.run(self, self.bn(self.conv1(x))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_between_two_layers(name):
    """They are found by their nodes, when the convolution reads their result."""
    run, num_gone = FUNCTIONS[name]
    torch.manual_seed(0)
    eager = CallsFunctions(run).to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    for _ in range(2):
        same(trained(ours, x), trained(eager, x))
    eager, ours = (saved_bytes(model, [x.requires_grad_()]) for model in (eager, ours))
    # and small factors
    assert eager - ours == pytest.approx(num_gone * PICTURE, abs=5 * VECTOR)


@pytest.fixture
def eps_untold(monkeypatch):
    """Nodes of group norms without eps, as from torch 2.14 on."""
    caches = private_nodes.tells_norm, node_recipes.tells_function
    monkeypatch.setattr(private_nodes, "LACKS_EPS", True)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("name", "num_gone"),
    # a SiLU's result is one more tensor beside its input, a ReLU saves no other
    [("group norm", 1), ("group norm alone", 0)],
)
def test_norms_of_code_whose_nodes_tell_no_eps(name, num_gone, eps_untold):
    """They have no recipe; the function behind them has one."""
    run, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    eager = CallsFunctions(run).to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    same(trained(ours, x), trained(eager, x))
    eager, ours = (saved_bytes(model, [x.requires_grad_()]) for model in (eager, ours))
    assert eager - ours == num_gone * PICTURE


def test_layers_of_norms_whose_nodes_tell_no_eps(eps_untold):
    """The layers tell theirs, as it is in the call."""

    def changed(model, h):
        y = model.norm(h)
        model.norm.eps /= 2
        return F_.silu(y)

    eager: Any = CallsFunctions(changed).to(DEVICE, torch.float64)
    _, x = net("group norm, SiLU")
    eager.bn, eager.norm = nn.Identity(), nn.GroupNorm(2, C, eps=0.5).to(x)
    ours = fused(eager)
    same(trained(ours, x), trained(eager, x))
    sizes = sizes_of(eager, ours, x)
    assert sizes[0] - sizes[1] == 2 * PICTURE


def test_functions_of_small_results_are_left():
    eager = CallsRelu().to(DEVICE)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    trained(ours, x, 1)
    sizes = []
    for recipe_mode.FLOOR_BYTES in (x.nbytes, x.nbytes + 1):
        sizes.append(saved_bytes(ours, [x.requires_grad_()]))
    assert sizes[1] - sizes[0] == x.nbytes
    # but for sums
    ours = fused(CallsFunctions(lambda model, h: h + h).to(DEVICE))
    trained(ours, x.detach(), 1)
    sizes = []
    for recipe_mode.FLOOR_BYTES in (4 * x.nbytes, 4 * x.nbytes + 1):
        sizes.append(saved_bytes(ours, [x.requires_grad_()]))
    assert sizes[1] - sizes[0] == x.nbytes


@pytest.mark.parametrize("name", ["batch norm, in place", "group norm, SiLU", "residual blocks"])
def test_mode_of_recipes_saves_no_more_than_layers(name, monkeypatch):
    model = NETS[name][0]().to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    # between the sizes that layers and that the mode take
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 2 * x.nbytes)
    ours, both = copy.deepcopy(model), copy.deepcopy(model)
    fusedckpt.fuse(ours)
    fusedckpt.fuse(both, recompute_elementwise=True)
    same(trained(both, x), trained(model, x))
    sizes = [saved_bytes(each, [x.requires_grad_()]) for each in (model, ours, both)]
    assert sizes[0] > sizes[1] == sizes[2]


def test_functions_whose_results_are_written_without_a_version():
    def write(model, h):
        h = F_.relu(h)
        h.data.mul_(2)
        return h

    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    ours = CallsFunctions(write).to(DEVICE)
    fusedckpt.fuse(ours)
    with pytest.raises(CheckpointError, match="without a version"):
        trained(ours, x)


def test_write_of_a_module_between_layers_of_a_sequence():
    class DoublesByData(nn.Module):
        def forward(self, h):
            h.data.mul_(2)
            return h

    torch.manual_seed(0)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    for layers in (
        [DoublesByData()],
        [DoublesByData(), nn.Dropout(0.0)],
        [nn.Dropout(0.0), DoublesByData()],
    ):
        model = nn.Sequential(conv(), bn(), *layers, nn.SiLU(), conv()).to(DEVICE)
        fusedckpt.fuse(model)
        with pytest.raises(CheckpointError, match="without a version"):
            trained(model, x, 1)


def test_sequence_takes_no_samples(monkeypatch):
    """Between two of its layers no code of others runs."""

    def fail(*_):
        raise AssertionError

    for name in ("batch norm, in place", "group norm, SiLU", "pools"):
        eager, x = net(name)
        model = fused(eager)
        # the first step is observed by hooks
        trained(model, x, 1)
        with monkeypatch.context() as patch:
            patch.setattr(recipes, "CHECKS", [fail])
            trained(model, x, 1)


def test_report_after_a_step_tells_what_recipes_would_save():

    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn, self.conv2 = conv(), bn(), conv()

        def forward(self, x):
            return self.conv2(self.bn(self.conv1(x)).clamp(min=0))

    model = Clamps().to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    recipes_alone = copy.deepcopy(model)
    report = fusedckpt.fuse(model)
    assert "recompute_elementwise=True:" not in str(report)
    model(x).sum().backward()
    fusedckpt.fuse(recipes_alone, recompute_elementwise=True)
    with saved_tensors([x, *model.buffers()]) as now:
        model(x)
    with saved_tensors([x, *recipes_alone.buffers()]) as after:
        recipes_alone(x)
    assert f"less is saved, {now.nbytes:,} -> {after.nbytes:,} bytes a step" in str(report)


def test_layers_take_few_calls():
    """Calls, C's included, of a convolution, batch norm and ReLU in a forward beside eager's."""
    layers = [layer for _ in range(4) for layer in (conv(), bn(), nn.ReLU(inplace=True))]
    eager = nn.Sequential(conv(), *layers).to(DEVICE)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    for _ in range(2):
        ours(x).sum().backward()
    assert calls(lambda: ours(x)) - calls(lambda: eager(x)) <= 4 * 193


def test_an_estimate_has_the_bytes_of_a_report():
    model, x = net("residual blocks")
    ours = fused(model)
    with torch.device(DEVICE):
        eager, report = fusedckpt.report(model, x), fusedckpt.report(ours, x)
    assert fusedckpt.estimate(ours, x).saved_bytes == report.saved_bytes < eager.saved_bytes


@pytest.mark.parametrize("name", ["batch norm, in place", "residual blocks"])
def test_traced_and_compiled(name):
    """Under a compiler or a trace the layers run as they did."""
    eager, x = net(name, torch.float32)
    ours = fused(eager)
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    same(trained(compiled, x, 1), trained(eager, x, 1))
    trace: Any = torch.jit.trace(ours.eval(), x)
    same([trace(x)], [eager.eval()(x)])


def sizes_of(eager: nn.Module, ours: nn.Module, x: torch.Tensor) -> list[int]:
    """Return the bytes that a net saves in eager and fused; both keep their states."""
    return [saved_bytes(copy.deepcopy(model), [x.requires_grad_()]) for model in (eager, ours)]


ACTIVATIONS: tuple[Any, ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus),
)
NOT_IN_PLACE = nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_behind_a_norm(act: Any):
    """Of each only the norm's input and statistics stay."""
    kinds: list[dict[str, Any]] = [{}] if act in NOT_IN_PLACE else [{}, {"inplace": True}]
    for options in kinds:
        torch.manual_seed(0)
        eager = nn.Sequential(conv(), bn(), act(**options), conv()).to(DEVICE, torch.float64)
        x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
        ours = fused(eager)
        assert sizes_of(eager, ours, x)[1] == 2 * PICTURE + 4 * VECTOR
        same(trained(ours, x.detach(), 1), trained(eager, x.detach(), 1))


@pytest.mark.parametrize(
    "act", [act for act in ACTIVATIONS if act not in (nn.ReLU, nn.Sigmoid, nn.Tanh)]
)
def test_every_activation_without_a_norm(act):
    """It saves its input, and the convolution behind it nothing more."""
    torch.manual_seed(0)
    eager: Any = nn.Sequential(conv(), act(), conv()).to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    ours = fused(eager)
    assert sizes_of(eager, ours, x) == [3 * PICTURE, 2 * PICTURE]
    same(trained(ours, x.detach(), 1), trained(eager, x.detach(), 1))
    if act not in NOT_IN_PLACE:
        # some save their result then, of which nothing else makes it
        eager[1].inplace = ours[1].inplace = True
        same(trained(ours, x.detach(), 1), trained(eager, x.detach(), 1))


# layers that read channels, by the number of dimensions of a picture
READERS: dict[str, tuple[int, Any]] = {
    "conv1d": (1, lambda: nn.Conv1d(C, C, 3)),
    "conv3d": (3, lambda: nn.Conv3d(C, C, 3)),
    "conv transpose1d": (1, lambda: nn.ConvTranspose1d(C, C, 3)),
    "conv transpose2d": (2, lambda: nn.ConvTranspose2d(C, C, 2, 2)),
    "conv transpose3d": (3, lambda: nn.ConvTranspose3d(C, C, 3)),
    "largest2d": (2, lambda: nn.MaxPool2d(2)),
    "largest3d": (3, lambda: nn.MaxPool3d(2)),
    "mean": (2, lambda: nn.AdaptiveAvgPool2d(2)),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader(name):
    """What it reads behind a norm and an activation is not saved."""
    num_dims, reader = READERS[name]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[num_dims - 1]
    eager = nn.Sequential(norm(C), nn.SiLU(), reader()).to(DEVICE, torch.float64)
    x = torch.randn(N, C, *(SIDE,) * num_dims, dtype=torch.float64, device=DEVICE)
    ours = fused(eager)
    sizes = sizes_of(eager, ours, x)
    # the result of the norm, and of the activation, as large as the input; not what "mean" saves
    assert sizes[0] - sizes[1] == x.nbytes * 2
    same(trained(ours, x.detach(), 1), trained(eager, x.detach(), 1))


def test_calls_with_options():
    """A transposed convolution takes the size of its result."""

    class TakesSize(SumOfLayers):
        def forward(self, x):
            h = self.act(self.bn1(self.conv1(x)))
            size = [2 * SIDE + 2, 2 * SIDE + 2]
            return self.conv2(self.write(h, size) + self.write(h, output_size=size))

    torch.manual_seed(0)
    eager = TakesSize(nn.ConvTranspose2d(C, C, 3, 2)).to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(fused(eager), x), trained(eager, x))


def test_masks_as_a_gpu_saves_them(monkeypatch):
    """Dropout on a GPU saves a mask of booleans, and scales."""
    native = lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]  # noqa: E731
    monkeypatch.setattr(F_, "dropout", native)
    torch.manual_seed(0)
    eager: Any = nn.Sequential(conv(), bn(), nn.SiLU(), nn.Dropout(0.3), conv())
    eager = eager.to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    same(trained(ours, x), trained(eager, x))
    sizes = sizes_of(eager, ours, x)
    assert sizes[0] - sizes[1] == 2 * PICTURE


def test_convolutions_that_are_left():
    """Those that pad by another function, and those of which a class changes the product."""

    class Halved(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input / 2, weight, bias)

    reflecting = nn.Conv2d(C, C, 3, padding=1, padding_mode="reflect")
    for left in (reflecting, Halved(C, C, 3)):
        model = nn.Sequential(conv(), bn(), nn.SiLU(), left, nn.SiLU(), conv()).to(DEVICE)
        ours = copy.deepcopy(model)
        fusedckpt.fuse(ours)
        assert not isinstance(ours[3], SharedChannels)
        x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
        same(trained(ours, x, 1), trained(model, x, 1))


def test_a_level_that_saves_more_leaves_layers():
    eager, x = net("batch norm, in place")
    ours = fused(eager)
    with fusedckpt.saving("preact"):
        sizes = sizes_of(eager, ours, x)
    assert sizes[0] == sizes[1]
    with fusedckpt.saving("inputs"):
        assert sizes_of(eager, ours, x)[1] < sizes[0]


@pytest.mark.parametrize("name", ["batch norm, in place", "group norm, SiLU", "no norm, GELU"])
def test_bytes_under_autocast(name):
    """A convolution's input in bfloat16 is a cast of what the recipe makes."""
    eager, x = net(name, torch.float32)
    ours = fused(eager)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        sizes = sizes_of(eager, ours, x)
    num_gone = {"batch norm, in place": 2, "group norm, SiLU": 4, "no norm, GELU": 2}[name]
    # in bfloat16
    assert sizes[0] - sizes[1] == num_gone * PICTURE // 4


def test_cast_of_a_recipe():
    """A norm of float32 under autocast: the convolution saves the recipe of its cast input."""
    torch.manual_seed(0)
    eager = nn.Sequential(bn(), nn.SiLU(), conv()).to(DEVICE)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        sizes = sizes_of(eager, ours, x)
        same(trained(ours, x.detach()), trained(eager, x.detach()))
    # the norm's result, and that of SiLU in bfloat16
    assert sizes[0] - sizes[1] == PICTURE // 2 + PICTURE // 4


def test_recipes_end_with_autocast():
    """A layer called inside, whose result is read outside, runs again as it ran."""

    class LeavesAutocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm, self.act, self.conv2 = conv(), group_norm(), nn.SiLU(), conv()
            self.soft = nn.Softplus()

        def forward(self, x):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                h = self.soft(self.act(self.norm(self.conv1(x))))
            return self.conv2(h.float()) + self.conv2(self.act(h.float() + h.float()))

    torch.manual_seed(0)
    eager = LeavesAutocast().to(DEVICE)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(fused(eager), x), trained(eager, x))


class SumOfLayers(nn.Module):
    """A sum of the results of two layers, behind code that may write to them."""

    def __init__(self, write: Any):
        super().__init__()
        self.conv1, self.bn1, self.act = conv(), bn(), nn.SiLU()
        self.conv2, self.bn2, self.conv3 = conv(), bn(), conv()
        self.write = write

    def forward(self, x):
        h = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(h))
        return self.conv3(self.act(self.write(self, y, h)))


@torch.no_grad()
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def with_part_doubled(model, y, h):
    doubled(y)
    # the part is freed before a layer reads the sum
    return y + h


def with_part_kept(model, y, h):
    model.part = y
    doubled(y)
    return y + h


def with_sum_doubled(model, y, h):
    return doubled(y + h)


def with_sum_in_place_doubled(model, y, h):
    y += h
    return doubled(y)


def with_bias_written(model, y, h):
    with torch.no_grad():
        model.bn2.bias.add_(1)
    return y + h


def with_another_shape(model, y, h):
    return y + model.act(h.mean((2, 3), keepdim=True))


def with_another_dtype(model, y, h):
    return y + model.act(h.half())


def with_factor(model, y, h):
    return torch.add(y, h, alpha=2)


def with_itself(model, y, h):
    y += y
    return y


def with_a_hook(model, y, h):
    y = y + h
    y.register_hook(lambda dy: 2 * dy)
    return y


# what code does with two layers' results, and whether the layer behind saves the recipe of the sum
SUMS: dict[str, tuple[Any, bool]] = {
    "sum": (lambda model, y, h: y + h, True),
    "in place": (lambda model, y, h: y.add_(h), True),
    "itself": (with_itself, True),
    "part written": (with_part_doubled, False),
    "part kept and written": (with_part_kept, False),
    "sum written": (with_sum_doubled, False),
    "sum in place written": (with_sum_in_place_doubled, False),
    "bias written": (with_bias_written, False),
    "another shape": (with_another_shape, False),
    "another dtype": (with_another_dtype, False),
    "factor": (with_factor, False),
    "hook": (with_a_hook, False),
    "number": (lambda model, y, h: y + 1, False),
    "constant": (lambda model, y, h: y + torch.ones_like(h), False),
    "view": (lambda model, y, h: (y + h)[:, :, 1:], True),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_code_writes(name):
    write, is_recipe = SUMS[name]
    torch.manual_seed(0)
    eager = SumOfLayers(write).to(DEVICE)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(ours, x), trained(eager, x))
    whole = fused(SumOfLayers(lambda model, y, h: y + h).to(DEVICE))
    eager, ours, whole = (saved_bytes(m, [x.requires_grad_()]) for m in (eager, ours, whole))
    assert (ours == whole) == is_recipe
    assert ours <= eager


@torch.no_grad()
def with_one_written(x):
    # no sample
    x.view(-1)[1] = 7
    return x


# what code does with two layers' results, one element of a function's result written in between
WRITTEN_IN_BETWEEN: dict[str, Any] = {
    "sum": lambda model, y, h: F_.relu(with_one_written(y + h)),
    "sum in place": lambda model, y, h: F_.relu_(with_one_written(y + h)),
    "part of a sum": lambda model, y, h: with_one_written(y + h) + h,
    "part of a product": lambda model, y, h: with_one_written(y + h) * h,
    "factor of a sum": lambda model, y, h: with_one_written(y * model.conv1.weight[0, 0, 0, 0]) + h,
    "input": lambda model, y, h: F_.silu(with_one_written(y + h)),
    "copy of an input": lambda model, y, h: F_.silu(with_one_written(F_.gelu(y)), inplace=True),
    "copy of a factor": lambda model, y, h: with_one_written(F_.gelu(y)).mul_(h),
    "result": lambda model, y, h: with_one_written(F_.silu(y.tanh())),
    "input of another reader": lambda model, y, h: F_.relu(with_one_written(F_.silu(y))),
    "norm": lambda model, y, h: F_.relu(with_one_written(F_.group_norm(y + h, 2))),
    "product in place": lambda model, y, h: with_one_written(y.mul_(F_.relu(y))),
}


@pytest.mark.parametrize("name", WRITTEN_IN_BETWEEN)
def test_few_elements_written_between_functions(name):
    """All values of a recipe are compared once: samples may not have those elements."""
    torch.manual_seed(0)
    eager = SumOfLayers(WRITTEN_IN_BETWEEN[name]).to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    same(trained(fused(eager), x), trained(eager, x))


def test_values_are_compared_once(monkeypatch):
    """Another number of writes is another program."""
    num_compared = []

    def counted(*args):
        num_compared.append(args)
        return samples.are_alike(*args)

    monkeypatch.setattr(recipes, "COMPARISONS", [counted])

    def write(model, y, h):
        y = F_.silu(F_.relu(y + h).tanh())
        return with_one_written(y) if model.is_written else y

    torch.manual_seed(0)
    eager: Any = SumOfLayers(write).to(DEVICE, torch.float64)
    eager.is_written = False
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    for model in (eager, ours):
        trained(model, x)
    # the result of ReLU, of which no reader has the sum
    assert len(num_compared) == 1
    ours.is_written = eager.is_written = True
    same(trained(ours, x), trained(eager, x))
    assert len(num_compared) == 2


def test_a_write_that_begins_to_change_values():
    """A result that was written more often than functions write is saved from the first step."""

    @torch.no_grad()
    def clamped(x, most):
        return x.clamp_(max=most)

    torch.manual_seed(0)
    write = lambda model, y, h: clamped(F_.silu(y), model.most)  # noqa: E731
    eager: Any = SumOfLayers(write).to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    for most in (float("inf"), 2.0):
        eager.most = ours.most = most
        same(trained(ours, x), trained(eager, x))


def test_a_bias_that_is_written_behind_a_function():
    """A norm does not save its bias, and nothing tells with which one it ran."""

    class WritesBias(nn.Module):
        is_written = False

        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.act = conv(), conv(), nn.SiLU()
            self.scale, self.shift = (nn.Parameter(torch.rand(C)) for _ in range(2))

        def forward(self, x):
            y = F_.batch_norm(self.conv1(x), None, None, self.scale, self.shift, True)
            if self.is_written:
                with torch.no_grad():
                    self.shift[1] += 1
            return self.act(self.conv2(y))

    torch.manual_seed(0)
    eager = WritesBias().to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    for is_written in (False, True):
        WritesBias.is_written = is_written
        ours = fused(eager)
        same(trained(ours, x), trained(eager, x))
        sizes = sizes_of(eager, ours, x)
        assert sizes[0] - sizes[1] == (0 if is_written else PICTURE)


def test_a_factor_written_without_a_version():
    """It is saved by the product alone, as the convolution behind has no gradient of its weight."""

    def write(model, y, h):
        y = y + h
        y.data.mul_(2)
        return y * h

    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    model = SumOfLayers(write).to(DEVICE)
    model.act = nn.Identity()  # type: ignore[assignment]
    model.conv3.weight.requires_grad_(False)
    ours = fused(model)
    # the first step is observed by hooks
    with pytest.raises(CheckpointError, match="without a version"):
        trained(ours, x, 2)


class ReadTwice(SumOfLayers):
    """Two convolutions read results of one function."""

    def forward(self, x):
        h = self.bn1(self.conv1(x))
        y = F_.relu(self.bn2(self.conv2(x)) + h)
        return self.conv3(self.write(self, y, h)) + self.conv3(y + h)


def test_results_of_functions_with_several_readers():
    """All of them save one recipe, and its value is made once."""
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    for write, num_gone in ((lambda model, y, h: y, 2), (lambda model, y, h: y.tanh(), 3)):
        torch.manual_seed(0)
        eager = ReadTwice(write).to(DEVICE, torch.float64)
        ours = fused(eager)
        same(trained(ours, x), trained(eager, x))
        sizes = sizes_of(eager, ours, x)
        assert sizes[0] - sizes[1] == num_gone * PICTURE
        loss = ours(x).square().mean()
        with torch.profiler.profile() as profile:
            loss.backward()
        names = [event.name for event in profile.events() or ()]
        assert names.count("aten::relu") == 1


def test_parts_with_other_strides():
    """A sum of a tensor with channels last and another is contiguous; both are read once more."""

    class Mixed(CallsFunctions):
        def forward(self, x):
            h = self.bn(self.conv1(x))
            a, b = self.run(h), h.contiguous()
            y = self.conv2(F_.silu(b) + h) + self.conv2(a + b)
            return y + self.conv2(a) + self.conv2(h) + self.conv2(F_.relu(h + a) * b)

    for act in (nn.ReLU(), nn.SiLU(), nn.Hardswish(), F_.relu):
        torch.manual_seed(0)
        eager: Any = Mixed(act).to(DEVICE, torch.float64)
        eager = eager.to(memory_format=torch.channels_last)
        x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
        x = x.contiguous(memory_format=torch.channels_last)
        same(trained(fused(eager), x), trained(eager, x))


def test_long_sequences_end_at_a_saved_sum():
    """Backward makes no more than twelve values for one."""

    class AddsOften(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = conv(), bn(), nn.SiLU()

        def forward(self, x):
            h = self.act(self.bn(self.conv(x)))
            for _ in range(14):
                h = self.act(h + h)
            return self.conv(h)

    torch.manual_seed(0)
    eager = AddsOften().to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    # the input, that of the norm, and the sums at twelve and twenty-four functions
    assert sizes_of(eager, ours, x)[1] == 4 * PICTURE + 4 * VECTOR
    same(trained(ours, x.detach(), 1), trained(eager, x.detach(), 1))


def test_dropout_that_returns_its_input():
    """Behind another one, whose noise is saved, it saves nothing."""
    for last in (nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout(0.0, inplace=True)):
        torch.manual_seed(0)
        layers = conv(), nn.SiLU(), nn.Dropout(0.5), last, conv()
        eager = nn.Sequential(*layers).to(DEVICE)
        ours = fused(eager)
        x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
        values = []
        for model in (ours, eager):
            torch.manual_seed(1)
            model(x).square().mean().backward()
            values.append([p.grad for p in model.parameters()])
        same(*values)


def test_layer_in_place_on_a_part_of_a_tensor():
    """The storage of a part has more than the layer makes."""

    class TakesPart(nn.Module):
        def __init__(self, act: nn.Module):
            super().__init__()
            self.conv1, self.bn, self.act, self.conv2 = conv(), bn(), act, conv(C // 2)

        def forward(self, x):
            h = self.bn(self.conv1(x))
            part = torch.cat([h, h])[:, : C // 2]
            return self.conv2(self.act(part))

    for act in (nn.ReLU(True), nn.SiLU(True), nn.ELU(0.1, True), nn.Dropout(0.5, True)):
        torch.manual_seed(0)
        eager = TakesPart(act).to(DEVICE)
        x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
        same(trained(fused(eager), x), trained(eager, x))


def test_norm_beside_layers_of_channels():
    """An activation behind a fused norm saves that norm's input, as without convolutions."""
    layers = conv(), nn.LayerNorm(SIDE), nn.SiLU(), nn.Linear(SIDE, SIDE)
    eager = nn.Sequential(*layers, conv(), bn(), nn.SiLU(), conv()).to(DEVICE, torch.float64)
    ours = fused(eager)
    x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, device=DEVICE)
    assert sizes_of(eager, ours, x)[1] == 4 * PICTURE + 4 * VECTOR


def test_graph_of_a_trace():
    """make_fx writes the operators of eager's forward and backward down, and no more."""

    def step(model):
        return lambda x: torch.autograd.grad(model(x).square().sum(), [*model.parameters()])

    eager, x = net("batch norm, in place")
    ours = fused(eager)
    graphs = [make_fx(step(model))(x) for model in (eager, ours)]
    names = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    assert names[0] == names[1]


def test_transforms_of_functions():
    eager, x = net("group norm, SiLU")
    ours = fused(eager)
    values = []
    for model in (eager, ours):
        parameters = dict(model.named_parameters())

        def loss(parameters, x, model=model):
            return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        values.append([*gradients.values()])
    same(*values)


def test_batch_norm_without_weights_in_bfloat16():
    """Its statistics have the dtype of the running ones."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(C, affine=False)
    eager = nn.Sequential(conv().bfloat16(), norm, nn.SiLU(), conv().bfloat16()).to(DEVICE)
    x = 10 + torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)
    same(trained(fused(eager), x), trained(eager, x))


def test_values_are_made_once():
    """Both of a value's readers read it before it is freed."""
    for name in ("batch norm, in place", "residual blocks"):
        eager, x = net(name)
        ours = fused(eager)
        trained(ours, x, 1)
        num_calls = []
        for model in (eager, ours):
            with torch.profiler.profile() as profile:
                model(x).square().mean().backward()
            names = [event.name for event in profile.events() or ()]
            num_calls.append(names.count("aten::batch_norm"))
        assert num_calls[1] <= 2 * num_calls[0]


def test_functions_that_other_code_replaces(monkeypatch):
    """Nodes of other functions tell no recipe."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, *dy):
            return 2 * dy[0]

    layers = conv(), nn.SiLU(), conv(), nn.GELU(), conv(), bn(), nn.ReLU(), conv()
    eager = nn.Sequential(*layers).to(DEVICE)
    ours = fused(eager)
    batch_norm = F_.batch_norm
    monkeypatch.setattr(F_, "batch_norm", lambda x, *args: Scaled.apply(batch_norm(x, *args)))
    monkeypatch.setattr(F_, "silu", lambda x, inplace=False: x.sigmoid() * x)
    monkeypatch.setattr(F_, "gelu", lambda x, approximate="none": Scaled.apply(x))
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE)
    same(trained(ours, x), trained(eager, x))
