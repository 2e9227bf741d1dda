"""ways, its presets and classics at toy sizes: honest bytes, gradients and losses that agree."""

from __future__ import annotations

import copy
import math
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.nn import functional as F

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.recipes import recipe_mode

pytest.importorskip("matplotlib", reason="needs the bench extra")
pytest.importorskip("sklearn", reason="needs the bench extra")

from bench import classics, models, tasks, training
from bench.__main__ import main
from bench.results import groups, read
from bench.training import compare
from bench.workload import Batch, Way, Workload

pytestmark = pytest.mark.usefixtures("aten")
STEPS, REPEAT, LAYERS, DIM, SEQ, BATCH = 3, 2, 2, 64, 48, 3
SIZES = {"steps": STEPS, "repeat": REPEAT, "layers": LAYERS, "dim": DIM, "seq": SEQ, "batch": BATCH}
MIB = 2**20
F32 = 4
Rows = dict[str, dict]


def bench(out: Path, command: str, *options: str, status: int = 0) -> list[Rows]:
    """Run a command, and return the rows of each case by name."""
    with forced_path("aten"):
        assert main([command, "--device=cpu", *options, f"--out={out}"]) == status
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    rows = read(out / f"{command}.jsonl")
    assert {row["command"] for row in rows} == {command}
    assert all(row["torch"] == torch.__version__ for row in rows)
    return [{row["name"]: row for row in case} for case in groups(rows)]


