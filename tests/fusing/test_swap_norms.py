"""fuse: RMSNorms of any class, by what they compute; what differs stays."""

import copy

import pytest
import torch
import torch.nn.functional as F
from own_norms import (
    L2,
    T5,
    Bare,
    Casting,
    D,
    Gemma,
    Hardcoded,
    KnowsWidth,
    Llama,
    NoEps,
    Norm,
    Normalize,
    Olmo,
    OneScale,
    OwnNorm,
    Pow,
    ReadBuffer,
    Standard,
    Switched,
    Torch,
    Unit,
    UnreadBuffer,
    Variance,
    WrittenOut,
)
from support import DEVICE, compare, randn, saved_bytes
from swap_cases import assert_equal
from torch import nn

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.fusing.norms import FusedNorm
from fusedckpt.fusing.swap import subclass
from fusedckpt.memory import saved_tensors
from fusedckpt.recipes.shared_layers import SharedNorm

FOUND = {
    "llama": (Llama, "rms_norm (llama cast)"),
    "gemma": (Gemma, "rms_norm (gemma cast, offset 1)"),
    "olmo": (Olmo, "rms_norm (gemma cast)"),
    "t5": (T5, "rms_norm (llama cast)"),
    "power": (Pow, "rms_norm (gemma cast)"),
    "torch": (Torch, "rms_norm (torch cast)"),
    "without a weight": (Bare, "rms_norm (llama cast)"),
    "eps an integer": (lambda: L2(1), "rms_norm (llama cast)"),
    "a buffer that it does not read": (UnreadBuffer, "rms_norm (llama cast)"),
    "layer_norm of a fixed eps": (Hardcoded, "layer_norm"),
    "function": (OwnNorm, "layer_norm"),
    "function without bias": (lambda: OwnNorm(False), "layer_norm"),
    "subclass that casts": (lambda: Casting(D), "layer_norm"),
    "subclass with a flag": (lambda: Switched(D), "layer_norm"),
    "normalize": (Normalize, "rms_norm (llama cast)"),
    "normalize, offset": (lambda: Normalize(1.0), "rms_norm (llama cast, offset 1)"),
    "written out": (WrittenOut, "layer_norm"),
    "over rows": (lambda: ByRows(), "rms_norm (llama cast)"),
    "written out, with a bias": (lambda: WrittenOut(True), "layer_norm"),
    "variance of torch": (Variance, "layer_norm"),
}


@pytest.mark.parametrize(("make", "change"), FOUND.values(), ids=list(FOUND))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rule_is_found_and_holds(make, change, dtype):
    norm = make().to(DEVICE, dtype)
    eager, kind = copy.deepcopy(norm), type(norm)
    if dtype == torch.bfloat16 and kind in (Variance, Normalize):
        pytest.skip("it rounds in half precision")
    assert fuse(norm).swapped == {"": f"{kind.__name__} -> {change}"}
    assert isinstance(norm, kind)
    # one class for all, named after it
    assert type(norm) is subclass(FusedNorm, kind)
    assert type(norm).__name__ == f"Fused{kind.__name__}"
    # a norm casts back what autocast widens if its class did
    if kind in (Casting, OwnNorm):
        assert norm._fusedckpt.match.casts_back is (kind is Casting)
    names = [name for name, _ in norm.named_parameters()]

    def at(module):
        def fn(x, *weights):
            given = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(module, given, (x,))

        return fn

    def inputs():
        own = (p.detach().clone().requires_grad_() for p in norm.parameters())
        return [randn(40, D, dtype=dtype) + 1, *own]

    compare(at(norm), at(eager), inputs)
    x = randn(4, D, dtype=dtype)
    assert saved_bytes(norm, [x]) == x.nbytes
    assert "LayerFunction" in norm(x).grad_fn.name()
    assert type(unfuse(norm)) is kind


