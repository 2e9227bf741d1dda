"""Copies of inputs of norms that code writes after the norm.

    x += attention(rms_norm(x))

In half precision an RMSNorm in torch's ops saves a copy of x in float32, so the write harms nothing
there. A fused norm saves x itself, and autograd would raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.storages import VersionCheck
from fusedckpt.kernels.runtime import HALF

# after so many calls that code did not write after, a norm saves its inputs as they are
_CALLS = 4


class InputCopies:
    """The copies of one norm's inputs: of all, once code has written to one; else of the first."""

    def __init__(self) -> None:
        # whether the next call copies its input
        self.is_on = True
        self._is_written = False
        # of inputs, which may be freed
        self._checks: list[VersionCheck] = []

    def __reduce__(self) -> Any:
        """Let a copy begin anew, as copies of tensors count from 0."""
        return InputCopies, ()

    def input_of(self, x: Tensor) -> Tensor:
        """Return the tensor that the norm of x reads and saves: a copy, or x itself."""
        if x.dtype not in HALF or x.grad_fn is None or torch.compiler.is_compiling():
            return x
        if not torch.is_grad_enabled() or x.__class__ is not Tensor:
            return x
        if not self._is_written:
            self._is_written = not all(check.is_current() for check in self._checks)
            if self._is_written:
                self._checks = []
            elif len(self._checks) == _CALLS:
                self._checks = []
                self.is_on = False
                return x
            else:
                self._checks.append(VersionCheck(x, ""))
        return x.clone()
