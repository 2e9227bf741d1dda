"""Sequentials, and what they are compared with."""

from __future__ import annotations

import torch
from support import DEVICE
from swap_cases import D, F, assert_equal, rows
from torch import nn

from fusedckpt import Sequential
from fusedckpt.layers.sequential import runs


def mlp(activation: nn.Module | None = None, bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(D, F, bias), activation or nn.GELU(), nn.Linear(F, D, bias)]


def sequential(*layers: nn.Module, save: str = "inputs") -> Sequential:
    return Sequential(*layers, save=save).to(DEVICE, torch.float64)


def kinds(model: nn.Sequential) -> str:
    return " ".join(run.kind for run in runs(list(model)))


def assert_as_torch(model: Sequential, x: torch.Tensor | None = None) -> None:
    """Hold a model against nn.Sequential of its very layers."""
    assert_equal(model, nn.Sequential(*model), rows() if x is None else x)
