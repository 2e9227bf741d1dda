"""`fuse(recipes=True)`: results of cheap functions are made again, not saved."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt
from fusedckpt.autograd import recipes, tracker
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.fusing import dropouts, recipe_mode, recipe_models
from fusedckpt.memory import peak_bytes, saved_tensors

D, T, C = 16, 24, 6


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)


class Residual(nn.Module):
    """A block of a residual net, with activations in place or not."""

    def __init__(self, inplace: bool = True):
        super().__init__()
        self.conv1 = nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(C)
        self.conv2 = nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(C)
        self.act = nn.ReLU(inplace)

    def forward(self, x):
        h = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        if self.act.inplace:
            h += x
        else:
            h = h + x
        return self.act(h)


class Diffusion(nn.Module):
    """A block of a diffusion transformer: modulated norms and gated branches."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False)
        self.modulation, self.out = nn.Linear(D, 6 * D), nn.Linear(D, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        parts = self.modulation(F.silu(x.mean(1)))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + parts[0]) + parts[1])[:, None].chunk(3, -1)
        x = x + parts[2] * self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        h = self.norm2(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class Encoder(nn.Module):
    """A block of BERT: dropout, and a norm behind the sum."""

    def __init__(self, p: float = 0.1):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.norm(self.drop(self.fc2(F.gelu(self.fc1(x)))) + x)


class Rotary(nn.Module):
    """RMSNorm by hand, rotated queries, a gate, a softcap, and writes to slices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.q, self.gate, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        q = self.q(h)
        angle = torch.arange(T, dtype=x.dtype)[:, None]
        q = q * angle.cos() + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1) * angle.sin()
        padded = torch.zeros_like(q)
        padded[:, 2:] = q[:, 2:]
        padded[:, :2] += 1
        h = self.out(padded * torch.sigmoid(self.gate(h)))
        return x + 30 * torch.tanh(h / 30)


def image() -> Tensor:
    return torch.randn(3, C, 7, 7)


def tokens() -> Tensor:
    return torch.randn(2, T, D)


class Dense(nn.Module):
    """A block of a dense net, whose layers read all results before, and activations in place."""

    def __init__(self):
        super().__init__()
        widths = [C, C + 2, C + 4]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.convs = nn.ModuleList(nn.Conv2d(width, 2, 3, padding=1) for width in widths)
        self.last = nn.Conv2d(C + 6, C, 1)

    def forward(self, x):
        parts = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            parts.append(conv(F.relu(norm(torch.cat(parts, 1)))))
        # autograd saves a copy of what silu writes over
        return F.silu(self.last(torch.cat(parts, 1)), inplace=True).mul_(1.5)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (Residual, image),
    "residual, not in place": (lambda: Residual(inplace=False), image),
    "dense": (Dense, image),
    "diffusion": (Diffusion, tokens),
    "encoder": (Encoder, tokens),
    "rotary": (Rotary, tokens),
}
# bytes of an image and of the statistics of two batch norms; of D features of all tokens
IMAGE, STATISTICS, WIDE = 8 * 3 * C * 49, 8 * 4 * C, 8 * 2 * T * D
# bytes of a batch norm's bias
BIAS = 8 * C
# saved bytes of three blocks: eager's, and with recipes
SAVED = {
    # the inputs of convolutions and batch norms, and the result; the inputs of batch norms and the
    # first one's, and copies of biases, which eager does not save
    "residual": (13 * IMAGE + 3 * STATISTICS, 7 * IMAGE + 3 * STATISTICS + 6 * BIAS),
    "residual, not in place": (13 * IMAGE + 3 * STATISTICS, 7 * IMAGE + 3 * STATISTICS + 6 * BIAS),
    # each part of a concatenation once
    "dense": (234_000, 93_456),
    "diffusion": (382_080, 203_136),
    "encoder": (205_056, 100_608),
    "rotary": (131_328, 62_592),
}


def net(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, draw = NETS[name]
    return nn.Sequential(*[make() for _ in range(3)]).to(dtype), draw().to(dtype)


def with_recipes(model: nn.Module, **kinds: bool) -> nn.Module:
    """Return a copy that saves recipes, and is not fused otherwise."""
    off = dict.fromkeys(("norm", "mlp", "linear", "attention", "experts"), False)
    fused = copy.deepcopy(model)
    fusedckpt.fuse(fused, recipes=True, **{**off, **kinds})
    return fused


def step(model: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Return the result, all gradients, the buffers and a random number after a step."""
    model.zero_grad()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    # as an intermediate
    y = (model if call is None else call)(x * 1)
    y.square().mean().backward()
    grads = [x.grad, *[p.grad for p in model.parameters()]]
    return [y.detach(), *grads, *[b.clone() for b in model.buffers()], torch.rand(1)]


def same(ours: list[Tensor], eager: list[Tensor]) -> None:
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a, b)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(x.clone().requires_grad_() * 1)
    return saved.nbytes