@pytest.mark.parametrize(
    "name", [n for n in FOUND if not any(w in n for w in ("function", "subclass", "offset"))]
)
def test_every_pair_of_dtypes_gives_what_it_did(name):
    """Fused where that was seen to hold; else the old forward, with its dtype and its errors."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    norm = FOUND[name][0]().to(DEVICE)
    eager, kind = copy.deepcopy(norm), type(norm)
    assert fuse(norm, verify=False).swapped
    for weight in dtypes:
        for x in (randn(5, D, dtype=dtype) for dtype in dtypes):
            ours, theirs = norm.to(weight)(x), eager.to(weight)(x)
            assert ours.dtype == theirs.dtype
            tol = 1e-2 if theirs.dtype in dtypes[:2] else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
            if kind in (Llama, Gemma, WrittenOut) and x.dtype == torch.float64:
                # they compute float64 in float32, and still do
                assert torch.equal(ours, theirs)


def test_float64_in_float32_runs_its_own_forward():
    report = fuse(Llama().double())
    assert (report.left, report.shared) == ({}, {"": "Llama -> saves its input"})


class DoubledLlama(Llama):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class EpsOutside(Norm):
    def forward(self, x):
        return self.w * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class OtherEps(Norm):
    """Seen only in rows of small numbers."""

    def forward(self, x):
        rms = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps * 1.5)
        return (self.w * rms).to(x.dtype)


class HalfNorm(Norm):
    """The same in float32, but it rounds everything to half precision."""

    def forward(self, x):
        return self.w * self.rms(x)


class ScaledNorm(Norm):
    def forward(self, x, scale):
        return self.w * self.rms(x) * scale


class Buffered(Llama):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class ChannelsFirst(OwnNorm):
    """Of images it normalizes the channels."""

    def forward(self, x):
        if x.ndim != 4:
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class OtherEpsOfVectors(OwnNorm):
    def forward(self, x):
        eps = 1e-5 if x.dim() > 1 else 1e-3
        return F.layer_norm(x, (D,), self.weight, self.bias, eps)


class OfManyRows(Llama):
    def forward(self, hidden_states):
        y = super().forward(hidden_states)
        return y if hidden_states.shape[0] < 100 else 2 * y


class ByRows(Llama):
    """Its result does not depend on the number of rows or dimensions."""

    def forward(self, hidden_states):
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return super().forward(rows).view(hidden_states.shape)


class Broken(Norm):
    def forward(self, x):
        raise KeyError("no")


OTHERS = [DoubledLlama, EpsOutside, OtherEps, Broken, ScaledNorm, Buffered, NoEps, Unit, Standard]
OTHERS += [ChannelsFirst, OtherEpsOfVectors, OfManyRows]
OTHERS += [KnowsWidth, lambda: OneScale(1), OneScale, ReadBuffer]


@pytest.mark.parametrize("make", OTHERS)
def test_others_are_left(make):
    norm = make().to(DEVICE)
    kind = type(norm)
    report = fuse(norm)
    assert report.swapped == {}
    # its own forward runs, which may save its input alone
    is_shared = issubclass(type(norm), SharedNorm)
    assert is_shared or (type(norm) is kind and list(report.left) == [""])
    assert list(report.shared) == [""] * is_shared
    assert type(norm).__name__ == kind.__name__
    assert not norm.state_dict().get("calls", torch.zeros(())).any()


@pytest.mark.parametrize("make", [DoubledLlama, OtherEps])
def test_others_save_their_input_alone(make):
    eager, x = make().to(DEVICE, torch.float64), randn(3, D, dtype=torch.float64)
    norm = copy.deepcopy(eager)
    assert fuse(norm).shared == {"": f"{make.__name__} -> saves its input"}
    for model in (norm, eager):
        model.w.data.uniform_(0.5, 1.5)
    eager.load_state_dict(norm.state_dict())
    assert_equal(norm, eager, x)
    # and a number for each row
    assert saved_bytes(norm, [x]) <= x.nbytes + 3 * 8 < saved_bytes(eager, [x])


@pytest.mark.parametrize("original", [nn.LayerNorm, nn.RMSNorm])
def test_subclass_that_inherits_its_forward(original):
    class Mine(original):
        tag = "mine"

        def extra_repr(self):
            return f"mine, {super().extra_repr()}"

    norm, x = Mine(D).to(DEVICE), randn(3, D)
    expected, shown = norm(x), repr(norm)
    assert fuse(norm).swapped == {"": f"Mine -> {original.__name__}"}
    assert isinstance(norm, (fusedckpt.LayerNorm, fusedckpt.RMSNorm))
    assert isinstance(norm, Mine)
    assert norm.tag == "mine"
    assert repr(norm) == f"Fused{shown}"
    torch.testing.assert_close(norm(x), expected)
    assert type(unfuse(norm)) is Mine


def test_fused_in_the_dtypes_that_were_seen_to_be_the_same():
    norm, x = HalfNorm().to(DEVICE), randn(4, D)
    eager = copy.deepcopy(norm)
    assert fuse(norm).swapped == {"": "HalfNorm -> rms_norm (llama cast)"}
    assert "LayerFunction" in norm(x).grad_fn.name()
    torch.testing.assert_close(norm(x), eager(x))
    half = x.bfloat16()
    assert torch.equal(norm.bfloat16()(half), eager.bfloat16()(half))
    # in bfloat16 it is no norm of ours, and its own forward saves its input alone
    assert fuse(eager).shared == {"": "HalfNorm -> saves its input"}


def test_eps_is_read_when_called():
    norm, x = Llama().to(DEVICE), randn(3, D)
    fuse(norm)
    norm.variance_epsilon = 1.0
    eager = unfuse(copy.deepcopy(norm))
    torch.testing.assert_close(norm(x), eager(x))


def test_a_norm_whose_flag_changes_runs_the_original():
    module, x = Switched(D).to(DEVICE), randn(4, D)
    eager = copy.deepcopy(module)
    fuse(module)
    module.is_fast = eager.is_fast = True
    assert torch.equal(module(x), eager(x))


def test_under_autocast_and_named_where_it_is_not_fused():
    norm = WrittenOut().to(DEVICE)
    report = fuse(norm)
    norm(randn(5, D, dtype=torch.float64))
    assert report.fallbacks[""] == ("dtype", torch.float64)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert norm(randn(5, D).bfloat16()).dtype == torch.bfloat16


class InFloat32(nn.LayerNorm):
    """As OpenAI's whisper and CLIP have it: it does not run in float64."""

    def forward(self, input):
        return super().forward(input.float()).type(input.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_casts_to_float32_is_checked_in_float32(dtype):
    module = InFloat32(D).to(DEVICE)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    eager, x = copy.deepcopy(module), randn(2, 3, D, dtype=dtype)
    assert fuse(module).swapped == {"": "InFloat32 -> layer_norm"}
    torch.testing.assert_close(module(x), eager(x))
    assert module(x).dtype == dtype


class ShiftedInFloat32(InFloat32):
    """Another function, which that check has to see."""

    def forward(self, input):
        return super().forward(input) * (1 + 1e-5)


def test_another_norm_in_float32_is_left():
    assert fuse(ShiftedInFloat32(D).to(DEVICE)).swapped == {}


# the forward of "over rows" raises for most
@pytest.mark.parametrize("name", [name for name in FOUND if name != "over rows"])
def test_results_lie_in_memory_as_those_of_the_class(name):
    make, _ = FOUND[name]
    norm = make().to(DEVICE)
    fused = copy.deepcopy(norm)
    fuse(fused)
    for axes in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)):
        sizes = [(2, 3, D)[axis] for axis in axes]
        x = randn(*sizes).permute([axes.index(axis) for axis in range(3)])
        for part in (x, torch.stack([x, x]).transpose(1, 2)):
            expected, y = norm(part), fused(part)
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("axes", [(0, 2, 1), (1, 0, 2)])
def test_linears_save_nothing_of_a_norm_in_another_order_in_memory(axes):
    model = nn.Sequential(Llama(), nn.Linear(D, D, bias=False)).to(DEVICE)
    eager = copy.deepcopy(model)
    fuse(model)
    base = randn(2, 3, D).permute(axes).contiguous().requires_grad_()
    x = base.permute([axes.index(axis) for axis in range(3)])
    with saved_tensors([base]) as saved:
        y = model(x)
    assert saved.nbytes == 0
    dy = randn(2, 3, D)
    weights = [*model.parameters()]
    expected = torch.autograd.grad(eager(x), [base, *eager.parameters()], dy)
    torch.testing.assert_close(torch.autograd.grad(y, [base, *weights], dy), expected)


