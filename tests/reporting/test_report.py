"""Reports against bytes counted by hand, and against `memory`'s of the same step."""

import json
import sys

import pytest
import torch
from support import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.memory import peak_bytes, saved_tensors
from fusedckpt.reporting.memory_report import report

# sizes of float32 tensors on the CPU; the allocator of a GPU rounds up to 512 bytes
R, D, F = 8, 16, 48
X, H, W = 4 * R * D, 4 * R * F, 4 * D * F


def given(*shape):
    return torch.randn(*shape)


def mlp():
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))


def squares(output):
    """Compute the default loss of one tensor."""
    return output.float().square().mean()


class Containers(nn.Module):
    """Takes and gives nested containers; a shared module called twice, frozen and no_grad parts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([mlp(), mlp()])
        self.blocks.append(self.blocks[0])
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.table = nn.ModuleDict({"norm": nn.BatchNorm1d(D)})
        self.register_buffer("scale", torch.ones(D))

    def forward(self, batch, *, factor):
        x = batch.pop("x") * self.scale * factor[0]
        with torch.no_grad():
            x = self.frozen(x)
        for block in self.blocks:
            x = x + block(self.frozen(x))
        return {"y": [self.table["norm"](x)], "count": 3, "name": "y", "ids": torch.arange(3)}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=D, n_head=2, vocab_size=32, n_positions=R, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def fused():
    model = nn.Sequential(nn.Linear(D, D), mlp(), fusedckpt.MLP(D, F, norm=nn.LayerNorm(D)))
    fusedckpt.fuse(model)
    return model


def case(name):
    """Return a model, its arguments and keyword arguments, and the default loss of its output."""
    tokens = torch.randint(0, 32, (2, R))
    x = given(R, D)
    return {
        "mlp": lambda: (mlp(), (x,), {}, squares),
        "containers": lambda: (
            Containers(),
            ({"x": x},),
            {"factor": (given(D), None)},
            lambda output: squares(output["y"][0]),
        ),
        "checkpoint": lambda: (Checkpointed(False), (x,), {}, squares),
        "reentrant": lambda: (Checkpointed(True), (x,), {}, squares),
        "fused": lambda: (fused(), (x,), {}, squares),
        "gpt2": lambda: (gpt2(), (tokens,), {"labels": tokens}, lambda output: output.loss),
        "half": lambda: (mlp().bfloat16(), (x.bfloat16(),), {}, squares),
    }[name]()


CASES = ["mlp", "containers", "checkpoint", "reentrant", "fused", "gpt2", "half"]


def call(model, args, kwargs):
    """Call a model so that it can take nothing out of the caller's dicts."""
    return model(*(dict(arg) if isinstance(arg, dict) else arg for arg in args), **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_modules_sum_up_to_what_is_saved(name):
    model, args, kwargs, loss = case(name)
    found = report(model, *args, **kwargs)
    tensors = [*args, *kwargs.values()]
    if name == "containers":
        tensors = [args[0]["x"], kwargs["factor"][0]]
    with saved_tensors([*model.parameters(), *model.buffers(), *tensors]) as saved:
        loss(call(model, args, kwargs))
    assert found.saved_bytes == saved.nbytes
    assert sum(found.saved_by_module.values()) == saved.nbytes
    assert list(found.saved_by_module.values()) == sorted(found.saved_by_module.values())[::-1]
    names = {name for name, _ in model.named_modules()} | {"(model)", "(loss)"}
    assert names.issuperset(found.saved_by_module)


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_the_same_step(name):
    model, args, kwargs, loss = case(name)
    found = report(model, *args, **kwargs)
    model.zero_grad()

    def step():
        # as in a training loop, these live on
        output = call(model, args, kwargs)
        value = loss(output)
        value.backward()

    # what was there before is all that the report adds
    there = found.parameter_bytes + found.buffer_bytes + found.input_bytes
    assert found.resident_bytes == there
    assert found.peak_bytes - there == peak_bytes(step)


@pytest.mark.parametrize("name", ["containers", "gpt2", "fused"])
def test_peak_with_an_optimizer_is_that_of_a_later_step(name):
    model, args, kwargs, loss = case(name)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        output = call(model, args, kwargs)
        value = loss(output)
        value.backward()
        optimizer.step()

    found = report(model, *args, optimizer=optimizer, **kwargs)
    assert not optimizer.state
    step()
    optimizer.zero_grad()
    assert found.peak_bytes - found.resident_bytes == peak_bytes(step)
    optimizer.zero_grad()
    again = report(model, *args, optimizer=optimizer, **kwargs)
    assert again.peak_bytes == found.peak_bytes
    assert again.resident_bytes == found.resident_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_a_gpu_is_the_allocators():
    model, x = mlp().cuda(), given(R, D).cuda()

    def step():
        output = model(x)
        value = squares(output)
        value.backward()

    # the first step sets up libraries
    step()
    model.zero_grad()
    found = report(model, x)
    assert found.device == "cuda:0"
    assert found.peak_bytes - found.resident_bytes == peak_bytes(step, "cuda")


def test_bytes_by_kind():
    model = nn.Sequential(nn.Linear(D, F), nn.BatchNorm1d(F), nn.Linear(F, D))
    model[2].weight.requires_grad_(False)
    x = given(R, D)
    found = report(model, x)
    parameters = W + 4 * F + 2 * 4 * F + W + 4 * D
    assert found.parameter_bytes == parameters
    # running mean and variance, and a count
    assert found.buffer_bytes == 2 * 4 * F + 8
    assert found.input_bytes == X
    assert found.gradient_bytes == parameters - W
    assert found.optimizer_bytes is None
    optimizer = torch.optim.Adam(model.parameters())
    found = report(model, x, optimizer=optimizer)
    # two moments, and a step count for each of the five
    assert found.optimizer_bytes == 2 * (parameters - W) + 5 * 4
    assert found.resident_bytes == parameters + 2 * 4 * F + 8 + X + found.optimizer_bytes
    assert report(model, x.requires_grad_()).gradient_bytes == parameters - W + X


def test_saved_storages_name_owner_and_sharers():
    class Sine(nn.Module):
        def forward(self, x):
            return x.sin()

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))
            self.one, self.other = Sine(), Sine()
            self.third = nn.Tanh()

        def forward(self, x):
            y = x * self.weight
            return self.one(y) + self.other(y[:4]).sum() + self.third(y) + self.one(y)

    found = report(Shares(), given(R, D), loss=torch.sum)
    shared, kept = found.saved
    assert (shared.nbytes, shared.dtype, shared.shape) == (X, "float32", (R, D))
    assert (shared.owner, shared.sharers) == ("one", ("other",))
    assert (kept.owner, kept.sharers, kept.nbytes) == ("third", (), X)
    assert found.saved_by_module == {"one": X, "third": X}
    text = str(found)
    assert "other" in text
    assert "float32 [8, 16]" in text