def sizes(**changes: object) -> list[str]:
    return [f"--{name}={size}" for name, size in (SIZES | changes).items()]


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no figure: those of other tests of a command are the same but for numbers."""

    def draw(cases: object, path: Path) -> None:
        path.write_bytes(b"\x89PNG")

    monkeypatch.setattr("bench.drawings.draw_training", draw)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Rows:
    (rows,) = bench(tmp_path_factory.mktemp("demo"), "demo", *sizes())
    return rows


def test_demo_trains_alike_and_saves_less(demo):
    assert list(demo) == ["eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan"]
    for row in demo.values():
        assert len(row["losses"]) == STEPS
        assert row["losses"][0] == pytest.approx(math.log(256), abs=0.5)
        assert row["losses"][-1] < row["losses"][0]
        pairs = zip(row["losses"], demo["eager"]["losses"], strict=True)
        # of every turn, which repeats the first
        assert row["loss_difference"] == max(abs(a - b) for a, b in pairs) < 1e-4
        assert len(row["both_ms"]) == STEPS * REPEAT
        assert row["saved_bytes"] < row["peak_bytes"]
        assert 0 < row["errors"][0] < 1e-5
    hidden = LAYERS * BATCH * SEQ * 4 * DIM * F32
    saved = {name: row["saved_bytes"] for name, row in demo.items()}
    assert saved["fuse"] <= saved["eager"] - hidden
    assert saved["fuse+ckpt"] <= saved["checkpoint"] < saved["fuse"]
    assert demo["fuse+ckpt"]["peak_bytes"] < demo["checkpoint"]["peak_bytes"]
    plan = demo["fuse+plan"]
    assert plan["peak_bytes"] <= plan["budget_bytes"] == demo["checkpoint"]["peak_bytes"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("option", "bound"),
    [
        *(pytest.param(f"--model={m}", 1e-4, id=m) for m in ("llama", "gpt2", "bert", "vit")),
        ("--mlp=swiglu", 1e-4),
        ("--dtype=bfloat16", 0.05),
    ],
)
def test_demo_of_other_models(tmp_path, option, bound):
    (rows,) = bench(tmp_path, "demo", *sizes(steps=1, repeat=1), option)
    assert max(row["loss_difference"] for row in rows.values()) < bound
    # gradients are judged in every model and dtype
    assert all(len(row["both_ms"]) == len(row["errors"]) == 1 for row in rows.values())
    assert rows["fuse"]["saved_bytes"] <= rows["eager"]["saved_bytes"]
    assert rows["fuse+ckpt"]["saved_bytes"] < rows["eager"]["saved_bytes"] / 2


@pytest.mark.usefixtures("undrawn")
def test_the_selective_peer_keeps_results_of_gemms_and_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)
    names = ("checkpoint", "selective", "fuse", "fuse+recipes")
    ways = [f"--ways={name}" for name in names]
    (rows,) = bench(tmp_path, "ways", *sizes(steps=1, repeat=1), "--model=own", *ways)
    assert list(rows) == ["eager", *names]
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    # results of q, k, v, attention and its linear, fc1 and fc2; a log-sum-exp; a random state
    cached = BATCH * SEQ * (10 * DIM + 1) * F32 + torch.get_rng_state().nbytes
    assert saved["selective"] - saved["checkpoint"] == LAYERS * cached
    assert rows["selective"]["recomputed"] == 0
    # the checkpoint runs all of a layer again but fc2, attention included
    gemm = 2 * BATCH * SEQ * DIM * DIM
    attention = 4 * BATCH * SEQ * SEQ * DIM
    again = LAYERS * (8 * gemm + attention)
    forward = LAYERS * (12 * gemm + attention) + 2 * BATCH * SEQ * DIM * models.VOCAB
    assert rows["checkpoint"]["recomputed"] == pytest.approx(again / forward, rel=1e-12)
    assert rows["fuse+recipes"]["recomputed"] == rows["fuse"]["recomputed"]
    assert max(saved["fuse"], saved["fuse+recipes"]) < saved["selective"] < saved["eager"]
    assert all(row["loss_difference"] < 1e-4 for row in rows.values())


def test_a_loss_that_is_not_finite_is_told(tmp_path, monkeypatch, capsys):
    def poison(model: nn.Module) -> str:
        nn.init.constant_(model.get_parameter("norm.weight"), math.nan)
        return "poisoned"

    # of gradients that are NaN nothing would be timed
    monkeypatch.setattr("bench.training.Judge.verdict", lambda judge, way: {})
    monkeypatch.setattr(fusedckpt, "fuse", poison)
    options = [*sizes(steps=2), "--ways=fuse"]
    (rows,) = bench(tmp_path, "demo", *options, status=1)
    assert math.isnan(rows["fuse"]["losses"][0])
    # parameters are shared
    assert "loss not finite: eager, fuse" in capsys.readouterr().out


def test_ways_that_all_fail_end_in_their_reasons(tmp_path, monkeypatch, capsys):
    def poison(judge: object, way: Way) -> dict[str, object]:
        is_wrong = way.name == "eager" or broken
        return {"failure": "wrong: poisoned", "is_wrong": True} if is_wrong else {}

    monkeypatch.setattr("bench.training.Judge.verdict", poison)
    command = [
        "demo",
        "--device=cpu",
        *sizes(steps=1, repeat=1),
        "--ways=fuse",
        f"--out={tmp_path}",
    ]
    broken = False
    assert main([*command, "--seed=0", "--seed=1"]) == 1
    eager, fuse = read(tmp_path / "demo.jsonl")
    assert (eager["failure"], fuse["failure"]) == ("wrong: poisoned", None)
    # there is no other loss to compare with
    assert len(fuse["losses"]) == 1
    assert "loss_difference" not in fuse
    broken = True
    assert main(command) == 1
    assert all(row["is_wrong"] for row in read(tmp_path / "demo.jsonl"))
    assert "fuse: wrong: poisoned" in capsys.readouterr().out
    assert not (tmp_path / "demo.png").exists()


def task(**changes: object) -> tasks.Task:
    made = {"kind": "own", "layers": 1, "dim": 64, "seq": 7, "batch": 5, "mlp": "gelu"}
    return tasks.Task(**{**made, "dtype": torch.float32, "device": torch.device("cpu"), **changes})


def test_batches_repeat_and_shift():
    first, other = task().batches(2, seed=3)
    assert torch.equal(first.target[:, :-1], first.args[0][:, 1:])
    (again,) = task().batches(1, seed=3)
    assert torch.equal(again.args[0], first.args[0])
    assert not torch.equal(other.args[0], first.args[0])


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_held_out_data_are_in_no_batch(kind, monkeypatch):
    # every window and picture is another
    monkeypatch.setattr(tasks, "stdlib_text", lambda: torch.arange(200, dtype=torch.uint8))
    held, batches = task(kind=kind).held_out(), task(kind=kind).batches(40, seed=0)
    rows = {tuple(x.flatten().tolist()) for batch in batches for x in batch.args[0]}
    assert not rows & {tuple(x.flatten().tolist()) for x in held.args[0]}


@pytest.mark.parametrize("base", ["dense", "int8"])
def test_finetuning_saves_less(tmp_path, base):
    pytest.importorskip("peft")
    short = sizes(steps=2, repeat=1, seq=32, batch=2)
    options = [*short, "--pretrain=1", "--lora=4", f"--base={base}"]
    (rows,) = bench(tmp_path, "finetune", *options)
    assert list(rows) == ["eager", "checkpoint", "fuse", "fuse preact", "fuse+plan"]
    for row in rows.values():
        assert row["loss_difference"] < 1e-4
        assert (row["base"], row["lora"]) == (base, 4)
        assert row["errors"]
    eager, fused, kept = (rows[n]["saved_bytes"] for n in ("eager", "fuse", "fuse preact"))
    assert fused < kept < eager


def test_paper_ways_save_less(tmp_path):
    pytest.importorskip("peft")
    options = [*sizes(steps=2, seq=32, batch=4, repeat=1), "--pretrain=1", "--model=vit"]
    both = bench(tmp_path, "paper", *options, "--seed=0", "--seed=1", "--lora=4", "--lora=0")
    assert [rows["eager"]["lora"] for rows in both] == [4, 0]
    for rows in both:
        assert list(rows) == ["eager", "checkpoint", "fuse", "approximate"]
        for name in ("fuse", "approximate"):
            assert rows[name]["loss_difference"] < (1e-4 if name == "fuse" else 0.3)
            assert rows[name]["saved_bytes"] < rows["eager"]["saved_bytes"]
            assert rows[name]["peak_bytes"] < rows["eager"]["peak_bytes"]
            # a turn of each seed
            assert len(rows[name]["accuracy"]) == 2
            assert len(rows[name]["both_ms"]) == 4
        assert rows["approximate"]["unjudged"] == "its derivatives are approximate on purpose"


CLASSIC = {
    **{"layers": 6, "width": 4, "batch": 4, "mlp-layers": 4, "mlp-width": 256, "mlp-batch": 64},
    **{"depth-dim": 64, "depth-seq": 16, "depth-batch": 2, "depth-budget": "512KiB", "steps": 2},
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, Rows]:
    options = [f"--{name}={size}" for name, size in CLASSIC.items()]
    found = bench(tmp_path_factory.mktemp("classics"), "classics", *options, "--repeat=1")
    return dict(zip(("conv", "mlp", "depth"), found, strict=True))


def test_classics_train_every_way_alike(parts):
    ways = [*(f"{whose} {k}" for whose in ("torch", "fusedckpt") for k in (1, 2, 4))]
    rules = ["fusedckpt sqrt", "fusedckpt recursive"]
    rules += [f"plan {policy}" for policy in ("all", "sqrt", "speed", "memory")]
    assert list(parts["conv"])[: 1 + len(ways) + len(rules)] == ["plain", *ways, *rules]
    assert {"plain", "torch 3", "fusedckpt 3", *rules} <= parts["mlp"].keys()
    for rows in parts.values():
        for name, row in rows.items():
            # bit for bit, but where kernels are fused
            assert row["loss_difference"] <= (1e-5 if "fused," in name else 0.0)
            assert row["losses"][-1] != row["losses"][0]
            assert len(row["losses"]) == len(row["both_ms"]) == 2


def test_plans_predict_their_peaks_within_budgets(parts):
    plans = [row for part in ("conv", "mlp") for name, row in parts[part].items() if "plan" in name]
    # besides 3 %, the random states of segments, of which the prediction allows one for each unit
    states = 8 * torch.get_rng_state().nbytes
    for row in plans:
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03, abs=states)
    asked = [row["budget_bytes"] for row in parts["mlp"].values() if "budget_bytes" in row]
    least = min(row["peak_bytes"] for name, row in parts["mlp"].items() if "plan" in name)
    assert [least, *asked, parts["mlp"]["plain"]["peak_bytes"]] == sorted(
        [least, *asked, parts["mlp"]["plain"]["peak_bytes"]]
    )
    assert len(asked) == 3
    within = [row for row in parts["mlp"].values() if "budget_bytes" in row]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in within)


def test_memory_through_a_step_rises_in_forward_and_falls_in_backward(parts):
    rows = parts["conv"]
    shown = {name: row["curve"] for name, row in rows.items() if "curve" in row}
    assert list(shown) == ["plain", "fusedckpt sqrt", "fusedckpt recursive", "plan memory"]
    for name, curve in shown.items():
        assert max(curve["mib"]) == pytest.approx(rows[name]["peak_bytes"] / MIB, abs=1e-3)
        assert 0 < curve["forward_ms"] < curve["ms"]
    mib, share = shown["plain"]["mib"], shown["plain"]["forward_ms"] / shown["plain"]["ms"]
    turn = mib[int((len(mib) - 1) * share)]
    # all that is saved is alive when backward begins
    assert turn * MIB >= rows["plain"]["saved_bytes"]
    # a stall in backward may leave all of forward to the first slice
    assert mib[-1] < turn


def test_a_curve_has_the_highest_of_each_slice():
    # in 160 ms, of which a slice is one
    forward = [(0, 1), (30.25, 5), (30.5, 3)]
    backward = [(40, 4), (40.5, 6), (160, 2)]
    moments = [
        SimpleNamespace(time_ns=int(1e6 * ms), live_bytes=mib * MIB, phase=phase)
        for phase, pairs in (("forward", forward), ("backward", backward))
        for ms, mib in pairs
    ]
    report = SimpleNamespace(timeline=moments, parameter_bytes=MIB, gradient_bytes=0)
    curve = training._curve(report)
    assert (curve["ms"], curve["forward_ms"]) == (160, 40)
    # the last is the end
    assert curve["mib"] == [0] * 30 + [4] + [2] * 9 + [5] * 120 + [1]


def test_ours_saves_the_inputs_of_segments_and_nothing_else(parts):
    rows = parts["conv"]
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    assert rows["plain"]["recomputed"] == 0
    assert saved["torch 1"] == saved["plain"]
    # the loss saves log-probabilities of ten classes, and the sum of the weights
    loss = CLASSIC["batch"] * 10 * F32 + F32
    assert saved["fusedckpt 1"] == loss
    # the second of two segments of eight functions starts at the fifth, which is given 5 x 5
    assert saved["fusedckpt 2"] == CLASSIC["batch"] * CLASSIC["width"] * 5 * 5 * F32 + loss


def test_depths_fit_and_one_more_layer_does_not(parts):
    rows = parts["depth"]
    assert [*rows] == [*classics.DEPTH_WAYS, classics.SAME]
    for row in rows.values():
        assert row["peak_bytes"] <= MIB // 2
        assert row["depth"] >= rows["plain"]["depth"]
    options = {name.replace("-", "_"): size for name, size in CLASSIC.items()}
    chosen = Namespace(
        **options | {"depth_budget": MIB // 2, "seed": 0, "device": "cpu", "steps": 1}
    )
    for name in ("plain", "torch, every block"):
        trial = classics.trial_of(chosen, name, rows[name]["depth"] + 1)
        assert classics.peak_of(trial) > MIB // 2


def test_scaled_layers_return_order_one_and_gradients_reach_the_first():
    torch.manual_seed(0)
    model, x = models.conv_net(30, 8), tasks.digits(28)[0][:8]
    models.scale(model, x)
    model(x).square().mean().backward()
    y, sides = x, []
    for layer in model:
        y = layer(y)
        sides.append(y.shape[-1])
        assert y.square().mean().item() == pytest.approx(1.0, rel=1e-3)
    assert sides[:7] == [30, 16, 9, 5, 3, 2, 2]
    assert models.final_side(30) == 2
    assert model.get_parameter("0.weight").grad.norm() > 1e-3
    assert sum(isinstance(m, nn.Linear) for m in models.mlp(20, 16).modules()) == 20


def tiny_work() -> Workload:
    torch.manual_seed(0)
    model, batches = models.mlp(3, 16), [Batch((torch.randn(8, 16),), {}, torch.arange(8))] * 2
    models.scale(model, batches[0].args[0])
    return Workload(model, batches, F.cross_entropy, partial(torch.optim.SGD, lr=0.1))


def test_a_wrong_gradient_is_not_timed_and_nothing_is_left_behind():
    work = tiny_work()
    model = work.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = [*copy.deepcopy(model).parameters()], torch.get_rng_state()
    wrong = Way("wrong", lambda x: model[1:](model[0](x).detach()))
    fails = Way("fails", lambda x: model(x).no_such_attribute)
    off = Way("off", lambda x: model(x) * 1.001)
    planned = work.planned("plan", policy="all")
    ways = [Way("plain", model), wrong, fails, off, planned]
    rows = compare(work, ways, 1, lambda what: None)
    assert all(map(torch.equal, model.parameters(), state[0]))
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in model.parameters())
    assert torch.equal(torch.get_rng_state(), state[1])
    assert [row["is_wrong"] for row in rows] == [False, True, False, True, False]
    assert rows[1]["failure"].startswith("wrong: gradients are off by ")
    assert rows[2]["failure"].startswith("AttributeError: ")
    assert [bool(row["both_ms"]) for row in rows] == [True, False, False, False, True]
    assert rows[0]["loss_difference"] == rows[4]["loss_difference"] == 0


def test_gradients_that_nothing_can_be_compared_with_are_not_judged():
    work = tiny_work()
    (row,) = compare(work, [Way("plain", work.model)], 1, lambda what: None)
    assert "unjudged" not in row
    dropped = work._replace(model=nn.Sequential(nn.Dropout(0.5), *work.model))
    (row,) = compare(dropped, [Way("plain", dropped.model)], 1, lambda what: None)
    assert row["unjudged"] == "the model draws random numbers"

    class Narrow(nn.Sequential):
        def forward(self, x):
            return super().forward(x.float())

    narrow = work._replace(model=Narrow(*work.model))
    (row,) = compare(narrow, [Way("plain", narrow.model)], 1, lambda what: None)
    assert row["unjudged"].startswith("eager does not run in float64 (RuntimeError: ")


@pytest.mark.usefixtures("undrawn")
def test_losses_that_disagree_end_in_an_error(tmp_path, monkeypatch, capsys):
    def wrong(functions, segments, input):
        y = nn.Sequential(*functions)(input)
        return y + 1e-2 * torch.randn_like(y)

    monkeypatch.setattr(fusedckpt, "checkpoint_sequential", wrong)
    options = [f"--{name}={size}" for name, size in CLASSIC.items()]
    bench(tmp_path, "classics", *options, "--repeat=1", "--part=depth", status=1)
    assert "losses differ by" in capsys.readouterr().out
    bench(tmp_path, "classics", *options, "--repeat=1", "--part=mlp", status=1)
    assert "fusedckpt 2: wrong: gradients are off by" in capsys.readouterr().out


SOURCE = """
import torch
from torch import nn

