"""Each example runs as it stands, in seconds, and does what its docstring says."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from fusedckpt.autograd.dispatch import forced_path

FOLDER = Path(__file__).parents[2] / "bench" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.fixture(autouse=True)
def aten():
    with forced_path("aten"):
        yield


def example(name: str):
    return import_module(f"bench.examples.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_says_what_to_expect(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    if name in ("finetune_lora",):
        pytest.importorskip("peft")
    module = example(name)
    assert f"python -m bench.examples.{name}" in module.__doc__
    assert inspect.isfunction(module.main)


def test_a_loop_goes_on_after_a_resume(capsys):
    losses = example("own_loop").main()
    assert losses == sorted(losses, reverse=True)
    assert "gated" in capsys.readouterr().out


def test_a_plan_keeps_its_budget(tmp_path):
    pytest.importorskip("matplotlib")
    plan = example("budget").main(tmp_path)
    assert plan.measured_bytes <= plan.budget_bytes
    assert {path.name for path in tmp_path.iterdir()} == {"report.png", "plan.png"}


def test_adapters_save_less(capsys):
    pytest.importorskip("peft")
    before, after, losses = example("finetune_lora").main()
    assert after < 0.4 * before
    assert losses[-1] < losses[0]
    assert f"{after:,} after" in capsys.readouterr().out


def test_checkpoints_of_long_contexts_save_less():
    sizes = example("long_context").main()
    plain, stock, ours, regions = sizes.values()
    assert ours <= stock < regions < plain
