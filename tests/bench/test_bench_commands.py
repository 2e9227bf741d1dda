"""The command line, env, gpu, fit, schedule and the shares of models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fusedckpt

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command
from bench import env, fit, gpu
from bench.gpu import PARTS, Step

COUNT = "expected a positive integer, got"
DEVICE = "--device expects cpu, cuda or cuda:N, got 'tpu'"


@pytest.mark.parametrize(
    ("base", "option", "message"),
    [
        ("run", "--case=nothing", "--case: invalid choice: 'nothing'"),
        ("run", "--size=huge", "--size: invalid choice: 'huge'"),
        ("run", "--repeat=0", f"--repeat: {COUNT} '0'"),
        ("run", "--dtype=int8", "--dtype: invalid choice: 'int8'"),
        ("run", "--device=tpu", DEVICE),
        # torch makes a negative index of it
        ("run", "--device=cuda:99999", "--device cuda:99999: this torch sees"),
        ("run", "--only=egaer", "--only egaer is part of no name: eager, "),
        ("run", "--skip=Ligar", "--skip Ligar is part of no name: eager, "),
        ("run", "--tokens=5000", "5000 tokens are no multiple of 2048, a sequence of decoder"),
        ("run", f"--out={__file__}", "File exists"),
        ("demo", "--batch=1.5", f"--batch: {COUNT} '1.5'"),
        ("demo", "--dim=100", "--dim expects a multiple of the head size 64, got 100"),
        ("demo", "--seq=99999999", "seq 99999999 needs a longer text than one of"),
        ("demo", "--seed=-1", "--seed: expected an integer in [0, 2^63), got '-1'"),
        ("classics", "--mlp-width=15", "--mlp-width expects a square number, got 15"),
        ("classics", "--depth-dim=100", "--depth-dim expects a multiple of the head size 64"),
        ("classics", "--depth-budget=much", "--depth-budget: a budget is bytes"),
        ("finetune", "--dim=65", "--dim expects a multiple of the head size 64, got 65"),
        ("fit", "--activations=step", "--activations expects one of identity, relu"),
        ("compare", "--threshold=1", "expected a number in [0, 1)"),
    ],
)
def test_bad_options_end_in_one_line_before_any_work(base, option, message, refused):
    device = () if "device" in option or base in ("fit", "compare") else ("--device=cpu",)
    error = refused(base, *device, option)
    assert error.startswith(f"python -m bench {base}: error: ")
    assert message in error


def test_help_lists_commands_without_torch(capsys):
    code = "import sys; from bench.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)
    assert all(name in out.stdout.decode() for name in command.COMMANDS)
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0


def test_a_missing_extra_names_its_install_command(monkeypatch, capsys):
    def missing(name: str):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(command, "import_module", missing)
    with pytest.raises(SystemExit) as ended:
        command.main(["plot", "run.jsonl"])
    assert ended.value.code == 2
    message = 'bench needs matplotlib: pip install -c constraints.txt -e ".[bench]"\n'
    assert capsys.readouterr().err == message


def test_an_interrupt_is_a_line(monkeypatch, capsys):
    def interrupt(name: str):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupt)
    assert command.main(["env"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_env_names_every_op(capsys):
    assert command.main(["env"]) == 0
    out = capsys.readouterr().out
    for op, path in fusedckpt.paths("cpu", torch.float32).items():
        assert any(op in line and path in line for line in out.splitlines())
    assert torch.__version__ in out


def test_an_environment_names_commit_libraries_and_tf32(monkeypatch):
    def version(name: str) -> str:
        if name != "flash-attn":
            raise PackageNotFoundError(name)
        return "2.8"

    found = SimpleNamespace(version=version, PackageNotFoundError=PackageNotFoundError)
    monkeypatch.setattr(env, "metadata", found)
    monkeypatch.setenv("FUSEDCKPT_COMMIT", "0123abc")
    monkeypatch.setattr(env, "has_tf32", lambda: True)
    facts = env.environment(torch.device("cpu"), torch.float32)
    assert (facts["commit"], facts["flash-attn"], facts["tf32"]) == ("0123abc", "2.8", True)
    assert "liger-kernel" not in facts
    assert env.summary(facts).endswith("flash-attn 2.8; TF32 matmuls")


CPU = ["gpu", "--allow-cpu", "--tiny"]


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    made: list[Step] = []
    monkeypatch.setattr(gpu, "steps_of", lambda *chosen: made)
    return made


def step(name: str, code: str, part: int = 1, share: float = 1.0) -> Step:
    return Step(part, name, (sys.executable, "-c", code), share)


def outcomes(out: Path) -> dict[str, str]:
    record = json.loads((out / "gpu.json").read_text())
    return {name: facts["outcome"] for name, facts in record["steps"].items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_without_a_gpu_it_says_so(refused):
    assert "this torch sees no GPU; --allow-cpu" in refused("gpu")


def test_steps_end_in_time_and_one_archive_has_it_all(tmp_path, capsys, steps):
    out, archive = tmp_path / "out", tmp_path / "elsewhere" / "all.tar.gz"
    child = "import os, time; os.fork() or time.sleep(60)"
    steps += [
        step("bad", "raise SystemExit('no [luck]')"),
        step("slow", "print('half', flush=True); import time; time.sleep(3600)", share=0.001),
        step("killed", "import os; os.kill(os.getpid(), 9)"),
        step("good", f"print(7); {child}"),
        step("other", "print(8)", part=2),
    ]
    options = [*CPU, "--part=1", f"--out={out}", f"--archive={archive}"]
    assert command.main(options) == 1
    expected = {"bad": "failed", "slow": "out of time", "killed": "killed", "good": "ok"}
    assert outcomes(out) == expected
    said = capsys.readouterr().out
    assert "    no [luck]" in said
    assert "not ok: bad, slow, killed" in said
    with tarfile.open(archive) as file:
        assert {*file.getnames()} == {"gpu.json", *(f"{name}.log" for name in expected)}
        # behind it, the child may tell how it was interrupted
        assert file.extractfile("good.log").read().startswith(b"7\n")
    # another call takes the steps that did not end, also in a copy of the checkout
    steps[1:3] = [step("slow", "print(1)"), step("killed", "print(2)")]
    assert command.main([*CPU, f"--out={out}"]) == 1
    assert outcomes(out) == dict.fromkeys(("slow", "killed", "good", "other"), "ok") | {
        "bad": "failed"
    }
    assert "good: ok, in an earlier call" in capsys.readouterr().out
    (out / "gpu.json").write_text("{")
    assert command.main([*CPU, f"--out={out}"]) == 1


def test_an_interrupt_ends_the_step_and_keeps_its_log(tmp_path, steps):
    stop = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(3600)"
    steps += [step("slow", f"print('half', flush=True); {stop}"), step("next", "")]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 130
    assert outcomes(tmp_path) == {"slow": "interrupted"}
    with tarfile.open(tmp_path.with_name(f"{tmp_path.name}.tar.gz")) as file:
        assert file.extractfile("slow.log").read().startswith(b"half\n")


@pytest.mark.parametrize("tiny", [False, True])
def test_the_steps_of_a_gpu_are_commands_that_exist(tmp_path, monkeypatch, tiny):
    seen = []

    def run(name: str, argv) -> int:
        module = command.import_module(f"bench.{name}")
        parser = command.import_module("bench.options").Options(name, "", "cuda")
        module.options(parser)
        chosen = parser.parse_args(argv)
        seen.append((name, module.prepare(chosen) if hasattr(module, "prepare") else chosen))
        return 0

    monkeypatch.setattr(command, "_run", run)
    found = gpu.steps_of(tmp_path, tiny)
    assert {step.part for step in found} == set(PARTS)
    for part in PARTS:
        assert 0.5 < sum(step.share for step in found if step.part == part) <= 1.0001
    for one in found:
        if "bench" in one.command:
            assert command.main(one.command[one.command.index("bench") + 1 :]) == 0
    names = ["env", "run", "run", "profile", *["run"] * 5, "capacity"]
    assert [name for name, _ in seen] == (
        ["env", "run", "profile", "run", "capacity"] if tiny else names
    )
    assert all((gpu.ROOT / "tests" / name).exists() for name in gpu.KERNEL_TESTS)
    compiled = [chosen for name, chosen in seen if name == "run" and "compile" not in chosen.skip]
    # compilers take part once, at the end
    assert len(compiled) == (0 if tiny else 1)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_fit_finds_the_constants_again(name):
    weights, boundaries = fit.fit_relus(name, points=40_001)
    slopes = np.concatenate([[0], np.cumsum(weights)])
    assert slopes[-1] == pytest.approx(1)
    assert weights @ boundaries == pytest.approx(0, abs=1e-9)
    paper = fit.APPROXIMATE[name]
    np.testing.assert_allclose(slopes, paper.slopes, atol=1e-3)
    np.testing.assert_allclose(boundaries, paper.boundaries, atol=3e-2)
    # no worse than the paper's, whose search was random
    mine, theirs = (fit.errors(name, *pair)[0] for pair in ((boundaries, slopes), paper))
    assert 0.999 * theirs < mine < theirs


def test_steps_are_the_best_of_all():
    boundaries, slopes = fit.fit_steps("gelu", 3, points=24)
    x, _, slope = fit.sampled("gelu", 24, 8.0)

    def error(cuts):
        pieces = np.split(slope, cuts)
        return sum(np.square(piece - piece.mean()).sum() for piece in pieces)

    best = min(combinations(range(1, 24), 2), key=error)
    np.testing.assert_allclose(boundaries, [(x[i - 1] + x[i]) / 2 for i in best], atol=1e-12)
    np.testing.assert_allclose(slopes, [piece.mean() for piece in np.split(slope, best)])


def scheduled(capsys, *options: str) -> str:
    assert command.main(["schedule", *options]) == 0
    return capsys.readouterr().out


def test_a_schedule_has_a_line_a_call(capsys):
    found = scheduled(capsys, "gated_mlp", "--save", "gate", "--norm", "rms", "--residual")
    forward, backward = found.split("backward\n")
    assert forward.endswith("saves x D, gate F\n")
    assert "  F          h = hidden(gate, up, out=up)" in forward
    assert "frees up\n" in forward
    made = [line[2:13].strip() for line in backward.splitlines()]
    # gate is given, up and n are recomputed
    assert "gate = " not in backward
    assert made[:4] == ["F", "D", "F", "F, F, F"]
    assert "  D, D       d_x, d_norm_weight = norm_grad(" in backward
    assert "  D x F      d_down_weight = mm(" in backward
    assert backward.splitlines()[-1].split()[:3] == ["return", "d_x,", "d_norm_weight,"]
    chunked = scheduled(capsys, "mlp", "--wanted", "fc2", "--chunks", "2")
    assert chunked.splitlines()[-1].strip() == "return None, None, None, d_fc2_weight, None"


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ("linear_act", "x D"),
        ("linear_act --save preact", "x D, z F"),
        ("mlp --save preact", "x D, z F"),
        ("gated_mlp", "x D"),
        ("gated_mlp --save preact", "x D, gate F, up F"),
        ("rms_norm", "x D"),
        ("layer_norm", "x D"),
        ("norm_linear", "x D"),
    ],
)
def test_a_schedule_names_the_saved_tensors(capsys, options, saves):
    assert f"saves {saves}\nbackward\n" in scheduled(capsys, *options.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rms_norm --save preact", "rms_norm: "),
        ("mlp --save gate", "gate"),
        ("linear_act --norm rms", "linear_act: "),
        ("norm_linear --chunks 2", "norm_linear: "),
        ("mlp --wanted up", "--wanted up is none of x, norm, fc1, fc2"),
    ],
)
def test_a_schedule_refuses_what_a_layer_has_not(refused, options, message):
    assert message in refused("schedule", *options.split())


def test_logits_and_layers_are_gone_from_whole_models(capsys):
    pytest.importorskip("transformers")
    from bench.whole_share import WHOLE, main

    with pytest.raises(SystemExit):
        main(["lama"])
    assert "MODEL must be one of llama, " in capsys.readouterr().err
    main(["llama"])
    row, median = capsys.readouterr().out.splitlines()[1:]
    layers, classes, before, after = map(int, row.split()[1:5])
    assert (layers, classes) == (32, WHOLE["llama"].classes // 16)
    # eager saves the logits of 64 tokens in bfloat16, at least
    assert before * 1024 > 2 * 64 * classes
    assert after < 0.12 * before
    assert re.fullmatch(r"median of 1: \d+\.\d% gone", median)