def block():
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return nn.Sequential(nn.LayerNorm(16), mlp, nn.Dropout(0.1))

class Net(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.wrong = wrong
        self.config = type("Config", (), {"use_cache": True})()

    def forward(self, x):
        for block in self.blocks:
            if self.wrong and type(block).__name__ == "CheckpointWrapper":
                raise RuntimeError("not wrapped")
            x = x + block(x)
        return self.norm(x)

def make():
    return Net(), torch.randn(32, 16)

def without_dropout():
    net = Net()
    for block in net.blocks:
        block[2].p = 0.0
    return net, torch.randn(32, 16)

def fails_wrapped():
    return Net(wrong=True), (), {"x": torch.randn(32, 16)}

def nothing():
    return None

def frozen():
    return Net().requires_grad_(False), {"x": torch.randn(32, 16)}

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    # a file that is named adds its folder, and a module stays
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net_of_the_caller", raising=False)
    path = tmp_path / "net_of_the_caller.py"
    path.write_text(SOURCE)
    return path


def test_ways_of_a_model_of_yours(file, capsys):
    (rows,) = bench(file.parent, "ways", f"--model={file}:make", "--repeat=1")
    names = ["eager", "checkpoint", "fuse", "fuse+ckpt", "plan memory", "fuse+plan memory"]
    assert [name for name in rows if name in names] == names
    others = {*names, "selective", "fuse+recipes"}
    budgets = [row for name, row in rows.items() if name not in others]
    assert budgets
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in budgets)
    # dropout and batch statistics are the same in every way
    assert all(row["loss_difference"] <= 1e-5 for row in rows.values())
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    assert saved["fuse+ckpt"] <= saved["checkpoint"] < saved["eager"] > saved["fuse"]
    out = capsys.readouterr().out
    assert "fuse: fused " in out
    assert "model.config.use_cache was set to False" in out


