"""The bench commands at toy sizes: their files, their figures' honesty, their errors."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedckpt

pytest.importorskip("matplotlib", reason="needs the bench extra")

from matplotlib.figure import Figure

from bench import __main__ as command
from bench import demo, env, lockstep, tasks, training_figures
from bench.settings import parsers

pytestmark = pytest.mark.usefixtures("aten")
STEPS, LAYERS, DIM, SEQ, BATCH = 4, 2, 64, 48, 3
SIZES = {"steps": STEPS, "layers": LAYERS, "dim": DIM, "seq": SEQ, "batch": BATCH}
TINY = ["demo", "--device", "cpu", *(f"--{name}={size}" for name, size in SIZES.items())]
MIB = 2**20


def run_demo(out: Path, *options: str) -> tuple[int, dict]:
    status = command.main([*TINY, *options, f"--out={out}"])
    return status, json.loads((out / "demo.json").read_text())


def by_name(result: dict) -> dict[str, dict]:
    return {run["name"]: run for run in result["runs"]}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    status, result = run_demo(out)
    assert status == 0
    return result | {"png": (out / "demo.png").read_bytes()}


def test_demo_records_what_a_number_needs(result):
    assert SIZES.items() <= result["settings"].items()
    # a folder is no part of it
    assert "out" not in result["settings"]
    assert result["settings"]["dtype"] == "float32"
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["paths"] == fusedckpt.paths("cpu", torch.float32)
    assert {"device", "commit", "python", "triton", "numpy"} <= result["environment"].keys()
    assert result["fused"].startswith("fused ")


def test_demo_writes_a_png_of_readable_size(result):
    png = result["png"]
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width == 2400
    assert 600 < height < 1200


def drawn(result: dict, path: Path, monkeypatch) -> Figure:
    seen, before = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: (seen.append(figure), before(figure, path))
    )
    training_figures.draw_demo(result, path)
    return seen[0]


def test_the_legend_lies_on_no_words(result, tmp_path, monkeypatch):
    words = "\n".join(2 * ["as many words as fit beside one another " * 3])
    changed = result | {"title": "title", "subtitle": words}
    figure = drawn(changed, tmp_path / "demo.png", monkeypatch)
    (legend,) = figure.legends
    place = legend.get_window_extent()
    titles = [axes._left_title for axes in figure.axes]
    for words in (*figure.texts, *titles):
        assert not place.overlaps(words.get_window_extent()), words.get_text()


@pytest.mark.parametrize("losses", [[3.4, 2.9, 3.0, 3.3, 2.8, 3.4, 2.7], [5.0, 3.0, 2.5], [3.0]])
def test_the_note_on_losses_lies_on_none(result, tmp_path, monkeypatch, losses):
    runs = [run | {"losses": losses} for run in result["runs"]]
    figure = drawn(result | {"runs": runs}, tmp_path / "demo.png", monkeypatch)
    axes = figure.axes[0]
    (note,) = axes.texts
    place = note.get_window_extent()
    points = axes.transData.transform([*enumerate(losses, 1)])
    assert not [point for point in points if place.contains(*point)]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_all_runs_learn_alike(result):
    runs = by_name(result)
    assert list(runs) == ["eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan"]
    for run in runs.values():
        assert len(run["losses"]) == STEPS
        assert run["losses"][0] == run["loss_first"] == pytest.approx(math.log(256), abs=0.5)
        assert run["losses"][-1] == run["loss_last"] < run["loss_first"]
        differences = [
            abs(a - b) for a, b in zip(run["losses"], runs["eager"]["losses"], strict=True)
        ]
        assert run["loss_difference"] == max(differences)
    assert runs["eager"]["loss_difference"] == 0
    assert max(run["loss_difference"] for run in runs.values()) < 1e-4


def test_saved_activations(result):
    runs = by_name(result)
    hidden = LAYERS * BATCH * SEQ * 4 * DIM * 4 / MIB
    assert runs["fuse"]["saved_mib"] <= runs["eager"]["saved_mib"] - hidden
    assert runs["checkpoint"]["saved_mib"] < runs["fuse"]["saved_mib"]
    assert runs["fuse+ckpt"]["saved_mib"] <= runs["checkpoint"]["saved_mib"]
    assert runs["fuse+ckpt"]["peak_mib"] < runs["checkpoint"]["peak_mib"]
    for run in runs.values():
        assert run["saved_mib"] < run["peak_mib"]


def test_time_leaves_the_first_steps_out(result):
    for run in by_name(result).values():
        assert 0 < len(run["step_ms"]) < STEPS
        assert min(run["step_ms"]) <= run["ms_per_step"] <= max(run["step_ms"])
        assert run["tokens_per_second"] == pytest.approx(BATCH * SEQ * 1e3 / run["ms_per_step"])


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "vit"])
def test_demo_of_transformers(tmp_path, model):
    status, result = run_demo(tmp_path, f"--model={model}", "--steps=2")
    assert status == 0
    runs = by_name(result)
    assert max(run["loss_difference"] for run in runs.values()) < 1e-4
    assert runs["fuse"]["saved_mib"] <= runs["eager"]["saved_mib"]
    assert runs["fuse+ckpt"]["saved_mib"] < runs["eager"]["saved_mib"] / 2


def test_demo_in_bfloat16(tmp_path):
    status, result = run_demo(tmp_path, "--dtype=bfloat16", "--steps=2")
    assert status == 0
    assert result["settings"]["dtype"] == "bfloat16"
    assert by_name(result)["fuse"]["loss_difference"] < 0.05


def test_demo_with_gated_mlps(tmp_path):
    status, result = run_demo(tmp_path, "--mlp=swiglu")
    assert status == 0
    assert result["settings"]["mlp"] == "swiglu"
    assert f"own transformer with SwiGLU, {LAYERS} layers" in result["subtitle"]
    assert f"{LAYERS} x GatedMLP -> " in result["fused"]
    runs = by_name(result)
    assert max(run["loss_difference"] for run in runs.values()) < 1e-4
    assert runs["fuse"]["loss_last"] < runs["fuse"]["loss_first"]
    # the gate before and after its activation, up, and their product
    hidden = 4 * LAYERS * BATCH * SEQ * 192 * 4 / MIB
    assert runs["fuse"]["saved_mib"] <= runs["eager"]["saved_mib"] - hidden


def test_gated_mlps_start_as_eager_ones_do():
    options = [*TINY[1:], "--mlp=swiglu", "--seed=3", "--dtype=float32"]
    chosen = env.settled(vars(parsers()[1]["demo"].parse_args(options)))
    torch.manual_seed(chosen.seed)
    models = lockstep.models_of(tasks.model_of(chosen), demo.WAYS)
    eager, *others = (model.state_dict() for model in models.values())
    for state in others:
        assert list(eager) == list(state)
        assert all(torch.equal(eager[name], state[name]) for name in eager)


def test_one_step_suffices(tmp_path):
    status, result = run_demo(tmp_path, "--steps=1")
    assert status == 0
    assert all(len(run["step_ms"]) == 1 for run in result["runs"])


def test_a_loss_that_is_not_finite_is_told(tmp_path, monkeypatch, capsys):
    def poison(model: nn.Module) -> str:
        nn.init.constant_(model.get_parameter("norm.weight"), math.nan)
        return "poisoned"

    monkeypatch.setattr(fusedckpt, "fuse", poison)
    status, result = run_demo(tmp_path, "--steps=2")
    assert status == 1
    assert math.isnan(by_name(result)["fuse"]["loss_difference"])
    assert "loss not finite: fuse, fuse+ckpt, fuse+plan" in capsys.readouterr().out


def test_no_text_to_train_on(tmp_path):
    with pytest.raises(ValueError, match="holds no Python sources"):
        tasks.stdlib_text(tmp_path)


def test_batches_repeat_and_shift():
    text = torch.arange(200, dtype=torch.uint8)
    chosen = Namespace(batch=5, seq=7, seed=3, device="cpu", model="own")
    first, second = (tasks.batches_of(chosen, 2, text) for _ in range(2))
    tokens, targets = first[1]
    assert tokens.shape == (5, 7)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(second[1][0], tokens)
    assert not torch.equal(first[0][0], tokens)


def test_a_copy_without_git_can_name_its_commit(monkeypatch):
    monkeypatch.delenv("FUSEDCKPT_COMMIT", raising=False)
    assert env.commit() != "0123abc"
    monkeypatch.setenv("FUSEDCKPT_COMMIT", "0123abc")
    assert env.commit() == "0123abc"


def test_libraries_are_named_where_they_are_installed(monkeypatch):
    def version(name: str) -> str:
        if name != "flash-attn":
            raise env.metadata.PackageNotFoundError(name)
        return "2.8"

    monkeypatch.setattr(env.metadata, "version", version)
    facts = env.environment(torch.device("cpu"), torch.float32)
    assert facts["flash-attn"] == "2.8"
    assert "liger-kernel" not in facts
    assert env.summary(facts).endswith(f"fusedckpt {fusedckpt.__version__}, flash-attn 2.8")


def test_rounding_to_tf32_is_named():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        facts = env.environment(torch.device("cpu"), torch.float32)
    finally:
        matmul.fp32_precision = before
    assert env.summary(facts).endswith("; TF32 matmuls")
    assert not env.has_tf32()


def test_env_names_every_op(capsys):
    assert command.main(["env"]) == 0
    out = capsys.readouterr().out
    for op, path in fusedckpt.paths("cpu", torch.float32).items():
        assert any(op in line and path in line for line in out.splitlines())
    assert torch.__version__ in out
