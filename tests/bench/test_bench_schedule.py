"""`python -m bench schedule` prints what forward and backward of a layer make, read and free."""

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from bench import __main__ as command


def printed(capsys, *options):
    assert command.main(["schedule", *options]) == 0
    return capsys.readouterr().out


def test_lines(capsys):
    found = printed(capsys, "gated_mlp", "--save", "gate", "--norm", "rms", "--residual")
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


@pytest.mark.parametrize("save", ["inputs", "preact"])
@pytest.mark.parametrize("layer", ["linear_act", "mlp", "gated_mlp"])
def test_levels(capsys, layer, save):
    found = printed(capsys, layer, "--save", save)
    saved = next(line for line in found.splitlines() if line.startswith("saves"))
    products = ["gate F", "up F"] if layer == "gated_mlp" else ["z F"]
    kept = products if save == "preact" else []
    assert saved == f"saves {', '.join(['x D', *kept])}"


@pytest.mark.parametrize("layer", ["rms_norm", "layer_norm", "norm_linear"])
def test_others(capsys, layer):
    assert "saves x D\nbackward\n" in printed(capsys, layer)


def test_wanted_gradients_alone(capsys):
    found = printed(capsys, "mlp", "--wanted", "fc2", "--chunks", "2")
    assert found.splitlines()[-1] == " " * 13 + "return None, None, None, d_fc2_weight, None"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rms_norm", "--save", "preact"], "rms_norm has no --save"),
        (["mlp", "--save", "gate"], "mlp has no --save gate"),
        (["linear_act", "--norm", "rms"], "linear_act has no --norm"),
        (["mlp", "--wanted", "up"], "--wanted up is none of x, norm, fc1, fc2"),
    ],
)
def test_refuses(capsys, options, message):
    with pytest.raises(SystemExit):
        command.main(["schedule", *options])
    assert message in capsys.readouterr().err
