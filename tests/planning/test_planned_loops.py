"""A plan's budget in the loops that people run: micro-batches, kept gradients, DDP, activations."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from plan_models import assert_predicted, planned, tokens, transformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedckpt import Plan
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.reporting.tables import size
from fusedckpt.reporting.trial import tensors_of

LAYERS = 3


def within(model, x, share=0.4, **options):
    """Return a budget between the least peak and that of keeping everything, and its plan."""
    least, most = (
        planned(model, x, policy=policy, **options).measured_bytes for policy in ("memory", "none")
    )
    budget = int(least + share * (most - least))
    return budget, planned(model, x, budget=budget, **options)


def zero(model, to_none):
    for p in model.parameters():
        p.grad = None if to_none else torch.zeros_like(p)


def peak_of(model, x, optimizer=None, micro_batches=1, to_none=True, steps=1, loss=None):
    """Return the peak of so many steps from the state the model is in.

    loss: of what the model returns, by default that itself.
    """

    def loop():
        for _ in range(steps):
            zero(model, to_none) if steps > 1 else None
            for i in range(micro_batches):
                is_last = i + 1 == micro_batches
                with getattr(model, "no_sync", nullcontext)() if not is_last else nullcontext():
                    # it lives until the next one does
                    output = model(x)
                    (output if loss is None else loss(output)).backward()
            if optimizer is not None:
                optimizer.step()

    state = list(tensors_of(list(optimizer.state.values()))) if optimizer is not None else []
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = nbytes_of([*model.parameters(), *model.buffers(), *gradients, *state, x])
    return held + peak_bytes(loop)


def assert_kept(found, budget, peak):
    assert peak <= budget
    # what DistributedDataParallel holds differs by some hundred bytes from step to step
    assert 0.999 * peak <= found.predicted_bytes <= 1.02 * peak


@pytest.mark.parametrize(("accumulate", "adamw"), [(True, False), (3, True)])
def test_micro_batches_add_to_gradients(accumulate, adamw):
    model, x = transformer(LAYERS), tokens()
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None
    budget, found = within(model, x, optimizer=optimizer, accumulate=accumulate)
    found.apply(model)
    if adamw:
        zero(model, to_none=False)
        optimizer.step()
    zero(model, to_none=True)
    assert_kept(found, budget, peak_of(model, x, optimizer, micro_batches=3))
    assert found.gradient_bytes == nbytes_of(model.parameters())


def test_gradients_that_are_there_are_counted_and_put_back():
    model, x = transformer(LAYERS), tokens()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    gradients = [p.grad for p in model.parameters()]
    budget, found = within(model, x)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all((g == 3.0).all() for g in gradients)
    found.apply(model)
    assert_kept(found, budget, peak_of(model, x))


class Spare(nn.Module):
    """A model with more parameters than a step reaches: of a tower, of a unit, and in code."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(SpareBlock() for _ in range(4))
        self.tower = nn.Sequential(*(SpareBlock() for _ in range(8)))
        self.scale = nn.Parameter(torch.ones(4096))
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        for inner in self.body:
            x = x + inner(x)
        return self.head(x).square().mean()


class SpareBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.across = nn.LayerNorm(64), nn.Linear(64, 512)
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x, memory=None):
        x = self.norm(x)
        return self.inner(x) if memory is None else self.across(x) @ memory


@pytest.mark.parametrize(("accumulate", "adamw"), [(False, False), (True, True)])
def test_what_no_gradient_reaches_has_none(accumulate, adamw):
    model, x = Spare(), torch.randn(64, 64)
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None
    options = {"optimizer": optimizer, "accumulate": accumulate}
    for policy in ("none", "memory"):
        found = planned(model, x, policy=policy, **options)
        assert_predicted(found, 1.001)
    model(x).backward()
    if adamw:
        optimizer.step()
    if not accumulate:
        zero(model, to_none=True)
    found.apply(model)
    assert_kept(found, found.measured_bytes, peak_of(model, x, optimizer))


