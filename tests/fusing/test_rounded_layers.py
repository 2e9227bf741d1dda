"""fuse(store="int8"), inputs of fused layers in nine bits: bits, bytes, and what composes."""

import copy
import itertools
import pickle
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support import DEVICE, launches
from torch import nn
from torch.autograd.graph import save_on_cpu
from zoo import MLP, Attention, MLPBlock, SwiGLU

import fusedckpt
from fusedckpt import checkpoint
from fusedckpt.autograd import rounded
from fusedckpt.kernels import int8
from fusedckpt.kernels.runtime import HAS_TRITON
from fusedckpt.memory import peak_bytes, saved_tensors

T, D, N = 64, 48, 3
rounding = partial(checkpoint, store="int8")


def gated():
    return SwiGLU(D, 2 * D, down_bias=True)


def normed_mlp(mlp=gated, kind=MLPBlock):
    return kind(nn.RMSNorm(D), mlp())


class RoundedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.blocks = nn.ModuleList(
            normed_mlp(mlp) for mlp in (gated, partial(MLP, D, 2 * D), gated)
        )
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return self.run(x, lambda fn, h: fn(h))

    def run(self, x, call):
        """Run each part that a rounded input is for through `call`."""
        h = self.first(x)
        for block in self.blocks:
            h = h + call(block.branch, h)
        return call(lambda h: self.last(self.norm(h)), h)


