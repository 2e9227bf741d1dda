"""The tensors that a module's forward writes in place, and those that other code wrote since.

After a forward's first call with gradients the versions of tensors show which of them it wrote. The
second and later calls copy only these. The first call copies small buffers, and all buffers of
classes with code that writes in place, and drops the copies when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.storages import storage_of
from fusedckpt.checkpointing.calls import Argument
from fusedckpt.checkpointing.written_buffers import COPIED_NBYTES
from fusedckpt.state.code_names import (
    functions_reached,
    names_in,
    names_in_forward,
    write_tensors,
)

# methods by which code reaches the parameters of all modules inside
_WALKS = frozenset(("parameters", "named_parameters", "state_dict"))
# not in every torch: then a buffer that is written with its own values is an error, too
_hash: Any = getattr(torch, "hash_tensor", None)
# for each tensor True if a forward writes it, else its version and digest
_KNOWN = WeakTensorKeyDictionary()


class Buffer(NamedTuple):
    """A buffer of a module at a call."""

    # the class of the module
    kind: type[nn.Module]
    tensor: Tensor
    # its version before the call
    version: int


class WrittenTensors:
    """The tensors that one call of a module writes, and those that other code wrote since.

    parameters, buffers: the module's; others: tensors in attributes and objects, and their
    versions.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Buffer],
        others: Sequence[tuple[Tensor, int]],
    ):
        self._parameters = parameters
        self._versions = _versions(parameters)
        self._buffers = buffers
        self._others = others
        # by a tensor's id: a copy of it before the call, None where there is none
        self._copies: dict[int, tuple[Tensor, Argument | Tensor | None]] = {}
        # of buffers that the call did not write
        self._digests: dict[int, Tensor | None] = {}
        # after the call: the tensors that it wrote and that have no copy
        self.uncopied: list[Tensor] = []
        for kind, tensor, _ in buffers:
            self._copy_if_written(tensor, tensor.nbytes <= COPIED_NBYTES or writes(kind))
        for tensor, _ in others:
            self._copy_if_written(tensor, tensor.is_leaf and tensor.nbytes <= COPIED_NBYTES)

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
        for parameter, version in self._changed_parameters():
            self._learn(parameter, version, digest_of)
        for _, buffer, version in self._buffers:
            self._learn(buffer, version, digest_of)
        for tensor, version in self._others:
            self._learn(tensor, version, lambda _: None)
        self._others = ()

    def _learn(self, tensor: Tensor, version: int, digest: Callable[[Tensor], Any]) -> None:
        if versions_of(tensor) != (version,):
            # without a copy, a recompute still leaves it as it is
            _, copy = self._copies.setdefault(id(tensor), (tensor, None))
            if copy is None:
                self.uncopied.append(tensor)
            _KNOWN[tensor] = True
            return
        known = _KNOWN.get(tensor)
        if known is not True:
            self._copies.pop(id(tensor), None)
            if known is None or known[0] != version:
                _KNOWN[tensor] = known = version, digest(tensor)
            self._digests[id(tensor)] = known[1]

    def _changed_parameters(self) -> list[tuple[Tensor, int]]:
        """Return the parameters that were written since, and their versions before the call."""
        now = _versions(self._parameters)
        if now == self._versions:
            return []
        rows = zip(self._parameters, self._versions, now, strict=True)
        return [(p, version) for p, version, other in rows if version != other]

    def written_by_others(self) -> Tensor | None:
        """Return a parameter or buffer that other code wrote since the call, None for none."""
        for parameter, _ in self._changed_parameters():
            if self._is_stale(parameter):
                return parameter
        for _, buffer, version in self._buffers:
            if versions_of(buffer) != (version,) and self._is_stale(buffer):
                return buffer
        return None

    def _is_stale(self, tensor: Tensor) -> bool:
        """Whether it was other code that wrote a tensor, with other values."""
        if _KNOWN.get(tensor) is True:
            return False
        digest = self._digests.get(id(tensor))
        if digest is not None:
            # a buffer may be written with its own values, as DistributedDataParallel does
            return not has_digest(tensor, digest)
        # an optimizer in backward writes a parameter after its last recompute
        return not private.updates_early(tensor)

    def replacements(self) -> dict[int, Tensor]:
        """Return, by the ids of tensors that the forward writes, tensors for a recompute to write.

        Their values are those before the call, where they were copied.
        """
        tensors = {}
        for number, (tensor, copy) in self._copies.items():
            before = copy.tensor() if isinstance(copy, Argument) else copy
            tensors[number] = (tensor if before is None else before).detach().clone()
        return tensors


def _versions(tensors: Sequence[Tensor]) -> Sequence[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        # an inference tensor has none
        return [*versions_of(*tensors)]


def is_constant(buffer: Tensor) -> bool:
    """Whether no forward has written a buffer that is large; small ones kernels write uncounted."""
    return buffer.nbytes > COPIED_NBYTES and type(_KNOWN.get(buffer)) is tuple


def digest_of(tensor: Tensor) -> Tensor | None:
    """Return numbers that tell a tensor's values from others; None for some classes and dtypes."""
    kind = tensor.dtype
    is_known = kind == torch.bool or (kind.is_floating_point and kind.itemsize > 1)
    if not (is_known and tensor.numel() and storage_of(tensor)) or tensor.device.type not in (
        "cpu",
        "cuda",
    ):
        return None
    if _hash is None:
        return None
    with private.unseen(), torch.no_grad():
        # of an even number of equal values the first is 0
        numbers = _hash(tensor), tensor.sum(dtype=torch.float64)
        return torch.stack([number.view(torch.int64) for number in numbers])


def has_digest(tensor: Tensor, digest: Tensor | None) -> bool:
    """Whether a tensor has the values of a digest; where there was none, nothing is known."""
    if digest is None:
        return True
    now = digest_of(tensor)
    return now is not None and torch.equal(now, digest)


@cache
def writes(kind: type[nn.Module]) -> bool:
    """Whether the code of a class writes to tensors in place."""
    return write_tensors(names_in_forward(kind))


def written_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the code of a model's modules may write in a forward.

    Those of modules with code that writes to tensors, and of their layers; of code that walks over
    parameters, as that of a moving average of another encoder does, all that are inside.
    """
    for module in model.modules():
        if _walks(type(module)):
            yield from module.parameters()
        elif writes(type(module)):
            for part in (module, *module.children()):
                yield from part.parameters(recurse=False)


@cache
def _walks(kind: type[nn.Module]) -> bool:
    """Whether the code of a class, or of functions that it calls, writes to parameters inside."""
    names = {n for fn in functions_reached(kind, "forward") for n in names_in(fn.__code__)}
    return not _WALKS.isdisjoint(names) and write_tensors(names)
