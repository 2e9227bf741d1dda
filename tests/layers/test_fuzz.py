"""The fuzz itself: that what it draws holds, and that it sees what does not."""

import pytest
import torch

from fusedckpt.autograd import recipes
from fusedckpt.kernels.runtime import IS_INTERPRETED
from tests.fuzz import loop, trial
from tests.fuzz.config import Config, parse
from tests.fuzz.draw import draw
from tests.fuzz.judge import judge
from tests.fuzz.nets import failure_of


@pytest.mark.parametrize("path", ["interpreter", "aten"])
def test_random_configurations_hold(path):
    if path == "interpreter" and not IS_INTERPRETED:
        pytest.skip("kernels are compiled here")
    with loop.surroundings(path):
        for index in range(10 if path == "interpreter" else 30):
            config = draw(1, index, path)
            assert parse(str(config)) == config
            assert judge(config) is None


def test_random_nets_hold():
    for number in range(20):
        assert failure_of(number) is None


def test_a_net_that_differs_is_seen(monkeypatch):
    """One of which code writes to an element that no sample has."""
    number = 39
    assert failure_of(number) is None
    monkeypatch.setattr(recipes, "COMPARISONS", [lambda *_: True])
    assert failure_of(number) is not None


class Through(torch.autograd.Function):
    """Identity, but for what `change` makes of the gradient."""

    @staticmethod
    def forward(ctx, y, change):
        ctx.change = change
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def wrong_gradient(c, t, call):
    return tuple(Through.apply(y, lambda dy: dy * (1 + 1e-4)) for y in call(c, t))


def zeros_for_none(c, t, call):
    first, second = call(c, t)
    return first + 0 * second.sum(), second


def refusal(c, t, call):
    raise ValueError("linear_act: not today")


# the failure, what makes it, and where
FAULTS = {
    "wrong row": ("error", lambda c, t, call: tuple(y.roll(1, 0) for y in call(c, t)), Config()),
    "gradient": ("error", wrong_gradient, Config("mlp", backward="backward_twice")),
    "float64": ("error", wrong_gradient, Config(dtype="float64", rows=(), d=1, f=1)),
    "dropped bias": (
        "none",
        lambda c, t, call: call(c, t | {"bias": t["bias"].detach()}),
        Config(present=("bias",)),
    ),
    "zeros for none": (
        "none",
        zeros_for_none,
        Config("norm_linear", f=1, douts=("plain", "none")),
    ),
    "written gradient": (
        "changes",
        lambda c, t, call: tuple(Through.apply(y, torch.Tensor.zero_) for y in call(c, t)),
        Config(),
    ),
    "wide result": (
        "type",
        lambda c, t, call: tuple(y.float() for y in call(c, t)),
        Config(dtype="bfloat16"),
    ),
    "refusal": ("raises", refusal, Config()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, monkeypatch):
    kind, fault, config = FAULTS[name]
    call = trial.ours.call
    with loop.surroundings("aten"):
        assert judge(config) is None
        monkeypatch.setattr(trial.ours, "call", lambda c, t: fault(c, t, call))
        failure = judge(config)
    assert failure is not None
    assert failure.kind == kind


def test_a_failure_is_made_plain_and_printed(monkeypatch, capsys):
    """A search ends with counts, and a failure has the command that runs it again."""
    call = trial.ours.call

    def wrong_in_three_chunks(c, t):
        return wrong_gradient(c, t, call) if c.chunks == 3 and c.d > 4 else call(c, t)

    monkeypatch.setattr(trial.ours, "call", wrong_in_three_chunks)
    config = Config(
        "mlp", 7, "float32", (2, 3), d=16, f=33, chunks=3, residual=True, norm="rms"
    ).but(layouts=(("x", "transposed"), ("fc1_weight", "step")), douts=("expanded", "none"))
    monkeypatch.setattr(loop, "draw", lambda *_: config)
    assert loop.search(1, 0, None, 2, "aten", 2) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("FAILS seed 1 index 0: error: ")
    command, text = second.split(" --config ")
    assert command.strip() == "python -m tests.fuzz --path aten"
    assert parse(text.strip("'")) == Config("mlp", seed=7, d=5, chunks=3)
    assert loop.reproduce(text.strip("'"), "aten") == 1
    assert last.startswith("aten: 2 configurations (mlp 2), 2 failures")