def made(kind=RoundedNet, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = kind().to(DEVICE, dtype)
    fusedckpt.fuse(model, **options)
    return model


@pytest.fixture
def x():
    torch.manual_seed(2)
    return torch.randn(T, D, device=DEVICE)


def step(model, x, run=None, hooks=None):
    """Return the saved bytes, the result, and the gradients of all parameters that have one."""
    model.zero_grad()
    with saved_tensors([x]) as saved:
        y = (model if run is None else run)(x)
    y.float().sin().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return saved.nbytes, y.detach(), grads


def assert_same_steps(found, expected):
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    for name, grad in found[2].items():
        assert torch.equal(grad, expected[2][name]), name


def assert_near_steps(found, expected, most=0.03):
    """The forward is exact, the gradients are not."""
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    errors = [
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(found[2].values(), expected[2].values(), strict=True)
    ]
    assert 0 < max(errors) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_backward_is_that_of_the_rounded_inputs(x, dtype):
    """As that of checkpoints of the same layers, which keep their inputs so."""
    ours, plain = made(dtype=dtype, store="int8"), made(dtype=dtype)
    x = x.to(dtype)
    found = step(ours, x)
    assert_same_steps(found, step(plain, x, lambda x: plain.run(x, rounding)))
    exact = step(plain, x)
    assert_near_steps(found, exact)
    # the inputs of four norms; all else reads these
    assert exact[0] == (N + 1) * T * D * dtype.itemsize
    assert found[0] == (N + 1) * T * D * 9 // 8
    assert not rounded._known


def functions():
    f = fusedckpt.functional
    options = {"device": DEVICE, "requires_grad": True}
    w, up, down = (torch.randn(*sizes, **options) for sizes in ((D, 2 * D), (2 * D, D), (D, D)))
    scale = torch.randn(D, **options)
    yield "rms_norm", lambda h: f.rms_norm(h, D, scale)
    yield "layer_norm", lambda h: f.layer_norm(h, D, scale, scale)
    yield "linear_act", lambda h: f.linear_act(h, up, None, "gelu")
    yield "mlp", lambda h: f.mlp(h, up, None, w, None, "gelu")
    yield "gated_mlp", lambda h: f.gated_mlp(h, up, up, w)
    yield "packed", lambda h: f.gated_mlp(h, up, None, down)


@pytest.mark.parametrize("name", [name for name, _ in functions()])
def test_functions_under_saving(x, name):
    torch.manual_seed(3)
    function = dict(functions())[name]
    leaf = x.clone().requires_grad_()

    def run(call):
        h = leaf * 1
        with saved_tensors([h]) as saved:
            y = call(h)
        return saved.nbytes, torch.autograd.grad(y.square().sum(), [leaf])[0]

    def stored(h):
        with fusedckpt.saving(store="int8"):
            return function(h)

    nbytes, found = run(stored)
    assert nbytes == T * D * 9 // 8
    assert torch.equal(found, run(partial(rounding, function))[1])
    assert run(function)[0] == 0
    # an input that the caller has anyway
    with saved_tensors([leaf]) as saved:
        stored(leaf)
    assert saved.nbytes == 0


@pytest.mark.parametrize("save", ["gate", "preact"])
def test_other_levels_keep_products_as_they_are(x, save):
    ours, plain = made(store="int8", save=save), made(save=save)
    found, exact = step(ours, x), step(plain, x)
    assert exact[0] - found[0] == (N + 1) * T * D * (4 - 9 / 8)
    assert_near_steps(found, exact)


class Readers(nn.Module):
    """A tensor with several readers, some of its norm's result."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        a, b = (norm(h) for norm in self.norms)
        q, k, v = (linear(a) for linear in self.linears[:3])
        return h + q + k + v + b + self.linears[3](h)


def test_readers_share_one_packed_copy(x):
    ours = made(Readers, store="int8")
    with patch.object(int8, "pack_int8", wraps=int8.pack_int8) as packs:
        found = step(ours, x)
    assert packs.call_count == 1
    assert found[0] == T * D * 9 // 8
    assert_near_steps(found, step(made(Readers), x))


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        # their makers have saved these
        (torch.exp, 4 * T * D),
        (lambda h: torch.tanh(h).view(4, -1, D), 4 * T * D),
        (lambda h: h.softmax(-1), 4 * T * D),
        # a view of a larger tensor, a small one, one of other digits
        (lambda h: torch.cat([h, h])[: T + 1], 4 * 2 * T * D),
        (lambda h: h[:16] * 1, 4 * 16 * D),
        (lambda h: h * 1, T * D * 9 // 8),
    ],
)
@pytest.mark.parametrize("kind", ["norm", "linear"])
def test_tensors_that_stay_as_they_are(x, make, nbytes, kind):
    """Nothing is stored twice."""

    class MadeInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, D)

        def forward(self, x):
            h = make(self.first(x))
            return self.norm(h) if kind == "norm" else self.last(h)

    found = step(made(MadeInput, store="int8"), x)
    exact = step(made(MadeInput), x)
    is_rounded = nbytes == T * D * 9 // 8
    assert found[0] == nbytes
    assert exact[0] == (4 * T * D if is_rounded else nbytes)
    (assert_near_steps if is_rounded else assert_same_steps)(found, exact)


def test_parameters_and_inputs_without_a_gradient_stay(x):
    norm = made(lambda: nn.Sequential(nn.RMSNorm(D)), store="int8")
    weight = nn.Parameter(x.clone())
    with patch.object(int8, "pack_int8") as packs:
        norm(weight).sum().backward()
        norm(weight.view(4, -1, D)).sum().backward()
        norm(x).sum().backward()
        with torch.no_grad():
            norm(x * 1)
    assert not packs.called


def test_every_mask_of_gradients(x):
    """No mask saves more than without, and none gives other gradients."""
    ours, plain = made(store="int8"), made()
    names = [name for name, _ in ours.named_parameters()]
    groups = [
        [n for n in names if key in n]
        for key in ("first", "norm", "gate_proj", "down_proj", "last")
    ]
    for flags in itertools.product([True, False], repeat=len(groups)):
        chosen = {n for group, flag in zip(groups, flags, strict=True) if flag for n in group}
        if not chosen:
            continue
        for model in (ours, plain):
            for name, p in model.named_parameters():
                p.requires_grad_(name in chosen)
        found, exact = step(ours, x), step(plain, x)
        assert found[0] <= exact[0]
        assert torch.equal(found[1], exact[1])
        assert found[2].keys() == exact[2].keys() == chosen
        for name in chosen:
            assert (found[2][name] - exact[2][name]).norm() <= 0.03 * exact[2][name].norm()


def test_retained_and_second_derivatives(x):
    ours, plain = made(store="int8"), made()
    parameters = [*ours.parameters()]
    loss = ours(x).square().mean()
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(a, b)

    def penalty(model):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(leaf).square().sum(), [leaf], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [leaf, *model.parameters()])

    for a, b in zip(penalty(ours), penalty(plain), strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


def test_writes_raise(x):
    block = made(normed_mlp, store="int8")
    h = nn.Parameter(x) * 1
    y = block(h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[64, 48\].*modified by an inplace operation"):
        y.sum().backward()

    class WritesByData(MLPBlock):
        def branch(self, x):
            n = self.norm(x)
            n.data.mul_(2)
            return self.mlp(n)

    written = made(partial(normed_mlp, kind=WritesByData), store="int8")(nn.Parameter(x) * 1)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"\.data"):
        written.sum().backward()


def test_autocast(x):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found, exact = step(made(store="int8"), x), step(made(), x)
    assert_near_steps(found, exact)
    # the first linear's cast of x stays, and a LayerNorm's result in float32 is no input
    assert exact[0] - found[0] == (N + 1) * T * D * (2 - 9 / 8)


def test_linears_of_one_cast_share_it(x):
    """Each would save its own cast of a tensor of float32."""
    leaf = nn.Parameter(x)

    class ThreeReaders(nn.Module):
        def __init__(self):
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            self.norm = nn.RMSNorm(D)

        def forward(self, h):
            return sum(linear(h) for linear in self.linears)

    model = made(ThreeReaders, store="int8")
    h = leaf * 1
    with torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors([h]) as saved:
        y = model(h)
    casts = sum(linear.weight.numel() * 2 for linear in model.linears)
    assert saved.nbytes == T * D * 9 // 8 + casts
    y.sum().backward()


@pytest.mark.parametrize("around", [checkpoint, partial(torch.utils.checkpoint.checkpoint)])
def test_inside_a_checkpoint_nothing_is_rounded(x, around):
    ours, plain = made(store="int8"), made()
    options = {} if around is checkpoint else {"use_reentrant": False}
    found = step(ours, x, lambda x: around(ours, x, **options))
    assert found[0] == 0
    assert_same_steps(found, step(plain, x))


def test_hooks_around_get_the_tensors_themselves(x):
    ours, plain = made(store="int8"), made()
    with save_on_cpu():
        found = step(ours, x)
    assert_same_steps(found, step(plain, x))


def test_programs_that_are_recorded_are_exact(x):
    ours, plain = made(normed_mlp, store="int8"), made(normed_mlp)
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    steps = [step(m, x, compiled(m)) for m in (ours, plain)]
    assert_same_steps(*steps)
    exported = [torch.export.export(m, (x,)).module() for m in (ours, plain)]
    assert torch.equal(*(m(x) for m in exported))


def test_copies_and_unfuse(x):
    ours = made(store="int8")
    expected = step(ours, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_steps(step(other, x), expected)
        fusedckpt.unfuse(other)
        assert not [key for m in other.modules() for key in vars(m) if "fusedckpt" in key]


def test_the_peak_is_lower(x):
    x = torch.randn(4096, D, device=DEVICE)
    peaks = []
    for options in ({"store": "int8"}, {}):
        model = made(**options)
        model(x).square().mean().backward()
        peaks.append(peak_bytes(lambda model=model: model(x).square().mean().backward()))
    # its inputs but the last one, whose packed copy lives beside the values that are read
    assert peaks[1] - peaks[0] >= (N - 1) * 4096 * D * (4 - 9 / 8)


def test_bad_options():
    for store, error in (("int4", ValueError), (8, TypeError), (True, TypeError)):
        with pytest.raises(error, match="store"):
            fusedckpt.fuse(RoundedNet(), store=store)
        with pytest.raises(error, match="store"), fusedckpt.saving(store=store):
            pass


def llama(**options):
    transformers = pytest.importorskip("transformers")
    kind = transformers.LlamaConfig
    options = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2} | options
    config = kind(hidden_size=D, intermediate_size=2 * D, vocab_size=32, **options)
    return transformers.LlamaForCausalLM(config).train()


def language_step(model):
    torch.manual_seed(5)
    ids = torch.randint(0, 32, (2, T), device=DEVICE)
    return step(model, ids, lambda ids: model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_attention(recompute, any_size):
    """Attention reads what the norm before it makes of the rounded input; its output is saved."""
    options = {"recompute_elementwise": recompute}
    steps = []
    for store in ("int8", None):
        model = made(llama, store=store, **options)
        language_step(model)
        steps.append(language_step(model))
    found, exact = steps
    assert exact[0] - found[0] == 5 * 2 * T * D * (4 - 9 / 8)
    assert_near_steps(found, exact)


class ResidualAttention(Attention):
    def forward(self, x):
        return x + super().forward(x[None])[0]


class PostNorms(nn.Module):
    """The last norm saves the run of attention again in place of its input."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(D, D), ResidualAttention(D, 4)
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))

    def forward(self, x):
        h = self.first(x)
        y = self.attention(self.norms[0](h))
        # code of the model runs between
        assert y.dim() == 2
        return h + self.norms[1](y)


