"""Reports against bytes counted by hand, and against `memory`'s of the same step."""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from functools import partial

import pytest
import torch
from report_models import (
    CASES,
    D,
    F,
    H,
    R,
    W,
    X,
    call,
    case,
    given,
    gpt2,
    mlp,
    squares,
    step,
)
from torch import nn

import fusedckpt
from fusedckpt.memory import peak_bytes, saved_tensors
from fusedckpt.reporting.memory_report import report
from fusedckpt.reporting.tables import size


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_peaks_are_those_of_the_same_step(name):
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
    # what was there before is all that the report adds
    there = found.parameter_bytes + found.buffer_bytes + found.input_bytes
    assert found.resident_bytes == there
    model.zero_grad()
    assert found.peak_bytes - there == peak_bytes(lambda: step(model, args, kwargs, loss))


@pytest.mark.parametrize("name", ["containers", "gpt2", "fused"])
def test_peak_with_an_optimizer_is_that_of_a_later_step(name):
    model, args, kwargs, loss = case(name)
    optimizer = torch.optim.Adam(model.parameters())
    run = partial(step, model, args, kwargs, loss, optimizer)
    found = report(model, *args, optimizer=optimizer, **kwargs)
    assert not optimizer.state
    run()
    optimizer.zero_grad()
    assert found.peak_bytes - found.resident_bytes == peak_bytes(run)
    optimizer.zero_grad()
    again = report(model, *args, optimizer=optimizer, **kwargs)
    assert again.peak_bytes == found.peak_bytes
    assert again.resident_bytes == found.resident_bytes


class Drops(nn.Module):
    """Its temporary is freed by Python, between two ops."""

    def forward(self, x):
        for _ in range(4):
            x = x.sin() + 1
        return x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [D, 128], ids=["part of a block", "a block"])
@pytest.mark.parametrize("last", [nn.Identity, Drops])
def test_peak_on_a_gpu_is_the_allocators(width, last):
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), last()).cuda()
    run = partial(step, model, (x := given(R, width).cuda(),), {}, squares)
    # the first step sets up libraries
    run()
    model.zero_grad()
    found = report(model, x)
    assert found.device == "cuda:0"
    assert found.peak_bytes - found.resident_bytes == peak_bytes(run, "cuda")


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

    class SharesInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))
            self.one, self.other = Sine(), Sine()
            self.third = nn.Tanh()

        def forward(self, x):
            y = x * self.weight
            return self.one(y) + self.other(y[:4]).sum() + self.third(y) + self.one(y)

    found = report(SharesInput(), given(R, D), loss=torch.sum)
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

    class OwnExp(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp()

    assert report(OwnExp(D, F), given(R, D), loss=torch.sum).saved_by_module == {"(model)": H}


def test_fused_layers_stay_fused():
    model = nn.Sequential(nn.Linear(D, D), mlp())
    fusedckpt.fuse(model)
    found = report(model, given(R, D))
    assert found.saved_by_module == {"1": X, "(loss)": X}


def test_a_loss_that_raises_leaves_no_hook_state_or_gradient():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    optimizer = torch.optim.Adam(model.parameters())

    def fail(output):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        report(model, given(R, D), loss=fail, optimizer=optimizer)
    assert not nn.modules.module._has_any_global_hook()
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model[1].num_batches_tracked == 0


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
    weight = torch.randn(D, requires_grad=True)
    x = torch.ones(R, D) * weight
    found = report(mlp(), x)
    assert found.gradient_bytes == 2 * W + 4 * (D + F) + X
    x.sum().backward()
    assert weight.grad is not None


@torch.inference_mode()
def made_in_inference_mode():
    return torch.ones(2, D)


class Nothing(nn.Linear):
    def forward(self, x):
        return None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((len, 1), {}, TypeError, "report: model must be an nn.Module, got builtin_function"),
        ((mlp(), 1), {"loss": 3}, TypeError, "report: loss must be callable or None, got int"),
        ((mlp(), 1), {"optimizer": 3}, TypeError, r"report: optimizer must be .* or None, got int"),
        ((nn.Tanh(), torch.ones(2)), {}, ValueError, "report: no parameter or input of the Tanh"),
        ((nn.LazyLinear(2), torch.ones(2)), {}, ValueError, "report: weight is not initialized"),
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
        ((mlp(), made_in_inference_mode()), {}, ValueError, "report: some tensors of the model"),
        ((mlp(), torch.ones(2, D)), {"loss": id}, ValueError, "the loss must .* got int"),
        ((mlp(), torch.ones(0, D)), {}, ValueError, r"report: .* got empty tensors of \[0, 16\]"),
        ((Nothing(2, 2), 1), {}, ValueError, "report: the output of Nothing, None, has neither"),
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
    layers = nn.Sequential(OrderedDict((f"layer{i}", mlp()) for i in range(20)))
    found = report(layers, given(R, D))
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


def test_modules_of_several_layers_have_one_row():
    class ExpOfMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp()

        def forward(self, x):
            return self.mlp(x).exp()

    found = report(nn.Sequential(*(ExpOfMLP() for _ in range(3))), given(R, D))
    text = str(found)
    for cells in (
        f"3 x *.mlp.1 {size(3 * H)} {3 * H / found.saved_bytes:.1%} 3 float32 [{R}, {F}]",
        # the linear, whose input is the block's own, too
        f"3 x *.mlp.2 {size(3 * H)}",
        f"3 x * {size(3 * X)}",
    ):
        assert cells in re.sub(r"[│ ]+", " ", text)
    # layers of one MLP are not alike
    assert " x " not in str(report(mlp(), given(R, D)))


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


def test_a_file_of_no_format_is_refused_before_it_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"^MemoryReport.plot: expected a file such as .*\.xyz$"):
        report(mlp(), given(R, D)).plot(tmp_path / "memory.xyz")


def test_eval_mode_is_named():
    assert "on cpu, in eval mode\n" in str(report(mlp().eval(), given(R, D)))
    assert "eval mode" not in str(report(mlp(), given(R, D)))
