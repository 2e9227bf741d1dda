"""How long the tensors live that units get and make in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.memory import nbytes_of, storage_ref

# a constant's places: the units that get it, and its number among the constants of each
Places: TypeAlias = tuple[tuple[int, int], ...]


class ConstantLife(NamedTuple):
    """How long a tensor lives that units get and that does not require grad."""

    # its bytes
    nbytes: int
    # the marker of the forward at which it was first gone; behind all of them where it never was
    gone: int
    # the first unit with a backward at which it still lives; behind all of them if none has
    kept_from: int


class Lifetimes:
    """The tensors that units get and make in a step, and the markers at which they are gone.

    A caller may hold a tensor that no backward needs for longer than the unit runs, as the forward
    of an nn.Sequential holds its argument. It is gone when the model returns.
    """

    def __init__(self, num_units: int):
        self._num_units = num_units
        # the storages that any unit has got so far
        self._taken = set[StorageWeakRef]()
        # by unit, the storages of its arguments that require grad
        self._inputs: list[list[StorageWeakRef]] = [[] for _ in range(num_units)]
        # the bytes of the same
        self.inputs: list[list[int]] = [[] for _ in range(num_units)]
        # by storage: the marker from which on nothing has to hold it, and its bytes
        self._since: dict[StorageWeakRef, tuple[int, int]] = {}
        # by storage, the marker at which it was first gone
        self._gone: dict[StorageWeakRef, int] = {}
        # by unit, the storages of its arguments that do not require grad, and their bytes
        self._constants: list[dict[StorageWeakRef, int]] = [{} for _ in range(num_units)]
        # by storage of these, its life so far
        self._lives: dict[StorageWeakRef, ConstantLife] = {}
        # by unit, the bytes of the same where a storage lives until backward, else 0; a storage
        # counts for the last unit that gets it
        self.saved_constants: list[list[int]] = [[] for _ in range(num_units)]

    def note_arguments(self, i: int, tensors: Iterable[Tensor]) -> None:
        """Note the tensors that unit i gets, as it begins."""
        all_tensors = [*tensors]
        trained = [x for x in all_tensors if x.requires_grad]
        self.note_gone(i)
        self._constants[i] = {
            storage_ref(x): nbytes_of([x]) for x in all_tensors if not x.requires_grad
        }
        for storage, nbytes in self._constants[i].items():
            behind = self._num_units + 1
            self._lives.setdefault(storage, ConstantLife(nbytes, gone=behind, kept_from=behind))
        self._inputs[i] = [*map(storage_ref, trained)]
        self.inputs[i] = [nbytes_of([x]) for x in trained]
        for x, storage in zip(trained, self._inputs[i], strict=True):
            # a tensor that a unit makes for another is for the first that gets it to hold
            if storage not in self._taken:
                self._since[storage] = i + 1, nbytes_of([x])
            self._taken.add(storage)

    def note_outputs(self, i: int, tensors: Iterable[Tensor]) -> None:
        """Note the tensors that unit i returns."""
        for x in tensors:
            if x.requires_grad:
                self._since.setdefault(storage_ref(x), (i + 1, nbytes_of([x])))

    def note_gone(self, marker: int) -> None:
        """Note the tensors that are gone by now; marker: the number of a unit, or of all units."""
        for storage in self._since:
            if storage not in self._gone and storage.expired():
                self._gone[storage] = marker
        for storage, life in self._lives.items():
            if storage.expired():
                self._lives[storage] = life._replace(gone=min(life.gone, marker))
        if marker == self._num_units:
            last = {storage: i for i, row in enumerate(self._constants) for storage in row}
            self.saved_constants = [
                [nbytes * (last[x] == i and not x.expired()) for x, nbytes in row.items()]
                for i, row in enumerate(self._constants)
            ]

    def note_backward(self, i: int) -> None:
        """Note the constants that live as the gradient of unit i arrives."""
        for storage, life in self._lives.items():
            if not storage.expired():
                self._lives[storage] = life._replace(kept_from=min(life.kept_from, i))

    def constants(self) -> dict[Places, ConstantLife]:
        """Return by its places the life of each tensor that does not require grad."""
        places: dict[StorageWeakRef, Places] = {}
        for i, row in enumerate(self._constants):
            for k, storage in enumerate(row):
                places[storage] = (*places.get(storage, ()), (i, k))
        return {places[storage]: life for storage, life in self._lives.items()}

    def saved_inputs(self) -> list[list[bool]]:
        """Return by unit whether each of its arguments that require grad lives until backward."""
        return [[storage not in self._gone for storage in storages] for storages in self._inputs]

    def late_bytes(self) -> list[int]:
        """Return by marker the bytes of tensors that live there, and are gone before backward."""
        late = [0] * (self._num_units + 1)
        for storage, gone in self._gone.items():
            since, nbytes = self._since[storage]
            for marker in range(since, gone):
                late[marker] += nbytes
        return late