@pytest.mark.usefixtures("undrawn")
def test_ways_that_are_compiled(file, monkeypatch):
    # budgets are the partitioner's: what it saves needs no compiler of C++
    def partition(graph, inputs, **options):
        return aot_eager_decomp_partition(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", partition)
    options = [f"--model={file}:without_dropout", "--ways=fuse", "--compile"]
    (rows,) = bench(file.parent, "ways", *options, "--repeat=1", "--steps=1")
    compiled = [row for name, row in rows.items() if "compile" in name]
    assert len(compiled) == 6
    # no FLOPs, which nothing counts in compiled code
    assert not any("recomputed" in row for row in compiled)
    assert all(row["loss_difference"] <= 1e-5 for row in compiled)
    assert rows["compile 0"]["saved_bytes"] < rows["compile"]["saved_bytes"]
    assert rows["fuse+compile"]["saved_bytes"] < rows["fuse preact+compile"]["saved_bytes"]


@pytest.mark.usefixtures("undrawn")
def test_budgets_that_no_plan_fits_and_ways_that_fail_are_told(file, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(file.parent))
    options = ["--budget=64KiB", "--budget=1KiB", "--budget=2KiB", "--repeat=1"]
    options += ["--model=net_of_the_caller:fails_wrapped"]
    (rows,) = bench(file.parent, "ways", *options, status=1)
    assert rows["checkpoint"]["failure"] == "RuntimeError: not wrapped"
    assert rows["fuse+plan 0.062 MiB"]["both_ms"]
    out = capsys.readouterr().out
    assert "checkpoint: RuntimeError: not wrapped" in out
    assert out.count("no plan: plan: the least feasible activation budget is") == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "make",
            "bert, vit, module:factory or file.py:factory, got 'make'",
        ),
        ("nowhere.at.all:make", "No module named 'nowhere'"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("{file}:other", "has no attribute 'other'"),
        ("{file}:number", "number is no function"),
        ("{file}:nothing", "it returned (NoneType)"),
        ("{file}:block", "it returned (Sequential)"),
        ("{file}:frozen", "no parameter of the Net is trained"),
    ],
)
def test_what_is_no_model_ends_in_one_line(file, spec, message, refused):
    model = f"--model={spec.format(file=file)}"
    assert message in refused("ways", model, f"--out={file.parent}")
