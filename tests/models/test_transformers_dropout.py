"""transformers' MLPs with dropout inside train fused."""

import copy

import pytest
import torch
from torch import nn
from transformers_cases import MODELS, tokens

from fusedckpt import fuse, reference
from fusedckpt.memory import saved_tensors


class Seeded(nn.Dropout):
    """It drops what a fused MLP does, with a seed for each call."""

    def forward(self, x):
        seed = torch.randint(2**63 - 1, (1,), device=x.device)[0]
        return reference.dropout(x, self.p, seed)


def built(name):
    """Return a model, a fused copy with its report, and one whose MLPs draw as that does."""
    torch.manual_seed(0)
    eager = MODELS[name].build(dropout_rate=0.1).train()
    fused, same = copy.deepcopy(eager), copy.deepcopy(eager)
    report = fuse(fused)
    assert list(report.swapped.values()).count(next(iter(MODELS[name].swapped))) == 12
    for module in same.modules():
        if type(module).__name__ in ("T5DenseActDense", "T5DenseGatedActDense"):
            module.dropout = Seeded(module.dropout.p)
    return eager, fused, report, same


def step(model, inputs):
    model.zero_grad()
    torch.manual_seed(4)
    with saved_tensors() as saved:
        loss = model(**inputs).loss
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found, saved.nbytes


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
def test_t5_trains_fused(name):
    eager, fused, report, same = built(name)
    inputs = tokens()
    ours, kept = step(fused, inputs)
    # its decoder makes a cache, and attention with dropout saves its scores on a CPU
    assert {report.kinds[name] for name in report.fallbacks} == {"attention"}
    torch.testing.assert_close(ours, step(same, inputs)[0], rtol=1e-4, atol=1e-5)
    assert kept < 0.9 * step(eager, inputs)[1]
    assert all(map(torch.equal, step(fused, inputs)[0], ours))
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    # what several layers read has its gradients summed in another order
    torch.testing.assert_close(step(fused, inputs)[0], ours, rtol=1e-5, atol=1e-6)
    fused.gradient_checkpointing_disable()
    for model in (fused, eager):
        model.load_state_dict(same.state_dict())
    torch.testing.assert_close(fused.eval()(**inputs).loss, eager.eval()(**inputs).loss)
