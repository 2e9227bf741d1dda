"""State of many kinds that an attention module reads and changes: results are eager's, or loud."""

from __future__ import annotations

import contextvars
import copy
import random
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, calls
from torch import nn

from fusedckpt import fuse, unfuse
from fusedckpt.checkpointing.call_state import CallState, modules_in

D, T = 16, 6
GENERATOR, VARIABLE = torch.Generator(), contextvars.ContextVar("scale", default=1.0)
GLOBAL = [1.0]
# changed by a function that a forward calls
NUM_CALLS, SEEN, AMAX = 0, [], torch.zeros((), dtype=torch.float64, device=DEVICE)
STATE = types.SimpleNamespace(num_calls=0, seen={"calls": []})


class ScaledAttention(nn.Module):
    """Scales its input by what a case says."""

    def __init__(self, case):
        super().__init__()
        self.qkv, self.out, self.case = nn.Linear(D, 3 * D), nn.Linear(D, D), case
        self.norm = nn.RMSNorm(D)
        case.prepare(self)

    def forward(self, x, given=None):
        x = x * self.case.scale(self, x, given)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(self.norm(q), self.norm(k), v))


class Case:
    """Nothing that changes."""

    def prepare(self, module):
        """Give the module attributes."""

    def reset(self, module):
        """Undo what fuse did to the state."""

    def given(self):
        """Return the second argument."""

    def scale(self, module, x, given):
        """Return the factor, in the module's forward."""
        return 1.0

    def between(self, module):
        """Change something between forward and backward."""

    def after(self, module):
        """Return state to compare after the step."""


@dataclass
class Schedule:
    """An object in an attribute."""

    n: int = 0
    seen: list = field(default_factory=list)

    def __call__(self):
        self.n += 1
        self.seen.append(self.n)
        return 1 + 0.1 * self.n


class AnObject(Case):
    def prepare(self, module):
        module.schedule = Schedule()

    def scale(self, module, x, given):
        return module.schedule()

    def after(self, module):
        return module.schedule.n, module.schedule.seen


class Nested(Case):
    def prepare(self, module):
        module.memory = {"a": ({"b": [[]]}, deque(maxlen=2)), "c": defaultdict(int)}

    def scale(self, module, x, given):
        inner, last = module.memory["a"]
        inner["b"][0].append(1)
        last.append(len(last))
        module.memory["c"]["calls"] += 1
        return 1 + 0.1 * (len(inner["b"][0]) + sum(last) + module.memory["c"]["calls"])

    def after(self, module):
        return module.memory


class Guarded(OrderedDict):
    """Refuses writes, as a config may."""

    def __setitem__(self, key, value):
        raise TypeError(f"closed: {key} = {value}")


class Few:
    """An object without a dict."""

    __slots__ = ("n", "seen")

    def __init__(self):
        self.n = 0


class Counts(dict):
    """A dict of a class of its own."""


class Subclasses(Case):
    def prepare(self, module):
        module.few, module.counts, module.config = Few(), Counts(), Guarded()

    def scale(self, module, x, given):
        module.few.n += 1
        module.few.seen = getattr(module.few, "seen", 0) + 1
        module.counts["n"] = module.counts.get("n", 0) + 1
        return 1 + 0.1 * (module.few.n + module.few.seen + module.counts["n"] + len(module.config))

    def between(self, module):
        OrderedDict.__setitem__(module.config, "more", 1)

    def after(self, module):
        return module.few.n, module.few.seen, module.counts, len(module.config)


class OfItsClass(Case):
    def prepare(self, module):
        type(module).shared = types.SimpleNamespace(counts=[0])
        type(module).num_calls = 0

    def scale(self, module, x, given):
        module.shared.counts[0] += 1
        type(module).num_calls += 1
        return 1 + 0.1 * module.shared.counts[0] * module.num_calls

    def after(self, module):
        return module.shared.counts, module.num_calls


