"""Plans and reports on the first batch of loops that know nothing of them."""

from functools import partial

import pytest
import torch
from support import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from zoo import Line

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.integrations.first_batch import at_first_batch

PLAN = {"policy": "all", "progress": False}


def build():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
    return nn.Sequential(*blocks, nn.Dropout(0.2))


def train(model, optimizer):
    """Evaluate, train, and return the losses and all parameters."""
    torch.manual_seed(1)
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.eval()(torch.randn(4, 8))
    model.train()
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def test_a_batch_without_rows_is_not_the_first():
    model, seen = build(), []
    at_first_batch(model, report=True, log=seen.append)
    model(torch.randn(0, 8)).sum().backward()
    assert not seen
    model(torch.randn(4, 8)).sum().backward()
    assert [report.input_bytes for report in seen] == [4 * 8 * 4]


@pytest.mark.parametrize("options", [{"report": True}, {"plan": PLAN}, {"plan": PLAN, "report": 1}])
def test_the_training_goes_on_as_without(options):
    found, seen = [], []
    for is_seen in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        if is_seen:
            at_first_batch(model, optimizer=optimizer, log=seen.append, **options)
        found.append(train(model, optimizer))
    assert all(map(torch.equal, *found))
    assert len(seen) == len(options)
    if "report" in options:
        assert isinstance(seen[-1], fusedckpt.MemoryReport)
        assert seen[-1].input_bytes == 4 * 8 * 4
        # of AdamW: two moments and a step for each parameter
        moments = sum(8 * p.numel() + 4 for p in model.parameters())
        assert seen[-1].optimizer_bytes == moments
    if "plan" in options:
        assert isinstance(seen[0], fusedckpt.Plan)
        with pytest.raises(ValueError, match="another plan is applied"):
            seen[0].apply(model)


class Loop(nn.Module):
    """A scan in a loop of its own, which shows when it runs."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        state = torch.zeros_like(x)
        for _ in range(6):
            state = (state * self.gate(x).sigmoid()).sin() + x * scale
        return state


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.loop = Loop()

    def forward(self, x, scale):
        return self.loop(x, scale=scale) + x


def test_it_fuses_what_a_run_of_the_batch_shows():
    results = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model, seen, x = Around(), [], torch.randn(4, 8)
        if is_fused:
            at_first_batch(model, fuse={"norm": False}, log=seen.append)
            assert not fusedckpt.fuse(model).swapped
        losses = [model(x, scale=2.0).square().mean() for _ in range(2)]
        results.append(torch.autograd.grad(sum(losses), [*model.parameters()]))
    assert [report.swapped for report in seen] == [{"loop": "Loop -> recomputed"}]
    torch.testing.assert_close(*results)


def test_it_can_be_taken_back():
    model, seen = build(), []
    at_first_batch(model, report=True, log=seen.append).remove()
    train(model, torch.optim.SGD(model.parameters()))
    assert not seen
    assert not model._forward_pre_hooks


# torch.compile takes a model of torch.nn's own classes otherwise than others: a hook that is there
# before would be compiled with it
@pytest.mark.parametrize(("kind", "before"), [(nn.Sequential, False), (Line, False), (Line, True)])
def test_it_stays_out_of_compiled_code(kind, before):
    model, seen, graphs = kind(*build()), [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    at_first_batch(model if before else compiled, report=True, log=seen.append)
    for _ in range(2):
        compiled(torch.randn(4, 8)).sum().backward()
    # what is reported is the step as it runs uncompiled, by module
    prefix = "" if kind is nn.Sequential else "units."
    owners = {storage.owner for storage in seen[0].saved}
    assert {f"{prefix}{index}.2" for index in range(3)} <= owners
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {}, "model must be a module, got NoneType"),
        (nn.ReLU(), {"fuse": True}, "fuse must be a dict of arguments or None, got bool"),
        (nn.ReLU(), {"plan": "20GiB"}, "plan must be a dict of arguments or None, got str"),
        (nn.ReLU(), {"log": 3}, "log must be callable, got int"),
    ],
)
def test_bad_input_is_refused_at_once(model, options, message):
    with pytest.raises(TypeError, match=f"at_first_batch: {message}"):
        at_first_batch(model, **options)


def trained(rank, wrap, **options):
    """Return the losses and the gradients of a few steps, looked at on the first batch or not."""
    model = build().train()[:3]
    fusedckpt.fuse(model)
    if options.pop("inside", False):
        at_first_batch(model, **options)
        options = {}
    wrapped = wrap(model)
    if options:
        at_first_batch(wrapped, **options)
    found = []
    generator = torch.Generator().manual_seed(rank)
    for is_last in (False, True):
        if wrap is not DistributedDataParallel:
            # an accumulation loop: the last backward reduces what all of them found
            wrapped.set_requires_gradient_sync(is_last)
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        found.append(loss.detach())
        if options and wrap is not DistributedDataParallel:
            fusedckpt.report(wrapped, torch.randn(4, 8, generator=generator.clone_state()))
    grads = (p.grad for p in wrapped.parameters())
    return found + [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads]


def sharded(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# what is not reduced yet is elsewhere than under `.grad`
MIXED = partial(sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))


@forced_path("aten")
def on_a_rank(rank):
    planned = {"plan": {"policy": "all", "progress": False}}
    both = {**planned, "report": True}
    for wrap, options in (
        (DistributedDataParallel, {**both, "inside": True}),
        (DistributedDataParallel, both),
        (sharded, {"report": True}),
        (MIXED, {"report": True}),
    ):
        seen = []
        found = trained(rank, wrap, log=seen.append, **options)
        assert [type(one).__name__ for one in seen] == [
            name for name, key in (("Plan", "plan"), ("MemoryReport", "report")) if key in options
        ]
        for ours, theirs in zip(found, trained(rank, wrap), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_two_ranks(tmp_path):
    """A plan and a report on the first batch, inside DDP, around it, and on FSDP2."""
    run_ranks(on_a_rank, tmp_path)
