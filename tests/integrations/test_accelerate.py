"""Accelerate needs no more than `fuse` before `prepare`; plans and reports come after it."""

import pytest
import torch
from little_llama import LAYERS, Texts, build
from support import DEVICE

import fusedckpt
from fusedckpt.integrations.first_batch import at_first_batch

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the Accelerator is told to use a CPU")


def train(is_ours, seen, **options):
    """Return losses, gradients of every step, and parameters."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model = build(dropout=0.1)
    if is_ours:
        assert len(fusedckpt.fuse(model).swapped) == 4 * LAYERS + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(Texts(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if is_ours:
        plan = {"policy": "all", "progress": False, "accumulate": 2}
        at_first_batch(
            model, plan=plan, report=True, optimizer=optimizer.optimizer, log=seen.append
        )
    torch.manual_seed(1)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    assert type(accelerator.unwrap_model(model)).__name__ == "LlamaForCausalLM"
    return [*found, *(p.detach() for p in model.parameters())]


def test_a_loop():
    seen = []
    ours, theirs = train(True, seen), train(False, [])
    assert [type(one) for one in seen] == [fusedckpt.Plan, fusedckpt.MemoryReport]
    assert seen[1].input_bytes == 2 * 2 * 8 * 8
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
