"""Convolutions, batch and group norms, activations and pools save recipes of their inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import DEVICE, calls, peak_of_step, saved_bytes
from torch import nn
from torch.nn import functional as F_
from torch.utils.checkpoint import CheckpointError, checkpoint

import fusedckpt
from fusedckpt.autograd import recipes
from fusedckpt.fusing import recipe_mode
from fusedckpt.fusing.shared_channels import SharedChannels
from fusedckpt.memory import saved_tensors

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


def test_functions_between_layers_take_no_recipe():
    """A ReLU that the code calls saves its result; recipes of all functions make it again."""

    torch.manual_seed(0)
    eager = CallsRelu().to(DEVICE, torch.float64)
    x = torch.randn(N, C, SIDE, SIDE, device=DEVICE, dtype=torch.float64)
    ours, by_function = copy.deepcopy(eager), copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    fusedckpt.fuse(by_function, recompute_elementwise=True)
    sizes = [saved_bytes(m, [x.requires_grad_()]) for m in (eager, ours, by_function)]
    assert sizes == [3 * PICTURE + 4 * VECTOR, 3 * PICTURE + 4 * VECTOR, 2 * PICTURE + 5 * VECTOR]
    same(trained(by_function, x.detach()), trained(eager, x.detach()))


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
    model = CallsRelu().to(DEVICE)
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
    assert calls(lambda: ours(x)) - calls(lambda: eager(x)) <= 4 * 235


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