@pytest.mark.parametrize("name", NETS)
def test_values_bytes_and_peaks(name):
    """The same kernels on the same numbers: gradients have the same bits."""
    eager, x = net(name)
    ours = with_recipes(eager)
    for _ in range(2):
        same(step(ours, x), step(eager, x))
    assert (saved_bytes(eager, x), saved_bytes(ours, x)) == SAVED[name]
    peaks = [peak_bytes(lambda m=m: (step(m, x), None)[1]) for m in (eager, ours)]
    assert peaks[1] < peaks[0] - (SAVED[name][0] - SAVED[name][1]) / 4, peaks


@pytest.mark.parametrize("name", NETS)
def test_other_dtypes_and_layouts(name):
    eager, x = net(name, torch.float32)
    if x.dim() == 4:
        channels_last = eager.to(memory_format=torch.channels_last)
        y = x.contiguous(memory_format=torch.channels_last)
        same(step(with_recipes(channels_last), y), step(channels_last, y))
    ours = with_recipes(eager)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            theirs = step(eager, x)
            same(step(ours, x), theirs)
    expanded = x[:1].expand_as(x)
    same(step(ours, expanded), step(eager, expanded))
    same(step(ours.eval(), x), step(eager.eval(), x))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("checkpoint", [fusedckpt.checkpoint, stock_checkpoint])
