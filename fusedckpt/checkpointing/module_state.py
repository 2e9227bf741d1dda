"""The parameters and buffers of a segment's modules, for its recompute as its forward found them.

A parameter, or a buffer that the forward only reads, must not be written in place before backward;
one that was replaced by another is put back for the recompute. A buffer that the forward itself
writes, such as a running mean, is copied before, and the recompute works on the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fusedckpt.checkpointing.versions import stale, version_of

if TYPE_CHECKING:
    from fusedckpt.checkpointing.kept import Marks

# names of the buffers that a module's forward was seen to change, in training and in eval mode
_changing: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()
# elements of a buffer that is copied before each forward, as it may change only sometimes
_SMALL = 1 << 16


class _Entry(NamedTuple):
    """A parameter or buffer before the segment ran; `value` is a copy where it may change."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor | None = None


class ModuleState:
    """Parameters and buffers, taken before a forward."""

    def __init__(self, modules: Iterable[nn.Module]):
        self.parameters: list[_Entry] = []
        self.buffers: list[_Entry] = []
        for module in modules:
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    self.parameters.append(_Entry(module, name, tensor, version_of(tensor)))
            if module._buffers:
                self.buffers += _buffers(module)

    def settle(self) -> None:
        """Learn, once the forward has run, which buffers it changed; let go of other copies."""
        learned = {entry.module: _known(entry.module) for entry in self.buffers}
        settled = []
        for entry in self.buffers:
            known = _changing.setdefault(entry.module, {}).setdefault(entry.module.training, set())
            changed = (
                entry.module._buffers.get(entry.name) is not entry.tensor
                or version_of(entry.tensor) != entry.version
                or (learned[entry.module] is None and _differs(entry))
            )
            if changed:
                known.add(entry.name)
            stays = entry.name in known or _has_statistics(entry.module)
            settled.append(entry if stays else entry._replace(value=None))
        self.buffers = settled

    def check(self) -> None:
        """Raise where what the segment only reads was written in place."""
        for entry in self.parameters:
            if version_of(entry.tensor) != entry.version:
                raise RuntimeError(stale("a parameter", entry.tensor))
        for entry in self.buffers:
            if entry.value is None and version_of(entry.tensor) != entry.version:
                name = f"buffer {entry.name!r} of {type(entry.module).__name__}"
                raise RuntimeError(stale(name, entry.tensor))

    def describe(self, marks: Marks) -> str:
        """Say what a saved tensor is, by name where it is a parameter."""
        if marks.parameter is None:
            return str(marks)
        for module, name, tensor, *_ in self.parameters:
            if id(tensor) == marks.parameter:
                return f"{name} of {type(module).__name__} ({marks})"
        return f"a parameter ({marks})"

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the modules have what they had, and copies of the buffers that the forward wrote."""
        after: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for entry in self.parameters:
                now = entry.module._parameters.get(entry.name)
                if now is not entry.tensor and _is_whole(entry.tensor):
                    _replace(entry.module._parameters, entry.name, entry.tensor, after)
            for entry in self.buffers:
                if entry.value is not None:
                    _replace(entry.module._buffers, entry.name, entry.value.clone(), after)
                elif entry.module._buffers.get(entry.name) is not entry.tensor:
                    _replace(entry.module._buffers, entry.name, entry.tensor, after)
            yield
        finally:
            for tensors, name, tensor in reversed(after):
                tensors[name] = tensor


def _replace(tensors: dict[str, Any], name: str, tensor: Tensor, after: list[Any]) -> None:
    if name in tensors:
        after.append((tensors, name, tensors[name]))
        tensors[name] = tensor


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is no shard, for which sharding swaps the whole in while a module runs."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.is_meta or tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def _known(module: nn.Module) -> set[str] | None:
    """Return the names of buffers that its forward changes; None before its first."""
    return _changing.get(module, {}).get(module.training)


def _buffers(module: nn.Module) -> Iterator[_Entry]:
    """Copy those that the forward may change."""
    known = _known(module)
    for name, tensor in module._buffers.items():
        if tensor is None:
            continue
        copies = known is None or name in known or tensor.numel() <= _SMALL
        value = tensor.detach().clone() if copies or _has_statistics(module) else None
        yield _Entry(module, name, tensor, version_of(tensor), value)


def _has_statistics(module: nn.Module) -> bool:
    # their kernels write the running statistics without raising the version
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _differs(entry: _Entry) -> bool:
    """Whether a buffer was written, also by what does not raise its version: F.batch_norm."""
    if entry.value is None or type(entry.tensor) is not Tensor or entry.tensor.is_meta:
        return False
    return not torch.equal(entry.tensor, entry.value)