class Generators(Case):
    def prepare(self, module):
        module.random, module.numpy = random.Random(3), np.random.default_rng(3)
        module.legacy, module.torch = np.random.RandomState(3), torch.Generator()
        GENERATOR.manual_seed(0), module.torch.manual_seed(0)

    def scale(self, module, x, given):
        draws = module.random.random() + module.numpy.random() + module.legacy.rand()
        ours = [torch.rand(T, generator=g, dtype=x.dtype) for g in (GENERATOR, module.torch)]
        return 1 + draws + sum(ours).view(T, 1).to(x.device)

    def after(self, module):
        return [g.get_state() for g in (GENERATOR, module.torch)], module.random.random()


class Popped(Case):
    def given(self):
        return {"scale": 1.3, "seen": [1.0]}

    def scale(self, module, x, given):
        given["seen"].append(2.0)
        return given.pop("scale", 1.0) * sum(given["seen"])


class AppendedTo(Case):
    def given(self):
        return UserDict(last=deque([1.0]))

    def scale(self, module, x, given):
        given["last"].append(2.0)
        given["next"] = given.get("next", 0) + 1
        return sum(given["last"]) * given["next"]


class Statistics(Case):
    """Written in place: a small buffer, tensors in an attribute, an object, a list."""

    def prepare(self, module):
        for name in ("mean", "steps"):
            module.register_buffer(name, torch.zeros((), dtype=torch.float64, device=DEVICE))
        module.amax, module.history = module.mean.clone(), [module.mean.clone()]
        module.recipe = types.SimpleNamespace(amax=module.mean.clone(), seen=[])

    def scale(self, module, x, given):
        found = x.detach().abs().max()
        module.mean.mul_(0.5).add_(0.5 * found)
        module.steps += 1
        for tensor in (module.amax, module.history[0], module.recipe.amax):
            torch.maximum(tensor, found, out=tensor)
            tensor.add_(1)
        module.recipe.seen.append(found)
        module.history.append(found)
        return 1.0 / (1 + module.mean.clone() + module.amax.clone())

    def after(self, module):
        return [module.mean, module.steps, module.amax, module.history, module.recipe.amax]


class Replaced(Case):
    def prepare(self, module):
        module.register_buffer("mean", torch.zeros((), dtype=torch.float64, device=DEVICE))

    def scale(self, module, x, given):
        module.mean = module.mean * 0.9 + x.detach().mean()
        return 1 + module.mean

    def after(self, module):
        return module.mean


class Growing(Case):
    """A table that is empty until the first call."""

    def prepare(self, module):
        empty = torch.empty(0, dtype=torch.float64, device=DEVICE)
        module.register_buffer("table", empty, persistent=False)

    def scale(self, module, x, given):
        if len(module.table) < x.shape[1]:
            module.table = torch.arange(x.shape[1]).to(x) + 1
        return module.table[:, None]

    def after(self, module):
        return module.table


class ReplacedLater(Case):
    """A buffer that other code replaces: the recompute reads it as it was, and leaves it."""

    def prepare(self, module):
        module.register_buffer("factor", torch.full((), 2.0, dtype=torch.float64, device=DEVICE))

    def scale(self, module, x, given):
        return module.factor

    def between(self, module):
        module.factor = module.factor + 1

    def after(self, module):
        return module.factor


class AVariable(Case):
    def scale(self, module, x, given):
        return VARIABLE.get()

    def between(self, module):
        VARIABLE.set(VARIABLE.get() + 1)


class AConfig(Case):
    def prepare(self, module):
        module.config = types.SimpleNamespace(scale=1.5, rope={"factor": 2.0})

    def scale(self, module, x, given):
        return module.config.scale * module.config.rope["factor"]

    def between(self, module):
        module.config.scale, module.config.rope = 2.0, {"factor": 3.0}


class Closed(Case):
    """A variable that the forward's function closes over."""

    def prepare(self, module):
        seen, kind = [], type(module)

        class Closing(kind):
            def forward(self, x, given=None):
                seen.append(1)
                return super().forward(x * len(seen), given)

        module.__class__, module.seen = Closing, seen

    def reset(self, module):
        # recording the forward has called it
        module.seen.clear()

    def after(self, module):
        return module.seen