def test_modules_go_by_their_names():
    found = report(mlp(), given(R, D))
    # gelu's input, its output; the loss keeps the output
    assert found.saved_by_module == {"1": H, "2": H, "(loss)": X}

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp()

    assert report(Own(D, F), given(R, D), loss=torch.sum).saved_by_module == {"(model)": H}


def test_fused_layers_stay_fused():
    model = nn.Sequential(nn.Linear(D, D), mlp())
    fusedckpt.fuse(model)
    found = report(model, given(R, D))
    assert found.saved_by_module == {"1": X, "(loss)": X}


class Bulge(nn.Module):
    """Needs 16 more tensors like its input for a moment of its forward."""

    def forward(self, x):
        with torch.no_grad():
            x.repeat(16, 1).sum()
        return x * 1


def test_peak_in_forward():
    model = nn.Sequential(nn.Linear(D, D), Bulge(), nn.Linear(D, D))
    found = report(model, given(64, D))
    assert (found.peak.phase, found.peak.module) == ("forward", "1")


def test_peak_in_backward():
    # the gradient of the table is as large as it; the peak comes when nothing else is left
    model = nn.Sequential(nn.Embedding(1000, D), nn.Linear(D, D), nn.GELU())
    found = report(model, torch.arange(R))
    assert (found.peak.phase, found.peak.module) == ("backward", "0")
    # a node that saves no tensors, after an op that made no node
    model = nn.Sequential(nn.Linear(D, D), Idle(), Pool(), nn.Linear(D, D))
    found = report(model, given(4 * R, 64, D))
    assert (found.peak.phase, found.peak.module) == ("backward", "2")
    # after a recompute that stopped early, by an exception out of its modules
    model = Checkpointed(False)
    model.first = nn.Embedding(1000, D)
    found = report(model, torch.arange(R))
    assert (found.peak.phase, found.peak.module) == ("backward", "first")
    assert found.timeline[-1].module == "first"