class InPlace(nn.Module):
    """A block that adds to its input in place, if asked to."""

    def __init__(self, norm, writes=True):
        super().__init__()
        self.norm, self.linear, self.writes = norm, nn.Linear(D, D), writes

    def forward(self, x):
        y = self.linear(self.norm(x))
        if self.writes:
            x += y
            return x
        return x + y


def assert_like_in_half_precision(model, eager):
    """Compare gradients in more calls than those in which norms copy their inputs."""
    for _ in range(6):
        x = randn(5, D, dtype=torch.bfloat16)
        grads = []
        for net in (eager, model):
            y = net(x)
            grads.append(torch.autograd.grad(y.float().square().sum(), [*net.parameters()]))
        errors = [(a - b).norm() / b.norm() for a, b in zip(*grads, strict=True)]
        assert max(errors) < 0.03


@pytest.mark.parametrize("make", [Llama, Gemma])
def test_inputs_in_half_precision_may_be_written_after_the_norm(make):
    model = nn.Sequential(nn.Linear(D, D), InPlace(make()), InPlace(make()))
    model = model.to(DEVICE, torch.bfloat16)
    eager = copy.deepcopy(model)
    fuse(model)
    assert_like_in_half_precision(model, eager)


@torch.no_grad()
def write(*args):
    """Write the first tensor of a call's arguments, as a hook or a function does."""
    x = args[-1][0] if isinstance(args[-1], tuple) else args[-1]
    x.mul_(1.5)


