"""The planner on whole models: peaks, budgets, gradients, and that it leaves no trace."""

import copy
import random
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import torch
from plan_models import (
    Chain,
    Packed,
    Pairs,
    assert_as_near,
    chunks_of,
    convolutional,
    images,
    tokens,
    transformer,
)
from torch import nn

import fusedckpt
from fusedckpt import Checkpoint, Plan, checkpoint_sequential, plan, report
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.calls import Times
from fusedckpt.planning.chain import simulate
from fusedckpt.planning.policies import policy as by_rule
from fusedckpt.planning.solver import solve
from fusedckpt.planning.trials import Trials

MODELS = {
    "transformer": (transformer, tokens),
    "fused": (lambda: transformer(fused=True), tokens),
    "conv": (convolutional, images),
    "flat": (lambda: convolutional(4, flat=True), images),
    "in place": (lambda: convolutional(4, flat=True, inplace=True), images),
    "pairs": (Pairs, lambda: torch.randn(512, 64)),
    "packed": (
        lambda: nn.Sequential(*(Packed(64, 96) for _ in range(3))),
        lambda: torch.randn(512, 64),
    ),
    "encoder and decoder": (
        lambda: TwoInputs(nn.Transformer(64, 4, 2, 2, 128, batch_first=True)),
        lambda: torch.randn(8, 32, 64),
    ),
}


@pytest.fixture(autouse=True)
def aten():
    """Kernels in the interpreter are too slow to be timed."""
    with forced_path("aten"):
        yield