class Idle(nn.Module):
    """Passes its input on, and computes something that needs no gradient."""

    def forward(self, x):
        given(3).mul(2)
        return x


class Pool(nn.Module):
    """Its gradient is a large tensor, made by an autograd.Function that keeps nothing."""

    def forward(self, x):
        return Mean.apply(x)


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mean(1)

    @staticmethod
    def backward(ctx, dy):
        return dy[:, None].repeat(1, 64, 1) / 64


class LateBulge(Bulge):
    """Bulges in a recompute only."""

    def forward(self, x):
        again = torch._C._current_graph_task_id() != -1
        return super().forward(x) if again else x * 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_peak_in_a_recompute(use_reentrant):
    model = Checkpointed(use_reentrant)
    model.inner = nn.Sequential(mlp(), LateBulge(), nn.Tanh())
    found = report(model, given(64, D))
    assert (found.peak.phase, found.peak.module) == ("backward", "inner.1")


def test_peak_in_the_optimizer():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    found = report(model, given(1, 256), optimizer=optimizer)
    assert (found.peak.phase, found.peak.module) == ("optimizer", "(optimizer)")


def test_timeline():
    model = mlp()
    found = report(model, given(R, D), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    times = [moment.time_ns for moment in found.timeline]
    assert times[0] == 0
    assert times == sorted(times)
    assert found.timeline[0].live_bytes == found.resident_bytes
    phases = [moment.phase for moment in found.timeline]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == {"forward", "backward", "optimizer"}
    # before the backward: three outputs, the loss's square and the loss
    before = [moment for moment in found.timeline if moment.phase == "forward"][-1]
    assert before.live_bytes == found.resident_bytes + H + H + X + 4
    # after it: the gradients, the output and the loss
    last = found.timeline[-1]
    assert last.live_bytes == found.resident_bytes + found.gradient_bytes + X + 4
    forward = [moment.module for moment in found.timeline if moment.phase == "forward"]
    assert list(dict.fromkeys(forward)) == ["(model)", "0", "1", "2", "(loss)"]
    backward = [moment.module for moment in found.timeline if moment.phase == "backward"]
    assert list(dict.fromkeys(backward)) == ["(loss)", "2", "1", "0"]


def test_nothing_changes_also_when_the_loss_raises():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5))
    x = given(R, D)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    model[0].bias.grad = None
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [*model.parameters(), *model.buffers(), *(g for g in gradients if g is not None)]
    values, stream = [tensor.detach().clone() for tensor in tensors], torch.get_rng_state()

    def fail(output):
        raise ZeroDivisionError

    for loss in (None, fail):
        if loss:
            with pytest.raises(ZeroDivisionError):
                report(model, x, loss=loss, optimizer=optimizer)
        else:
            report(model, x, optimizer=optimizer)
        now = [parameter.grad for parameter in model.parameters()]
        assert all(old is new for old, new in zip(gradients, now, strict=True))
        assert all(map(torch.equal, tensors, values))
        assert torch.equal(torch.get_rng_state(), stream)
        assert not optimizer.state
    assert not nn.modules.module._has_any_global_hook()


def test_a_loss_that_is_a_module_is_put_back():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.norm = nn.Linear(D, 1), nn.BatchNorm1d(D)

        def forward(self, y):
            return self.head(self.norm(y)).sum()

    loss = Loss()
    found = report(mlp(), given(R, D), loss=loss)
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert loss.norm.num_batches_tracked == 0
    # what it keeps is the loss's
    assert found.saved_by_module["(loss)"] > 2 * X


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors():
    model = nn.Sequential(nn.Embedding(100, D, sparse=True), Adjacent())
    optimizer = torch.optim.SparseAdam([model[0].weight])
    before = model[1].edges.values().clone()
    found = report(model, torch.arange(R), optimizer=optimizer)
    # as many rows as tokens, and their indices
    assert found.gradient_bytes == X + 8 * R
    # the weights of edges, row offsets and columns
    assert found.buffer_bytes == 4 * R + 8 * (R + 1) + 8 * R
    # for the loss
    assert found.saved_by_module == {"(loss)": X}
    assert torch.equal(model[1].edges.values(), before)