@pytest.mark.parametrize(("accumulate", "view"), [(False, False), (2, True)])
def test_buckets_of_ddp_are_counted(one_rank, accumulate, view):
    model, x = transformer(LAYERS), tokens()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=view)
    budget, found = within(parallel, x, accumulate=accumulate)
    found.apply(parallel)
    # the second of these makes the buckets anew, so that they are seen
    peak = peak_of(parallel, x, steps=3, micro_batches=accumulate or 1)
    assert_kept(found, budget, peak)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/x", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("adamw", [False, True])
def test_an_activation_budget_bounds_activations(adamw):
    model, x = transformer(LAYERS), tokens()
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None
    with pytest.raises(ValueError, match="the least feasible activation budget is") as caught:
        planned(model, x, activation_budget="1KiB", optimizer=optimizer)
    least = int(str(caught.value).split(" bytes")[0].split()[-1])
    found = planned(model, x, activation_budget=least, optimizer=optimizer)
    found.apply(model)
    parameters = nbytes_of(model.parameters())
    for to_none in (True, False):
        zero(model, to_none)
        assert peak_of(model, x) - 2 * parameters <= least
    assert peak_of(model, x) - 2 * parameters >= 0.98 * least
    # two moments, and a count per parameter
    state = 2 * parameters + 4 * len([*model.parameters()]) if adamw else 0
    assert found.budget_bytes == least + 2 * parameters + state


def test_the_page_says_for_which_step_it_holds(tmp_path):
    model, x = transformer(2), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    found = planned(model, x, policy="none", optimizer=optimizer)
    assert "the step begins without gradients; with accumulate=True" in str(found)
    found = planned(model, x, policy="none", optimizer=optimizer, accumulate=2)
    assert f"the step begins with {size(found.gradient_bytes)} of gradients" in str(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_one_micro_batch_adds_to_nothing():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    for accumulate in (False, 0, 1, np.int64(1)):
        assert planned(model, x, policy="none", accumulate=accumulate).gradient_bytes == 0
    found = planned(model, x, policy="none", accumulate=np.int64(2))
    assert found.gradient_bytes == nbytes_of(model.parameters())


@pytest.mark.parametrize("wrong", [-1, "yes", 2.0, None, np.int64(-1), np.float64(2)])
def test_what_accumulate_is_not(wrong):
    with pytest.raises(ValueError, match="plan: accumulate must be"):
        planned(transformer(2), tokens(), policy="none", accumulate=wrong)


class Hidden(nn.Module):
    """Returns what every layer did, as a model of transformers can."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]).relu())
        return {"loss": hidden[-1].mean(), "hidden": hidden}


def test_the_last_output_lives_until_the_next():
    model, x = Hidden(), torch.randn(512, 64)
    names = [f"layers.{i}" for i in range(LAYERS)]
    loss = lambda output: output["loss"]  # noqa: E731
    found = planned(model, x, policy="none", units=names, loss=loss)
    peak = peak_of(model, x, steps=3, loss=loss)
    assert peak <= found.measured_bytes <= found.predicted_bytes <= 1.02 * peak


class Leaves(nn.Module):
    """Its forward makes a leaf, as wav2vec2's does, or peft where embeddings are frozen."""

    def __init__(self, where, is_view):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.where, self.is_view = where, is_view
        if where == "unit":
            self.layers[0].register_forward_pre_hook(lambda _, args: self.leaf(*args))
            self.layers[0] = nn.Sequential(self.layers[0], nn.GELU())

    def leaf(self, x):
        leaf = x.detach()[:] if self.is_view else x.detach().clone()
        return leaf.requires_grad_()

    def forward(self, x):
        if self.where == "code":
            x = self.leaf(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean(1)


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize(("where", "is_view"), [("code", True), ("unit", False)])
def test_leaves_of_the_last_forward_live_with_its_output(where, is_view, policy):
    model, x = Leaves(where, is_view), torch.randn(2048, 64)
    found = planned(model, x, policy=policy)
    found.apply(model)
    peak = peak_of(model, x, steps=3, loss=lambda output: output.square().mean())
    assert_kept(found, found.measured_bytes, peak)