class ByFunction(InPlace):
    """A block with a function in an attribute, which writes its input."""

    def forward(self, x):
        y = self.linear(self.norm(x))
        if callable(self.writes):
            self.writes(x)
        return x + y


@pytest.mark.parametrize("is_hook", [False, True])
def test_inputs_in_half_precision_may_be_written_by_functions_and_hooks(is_hook):
    blocks = [ByFunction(nn.RMSNorm(D), None if is_hook else write) for _ in range(2)]
    eager = nn.Sequential(nn.Linear(D, D), *blocks).to(DEVICE, torch.bfloat16)
    model = copy.deepcopy(eager)
    for net in (eager, model):
        for block in net[1:] if is_hook else ():
            block.norm.register_forward_hook(lambda _module, args, _y: write(args))
    fuse(model)
    assert_like_in_half_precision(model, eager)


def test_inputs_that_no_code_writes_are_copied_in_the_first_calls_alone():
    model = nn.Sequential(nn.Linear(D, D), InPlace(nn.RMSNorm(D), writes=False))
    model = model.to(DEVICE, torch.bfloat16)
    fuse(model)
    sizes = []
    for number in range(6):
        if number == 1:
            # copies of tensors count from 0
            model = copy.deepcopy(model)
        x = randn(5, D, dtype=torch.bfloat16)
        with saved_tensors([x]) as saved:
            model(x)
        sizes.append(saved.nbytes // x.nbytes)
    # the norm's input, or a copy of it, which nothing else saves
    assert sizes == [1] * 6
    assert not model[1].norm._fusedckpt.input_copies.is_on, sizes