class Adjacent(nn.Module):
    """Multiplies by a sparse buffer, and changes that."""

    def __init__(self):
        super().__init__()
        rows, columns = torch.arange(R + 1), torch.arange(R)
        edges = torch.sparse_csr_tensor(rows, columns, torch.ones(R), (R, R))
        self.register_buffer("edges", edges)

    def forward(self, x):
        y = self.edges @ x
        with torch.no_grad():
            self.edges.values().mul_(2)
        return y


def test_inputs_in_a_graph_of_the_caller():
    weight = randn(D).cpu()
    x = torch.ones(R, D) * weight
    found = report(mlp(), x)
    assert found.gradient_bytes == 2 * W + 4 * (D + F) + X
    x.sum().backward()
    assert weight.grad is not None


@torch.inference_mode()
def made_in_inference_mode():
    return torch.ones(2, D)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((len, 1), {}, TypeError, "report: model must be an nn.Module, got builtin_function"),
        ((mlp(), 1), {"loss": 3}, TypeError, "report: loss must be callable or None, got int"),
        ((mlp(), 1), {"optimizer": 3}, TypeError, r"report: optimizer must be .* or None, got int"),
        ((nn.Tanh(), torch.ones(2)), {}, ValueError, "report: expected a parameter or an input"),
        ((nn.LazyLinear(2), torch.ones(2)), {}, ValueError, "report: weight is not initialised"),
        (
            (mlp(), torch.ones(2, D)),
            {"loss": torch.exp},
            ValueError,
            r"report: the loss must be a scalar .* got shape \[2, 16\], requires_grad=True",
        ),
        (
            (mlp(), torch.ones(2, D)),
            {"loss": lambda y: y.detach().sum()},
            ValueError,
            r"got shape \[\], requires_grad=False",
        ),
        ((mlp(), made_in_inference_mode()), {}, ValueError, "report: expected ordinary tensors"),
        ((mlp(), torch.ones(2, D)), {"loss": id}, ValueError, "the loss must .* got int"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        report(*arguments, **options)


def test_dict_and_json(tmp_path):
    found = report(mlp(), given(R, D))
    file = tmp_path / "report.json"
    read = json.loads(found.to_json(file))
    assert read == json.loads(file.read_text())
    assert read["model"] == "Sequential"
    assert read["peak_bytes"] == found.peak_bytes
    assert read["peak_module"] == found.peak.module
    assert read["saved_bytes_by_module"] == found.saved_by_module
    assert read["saved"][0] | {"sharers": ()} == vars(found.saved[0]) | {"shape": [R, F]}
    assert read["timeline"]["live_bytes"] == [moment.live_bytes for moment in found.timeline]
    assert {len(column) for column in read["timeline"].values()} == {len(found.timeline)}


def test_text_with_and_without_rich(monkeypatch):
    found = report(nn.Sequential(*(mlp() for _ in range(20))), given(R, D))
    pytest.importorskip("rich")
    tabled = str(found)
    for module in ("rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)
    plain = str(found)
    assert "┃" in tabled
    assert "┃" not in plain
    for text in (tabled, plain):
        # 24 are shown
        assert f"{len(found.saved_by_module) - 24} more" in text
        assert "peak " in text
        assert f"in {found.peak.phase}, in {found.peak.module}" in text
    _, rule, *rows = plain.split("\n\n")[1].splitlines()
    assert rule.startswith("---")
    ends = {row.index("KiB") for row in rows}
    assert len(ends) == 1


def test_plot(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    found = report(gpt2(), torch.arange(R)[None], labels=torch.arange(R)[None])
    file = tmp_path / "report.svg"
    # text as text, not as shapes
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        found.plot(file)
    drawn = file.read_text()
    assert all(f">transformer.h.{i}<" in drawn for i in range(2))
    assert ">transformer.h.0.mlp.act<" not in drawn
    for text in ("forward", "backward", "parameters", "gradients", "activations"):
        assert f">{text}<" in drawn
    assert ">optimizer<" not in drawn
    assert f">in {found.peak.phase}, {found.peak.module}<" in drawn
    monkeypatch.delitem(sys.modules, "fusedckpt.reporting.memory_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"MemoryReport.plot: .* 'fusedckpt\[bench\]'"):
        found.plot(file)
