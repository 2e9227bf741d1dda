"""The paper and fit commands at toy sizes: what each way saves, and the constants found again."""

import json
from itertools import combinations

import numpy as np
import pytest

from fusedckpt.autograd.dispatch import forced_path

pytest.importorskip("matplotlib", reason="needs the bench extra")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("sklearn")

from bench import __main__ as command
from bench import fit

SIZES = ("--pretrain=2", "--steps=2", "--layers=2", "--dim=64", "--seq=32", "--batch=4")


def test_ways_and_what_they_save(tmp_path):
    sizes = [*SIZES, "--seeds=0", "--models=vit", "--tuning=lora", f"--out={tmp_path}"]
    with forced_path("aten"):
        assert command.main(["paper", "--device=cpu", *sizes]) == 0
    assert (tmp_path / "paper.png").stat().st_size > 0
    record = json.loads((tmp_path / "paper.json").read_text())
    runs = {(run["part"], run["name"]): run for run in record["fine_tunings"]}
    assert len(runs) == 5
    eager = runs["vit lora", "eager"]
    assert len(eager["losses"][0]) == 2
    for name in ("fuse", "fuse approximate", "approximate"):
        run = runs["vit lora", name]
        np.testing.assert_allclose(
            run["losses"], eager["losses"], rtol=1e-4 if name == "fuse" else 0.1
        )
        assert run["saved_mib"] < eager["saved_mib"]
        assert run["peak_ratio"] < 1


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


def test_fit_names_unknown_activations(capsys):
    with pytest.raises(SystemExit):
        command.main(["fit", "--activations=step"])
    assert "--activations expects one of identity, relu" in capsys.readouterr().err