def test_checkpoints_around_and_inside(name, checkpoint):
    eager, x = net(name)
    ours = with_recipes(eager)

    def around(model):
        return lambda x: checkpoint(model, x, use_reentrant=False)

    same(step(ours, x, around(ours)), step(eager, x, around(eager)))

    class Inside(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            x = self.blocks[0](x)
            x = checkpoint(self.blocks[1], F.gelu(x), use_reentrant=False)
            return self.blocks[2](F.gelu(x))

    inside = Inside(eager)
    same(step(with_recipes(inside), x), step(inside, x))


@pytest.mark.parametrize("name", ["diffusion", "rotary", "residual, not in place"])
def test_second_derivatives(name):
    eager, x = net(name)
    ours = with_recipes(eager)

    def second(model):
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        # torch's fused attention has none
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = model(inputs[0]).square().mean()
            grads = torch.autograd.grad(y, inputs, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    same(list(second(ours)), list(second(eager)))


@pytest.mark.parametrize("name", NETS)
def test_graphs_that_are_kept_and_run_in_parts(name):
    eager, x = net(name)
    results = []
    for model in (with_recipes(eager), eager):
        torch.manual_seed(3)
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        y = model(inputs[0]).square().mean()
        parts = [
            *torch.autograd.grad(y, inputs, retain_graph=True),
            *torch.autograd.grad(y, inputs[:1], retain_graph=True),
            *torch.autograd.grad(y, inputs[2:3], retain_graph=True),
            *torch.autograd.grad(y, inputs),
        ]
        results.append(parts)
    same(*results)


@pytest.mark.parametrize("name", NETS)
def test_nothing_lives_after_a_step(name):
    """No reference cycle keeps a graph, abandoned or run."""
    eager, x = net(name)
    ours = with_recipes(eager)
    alive: list[Any] = []
    original = recipes.Leaf.__init__

    def noted(self, *args):
        original(self, *args)
        alive.append(weakref.ref(self))

    recipes.Leaf.__init__ = noted
    gc.collect()
    gc.disable()
    try:
        given, late = x.clone().requires_grad_(), []
        # the last gradient: the tensors of later blocks are free before the backward ends
        given.register_hook(lambda _: late.append(sum(ref() is not None for ref in alive)))
        y = ours(given)
        held = sum(ref() is not None for ref in alive)
        y.sum().backward()
        assert held > 0
        assert late[0] <= held / 3, (late, held)
        del y
        assert not any(ref() is not None for ref in alive)
        y = ours(x.clone().requires_grad_())
        del y
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
        recipes.Leaf.__init__ = original


class Scaled(nn.Module):
    """A sum with a small tensor and a bias, which autograd does not save."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.shift = torch.zeros(D, dtype=torch.float64)

    def forward(self, x):
        return self.linear(F.gelu(self.norm(x) + self.shift))


def test_writes_between_forward_and_backward():
    """What autograd does not save may be written; what it saves raises, as in eager."""
    eager = Scaled().double()
    ours, x = with_recipes(eager), tokens().double()

    def gradients(model, write):
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        given = inputs[0] * 1
        y = model(given)
        with torch.no_grad():
            write(model, given)
        return list(torch.autograd.grad(y.square().sum(), inputs))

    for write in (
        lambda model, _: model.shift.add_(1),
        lambda model, _: model.linear.bias.add_(1),
    ):
        same(gradients(ours, write), gradients(eager, write))
    for write in (
        lambda _, given: given.add_(1),
        lambda model, _: model.norm.weight.add_(1),
        lambda model, _: model.norm.bias.add_(1),
        lambda model, _: model.linear.weight.add_(1),
    ):
        for model in (eager, ours):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(model, write)


def test_a_value_whose_inputs_were_written_in_the_forward_is_saved():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x):
            a = self.linear(x)
            b = a * 2
            c = a.sin()
            with torch.no_grad():
                # eager's gradient of sin reads a
                d = c.clone()
            b.add_(1)
            return self.linear(b) + self.linear(F.gelu(b)) * d

    eager, x = Written().double(), tokens().double()
    same(step(with_recipes(eager), x), step(eager, x))


class RunningStatistics(nn.Module):
    """Convolutions with a norm between that updates running statistics."""

    def __init__(self, norm: Callable[..., Tensor]):
        super().__init__()
        self.first, self.last = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.norm = norm
        self.register_buffer("mean", torch.zeros(C))
        self.register_buffer("var", torch.ones(C))

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x), self.mean, self.var)))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, m, v: F.instance_norm(x, m, v),
        lambda x, m, v: F.instance_norm(x, running_mean=m, running_var=v),
        lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=False),
        lambda x, m, v: F.batch_norm(x, running_mean=m, running_var=v, training=True),
        lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
        lambda x, m, v: torch.instance_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    ],
)
def test_running_statistics_advance_once(norm):
    eager, x = RunningStatistics(norm).double(), torch.randn(2, C, 4, 4, dtype=torch.float64)
    model = copy.deepcopy(eager)
    fusedckpt.fuse(model, recipes=True)
    for net in (eager, model):
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(eager.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert all(map(torch.equal, eager.buffers(), model.buffers()))


def test_hooks():
    """Hooks on results see the same gradients; saved-tensor hooks of others are left alone."""
    eager, x = net("diffusion")
    ours = with_recipes(eager)
    seen: dict[nn.Module, list[Tensor]] = {ours: [], eager: []}
    for model in seen:
        model[1].register_forward_hook(
            lambda _, args, y, model=model: y.register_hook(seen[model].append) and None
        )
    same(step(ours, x), step(eager, x))
    same(seen[ours], seen[eager])
    report = fusedckpt.fuse(ours)
    assert "recipes: results of cheap functions are made again in backward\n" in f"{report}\n"
    with torch.autograd.graph.save_on_cpu():
        same(step(ours, x)[1:2], step(eager, x)[1:2])
    assert "not in the last call: saved-tensor hooks of other code" in str(report)
    assert not tracker.active()


def test_no_grad_compile_and_transforms():
    eager, x = net("encoder")
    eager.eval()
    ours = with_recipes(eager)
    with torch.no_grad():
        assert torch.equal(ours(x), eager(x))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    same(step(ours, x, compiled), step(eager, x, torch.compile(eager, backend="aot_eager")))
    grads = [torch.func.grad(lambda x, m=m: m(x).sum())(x) for m in (ours, eager)]
    assert torch.equal(*grads)


def test_a_compiled_module_inside():
    eager, x = net("encoder")
    eager.eval()
    expected = step(eager, x)
    ours = with_recipes(eager)
    ours[1] = torch.compile(ours[1], backend="aot_eager")
    torch.testing.assert_close(step(ours, x)[:2], expected[:2])


def test_beside_fused_layers():
    """Fused layers save recipes of their inputs, and functions those of fused norms' results."""
    for name in ("diffusion", "encoder", "rotary"):
        eager, x = net(name)
        for p in eager.modules():
            if isinstance(p, nn.Dropout):
                p.p = 0.0
        fused, both = copy.deepcopy(eager), copy.deepcopy(eager)
        fusedckpt.fuse(fused)
        fusedckpt.fuse(both, recipes=True)
        torch.testing.assert_close(step(both, x), step(eager, x), rtol=1e-9, atol=1e-12)
        assert saved_bytes(both, x) <= saved_bytes(fused, x)
        # the last one has no MLP, attention or norm that is fused
        alone = saved_bytes(with_recipes(eager), x)
        assert saved_bytes(both, x) < alone or name == "rotary"


def test_a_model_that_is_a_block_and_back():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    kinds = [type(m) for m in mlp.modules()]
    x = tokens()
    expected = step(mlp, x)
    assert fusedckpt.fuse(mlp, recipes=True).swapped
    torch.testing.assert_close(step(mlp, x), expected)
    twin = copy.deepcopy(mlp)
    fusedckpt.unfuse(twin)
    assert [type(m) for m in twin.modules()] == kinds
    model, _ = net("encoder")
    ours = with_recipes(model)
    assert isinstance(ours, recipe_models.WithRecipes)
    assert type(ours).__name__ == "Sequential"
    fusedckpt.fuse(ours, recipes=True)
    fusedckpt.unfuse(ours)
    assert type(ours) is nn.Sequential
    with pytest.raises(TypeError, match="recipes"):
        fusedckpt.fuse(model, recipes="yes")


def test_small_tensors_run_as_they_are(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 1 << 20)
    eager, x = net("residual")
    assert saved_bytes(with_recipes(eager), x) == saved_bytes(eager, x)


def test_the_random_state_of_a_dropout():
    """Gradients see the mask of the forward, whatever is drawn in between."""
    eager, x = net("encoder")
    results = []
    for model in (with_recipes(eager), eager):
        torch.manual_seed(3)
        inputs = [x.clone().requires_grad_(), *model.parameters()]
        y = model(inputs[0]).square().mean()
        torch.manual_seed(99)
        torch.rand(7)
        results.append([*torch.autograd.grad(y, inputs), torch.rand(1)])
    same(*results)


def test_the_mask_of_a_dropout():
    """A device's dropout saves its mask, which makes the result again."""
    x = torch.randn(5, 7)
    y, mask = torch.native_dropout(x, 0.3, True)
    assert torch.equal(dropouts.masked(1 / 0.7, x, mask), y)


@forced_path("aten")
def on_a_rank(rank: int) -> None:
    recipe_mode.FLOOR_BYTES = 0
    mesh = init_device_mesh("cpu", (2,))
    for name in ("residual", "diffusion", "encoder"):
        eager, x = net(name, torch.float32)
        x = x + rank
        ours = with_recipes(eager)
        pairs = [DistributedDataParallel(copy.deepcopy(m)) for m in (ours, eager)]
        same(*[step(m, x) for m in pairs])
        for model in (ours, eager):
            for part in (*model, model):
                fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(True)
        results = [step(m, x) for m in (ours, eager)]
        for a, b in zip(*results, strict=True):
            assert torch.equal(*[getattr(t, "_local_tensor", t) for t in (a, b)])


def test_on_two_ranks(tmp_path):
    """DDP, and FSDP2 of each block, which gathers parameters for a block's own backward alone."""
    run_ranks(on_a_rank, tmp_path)


class Attention(nn.Module):
    """Self-attention that `fuse` runs again in backward."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])


class Transformer(nn.Module):
    """A pre-norm block."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_modules_that_run_again_hold_nothing_of_the_forward():
    """The context of a call, which they keep, has no recipe: saved bytes and peak are fuse's."""
    torch.manual_seed(0)
    eager = nn.Sequential(*[Transformer() for _ in range(6)]).double()
    x = torch.randn(2, 16 * T, D, dtype=torch.float64)
    fused, both = copy.deepcopy(eager), copy.deepcopy(eager)
    fusedckpt.fuse(fused)
    fusedckpt.fuse(both, recipes=True)
    for model in (fused, both):
        same(step(model, x)[1:3], step(eager, x)[1:3])
    assert saved_bytes(both, x) <= saved_bytes(fused, x)
    peaks = [peak_bytes(lambda m=m: (step(m, x), None)[1]) for m in (fused, both)]
    assert peaks[1] <= peaks[0], peaks


def test_choices():
    """Reports ask which functions made what, and where a chain was cut."""
    eager, x = net("residual", torch.float32)
    ours = with_recipes(eager)
    with tracker.choices() as noted:
        ours(x)
    made = [choice for choice in noted if choice.functions]
    assert made[0].functions == ("relu", "batch_norm")
    assert made[0].nbytes == IMAGE // 2
    assert not any(choice.cut for choice in noted)
    recipes_of = {choice.functions for choice in noted}
    assert () in recipes_of

    class Sums(nn.Module):
        def forward(self, x):
            for _ in range(tracker.LIMIT + 2):
                x = torch.sigmoid(x)
            return x

    long = with_recipes(nn.Sequential(nn.Linear(D, D), Sums()))
    with tracker.choices() as noted:
        long(tokens())
    (cut,) = [choice for choice in noted if choice.cut]
    assert cut.cut == ("sigmoid",) * (tracker.LIMIT + 1)


def test_python_work_of_a_function():
    """Calls of Python that a function takes more; a small one takes that of the mode alone."""
    x = torch.randn(4, D, requires_grad=True) * 1
    y = torch.randn(4, D)

    def calls(run, floor: int) -> int:
        count = [0]

        def noted(frame, event, arg):
            count[0] += event == "call"

        known = tracker.Tracker(floor=floor)
        with tracker.tracking(known), recipe_mode.RecipeMode(known, floor):
            run()
            sys.setprofile(noted)
            run()
            sys.setprofile(None)
        return count[0]

    small, large = x.nbytes + 1, x.nbytes
    # the lambda, and the mode
    assert calls(lambda: x + y, small) == 2
    assert calls(lambda: x + y, large) <= 19
    assert calls(lambda: x * y, large) <= 28
    weight, bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
    # of which torch has a third
    assert calls(lambda: F.layer_norm(x, (D,), weight, bias), large) <= 70