class TwoInputs(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def made(name):
    model, example = MODELS[name]
    return model(), example()


def planned(model, *args, **options):
    return plan(model, *args, progress=False, **options)


def units_of(found):
    return [unit.name for unit in found.chain.units if not unit.code]


def step(model, *args, seed=1, **kwargs):
    """Return the loss and every gradient of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(*args, **kwargs)
    output = getattr(output, "loss", output)
    loss = output.square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_predicted(found):
    # never too low, and within what the issue asks for
    assert found.measured_bytes <= found.predicted_bytes <= 1.03 * found.measured_bytes


@pytest.mark.parametrize("adamw", [False, True], ids=["no optimizer", "AdamW"])
@pytest.mark.parametrize("name", ["transformer", "fused", "conv"])
def test_peaks_are_as_predicted(name, adamw):
    model, x = made(name)
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None
    for policy in ("none", "all", "sqrt", "uniform:3", "memory"):
        found = planned(model, x, policy=policy, optimizer=optimizer)
        assert_predicted(found)
    whole = report(model, x, optimizer=optimizer).peak_bytes
    least = found.measured_bytes
    for share in (0.3, 0.7):
        budget = int(least + share * (whole - least))
        within = planned(model, x, budget=budget, optimizer=optimizer)
        assert within.measured_bytes <= budget
        if within.predicted_bytes <= budget:
            assert_predicted(within)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("transformer", "conv")])
@pytest.mark.parametrize("policy", ["all", "sqrt", "memory", "speed"])
def test_a_planned_step_is_bit_equal(name, policy):
    model, x = made(name)
    plain = copy.deepcopy(model)
    found = planned(model, x, policy=policy)
    found.apply(model)
    for seed in (1, 2):
        ours, theirs = step(model, x, seed=seed), step(plain, x, seed=seed)
        if chunks_of(found) > 1:
            # the same from run to run
            assert_equal(ours, step(model, x, seed=seed))
            assert_as_near(ours, theirs, step(copy.deepcopy(plain).double(), x, seed=seed))
        else:
            assert_equal(ours, theirs)
    assert_equal(list(model.buffers()), list(plain.buffers()))
    found.undo()
    assert_equal(step(model, x), step(plain, x))
    found.apply(model)
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("name", ["flat", "in place", "pairs", "packed", "encoder and decoder"])
def test_peaks_where_units_share_tensors(name):
    model, x = made(name)
    for policy in ("none", "all", "sqrt", "memory"):
        found = planned(model, x, policy=policy)
        assert_predicted(found)


def test_dropout_and_masks():
    model, x = transformer(4, dropout=0.2), tokens()
    mask = torch.rand(64, 64) > 0.3
    mask.fill_diagonal_(True)
    plain = copy.deepcopy(model)
    found = planned(model, x, mask=mask, policy="uniform:2")
    found.apply(model)
    assert_equal(step(model, x, mask=mask), step(plain, x, mask=mask))


def test_gradients_accumulate_over_micro_batches():
    model, x = transformer(3), tokens()
    plain = copy.deepcopy(model)
    planned(model, x[:2], policy="uniform:1").apply(model)
    for each in (model, plain):
        for part in x.chunk(2):
            each(part).backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("order", [[3, 0, 2, 1], [0, 1, 2, 3]])
def test_units_in_another_order_or_left_out_in_eval(order):
    model = Chain([nn.Linear(16, 16) for _ in range(4)], order)
    x, plain = torch.randn(8, 16), copy.deepcopy(model)
    planned(model, x, policy="uniform:2").apply(model)
    model.eval(), plain.eval()
    assert_equal(step(model, x), step(plain, x))
    model.train(), plain.train()
    model.order, plain.order = [1, 3, 0, 0, 2], [1, 3, 0, 0, 2]
    assert_equal(step(model, x), step(plain, x))


def test_budgets_are_kept_and_the_least_is_named():
    model, x = transformer(6), tokens()
    with pytest.raises(ValueError, match="plan: the least feasible budget is") as caught:
        planned(model, x, budget=1000)
    least = int(str(caught.value).split(" bytes")[0].split()[-1])
    found = planned(model, x, budget=least)
    assert found.measured_bytes <= least
    assert found.budget_bytes == least


def test_a_larger_budget_is_never_slower_and_sqrt_never_better():
    model, x = transformer(fused=True), tokens()
    found = planned(model, x, policy="memory")
    chain, least = found.chain, found.predicted_bytes
    rule = simulate(chain, by_rule(chain, "sqrt"))
    assert solve(chain, rule.peak).extra <= rule.extra
    most = simulate(chain, by_rule(chain, "none")).peak
    times = [solve(chain, b).extra for b in range(least, most, (most - least) // 12)]
    assert times == sorted(times, reverse=True)


def test_the_activation_budget_leaves_out_what_is_there_anyway():
    model, x = transformer(4), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(p.numel() * 4 for p in model.parameters())
    found = planned(model, x, activation_budget="2MiB", optimizer=optimizer)
    # parameters, gradients of the units, two moments
    assert 2**21 + 3 * parameters < found.budget_bytes < 2**21 + 4.1 * parameters
    assert found.measured_bytes <= found.budget_bytes


def state_of(model, optimizer):
    return (
        [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()],
        [(id(p), p.detach().clone(), id(p.grad), p._version) for p in model.parameters()],
        [p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        copy.deepcopy(optimizer.state_dict()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    )


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    else:
        assert a == b


@pytest.mark.parametrize("fails_at", [None, 1, 3, 12])
def test_everything_is_as_before(fails_at):
    model, x = convolutional(3), images()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    calls = []

    def loss(output):
        return output.square().mean()

    class Fails(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == fails_at:
                raise KeyError("in the middle")
            return x

    model[2].append(Fails())
    before = state_of(model, optimizer)
    if fails_at is None:
        planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    else:
        with pytest.raises(KeyError):
            planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    parameters = [p._version for p in model.parameters()]
    after = state_of(model, optimizer)
    assert_same(before[0], after[0])
    assert_same([p[:3] for p in before[1]], [p[:3] for p in after[1]])
    assert_same(before[2:], after[2:])
    assert len(parameters) > 0


WRONG = {
    "no budget": ({}, ValueError),
    "two budgets": ({"budget": 10, "activation_budget": 10}, ValueError),
    "budget and policy": ({"budget": 10, "policy": "all"}, ValueError),
    "negative": ({"budget": -1}, ValueError),
    "unit": ({"budget": "20 parsecs"}, ValueError),
    "share": ({"budget": 1.5}, ValueError),
    "bool": ({"budget": np.True_}, ValueError),
    "policy": ({"policy": "best"}, ValueError),
    "uniform": ({"policy": "uniform:0"}, ValueError),
    "too uniform": ({"policy": "uniform:99"}, ValueError),
    "number": ({"policy": 3}, ValueError),
    "empty": ({"policy": []}, ValueError),
    "module": ({"policy": ["blocks.0", "nowhere"]}, ValueError),
    "nested": ({"policy": "all", "units": ["blocks.0", "blocks.0.mlp"]}, ValueError),
    "twice": ({"policy": "all", "units": ["blocks.0", "blocks.0"]}, ValueError),
    "one name": ({"policy": "all", "units": "blocks"}, TypeError),
    "root": ({"policy": "all", "units": [""]}, ValueError),
    "stranger": ({"policy": "all", "units": [nn.Linear(1, 1)]}, ValueError),
    "both": ({"policy": ["blocks.0"], "units": ["blocks.1"]}, ValueError),
    "loss": ({"policy": "all", "loss": 3}, TypeError),
    "optimizer": ({"policy": "all", "optimizer": 3}, TypeError),
    "another's optimizer": (
        {"policy": "all", "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        ValueError,
    ),
    "group": ({"policy": "all", "group": "dp"}, TypeError),
    "no unit": ({"budget": "0.8"}, ValueError),
}


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [(np.int64(3), 3), (np.uint8(3), 3), ("1.5 KiB", 1536), ("2kB", 2000), ("0.1MiB", 104857)],
)
def test_budgets_in_bytes(budget, nbytes):
    found = bytes_of("plan", budget, torch.device("cpu"))
    assert type(found) is int
    assert found == nbytes
    share = bytes_of("plan", np.float64(0.5), torch.device("cpu"))
    assert share == bytes_of("plan", 0.5, torch.device("cpu"))


@pytest.mark.parametrize("budget", [True, 0, np.int64(-1), 1.5, "20 parsecs", [1]])
def test_a_wrong_budget_is_named_with_its_type(budget):
    with pytest.raises(ValueError, match=rf"^plan: a budget is .* of type {type(budget).__name__}"):
        bytes_of("plan", budget, torch.device("cpu"))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_any_work(name):
    options, error = WRONG[name]
    model = transformer(2)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(error, match=r"^plan: "):
        planned(model, tokens(), **options)


def test_models_that_cannot_be_planned():
    model, x = transformer(2), tokens()
    with pytest.raises(ValueError, match=r"^plan: .*call fusedckpt.checkpoint_sequential"):
        planned(model, x, policy="recursive")
    with pytest.raises(TypeError, match=r"^plan: "):
        planned(lambda: None, x, policy="all")
    with pytest.raises(ValueError, match=r"^plan: .* with data"):
        planned(copy.deepcopy(model).to("meta"), x, policy="all")
    found = planned(model, x, policy="all")
    found.apply(model)
    with pytest.raises(ValueError, match=r"^plan: a plan is applied"):
        planned(model, x, policy="all")
    found.undo()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^plan: .*got blocks.0 compiled.*apply the plan, then"):
        planned(model, x, policy="all")
    model = transformer(2)
    model.blocks[1] = torch.compile(model.blocks[1])
    with pytest.raises(ValueError, match=r"^plan: .*compiled"):
        planned(model, x, policy="all")


@dataclass
class State:
    x: torch.Tensor


class Stateful(nn.Linear):
    def forward(self, state):
        return State(super().forward(state.x))


class InCheckpoints(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.units, self.run = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), run

    def forward(self, x):
        return self.run(self.units, x)


def _stock(units, x):
    for unit in units:
        x = torch.utils.checkpoint.checkpoint(unit, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("run", [_stock, lambda units, x: checkpoint_sequential(units, 2, x)])
def test_checkpoints_around_units_are_named(run):
    x = torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"^plan: unit units.0 runs inside a checkpoint: .*take"):
        planned(InCheckpoints(run), x, policy="all", loss=torch.sum)
    model = nn.Sequential(Checkpoint(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 1))
    planned(model, x, policy="all", loss=torch.sum)


def test_dataclasses_between_units_are_named():
    model = nn.Sequential(Stateful(16, 16), Stateful(16, 16))
    with pytest.raises(ValueError, match=r"0 returns a dataclass, State, .*let it return a tensor"):
        planned(model, State(torch.randn(8, 16)), policy="all", loss=lambda state: state.x.sum())


def test_units_by_name_and_as_modules():
    model, x = transformer(4), tokens()
    found = planned(model, x, policy=["blocks.3", model.blocks[1]])
    assert units_of(found) == ["blocks.1", "blocks.3"]
    assert found.policy == "again: blocks.3, blocks.1"
    assert found.measured_bytes <= found.predicted_bytes
    found = planned(model, x, policy="uniform:1", units=[block.mlp for block in model.blocks])
    assert units_of(found) == [f"blocks.{i}.mlp" for i in range(4)]


def test_what_is_no_unit_is_said():
    shared = nn.Linear(16, 16)
    model = Chain([nn.Linear(16, 16), shared, nn.Linear(16, 16), nn.Linear(16, 16)], [0, 1, 1, 2])
    model.units[0].requires_grad_(False)
    found = planned(model, torch.randn(8, 16), policy="all")
    assert found.left_out == {
        "units.0": "returns nothing that requires a gradient",
        "units.1": "is called 2 times in a step",
        "units.3": "is not called in a step with gradients",
    }
    assert "not planned     units.1: is called 2 times" in str(found)
    with pytest.raises(ValueError, match=r"runs exactly once.*units.1 is called 2 times"):
        planned(model, torch.randn(8, 16), policy="all", units=["units.1"])


class Noting(nn.Linear):
    def forward(self, x, notes):
        notes[self] = y = super().forward(x).relu()
        return y


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(Noting(16, 16) for _ in range(3))

    def forward(self, x):
        notes = {}
        for unit in self.units:
            x = unit(x, notes)
        return x + sum(notes.values())


@pytest.mark.parametrize("policy", ["all", "memory"])
def test_units_that_write_into_a_dict_stay(policy):
    model, x = Notes(), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    found = planned(model, x, policy=policy)
    assert all(unit.fixed for unit in found.chain.units[1:-1] if not unit.code)
    found.apply(model)
    assert_equal(step(model, x), step(plain, x))


def test_units_that_write_into_their_input_stay():
    model, x = made("in place")
    found = planned(model, x, policy="all")
    fixed = [unit.name for unit in found.chain.units[1:-1] if unit.fixed]
    assert fixed == ["3", "6", "9", "12"]
    assert "as it is, writes into its input" in str(found)


@pytest.mark.parametrize("fused", [False, True])
def test_caches_are_refused(fused):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model, x = transformers.LlamaForCausalLM(config), tokens()
    if fused:
        # which is called at each of its levels
        fusedckpt.fuse(model)
    with pytest.raises(ValueError, match=r"^plan: .*past_key_values.*use_cache=False"):
        planned(model, input_ids=x, labels=x, policy="all")


HF = {
    "llama": {"intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "bert": {"intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "decoder_start_token_id": 0},
}
HEADS = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    layers = {"t5": "num_layers", "gpt2": "n_layer"}.get(kind, "num_hidden_layers")
    options = {"vocab_size": 128, **special, **HF[kind], layers: 3}
    config = transformers.AutoConfig.for_model(kind, **options)
    auto = getattr(transformers, f"AutoModelFor{HEADS.get(kind, 'CausalLM')}")
    return auto.from_config(config).train()


@pytest.mark.parametrize("kind", HF)
def test_hugging_face_models(kind):
    model, x = hugging_face(kind), tokens()
    inputs = {"input_ids": x, "labels": x, **({} if kind == "bert" else {"use_cache": False})}
    plain = copy.deepcopy(model)
    for policy in ("memory", "uniform:2"):
        found = planned(model, policy=policy, **inputs)
        assert len(units_of(found)) == (6 if kind == "t5" else 3)
        # of what is as small as this
        most = 1.06 if kind == "t5" else 1.03
        assert 1 <= found.predicted_bytes / found.measured_bytes <= most
        found.apply(model)
        assert_equal(step(model, **inputs), step(plain, **inputs))
        found.undo()
    if kind == "llama":
        found.apply(model)
        ours, theirs = (m.generate(x[:1, :4], max_new_tokens=4) for m in (model, plain))
        assert torch.equal(ours, theirs)


def test_beside_hugging_faces_own_checkpoints():
    model, x = hugging_face("llama"), tokens()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    inputs = {"input_ids": x, "labels": x, "use_cache": False}
    with pytest.raises(ValueError, match=r"^plan: unit model.layers.0 .*_checkpointing_disable"):
        planned(model, policy="uniform:1", **inputs)
    model.gradient_checkpointing_disable()
    planned(model, policy="uniform:1", **inputs).apply(model)
    model.gradient_checkpointing_enable()
    assert_equal(step(model, **inputs), step(plain, **inputs))


@pytest.mark.parametrize("outside", [False, True])
def test_under_autocast(outside):
    model, x = transformer(3, fused=True), tokens()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        found = planned(model, x, policy="sqrt")
    found.apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(step(model, x), step(plain, x))


def test_weights_that_autocast_has_cast_are_counted():
    model, x = transformer(3), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        # the casts live until it ends
        model(x)
        found = planned(model, x, policy="all")
    # what a segment casts in backward goes with its recompute
    assert_predicted(found)
    found.apply(model)

    def loop():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()

    held = nbytes_of([*model.parameters(), *model.buffers(), x])
    assert held + peak_bytes(loop) <= found.measured_bytes


def test_bfloat16_parameters_and_a_single_block():
    model, x = transformer(1, fused=True).bfloat16(), tokens()
    plain = copy.deepcopy(model)
    found = planned(model, x, policy="all")
    assert found.measured_bytes <= found.predicted_bytes
    found.apply(model)
    assert_equal(step(model, x), step(plain, x))


def test_units_that_are_alike_are_measured_once(monkeypatch):
    model, x = (
        Chain([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(100)]),
        torch.randn(4, 8),
    )
    kinds = []
    measured = fusedckpt.planning.survey.measured
    monkeypatch.setattr(
        "fusedckpt.planning.survey.measured", lambda *a: kinds.append(1) or measured(*a)
    )
    found = planned(model, x, policy="sqrt")
    assert len(units_of(found)) == 100
    # the first one's input requires no gradient
    assert len(kinds) == 2


def test_levels_that_keep_less_are_never_faster():
    model, x = transformer(2, fused=True), tokens()
    found = planned(model, x, policy="none")
    for unit in found.chain.units[1:-1]:
        by_kept = sorted(unit.levels, key=lambda level: -level.kept)
        assert by_kept[0].extra == 0 < by_kept[-1].extra
        assert [level.extra for level in by_kept] == sorted(level.extra for level in by_kept)


def test_the_claim_is_the_difference_of_steps_in_turns(monkeypatch, tmp_path):
    steps = []

    def ms(self, plan):
        steps.append(plan.extra_ms > 0)
        return Times(40.0, 60.0 + len(steps)) if steps[-1] else Times(20.0, 50.0 + len(steps))

    monkeypatch.setattr(Trials, "_ms", ms)
    found = planned(Chain([nn.Linear(17, 17) for _ in range(3)]), torch.randn(8, 17), policy="all")
    # as many as end within the time for them
    assert steps == [False, True] * 3
    assert (found.rounds, found.extra_ms, found.error_ms) == (3, pytest.approx(11), 0)
    assert found.chain.forward == pytest.approx(20)
    share = "11.00 ms, 55.0% of the forward"
    assert f"{share}, measured in 3 pairs of steps, give or take 0.00 ms" in str(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_a_single_pair_of_steps_counts_as_much_as_the_units(monkeypatch):
    model, x = Chain([nn.Linear(21, 21) for _ in range(3)]), torch.randn(8, 21)
    monkeypatch.setattr(Trials, "_ms", lambda self, plan: Times(100.0, 200.0 + (plan.extra_ms > 0)))
    found = planned(model, x, policy="all")
    assert found.rounds == 1
    # of the 1 ms, and of what the units took on their own, which is less
    assert 1 < 2 * found.extra_ms < 2
    assert found.error_ms > 0


def test_a_page_gives_no_figure_that_steps_do_not_resolve(monkeypatch):
    model, x = Chain([nn.Linear(22, 22) for _ in range(3)]), torch.randn(8, 22)
    seconds = cycle([50.0, 54.0, 50.0, 60.0, 50.0, 45.0])
    monkeypatch.setattr(Trials, "_ms", lambda self, plan: Times(20.0, next(seconds)))
    found = planned(model, x, policy="all")
    # 4, 10 and -5 ms
    assert (found.rounds, found.extra_ms) == (3, pytest.approx(4))
    most = 4 + 2 * 15 / 3**0.5
    assert found.error_ms == pytest.approx(15 / 3**0.5)
    told = f"less than {most:.2f} ms, {most / 20:.1%} of the forward: 3 pairs of steps cannot tell"
    assert told in str(found)


def test_what_is_recomputed_is_never_claimed_to_be_free(monkeypatch):
    predicted = []
    timed = Trials.timed
    monkeypatch.setattr(Trials, "_ms", lambda self, plan: Times(1.0, 5.0 - (plan.extra_ms > 0)))
    monkeypatch.setattr(
        Trials, "timed", lambda self, *a: predicted.append(a[0].extra_ms) or timed(self, *a)
    )
    found = planned(Chain([nn.Linear(19, 19) for _ in range(3)]), torch.randn(8, 19), policy="all")
    assert found.rounds == 15
    assert found.extra_ms == pytest.approx(predicted[0] / 2)


def test_a_step_that_may_not_fit_is_not_run_for_the_claim(monkeypatch):
    monkeypatch.setattr("fusedckpt.planning.trials.spare_bytes", lambda device: 0)
    monkeypatch.setattr(Trials, "_ms", None)
    model, x = Chain([nn.Linear(18, 18) for _ in range(3)]), torch.randn(8, 18)
    found = planned(model, x, policy="all")
    assert found.rounds == 0 < found.extra_ms
    assert "% of the forward, predicted" in str(found)
    assert "0.00 ms, 0.0% of the forward\n" in f"{planned(model, x, policy='none')}\n"


def test_a_hopeless_budget_is_not_tried(monkeypatch):
    """What keeps everything may not fit the device at all."""
    tried = []
    monkeypatch.setattr(Trials, "tried", lambda self, found: tried.append(found))
    with pytest.raises(ValueError, match="plan: the least feasible budget is"):
        planned(transformer(2), tokens(), budget="10KiB")
    assert not tried