def advanced(seen=[], *, more={"calls": 0}):  # noqa: B006  # as some code has it
    """Change state of this file, and return a number by it."""
    global NUM_CALLS
    NUM_CALLS += 1
    STATE.num_calls += 1
    STATE.seen["calls"].append(NUM_CALLS)
    SEEN.append(NUM_CALLS)
    seen.append(NUM_CALLS)
    more["calls"] += 1
    AMAX.add_(1.0)
    counts = NUM_CALLS, STATE.num_calls, len(STATE.seen["calls"]), *map(len, (SEEN, seen))
    return 1 + 0.1 * (sum(counts) + more["calls"] + AMAX.clone())


class OfItsFile(Case):
    """Global variables, containers and tensors, and default values of a helper's arguments."""

    def prepare(self, module):
        kind = type(module)

        class Advancing(kind):
            def forward(self, x, given=None):
                return super().forward(x * advanced(), given)

        module.__class__ = Advancing

    def reset(self, module):
        global NUM_CALLS
        NUM_CALLS = STATE.num_calls = advanced.__kwdefaults__["more"]["calls"] = 0
        for seen in (STATE.seen["calls"], SEEN, advanced.__defaults__[0]):
            seen.clear()
        AMAX.zero_()

    def after(self, module):
        return NUM_CALLS, STATE.num_calls, STATE.seen, SEEN, advanced.__defaults__, AMAX


def held():
    """Count in its own attribute, and in variables that a helper names."""
    held.calls += 1
    return advanced()


held.calls = 0


class Held(OfItsFile):
    """A function in an attribute of the module."""

    def prepare(self, module):
        module.factor = held

    def scale(self, module, x, given):
        return module.factor()

    def reset(self, module):
        super().reset(module)
        held.calls = 0

    def after(self, module):
        return *super().after(module), held.calls


class Unfused(Case):
    def between(self, module):
        if "_fusedckpt" in vars(module):
            unfuse(module)


class OwnValues(Case):
    """As DistributedDataParallel writes buffers ahead of each forward."""

    def prepare(self, module):
        table = torch.rand(T, D, dtype=torch.float64, device=DEVICE)
        module.register_buffer("table", table)

    def scale(self, module, x, given):
        return module.table.clone()

    def between(self, module):
        module.table.copy_(module.table.clone())


RIGHT = [
    AnObject,
    Nested,
    Subclasses,
    OfItsClass,
    Generators,
    Popped,
    AppendedTo,
    Statistics,
    Replaced,
]
RIGHT += [Growing, ReplacedLater, AVariable, AConfig, Closed, OfItsFile, Held, Unfused, OwnValues]


def models(case):
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        # a class of its own, as one case writes to it
        kind = type("ScaledAttention", (ScaledAttention,), {"__module__": __name__})
        found.append(nn.Sequential(nn.LayerNorm(D), kind(case())).double().to(DEVICE))
    eager, fused = found
    assert "recomputed but for attention" in fuse(fused).swapped["1"]
    fused[1].case.reset(fused[1])
    return eager, fused


def step(model):
    """Return the gradients of two forwards, as in accumulation, and state of the module."""
    torch.manual_seed(1)
    norm, attention = model
    case = attention.case
    case.reset(attention)
    x = torch.randn(2, T, D, dtype=torch.float64, device=DEVICE, requires_grad=True)
    loss = sum(attention(norm(scale * x), case.given()).square().sum() for scale in (1, 2))
    case.between(attention)
    found = torch.autograd.grad(loss, [x, *model.parameters()])
    return [*found, copy.deepcopy(case.after(attention))]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_as_eager(case):
    eager, fused = models(case)
    for _ in range(3):
        contexts = [contextvars.copy_context() for _ in range(2)]
        GENERATOR.manual_seed(0)
        expected = contexts[0].run(step, eager)
        GENERATOR.manual_seed(0)
        torch.testing.assert_close(contexts[1].run(step, fused), expected)


class ABias(Case):
    def between(self, module):
        with torch.no_grad():
            module.qkv.bias += 1


class ABuffer(Case):
    def prepare(self, module):
        module.register_buffer("table", torch.ones(4096, D, device=DEVICE))

    def scale(self, module, x, given):
        return module.table[:T]

    def between(self, module):
        # a row that no sample may be of
        module.table[4000].zero_()


