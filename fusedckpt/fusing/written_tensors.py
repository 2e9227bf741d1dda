"""The tensors that a module's forward writes in place, and those that other code wrote since.

Which tensors a forward writes is known by their versions after its first call with gradients. Only
these are copied, and from the second call on; in the first call small buffers are copied, and those
of a class whose code writes in place, until the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.checkpointing.calls import Argument, storage_of
from fusedckpt.fusing.code_names import names_in_forward

# bytes of a tensor that is copied for one call in any case
SMALL = 1 << 16
# not in every torch: then a buffer that is written with its own values is an error, too
_hash: Any = getattr(torch, "hash_tensor", None)
# for each tensor True if a forward writes it, else its version and digest
_KNOWN = WeakTensorKeyDictionary()


class ModuleTensor(NamedTuple):
    """A parameter or buffer of a module at a call."""

    module: nn.Module
    # its name in the module
    name: str
    tensor: Tensor
    # its version before the call
    version: int

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.name not in self.module._parameters


class WrittenTensors:
    """The tensors that one call of a module writes, and those that other code wrote since.

    members: the module's parameters and buffers; others: tensors in attributes and objects, and
    their versions.
    """

    def __init__(self, members: Sequence[ModuleTensor], others: Sequence[tuple[Tensor, int]]):
        self._members = members
        self._others = others
        # by a tensor's id: a copy of it before the call, None where there is none
        self._copies: dict[int, tuple[Tensor, Argument | Tensor | None]] = {}
        # of buffers that the call did not write
        self._digests: dict[int, Tensor | None] = {}
        # after the call: the tensors that it wrote and that have no copy, None for no member
        self.uncopied: list[ModuleTensor | None] = []
        for member in members:
            if member.is_buffer:
                is_small = member.tensor.nbytes <= SMALL
                self._copy_if_written(member.tensor, is_small or writes(type(member.module)))
        for tensor, _ in others:
            self._copy_if_written(tensor, tensor.is_leaf and tensor.nbytes <= SMALL)

    def _copy_if_written(self, tensor: Tensor, is_likely: bool) -> None:
        """Copy a tensor that the forward writes, or, where that is not known, is likely to."""
        known = _KNOWN.get(tensor)
        is_written = is_likely if known is None else known is True
        if is_written and not tensor.requires_grad and type(tensor) is Tensor:
            copy = tensor.detach().clone()
            # counted as any saved tensor
            self._copies[id(tensor)] = tensor, copy if known is None else Argument(copy)

    def learn(self) -> None:
        """Learn, after the call, which tensors it wrote."""
        for member in self._members:
            if member.is_buffer or versions_of(member.tensor) != (member.version,):
                self._learn(member.tensor, member.version, _digest, member)
        for tensor, version in self._others:
            self._learn(tensor, version, lambda _: None, None)
        self._others = ()

    def _learn(
        self,
        tensor: Tensor,
        version: int,
        digest: Callable[[Tensor], Any],
        member: ModuleTensor | None,
    ) -> None:
        if versions_of(tensor) != (version,):
            # without a copy, a recompute still leaves it as it is
            _, copy = self._copies.setdefault(id(tensor), (tensor, None))
            if copy is None:
                self.uncopied.append(member)
            _KNOWN[tensor] = True
            return
        known = _KNOWN.get(tensor)
        if known is not True:
            self._copies.pop(id(tensor), None)
            if known is None or known[0] != version:
                _KNOWN[tensor] = known = version, digest(tensor)
            self._digests[id(tensor)] = known[1]

    def written_by_others(self) -> ModuleTensor | None:
        """Return a parameter or buffer that other code wrote since the call, None for none."""
        return next(filter(self._is_stale, self._members), None)

    def _is_stale(self, member: ModuleTensor) -> bool:
        if versions_of(member.tensor) == (member.version,) or _KNOWN.get(member.tensor) is True:
            return False
        digest = self._digests.get(id(member.tensor))
        if digest is not None:
            # a buffer may be written with its own values, as DistributedDataParallel does
            now = _digest(member.tensor)
            return now is None or not torch.equal(digest, now)
        # an optimizer in backward writes a parameter after its last recompute
        return not private.updates_early(member.tensor)

    def replacements(self) -> dict[int, Tensor]:
        """Return, by the ids of tensors that the forward writes, tensors for a recompute to write.

        Their values are those before the call, where they were copied.
        """
        tensors = {}
        for number, (tensor, copy) in self._copies.items():
            before = copy.tensor() if isinstance(copy, Argument) else copy
            tensors[number] = (tensor if before is None else before).detach().clone()
        return tensors


def is_constant(buffer: Tensor) -> bool:
    """Whether no forward has written a buffer that is large; small ones kernels write uncounted."""
    return buffer.nbytes > SMALL and type(_KNOWN.get(buffer)) is tuple


def _digest(tensor: Tensor) -> Tensor | None:
    """Return numbers that tell a tensor's values from others; None for some classes and dtypes."""
    kind = tensor.dtype
    is_known = kind == torch.bool or (kind.is_floating_point and kind.itemsize > 1)
    if not (is_known and storage_of(tensor)) or tensor.device.type not in ("cpu", "cuda"):
        return None
    if _hash is None:
        return None
    with private.unseen(), torch.no_grad():
        # of an even number of equal values the first is 0
        numbers = _hash(tensor), tensor.sum(dtype=torch.float64)
        return torch.stack([number.view(torch.int64) for number in numbers])


@cache
def writes(kind: type[nn.Module]) -> bool:
    """Whether the code of a class writes to tensors in place."""
    names = names_in_forward(kind)
    return "data" in names or any(n.endswith("_") and not n.endswith("__") for n in names)
