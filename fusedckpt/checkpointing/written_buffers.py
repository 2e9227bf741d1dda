"""Buffers that a forward writes: its recompute finds them as the forward found them.

Spectral norm's power iteration begins with the vectors that the forward before left, and writes
them. A recompute that began with those of its own forward would compute other weights, and
gradients would be silently wrong. Code keeps such vectors in buffers, in parameters without
gradients, or in attributes: here a buffer is any of these, an attribute if it is small.

The first call of a module shows which buffers its forward writes. It copies the small buffers, and
compares versions afterwards; on a CPU also values, as code may write to `.data`. Later calls copy
only the buffers that were written; without such buffers they only look that up.
A recompute gets copies in place of the buffers, so that its writes change no buffer.
BatchNorm's statistics are not read in training, and not copied.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.weak_map import WeakMap
from fusedckpt.checkpointing.determinism import same_bits

# bytes of a tensor that is copied before a call that may write it
COPIED_NBYTES = 1 << 16
# where a module has them; attributes come last
_TABLES = "_buffers", "_parameters", ""
# how deep functions are looked into for the modules that they call, and how long lists may be
_DEPTH_OF_MODULES = 4
_MOST = 64


def is_state(value: Any) -> TypeGuard[Tensor]:
    """Whether an attribute of a module is a tensor that calls of the module may write."""
    return type(value) is Tensor and _may_be_written(value)


def _may_be_written(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.requires_grad:
        return False
    return not (tensor.is_meta or tensor.is_inference())


def _is_buffer(value: Any) -> TypeGuard[Tensor]:
    return is_state(value) or (type(value) is nn.Parameter and _may_be_written(value))


class BufferPlace(NamedTuple):
    """A buffer, by its module, the table there, "" for the attributes, and its name."""

    module: weakref.ref[nn.Module]
    table: str
    name: str


# whether a module trains, and the code of the function that calls it, None for the module itself
_Key = tuple[bool, Any]
# classes of torch with statistics as buffers
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
# of modules that were called: the buffers that are written then
_WRITTEN = WeakMap[nn.Module, dict[_Key, list[BufferPlace]]]()
# classes of modules that a warning has named
_named = weakref.WeakSet[type]()


class _BufferBefore(NamedTuple):
    """A buffer before a call."""

    # the module that has it
    module: nn.Module
    # the table that has it, "" for the attributes
    table: str
    # its name there
    name: str
    # the buffer
    tensor: Tensor
    # its version
    version: int
    # of its memory
    address: int
    # its values, None where it is large and not known to be written
    copy: Tensor | None

    def is_written(self) -> bool:
        """Whether it was written, or replaced, since."""
        tensor = self.tensor
        if _table(self.module, self.table).get(self.name) is not tensor:
            return True
        if tensor._version != self.version or tensor.data_ptr() != self.address:
            return True
        is_read = self.copy is not None and tensor.device.type == "cpu"
        return is_read and not same_bits(tensor, self.copy)  # type: ignore[arg-type]  # no None

    def may_change(self) -> bool:
        """Whether later calls copy it: small ones of a module that writes some, written ones."""
        return self.copy is not None or self.is_written()

    def before(self) -> Tensor | None:
        """Return a tensor with its values before the call, None where there is none."""
        is_intact = self.tensor._version == self.version
        return self.tensor if self.copy is None and is_intact else self.copy


class WrittenBuffers:
    """The buffers that one call of a function writes, as they were before it.

    code: that of the function, see `_Key`. roots: the modules that it may call.
    """

    def __init__(self, code: Any, roots: Sequence[nn.Module]):
        # modules in their first call, each with its buffers
        self._firsts: list[tuple[nn.Module, _Key, list[_BufferBefore]]] = []
        self._noted: list[_BufferBefore] = []
        for root in roots:
            key = root.training, code
            known = _WRITTEN.get(root)
            places = None if known is None else known.get(key)
            if places is None:
                self._firsts.append((root, key, [*_buffers_of(root)]))
            elif places:
                self._noted += _noted_at(places)

    @property
    def is_empty(self) -> bool:
        """Whether the call is known to write none."""
        return not (self._firsts or self._noted)

    def end(self) -> None:
        """Learn, after the call, which buffers it wrote; free the copies of the others."""
        for root, key, buffers in self._firsts:
            # a module that writes one of its buffers may write another in the next call
            writers = {noted.module for noted in buffers if noted.is_written()}
            written = [noted for noted in buffers if noted.module in writers and noted.may_change()]
            places = [BufferPlace(weakref.ref(n.module), n.table, n.name) for n in written]
            _known_of(root)[key] = places
            self._noted += written
        self._firsts = []

    @contextmanager
    def restored(self) -> Iterator[frozenset[int]]:
        """Give the modules copies with the values before the call; yield the copies' ids."""
        replaced = list[tuple[dict[str, Any], str, Any]]()
        copies = list[Tensor]()
        with private.unseen(), torch.no_grad():
            for noted in self._noted:
                before = noted.before()
                buffers = _table(noted.module, noted.table)
                if before is not None and noted.name in buffers:
                    copy = before.detach().clone()
                    if isinstance(noted.tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=False)
                    copies.append(copy)
                    replaced.append((buffers, noted.name, buffers[noted.name]))
                    buffers[noted.name] = copy
        try:
            yield frozenset(map(id, copies))
        finally:
            for buffers, name, buffer in replaced:
                buffers[name] = buffer