def test_norms_of_recomputed_attention(x):
    steps = []
    for store in ("int8", None):
        model = made(PostNorms, store=store).train()
        step(model, x)
        steps.append(step(model, x))
    found, exact = steps
    # attention's output, and its log-sum-exp
    assert exact[0] == 2 * 4 * T * D + 4 * 4 * T
    assert found[0] == T * D * 9 // 8 + 4 * T * D + 4 * 4 * T
    assert_near_steps(found, exact)


def test_routers_choose_once():
    """No choice of experts is recomputed from rounded values."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=D,
        intermediate_size=D,
        moe_intermediate_size=D,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    steps = []
    for store in ("int8", None):
        model = made(lambda: transformers.Qwen3MoeForCausalLM(config).train(), store=store)
        language_step(model)
        calls = []
        topk = torch.topk

        def counted(*args, calls=calls, topk=topk, **kwargs):
            calls.append(torch._C._current_graph_task_id())
            return topk(*args, **kwargs)

        with patch.object(torch, "topk", counted):
            steps.append(language_step(model))
        assert calls == [-1, -1]
    assert steps[0][0] < steps[1][0]
    assert_near_steps(*steps)


def test_adapters(x):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(RoundedNet(), config)
        # as enable_input_require_grads does for embeddings
        return model.train()

    ours, plain = made(adapted, store="int8"), made(adapted)
    found, exact = step(ours, x), step(plain, x)
    assert exact[0] - found[0] == (N + 1) * T * D * (4 - 9 / 8)
    assert_near_steps(found, exact)


class SharedNorm(nn.Module):
    """A norm whose result two linears read."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.norm = norm(D)
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        h = self.first(x)
        n = self.norm(h)
        a, b = (linear(n) for linear in self.linears)
        return a * b + h


