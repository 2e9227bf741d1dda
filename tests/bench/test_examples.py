"""Each example runs as it stands, in seconds, and does what its docstring says."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import run_ranks

from fusedckpt.autograd.dispatch import forced_path

FOLDER = Path(__file__).parents[2] / "bench" / "examples"
NEEDS = {
    "diffusion": ("diffusers", "transformers"),
    "finetune_lora": ("peft", "transformers"),
    "moe": ("transformers",),
    "trainer": ("accelerate", "transformers"),
    "vision_language": ("transformers",),
}
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
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library, reason=f"the example {name} needs {library}")
    module = example(name)
    assert f"-m bench.examples.{name}\n" in module.__doc__
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


def test_a_trainer_with_our_checkpoint_learns(capsys):
    pytest.importorskip("accelerate")
    losses = example("trainer").main()
    assert losses == sorted(losses, reverse=True)
    printed = capsys.readouterr().out
    assert "fused 9 modules, left 0" in printed
    assert "Memory of one training step of LlamaForCausalLM" in printed


def test_experts_save_the_tokens_once(capsys):
    pytest.importorskip("transformers")
    sizes = example("moe").main()
    before, after = zip(*(sizes[count] for count in (2, 4, 8)), strict=True)
    # an input of the experts serves all; each adds its index and score, 12 bytes a token and layer
    per_expert = 12 * 64 * 2
    assert [after[1] - after[0], after[2] - after[1]] == [2 * per_expert, 4 * per_expert]
    assert before[2] - before[1] > 100 * (after[2] - after[1])
    *_, last = capsys.readouterr().out.splitlines()
    assert len(set(re.findall(r"loss (.*) and (.*)", last)[0])) == 1


def test_recipes_reach_a_diffusion_transformer(capsys):
    pytest.importorskip("diffusers")
    sizes = example("diffusion").main()
    assert [*sizes.values()] == sorted(sizes.values(), reverse=True)
    assert len(set(re.findall(r"loss (.*)", capsys.readouterr().out))) == 1


def test_logprobs_need_no_logits():
    logits, ours = example("rl_logprobs").main().values()
    # logits, what softmax and its exponential keep: here x, a target and two numbers of a token
    assert ours[0] < logits[0] / 100
    torch.testing.assert_close(ours[1:], logits[1:])


def test_distillation_needs_no_logits():
    logits, ours = example("distillation").main().values()
    assert ours[0] < logits[0] / 10
    torch.testing.assert_close(ours[1], logits[1])
    assert ours[1] == sorted(ours[1], reverse=True)


def test_an_optimizer_in_backward_keeps_no_gradients():
    (after, truth), (inside, losses) = example("optimizer_in_backward").main().values()
    assert losses == truth == sorted(losses, reverse=True)
    assert inside < after / 4


def test_a_frozen_tower_is_left():
    pytest.importorskip("transformers")
    eager, skip, only = example("vision_language").main().values()
    # the projector is outside of the language model
    assert [len(report.swapped) for report, *_ in (skip, only)] == [10, 9]
    assert skip[1] < only[1] < eager[1] / 4
    for _, _, losses in (skip, only):
        torch.testing.assert_close(losses, eager[2])
        assert losses == sorted(losses, reverse=True)


def train_a_shard(rank):
    losses, share = example("fsdp2").main()
    assert losses == sorted(losses, reverse=True)
    assert share == 0.5


def test_two_ranks_share_the_parameters(tmp_path):
    first, second = run_ranks(train_a_shard, tmp_path)
    assert "fused 9 modules, left 0" in first
    assert "this rank has 50% of the parameters" in first
    assert not second
