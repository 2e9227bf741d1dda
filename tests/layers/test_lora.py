"""Adapters in the place of weights: numbers, gradients of every mask, bytes, GEMMs."""

import pytest
import torch
from cases import Case
from lora_cases import CASES
from support import compare

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=BY_NAME)
def case(request) -> Case:
    return BY_NAME[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(case, path, dtype):
    compare(case.fused, case.eager, lambda: case.inputs((17,), 21, 33, dtype))