def _known_of(root: nn.Module) -> dict[_Key, list[BufferPlace]]:
    known = _WRITTEN.get(root)
    return _WRITTEN.put(root, {}) if known is None else known


def written_buffers(fn: Any, values: Iterable[Any]) -> WrittenBuffers | None:
    """Note the buffers that a call of `fn` with these arguments may write; None for none."""
    code = None
    # a module looks long for an attribute that it has not
    if not isinstance(fn, nn.Module):
        if hasattr(fn, "is_constant"):
            # such a function brings the state of its modules back itself
            return None
        code = getattr(fn, "__code__", None)
    roots = _modules_of(fn, values)
    written = WrittenBuffers(code, roots) if roots else None
    return None if written is None or written.is_empty else written


def _modules_of(fn: Any, values: Iterable[Any]) -> list[nn.Module]:
    """Return the modules that a function is, is bound to, closes over, or gets as arguments."""
    modules = dict[nn.Module, None]()
    todo = [(fn, _DEPTH_OF_MODULES), *((value, 1) for value in values)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, nn.Module):
            modules[value] = None
        elif depth == 0:
            continue
        elif isinstance(value, MethodType):
            todo += [(value.__self__, depth - 1), (value.__func__, depth - 1)]
        elif isinstance(value, partial):
            parts = value.func, *value.args, *value.keywords.values()
            todo += [(part, depth - 1) for part in parts]
        elif isinstance(value, FunctionType):
            todo += [(part, depth - 1) for part in _closed_over(value)]
        elif type(value) in (list, tuple) and len(value) <= _MOST:
            todo += [(part, 1) for part in value if isinstance(part, nn.Module)]
    return [*modules]


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # not assigned yet
            continue


def _buffers_of(root: nn.Module) -> Iterator[_BufferBefore]:
    """Yield the buffers in a module, with copies of the small ones."""
    with private.unseen(), torch.no_grad():
        for module in root.modules():
            for table in () if isinstance(module, torch.jit.ScriptModule) else _TABLES:
                for name, buffer in _table(module, table).items():
                    if not _is_buffer(buffer) or _is_statistic(module, name):
                        continue
                    if buffer.nbytes <= COPIED_NBYTES:
                        yield _noted(module, table, name, buffer, buffer.detach().clone())
                    elif table:
                        yield _noted(module, table, name, buffer, None)


def _noted(
    module: nn.Module, table: str, name: str, buffer: Tensor, copy: Tensor | None
) -> _BufferBefore:
    return _BufferBefore(module, table, name, buffer, buffer._version, buffer.data_ptr(), copy)


def _table(module: nn.Module, table: str) -> Any:
    """Return the buffers or parameters of a module, for "" its attributes."""
    return getattr(module, table) if table else vars(module)


def _noted_at(places: Sequence[BufferPlace]) -> Iterator[_BufferBefore]:
    with private.unseen(), torch.no_grad():
        for place in places:
            module = place.module()
            buffer = None if module is None else _table(module, place.table).get(place.name)
            if module is None or not _is_buffer(buffer):
                continue
            if place.table or buffer.nbytes <= COPIED_NBYTES:
                yield _noted(module, place.table, place.name, buffer, buffer.detach().clone())


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Whether a buffer is a statistic that a forward writes in training, and reads elsewhere.

    TorchScript's modules, which have no dict of buffers, are taken to have none but such.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if not isinstance(module, _WITH_STATISTICS):
        return False
    forward = type(module).forward.__module__
    return name == "num_batches_tracked" or forward.startswith("torch.nn.modules.")


def learn_late(module: nn.Module, name: str, fn: Any, values: Iterable[Any]) -> None:
    """Learn of a buffer that a recompute wrote and its call had not noted; warn that it did."""
    if _is_statistic(module, name):
        return
    owners = [r for r in _modules_of(fn, values) if any(part is module for part in r.modules())]
    for root in owners:
        key = root.training, getattr(fn, "__code__", None)
        places = _known_of(root).setdefault(key, [])
        places.append(BufferPlace(weakref.ref(module), "_buffers", name))
    if type(module) in _named:
        return
    _named.add(type(module))
    remedy = "Checkpoint that module itself, or pass it as an argument, so that it is copied"
    warnings.warn(
        f"checkpoint: the forward of {type(module).__name__} writes its buffer {name!r}, and the "
        "recompute read the values after the forward instead of those before. If the forward "
        "reads this buffer, the gradients of this backward are wrong. "
        f"{'Later calls copy it before the forward' if owners else remedy}",
        stacklevel=2,
    )
