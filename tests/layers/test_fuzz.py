"""The fuzz itself: that what it draws holds, and that it sees what does not."""

import pytest
import torch

from fusedckpt.kernels.runtime import IS_INTERPRETED
from tests.fuzz import loop, trial
from tests.fuzz.config import Config, parse
from tests.fuzz.draw import draw
from tests.fuzz.judge import judge
from tests.fuzz.minimise import minimise

SEED = 1
NORMS = Config("shared", present=("norm_weight",), readers=("linear", "linear"))


@pytest.mark.parametrize("index", [*range(5), 15])
def test_random_configurations_hold(index, path):
    kind = "interpreter" if path == "triton" and IS_INTERPRETED else "aten"
    with loop.surroundings(kind):
        config = draw(SEED, index, kind)
        assert parse(str(config)) == config
        assert judge(config) is None


class Through(torch.autograd.Function):
    """Identity, but for what `change` makes of the gradient."""

    @staticmethod
    def forward(ctx, y, change):
        ctx.change = change
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def wrong_row(c, t, call):
    return tuple(y.roll(1, 0) for y in call(c, t))


def wrong_gradient(c, t, call):
    return tuple(Through.apply(y, lambda dy: dy * (1 + 1e-4)) for y in call(c, t))


def dropped_bias(c, t, call):
    return call(c, t | {"bias": t["bias"].detach()})


def zeros_for_none(c, t, call):
    first, second = call(c, t)
    return first + 0 * second.sum(), second


def written_gradient(c, t, call):
    return tuple(Through.apply(y, torch.Tensor.zero_) for y in call(c, t))


def wide_result(c, t, call):
    return tuple(y.float() for y in call(c, t))


def kept_too_much(c, t, call):
    return tuple(y * y.detach() / y.detach() for y in call(c, t))


def refusal(c, t, call):
    raise ValueError("linear_act: not today")


FAULTS = [
    ("error", wrong_row, Config()),
    ("error", wrong_gradient, Config()),
    ("error", wrong_gradient, Config("Linear", backward="backward_twice")),
    ("error", wrong_gradient, Config(dtype="float64", rows=(), d=1, f=1)),
    ("none", dropped_bias, Config(present=("bias",))),
    ("none", zeros_for_none, NORMS.but(douts=("plain", "none"))),
    ("changes", written_gradient, Config()),
    ("type", wide_result, Config(dtype="bfloat16")),
    ("bytes", kept_too_much, Config(weighs=True)),
    ("raises", refusal, Config()),
]


@pytest.mark.parametrize(
    ("kind", "fault", "config"),
    FAULTS,
    ids=[f"{fault[1].__name__}-{fault[2].function}" for fault in FAULTS],
)
def test_a_planted_fault_is_seen(kind, fault, config, monkeypatch):
    call = trial.ours.call
    with loop.surroundings("aten"):
        assert judge(config) is None
        monkeypatch.setattr(trial.ours, "call", lambda c, t: fault(c, t, call))
        failure = judge(config)
    assert failure is not None
    assert failure.kind == kind


def test_a_failure_is_made_plain(monkeypatch):
    call = trial.ours.call

    def wrong_in_three_chunks(c, t):
        return wrong_gradient(c, t, call) if c.chunks == 3 and c.d > 4 else call(c, t)

    monkeypatch.setattr(trial.ours, "call", wrong_in_three_chunks)
    config = Config(
        "mlp", 7, "float32", (2, 3), d=16, f=33, chunks=3, residual=True, views=True, norm="rms"
    ).but(layouts=(("x", "transposed"), ("fc1_weight", "step")), douts=("expanded", "none"))
    with loop.surroundings("aten"):
        failure = judge(config)
        assert failure is not None
        least, _ = minimise(config, failure, judge)
    assert least == Config("mlp", 7, d=5, chunks=3)


def test_what_a_search_prints(monkeypatch, capsys):
    """It ends with counts, and a failure has the command that runs it again."""
    assert loop.search(SEED, 0, None, 3, "aten", 1) == 0
    out = capsys.readouterr().out
    assert out.startswith("aten: 3 configurations (")
    assert out.rstrip().endswith(f"per second, seed {SEED}")
    call = trial.ours.call
    monkeypatch.setattr(trial.ours, "call", lambda c, t: wrong_row(c, t, call))
    assert loop.search(SEED, 0, None, 100, "aten", 1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"FAILS seed {SEED} index ")
    command, text = lines[1].split(" --config ")
    assert command.strip() == "python -m tests.fuzz --path aten"
    assert loop.reproduce(text.strip("'"), "aten") == 1
    assert "1 failures" in lines[-1]
