"""Checkpoint is its module in all but memory, alone and on several ranks (C27)."""

import copy
import io
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import assert_as_plain, same, step
from support import DEVICE, HANGS, randn
from torch import nn

from fusedckpt import Checkpoint, checkpoint
from fusedckpt.memory import saved_tensors


class Block(nn.Module):
    kind = "block"

    def __init__(self, width=6):
        super().__init__()
        self.fc1, self.norm, self.fc2 = (
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, width),
        )
        self.note = "mine"

    def forward(self, x, *, scale=1.0):
        """Return x, changed."""
        return x + self.fc2(self.norm(self.fc1(x)).sin()) * scale


def test_equals_its_module():
    block = Block().to(DEVICE)
    x = randn(4, 6)
    expected = step(block, x, parameters=block.parameters())
    block.norm.reset_running_stats()
    found = step(Checkpoint(block), x, parameters=block.parameters())
    assert all(map(same, found, expected))
    assert block.norm.num_batches_tracked == 1


def test_keeps_its_input_alone():
    block, x = Block().to(DEVICE), randn(4, 6)
    with saved_tensors() as saved:
        Checkpoint(block)(x * 1)
    assert saved.nbytes == x.nbytes


def test_is_its_module():
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    names, state = [n for n, _ in model.named_parameters()], model.state_dict()
    wrapped = nn.Sequential(*map(Checkpoint, model))
    assert [n for n, _ in wrapped.named_parameters()] == names
    assert list(wrapped.state_dict()) == list(state)
    wrapped.load_state_dict(state)
    block, inner = wrapped[0], model[0]
    assert isinstance(block, Block)
    assert block.kind == "block"
    assert block.note == "mine"
    block.note = "new"
    block.eval()
    assert inner.note == "new"
    assert not inner.training
    block.norm = nn.Identity()
    assert type(inner.norm) is nn.Identity
    assert type(block).__name__ == "CheckpointBlock"
    assert Checkpoint(model)[1] is model[1]
    assert len(Checkpoint(model)) == 2


def test_hooks_of_the_module_itself_run_once():
    calls = []
    block = Block().to(DEVICE)
    block.register_forward_pre_hook(lambda *_: calls.append("pre"))
    wrapped = Checkpoint(block)
    wrapped.register_forward_hook(lambda *_: calls.append("post"))
    block.fc1.register_forward_hook(lambda *_: calls.append("child"))
    wrapped(randn(4, 6), scale=2.0).sum().backward()
    assert calls == ["pre", "child", "post", "child"]


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load]
)
def test_copies(copied):
    block = Checkpoint(Block().to(DEVICE), debug=True)
    other = copied(block)
    assert type(other) is type(block)
    assert other.options.debug
    x = randn(4, 6)
    assert all(map(same, step(other, x), step(block, x)))


def test_of_a_checkpoint_is_one():
    calls = []
    block = Block().to(DEVICE)
    block.fc1.register_forward_hook(lambda *_: calls.append(1))
    twice = Checkpoint(Checkpoint(block), debug=True)
    twice(randn(4, 6)).sum().backward()
    assert len(calls) == 2
    assert twice.options.debug


def test_compiles():
    torch._dynamo.reset()
    block, x = Block().eval().to(DEVICE), randn(4, 6)
    compiled = torch.compile(Checkpoint(block), backend="aot_eager", fullgraph=True)
    for a, b in zip(step(compiled, x), step(block, x), strict=True):
        torch.testing.assert_close(a, b)


def replaced():
    block = Block()
    block.forward = lambda x: x
    return block


def compiled_in_place():
    block = Block()
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.sin, "expected an nn.Module"),
        (lambda: nn.ModuleList(), "has no forward"),
        (replaced, "the forward of this Block was replaced"),
        (compiled_in_place, "compile the Checkpoint of it"),
        (lambda: torch.compile(Block(), backend="eager"), "compile the Checkpoint of it"),
        (lambda: torch.jit.trace(nn.ReLU(), torch.ones(2)), "TorchScript"),
    ],
)
def test_refused(make, match):
    with pytest.raises(TypeError, match=f"Checkpoint: .*{match}"):
        Checkpoint(make())


def test_gradient_accumulation():
    """Micro-batches through one checkpointed model add up to the gradient of the batch."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE), randn(8, 6)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    for part in x.split(2):
        checkpoint(model, part).square().sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert_as_plain(partial(checkpoint, model), x)


def test_data_parallel(tmp_path):
    """C27: DDP and FSDP2, by one process per rank; see checkpoint_ranks.py."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    script = Path(__file__).parent / "checkpoint_ranks.py"
    command = [sys.executable, "-W", "ignore", script, str(tmp_path / "store")]
    root = Path(__file__).parents[1]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=HANGS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
