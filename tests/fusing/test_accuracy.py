"""The error rule needs statistics: results of few elements are held to a bound of their dtype."""

import pytest
import torch
from support import assert_near
from torch import nn

from fusedckpt import fuse
from fusedckpt.fusing.accuracy import FEWEST, Errors, bound


def errors_of(count: int, draws: int = 1) -> Errors:
    """Return errors in which eager is lucky: four times nearer than ours, which is near as well."""
    errors = Errors(torch.float32)
    truth = torch.ones(count, dtype=torch.float64)
    for _ in range(draws):
        errors.add((truth + 4e-5).float(), (truth + 1e-5).float(), truth)
    return errors


@pytest.mark.parametrize("count", [1, 2, FEWEST - 1])
def test_a_ratio_of_few_elements_is_refused(count):
    with pytest.raises(ValueError, match=f"needs 16 elements, not {count}"):
        errors_of(count).problem()
    # as many draws as it takes, or none at all
    assert errors_of(count, draws=FEWEST).problem() is not None
    assert errors_of(0).problem() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_is_of_the_dtype(dtype):
    eps = torch.finfo(dtype).eps
    assert bound(0.1, dtype) == 8 * eps
    assert bound(-5.0, dtype) == 40 * eps


def test_a_loss_is_held_to_the_dtype_of_its_model():
    """As on one CPU of many: a loss near 5 of a model in bfloat16, 3.11e-05 beside 8.1e-06."""
    truth = torch.tensor(5.0, dtype=torch.float64)
    ours, eager = (truth + 3.11e-5).float(), (truth + 8.1e-6).float()
    assert_near(ours, eager, truth, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"error 3\.1e-05 where 4\.77e-06 is allowed"):
        assert_near(ours, eager, truth)
    with pytest.raises(AssertionError, match=r"error 0\.5"):
        assert_near(ours + 0.5, eager, truth, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="error nan"):
        assert_near(ours * torch.nan, eager, truth, dtype=torch.bfloat16)


class ScaledMLP(nn.Module):
    """An MLP with a parameter of one number, and a sum as its output."""

    def __init__(self, sums: bool):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.scale, self.sums = nn.Parameter(torch.ones(1)), sums

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(x))) * self.scale
        return y.sum() if self.sums else y


@pytest.mark.parametrize("sums", [False, True])
def test_fuse_draws_until_it_can_judge(sums, monkeypatch):
    counts = []
    judge = Errors.problem

    def watched(errors, **options):
        counts.append(errors.count)
        return judge(errors, **options)

    monkeypatch.setattr(Errors, "problem", watched)
    fuse(nn.Sequential(ScaledMLP(sums), nn.RMSNorm(64)))
    assert counts
    assert min(counts) >= FEWEST
