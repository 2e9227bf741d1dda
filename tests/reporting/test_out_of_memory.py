"""The report that is printed when a GPU's memory runs out."""

import pytest
import torch
from support import DEVICE
from torch import nn

import fusedckpt
from fusedckpt.allocations import open_workspaces
from fusedckpt.reporting import out_of_memory
from fusedckpt.reporting.out_of_memory import EARLIER, OUTSIDE, LiveAllocation
from fusedckpt.reporting.tables import size

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
D, ROWS = 64, 1000


class Greedy(nn.Module):
    """Asks for more memory than there is where it is told to."""

    def __init__(self, more):
        super().__init__()
        self.linear, self.more = nn.Linear(D, D), more

    def forward(self, x):
        y = self.linear(x).sin()
        if self.more:
            x.new_empty(1 << 45)
        return y


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy * dy.new_empty(1 << 45)


@pytest.fixture
def watched():
    watches = []
    open_workspaces(DEVICE)
    yield lambda model: watches.append(fusedckpt.report_on_oom(model)) or watches[-1]
    for watch in watches:
        watch.remove()
    assert DEVICE.type == "cpu" or not torch._C._cuda_isHistoryEnabled()


@needs_gpu
def test_blocks_by_module_and_line(watched, capsys):
    model = nn.Sequential(Greedy(False), Greedy(True)).to(DEVICE)
    x = torch.ones(ROWS, D, device=DEVICE, requires_grad=True)
    watch = watched(model)
    kept = torch.empty(3 * ROWS, D, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    report = watch.last
    assert report.requested_bytes >= 4 << 45
    assert report.running == "1"
    counts = report.live_by_module
    # the linear's result, which the sine saves, and the sine
    one = 4 * ROWS * D
    assert {key: counts[key] for key in ("0.linear", "0", "1.linear", "1", OUTSIDE)} == {
        **dict.fromkeys(("0.linear", "0", "1.linear", "1"), one),
        OUTSIDE: kept.nbytes,
    }
    # the parameters and x
    assert counts[EARLIER] >= x.nbytes + sum(p.nbytes for p in model.parameters())
    assert report.live[0].nbytes == max(block.nbytes for block in report.live)
    (line,) = [block.line for block in report.live if block.module == "0.linear"]
    assert line.startswith(f"{__file__}:")
    assert line.endswith(" in forward")
    printed = capsys.readouterr().err
    assert printed.startswith("Out of memory on cuda:0, while 1 ran\n  requested 131,072.0 GiB;")
    assert "1.linear" in printed


@needs_gpu
def test_in_the_backward_and_after_the_end(watched, capsys):
    model = nn.Linear(D, D).to(DEVICE)
    watch = watched(model)
    y = FailsInBackward.apply(model(torch.ones(ROWS, D, device=DEVICE)))
    with pytest.raises(torch.OutOfMemoryError):
        y.sum().backward()
    assert watch.last.running == OUTSIDE
    assert watch.last.live_by_module["(model)"] == 4 * ROWS * D
    watch.remove()
    watch.last = None
    capsys.readouterr()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, device=DEVICE)
    assert watch.last is None
    assert capsys.readouterr().err.count("module") == 0


def test_as_text():
    blocks = [
        LiveAllocation(2**20 * (20 - i), f"layers.{i}", f"model.py:{i} in forward")
        for i in range(15)
    ]
    found = out_of_memory.OutOfMemoryReport(
        "cuda:0", 2**30, 2**34, 2**20, "layers.15", tuple(blocks)
    )
    assert found.live_bytes == sum(block.nbytes for block in blocks)
    text = str(found)
    assert text.startswith(
        "Out of memory on cuda:0, while layers.15 ran\n"
        "  requested 1.0 GiB; tensors have 195.0 MiB of 16.0 GiB, 1.0 MiB are free\n"
    )
    assert "3 more" in text
    assert "21.0 MiB" in text
    assert "model.py:11 in forward" in text
    assert "model.py:12 in forward" not in text


def test_the_advice_for_plan_is_the_fastest_measured_plan():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    x = torch.randn(64, 8)
    assert out_of_memory.advice_for_plan(model, 1 << 40) == ""
    plans = [fusedckpt.plan(model, x, policy=name, progress=False) for name in ("all", "none")]
    least, most = sorted(plan.measured_bytes for plan in plans)
    fastest = min(plans, key=lambda plan: plan.extra_ms)
    assert f"peak at {size(fastest.measured_bytes)}" in out_of_memory.advice_for_plan(model, most)
    assert f"peak at {size(least)}" in out_of_memory.advice_for_plan(model, least)
    text = out_of_memory.advice_for_plan(model, least - 1)
    assert text.startswith("no measured plan fits into")
    assert text.endswith(f"the least peak is {size(least)}")
    # of another model, nothing is known
    assert out_of_memory.advice_for_plan(nn.Linear(2, 2), 1 << 40) == ""


@needs_gpu
def test_a_measured_plan_is_named_at_the_error(watched):
    model = nn.Sequential(Greedy(False), Greedy(False)).to(DEVICE)
    x = torch.ones(ROWS, D, device=DEVICE)
    plan = fusedckpt.plan(model, x, policy="all", progress=False)
    watch = watched(model)
    model[1].more = True
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert f"peak at {size(plan.measured_bytes)}" in watch.last.way
    assert f"  {watch.last.way}\n" in str(watch.last)


def test_lines_of_torch_are_skipped():
    frames = [
        {"filename": torch.nn.functional.__file__, "line": 1, "name": "linear"},
        {"filename": fusedckpt.memory.__file__, "line": 2, "name": "peak_bytes"},
        {"filename": "model.py", "line": 3, "name": "forward"},
    ]
    assert out_of_memory._line(frames) == "model.py:3 in forward"
    assert out_of_memory._line(frames[:1]).endswith(":1 in linear")
    assert out_of_memory._line([]) == "no line of Python: the backward pass"


def test_errors():
    with pytest.raises(TypeError, match=r"report_on_oom: model must be an nn.Module, got int"):
        fusedckpt.report_on_oom(3)
    for model in (nn.Linear(2, 2), nn.Identity()):
        with pytest.raises(ValueError, match=r"report_on_oom: expected a model on a CUDA device"):
            fusedckpt.report_on_oom(model)
