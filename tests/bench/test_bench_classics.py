"""`python -m bench classics` at toy sizes: shapes that settle, honest bytes, losses that agree."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedckpt

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import models
from bench.classics import RECIPES, trial_of
from bench.env import settled
from bench.models import conv_net, images, mlp, scale
from bench.search import most
from bench.settings import parsers
from bench.tables import progress
from bench.training import NUM_PLANS, Batch, Way, Workload, compare

pytestmark = pytest.mark.usefixtures("aten")
SIZES = {
    "layers": 6,
    "width": 4,
    "batch": 4,
    "mlp-layers": 4,
    "mlp-width": 256,
    "mlp-batch": 64,
    "depth-dim": 64,
    "depth-seq": 16,
    "depth-batch": 2,
    "steps": 2,
    "repeat": 2,
}
TINY = ["classics", "--device=cpu", *(f"--{name}={size}" for name, size in SIZES.items())]
BUDGET = "--depth-budget=1MiB"
F32 = 4


def bench(out: Path, *options: str) -> tuple[int, dict]:
    status = command.main([*TINY, BUDGET, *options, f"--out={out}"])
    return status, json.loads((out / "classics.json").read_text())


def by_name(part: dict) -> dict[str, dict]:
    return {row["name"]: row for row in part["rows"]}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("classics")
    with redirect_stderr(io.StringIO()) as told:
        status, result = bench(out)
    assert status == 0
    return result | {"png": (out / "classics.png").read_bytes(), "told": told.getvalue()}


def test_a_result_names_what_a_number_needs(result):
    settings, environment = result["settings"], result["environment"]
    assert {
        name.replace("-", "_"): size for name, size in SIZES.items()
    }.items() <= settings.items()
    assert settings["depth_budget"] == 2**20
    assert environment["torch"] == torch.__version__
    assert {"device", "date", "commit", "python", "triton"} <= environment.keys()
    assert result["png"][:8] == b"\x89PNG\r\n\x1a\n"


def test_every_way_is_weighed_and_timed(result):
    segments = (1, 2, 4)
    names = list(by_name(result["conv"]))
    expected = ["plain", *(f"{way} {k}" for way in ("torch", "fusedckpt") for k in segments)]
    assert names[: len(expected)] == expected
    rules = ["fusedckpt sqrt", "fusedckpt recursive"]
    rules += [f"plan {policy}" for policy in ("all", "sqrt", "speed", "memory")]
    assert names[len(expected) :][: len(rules)] == rules
    assert {"plain", "torch 3", "fusedckpt 3", *rules} <= by_name(result["mlp"]).keys()
    for part in (result["conv"], result["mlp"]):
        for row in part["rows"]:
            assert len(row["ms"]) == SIZES["steps"] * SIZES["repeat"]
            assert 0 <= row["saved_bytes"] <= row["rise_bytes"]
            assert len(row["losses"]) == SIZES["steps"]


@pytest.mark.parametrize("part", ["conv", "mlp", "depth"])
def test_losses_agree(result, part):
    rows = by_name(result[part])
    for name, row in rows.items():
        # bit for bit, but where kernels are fused
        assert row["loss_difference"] <= (1e-5 if "fused," in name else 0.0)
        assert row["losses"][-1] != row["losses"][0]
        assert all(map(math.isfinite, row["losses"]))


def test_a_plan_predicts_the_peak_that_is_measured(result):
    plans = [row for part in ("conv", "mlp") for row in result[part]["rows"]]
    plans = [row for row in plans if row["name"].startswith("plan")]
    assert plans
    # besides 3 %, the random states of segments, of which the prediction allows one for each unit
    states = 8 * torch.get_rng_state().nbytes
    for row in plans:
        assert row["predicted_bytes"] == pytest.approx(row["rise_bytes"], rel=0.03, abs=states)


def test_budgets_lie_between_the_least_peak_and_that_of_keeping_everything(result):
    rows = by_name(result["mlp"])
    plans = [row for row in rows.values() if row["asked_bytes"] is not None]
    assert len(plans) == 3
    least = min(row["rise_bytes"] for name, row in rows.items() if name.startswith("plan"))
    peaks = [least, *(row["asked_bytes"] for row in plans), rows["plain"]["rise_bytes"]]
    assert peaks == sorted(peaks)
    assert all(row["rise_bytes"] <= row["asked_bytes"] for row in plans)


def test_memory_through_a_step_rises_in_forward_and_falls_in_backward(result):
    rows = by_name(result["conv"])
    shown = {name: row["curve"] for name, row in rows.items() if row["curve"]}
    assert list(shown) == ["plain", "fusedckpt sqrt", "fusedckpt recursive", "plan memory"]
    for name, curve in shown.items():
        assert max(curve["mib"]) == pytest.approx(rows[name]["rise_bytes"] / 2**20, abs=1e-3)
        assert 0 < curve["forward_ms"] < curve["ms"]
    mib, share = shown["plain"]["mib"], shown["plain"]["forward_ms"] / shown["plain"]["ms"]
    turn = mib[int((len(mib) - 1) * share)]
    # all that is kept is there when backward begins
    assert turn >= rows["plain"]["saved_bytes"] / 2**20
    assert max(mib[0], mib[-1]) < turn


def test_ours_keeps_the_inputs_of_segments_and_nothing_else(result):
    rows = by_name(result["conv"])
    assert rows["plain"]["recomputed"] == 0
    assert rows["torch 1"]["saved_bytes"] == rows["plain"]["saved_bytes"]
    # what the loss keeps: log-probabilities of ten classes, and the sum of the weights
    loss = SIZES["batch"] * 10 * F32 + F32
    assert rows["fusedckpt 1"]["saved_bytes"] == loss
    # the second of two segments of eight functions starts at the fifth, which is given 5 x 5
    boundary = SIZES["batch"] * SIZES["width"] * 5 * 5 * F32
    assert rows["fusedckpt 2"]["saved_bytes"] == boundary + loss


def test_sides_settle_at_two():
    model = conv_net(8, 3)
    x, sides = torch.randn(2, 1, 28, 28), []
    for layer in list(model)[:-1]:
        x = layer(x)
        sides.append(x.shape[-1])
    assert sides == [30, 16, 9, 5, 3, 2, 2, 2, 2]
    assert models.final_side(100) == 2
    assert list(model)[-1](x).shape == (2, 10)
    # as the workload is known: 2 x 2 of 320 channels are 1280 features
    assert conv_net(5, 320).get_parameter("6.1.weight").shape[1] == 1280
    assert len(conv_net(100, 1)) == 102


def test_the_mlp_has_as_many_linears_as_layers():
    linears = [m for m in mlp(20, 16).modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 20
    assert [linears[0].in_features, linears[-1].out_features] == [16, 10]


def test_scaled_layers_return_order_one_and_gradients_reach_the_first():
    torch.manual_seed(0)
    model, x = conv_net(30, 8), images(28, 0).x[:8]
    scale(model, x)
    model(x).square().mean().backward()
    y = x
    for layer in model:
        y = layer(y)
        assert y.square().mean().item() == pytest.approx(1.0, rel=1e-3)
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    assert gradient.norm() > 1e-3


def test_digits_are_real_where_they_are_installed(monkeypatch):
    real = images(28, 0)
    if "scikit-learn" in real.source and "generated" not in real.source:
        assert real.x.shape == (1797, 1, 28, 28)
        assert real.labels.unique().tolist() == list(range(10))
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    noise = images(32, 0)
    assert "generated" in noise.source
    assert noise.x.shape[1:] == (1, 32, 32)
    assert noise.x.std().item() == pytest.approx(1.0, abs=0.01)


def test_batches_start_again_where_images_end():
    few = images(28, 0)._replace(x=torch.arange(5.0), labels=torch.arange(5))
    batches = few.batches(3, 4, torch.device("cpu"))
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def tiny_work() -> Workload:
    torch.manual_seed(0)
    model, images_ = mlp(3, 16), images(4, 0)
    batches = images_._replace(x=images_.x.flatten(1)).batches(2, 8, torch.device("cpu"))
    scale(model, batches[0][0])
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Workload(model, [Batch((x,), {}, y) for x, y in batches], F.cross_entropy, sgd)


def test_a_wrong_gradient_shows_in_the_losses():
    work = tiny_work()
    model = work.model

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return model[1:](model[0](x).detach())

    rows = compare(work, [Way("plain", model), Way("wrong", wrong)], 1, lambda what: None)
    assert rows[0]["loss_difference"] == 0
    assert rows[1]["losses"][0] == rows[0]["losses"][0]
    assert rows[1]["loss_difference"] > 1e-4


def test_weights_gradients_and_random_numbers_are_as_before():
    work = tiny_work()
    for parameter in work.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in work.model.parameters()]
    drawn = torch.get_rng_state()
    way = work.planned("plan", policy="all")
    compare(work, [Way("plain", work.model), way], 2, lambda what: None)
    for parameter, start in zip(work.model.parameters(), before, strict=True):
        assert torch.equal(parameter, start)
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert torch.equal(torch.get_rng_state(), drawn)
    # a copy was planned, which shares the parameters
    assert way.plan.apply(work.model) is work.model
    assert set(way.run.parameters()) == set(work.model.parameters())


@pytest.mark.parametrize("truth", [0, 1, 2, 3, 7, 8, 100])
def test_the_deepest_that_fits_is_found(truth):
    asked = []

    def fits(layers: int) -> bool:
        asked.append(layers)
        return layers <= truth

    for guess in (1, 5, 30):
        asked.clear()
        assert most(fits, guess) == truth
        assert len(asked) <= 2 * max(guess, truth).bit_length() + 2
        assert len(set(asked)) == len(asked)


def test_depths_fit_and_one_more_layer_does_not(result):
    rows = by_name(result["depth"])
    budget = result["depth"]["budget_bytes"]
    options = [*TINY[1:], "--seed=0", "--steps=1"]
    chosen = settled(vars(parsers()[1]["classics"].parse_args(options)))
    assert [*rows] == [*RECIPES, "plan, same depth"]
    for name, row in rows.items():
        assert row["peak_bytes"] <= budget, name
        assert row["layers"] >= rows["plain"]["layers"], name
    for name in ("plain", "torch, every block"):
        trial = trial_of(chosen, name, rows[name]["layers"] + 1)
        assert trial.work.peak_bytes(trial.way.run) > budget


@pytest.mark.parametrize("part", ["mlp", "depth"])
def test_without_a_terminal_steps_are_lines_that_count_to_the_end(part, result):
    steps = re.compile(r"(\w+) (\d+)/(\d+): (.+)")
    found = [steps.fullmatch(line).groups() for line in result["told"].splitlines()]
    assert {name for name, *_ in found} == {"conv", "mlp", "depth"}
    found = [line for line in found if line[0] == part]
    (total,) = {int(total) for _, _, total, _ in found}
    counts = [int(count) for _, count, *_ in found]
    assert list(dict.fromkeys(counts)) == list(range(1, total + 1))
    whats = [what for *_, what in found]
    if part == "mlp":
        assert len(counts) == total
        assert whats[:NUM_PLANS] == [what for what in whats if what.startswith("planning")]
        # weighed once, then trained in turns
        assert whats.count("fusedckpt recursive") == 1 + SIZES["repeat"]


def test_in_a_terminal_a_bar_has_an_end(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("TERM", "xterm")
    with progress("conv", 2) as begin:
        begin("plain")
        begin("plain, deeper", counts=False)
    shown = file.getvalue()
    assert "1/2" in shown
    assert "plain, deeper" in shown
    assert not capsys.readouterr().err


def test_losses_that_disagree_end_in_an_error(tmp_path, monkeypatch, capsys):
    def wrong(functions, segments, input):
        return nn.Sequential(*functions)(input) + 1e-2 * torch.randn(10)

    monkeypatch.setattr(fusedckpt, "checkpoint_sequential", wrong)
    status, result = bench(tmp_path, "--part=mlp")
    assert status == 1
    assert result["conv"] is result["depth"] is None
    assert "losses differ by" in capsys.readouterr().out