class AGlobal(Case):
    def scale(self, module, x, given):
        return GLOBAL[0]

    def between(self, module):
        GLOBAL[0] = 3.0 - GLOBAL[0]


class ATensorGiven(Case):
    def given(self):
        self.own = UserDict(scale=torch.ones(D, device=DEVICE))
        return self.own

    def scale(self, module, x, given):
        return given["scale"]

    def between(self, module):
        self.own["scale"].mul_(2)


LOUD = {
    ABias: r"FusedScaledAttention: qkv.bias has been modified by an inplace operation",
    ABuffer: r"FusedScaledAttention: table has been modified by an inplace operation",
    AGlobal: r"fuse: FusedScaledAttention: the recompute gives other values",
    ATensorGiven: r"FusedScaledAttention: a tensor in its arguments has been modified",
}


@pytest.mark.parametrize("case", LOUD, ids=lambda case: case.__name__)
def test_loud(case):
    _, fused = models(case)
    with pytest.raises(RuntimeError, match=LOUD[case]):
        step(fused)


def test_a_written_bias_matters_only_where_it_is_read():
    """An optimizer in backward updates a bias before an earlier recompute."""

    def update(bias):
        bias.detach().add_(1)

    eager, fused = models(Case)
    for model in (eager, fused):
        model[1].out.weight.requires_grad_(False)
        model[1].out.bias.register_post_accumulate_grad_hook(update)
        torch.manual_seed(1)
        model(torch.randn(2, T, D, dtype=torch.float64, device=DEVICE)).square().sum().backward()
    for ours, theirs in zip(fused.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class _Clones(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.largest = max(self.largest, result.numel())
        return result


def test_copies_no_mask():
    """Of a class whose code writes in place, too; but for its first call."""

    class Masked(Case):
        def prepare(self, module):
            module.register_buffer("mask", torch.ones(1024, 1024, device=DEVICE).tril())

        def scale(self, module, x, given):
            return module.mask[T : 2 * T, :1].clone().mul_(0.5)

    _, fused = models(Masked)
    step(fused)
    with _Clones() as clones:
        step(fused)
    assert clones.largest <= 2 * T * D


def test_noting_a_call_and_its_state_takes_few_calls():
    """Of functions of Python and C, of a module with three modules inside."""
    module = ScaledAttention(Case()).to(DEVICE)
    args = torch.randn(2, T, D, device=DEVICE), {"mask": None}
    states = []

    def note():
        states.append(CallState(modules_in(module), args))
        states[-1].end()

    def bring_back():
        with states[-1].restored():
            pass

    note()
    bring_back()
    # 178 and 248 with Python 3.11
    assert calls(note) < 195
    assert calls(bring_back) < 270


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_saves_nothing_where_nothing_needs_a_gradient(kind):
    from test_recomputed_call import OddMLP

    module = ScaledAttention(Case()) if kind == "attention" else OddMLP()
    model = nn.Sequential(nn.LayerNorm(module.out.out_features), module).to(DEVICE)
    fuse(model)
    model.requires_grad_(False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        model(torch.randn(2, T, module.out.out_features, device=DEVICE))
    assert packed == []


class WithScript(nn.Module):
    """An attention with a child that TorchScript has compiled, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = torch.jit.script(nn.BatchNorm1d(8))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.norm(y.transpose(1, 2)).transpose(1, 2)


def test_a_child_of_torchscript_runs_once():
    torch.manual_seed(0)
    model = nn.Sequential(WithScript(), nn.LayerNorm(8))
    eager = copy.deepcopy(model[0].qkv), copy.deepcopy(model[1])
    fuse(model)
    x = torch.randn(2, 5, 8)
    for step in range(1, 4):
        model(x).square().sum().backward()
        assert int(model[0].norm.num_batches_tracked) == step
    q, k, v = eager[0](x).chunk(3, -1)
    y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    y = eager[1](nn.functional.batch_norm(y, None, None, torch.ones(8), training=True).mT)
    y.square().sum().backward()
    torch.testing.assert_close(model[0].qkv.weight.grad / 3, eager[0].weight.grad)
