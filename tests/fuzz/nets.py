"""Random convolutional nets: a forward of its own each, fused against eager, bit by bit.

Their code calls layers and functions, writes to tensors, hooks, keeps and frees them. Eager runs
first: a net that raises there, as the writes of some do, proves nothing.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedckpt
from fusedckpt.recipes import recipe_mode

# pictures, channels, and their side
N, C, SIDE = 2, 4, 6
ACTIVATIONS: tuple[Any, ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU),
)
LAYERS: tuple[Callable[[random.Random], nn.Module], ...] = (
    lambda r: nn.Conv2d(C, C, 3, padding=1, groups=r.choice((1, 2, 4))),
    lambda r: nn.Conv2d(C, C, 1, bias=False),
    lambda r: nn.ConvTranspose2d(C, C, 3, padding=1),
    lambda r: nn.BatchNorm2d(C, affine=r.random() < 0.8, track_running_stats=r.random() < 0.8),
    lambda r: nn.GroupNorm(r.choice((1, 2, 4)), C, affine=r.random() < 0.8),
    lambda r: r.choice(ACTIVATIONS)(inplace=r.random() < 0.4),
    lambda r: r.choice((nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus))(),
    lambda r: r.choice((nn.Dropout, nn.Dropout2d))(r.choice((0.0, 0.3)), r.random() < 0.3),
    lambda r: r.choice((nn.AvgPool2d, nn.MaxPool2d))(3, 1, 1),
)
# functions of one tensor; the last ones write to it
FUNCTIONS = (
    *("F.relu({})", "F.silu({})", "F.gelu({})", "{}.tanh()", "{}.sigmoid()", "{} * 1.5"),
    *("F.group_norm({}, 2, self.w, self.b)", "F.dropout({}, 0.3)", "{}.detach()", "{}[:]"),
    *("F.batch_norm({}, None, None, self.w, self.b, True)", "{}.transpose(2, 3)", "{}.clone()"),
    *("F.avg_pool2d({}, 3, 1, 1)", "{} * self.scale", "{}.contiguous()", "{}.flip(1)"),
    *("{}.relu_()", "F.silu({}, inplace=True)", "{}.mul_(0.5)"),
    *(3 * ("write({})",)),
)
# of two; the first of the last one may be written
JOINTS = (
    *("{} + {}", "{} + {}", "{} * {}", "{} * {}.mean((2, 3), keepdim=True).sigmoid()"),
    *("{} - {}", "self.join(torch.cat([{}, {}], 1))", "torch.add({}, {}, alpha=2)", "{}.add_({})"),
)
STATEMENTS = (
    *("{0} += {1}", "{0}.register_hook(lambda dy: 2 * dy)", "self.kept.append({0})", "write({0})"),
    *("F.relu_({0})", "self.sums.append({0}.square().mean())", "{0}[:, 0] = 0", "del {1}"),
)


@torch.no_grad()
def write(x: Tensor) -> Tensor:
    """Write to one element, which no sample has; torch 2.13 crashes at hooks of views then."""
    if not x._is_view():
        x[1, 1, 0, 1] = 2
    return x


class RandomNet(nn.Module):
    """Layers, and a forward of lines of code."""

    def __init__(self, lines: list[str], layers: list[nn.Module]):
        super().__init__()
        self.stem, self.join = nn.Conv2d(C, C, 1), nn.Conv2d(2 * C, C, 1)
        self.layers = nn.ModuleList(layers)
        self.w, self.b = nn.Parameter(torch.rand(C)), nn.Parameter(torch.rand(C))
        self.scale = nn.Parameter(torch.rand(C, 1, 1))
        self.kept: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.lines = lines


def net_of(seed: int) -> RandomNet:
    """Return the net of a seed, whose class has the one method `forward`."""
    r = random.Random(seed)
    layers = [r.choice(LAYERS)(r) for _ in range(6)]
    names = ["h"]
    lines = ["h = self.stem(x)"]
    for _ in range(r.randint(2, 10)):
        name, other = r.choice(names), r.choice(names)
        if r.random() < 0.75:
            new = r.choice("hyz")
            lines.append(f"{new} = {_expression(r, names, r.randint(1, 4))}")
            names = [*dict.fromkeys([*names, new])]
        else:
            line = r.choice(STATEMENTS).format(name, other)
            if line.startswith("del"):
                if len(names) == 1:
                    continue
                names.remove(other)
            lines.append(line)
    lines.append(f"return {names[-1]}.square().mean() + sum(self.sums)")
    space: dict[str, Any] = {"F": F, "torch": torch, "write": write, "RandomNet": RandomNet}
    code = "".join(f"        {line}\n" for line in lines)
    exec(f"class Net{seed}(RandomNet):\n    def forward(self, x):\n{code}", space)
    torch.manual_seed(seed)
    return space[f"Net{seed}"](lines, layers).double()


def _expression(r: random.Random, names: list[str], depth: int) -> str:
    """Return an expression of tensors, in which the calls of up to `depth` are nested."""
    if depth == 0:
        return r.choice(names)
    part = _expression(r, names, depth - 1)
    kind = r.random()
    if kind < 0.5:
        return f"self.layers[{r.randrange(6)}]({part})"
    if kind < 0.75:
        return f"({r.choice(FUNCTIONS).format(part)})"
    return f"({r.choice(JOINTS).format(part, r.choice(names))})"


def steps_of(net: RandomNet, seed: int) -> list[Tensor | None]:
    """Return the losses, gradients, buffers and random states of two steps."""
    r = random.Random(seed)
    is_frozen = r.random() < 0.3
    backward = r.choice(("plain", "plain", "retain", "double", "some"))
    parameters = [p for p in net.parameters() if not is_frozen or r.random() < 0.6]
    for p in net.parameters():
        p.requires_grad_(any(p is trained for trained in parameters))
    values: list[Tensor | None] = []
    for number in range(2):
        torch.manual_seed(number)
        x = torch.randn(N, C, SIDE, SIDE, dtype=torch.float64, requires_grad=True)
        net.kept, net.sums = [], []
        loss = net(x)
        leaves = [x, *parameters]
        if backward == "retain":
            values += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        if backward == "some":
            leaves = leaves[::2]
        grads = torch.autograd.grad(
            loss, leaves, create_graph=backward == "double", allow_unused=True
        )
        deep = [g for g in grads if g is not None and g.requires_grad]
        if deep:
            second = sum(g.square().sum() for g in deep)
            values += torch.autograd.grad(second, leaves, allow_unused=True)  # type: ignore[arg-type]
        values += [loss.detach(), *grads, *net.kept]
    return [*values, *net.buffers(), torch.get_rng_state()]


def failure_of(seed: int) -> str | None:
    """Return how the fused net of a seed differs from eager, None where it does not."""
    eager = net_of(seed)
    ours = copy.deepcopy(eager)
    try:
        expected = steps_of(eager, seed)
    except RuntimeError:
        return None
    fusedckpt.fuse(ours)
    floor = recipe_mode.FLOOR_BYTES
    recipe_mode.FLOOR_BYTES = 0
    try:
        values = steps_of(ours, seed)
    except RuntimeError as error:
        return _text("".join(traceback.format_exception_only(error)), eager)
    finally:
        recipe_mode.FLOOR_BYTES = floor
    for i, (a, b) in enumerate(zip(values, expected, strict=True)):
        if (a is None) != (b is None) or (a is not None and not _same_bits(a, b)):
            return _text(f"value {i} differs", eager)
    return None


def _same_bits(a: Tensor, b: Any) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _text(reason: str, net: RandomNet) -> str:
    layers = "\n".join(f"    {i}: {layer}" for i, layer in enumerate(net.layers))
    code = "\n".join(f"    {line}" for line in net.lines)
    return f"{type(net).__name__}: {reason}\n{code}\n{layers}"


def search_nets(seeds: range) -> int:
    """Run the nets of some seeds; return the exit status."""
    failures = [failure for seed in seeds if (failure := failure_of(seed)) is not None]
    print("\n".join([*failures, f"{len(seeds)} nets, {len(failures)} failures"]))
    return len(failures) > 0