class NormLinear(nn.Sequential):
    """A norm and its linear, which are one layer."""

    def __init__(self, norm):
        super().__init__(nn.Linear(D, D), norm(D), nn.Linear(D, D))


def backward_of(kind, norm, dtype):
    """Return the launches of a backward, the peak of one, and the gradients."""
    model = made(partial(kind, norm), dtype, store="int8")
    torch.manual_seed(2)
    y = model(torch.randn(2, T // 2, D, device=DEVICE, dtype=dtype)).float().square().sum()
    with launches() as counts:
        y.backward(retain_graph=True)
    grads = [p.grad.clone() for p in model.parameters()]
    # a graph of the gradients is made of the values
    again = torch.autograd.grad(y, list(model.parameters()), create_graph=True)
    for grad, same in zip(grads, again, strict=True):
        assert torch.allclose(grad, same, rtol=0.02, atol=0.02 * float(grad.abs().max()))
    del again, same
    return counts, peak_bytes(y.backward, DEVICE), grads


@pytest.mark.usefixtures("unverified")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(
    ("kind", "unpacks", "is_peak"), [(SharedNorm, 2, False), (NormLinear, 1, True)]
)
def test_norms_read_nine_bits(path, kind, unpacks, is_peak, norm, dtype):
    """The norm that runs again and its gradient: no launch unpacks, and no tensor is made."""
    counts, peak, grads = backward_of(kind, norm, dtype)
    with patch.object(rounded.RoundedLeaf, "holds", return_value=False):
        old_counts, old_peak, old_grads = backward_of(kind, norm, dtype)
    is_kernel = path == "triton"
    assert old_counts - counts == ({"unpack_int8_kernel": unpacks} if is_kernel else {})
    assert not counts["unpack_int8_kernel"]
    # the linears' gradients are the peak where two read the norm
    assert old_peak - peak == is_kernel * is_peak * T * D * dtype.itemsize
    for a, b in zip(grads, old_grads, strict=True):
        assert torch.equal(a, b)


class Stack(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), *[normed_mlp() for _ in range(N)])


def test_plan(x):
    """A plan has the level only where it is asked for, and predicts its peak."""
    model = made(Stack)
    x = torch.randn(1024, D, device=DEVICE)
    options = {"policy": "memory", "loss": lambda y: y.square().mean(), "progress": False}
    plain = fusedckpt.plan(model, x, **options)
    assert "int8" not in str(plain)
    found = fusedckpt.plan(model, x, store="int8", **options)
    assert {item.level for item in found.items[1:]} == {"inputs, int8"}
    assert "saves inputs, int8" in str(found)
    assert found.predicted_bytes == found.measured_bytes < plain.measured_bytes
    exact = step(model, x)
    found.apply(model)
    assert_near_steps(step(model, x), exact)
    found.undo()
    assert_same_steps(step(model, x), exact)
    with pytest.raises(ValueError, match="store"):
        fusedckpt.plan(model, x, store="int4", **options)
