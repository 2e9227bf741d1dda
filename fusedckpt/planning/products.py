"""The outputs of matrix products and convolutions, which units save at the level "products".

A unit that writes such an output in place, as by nn.ReLU(inplace=True), has no such level: its
recompute would take the written value for the product's, and write it again. Torch notices that by
the version of the output, but not of one that a matmul of three dimensions reshapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from fusedckpt.autograd.private import TorchDispatchMode, pytree, schema_of, written_by
from fusedckpt.memory import storage_ref
from fusedckpt.planning.trimming import trimmers_of

WRITES_PRODUCT = (
    "policy 'speed' saves all of its tensors, because it writes the output of a product or "
    "convolution in place, as nn.ReLU(inplace=True) does"
)

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return that an op's output is saved if it is a product's: a policy of a checkpoint."""
    is_saved = _is_product(op)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_product(op: Any) -> bool:
    library, _, name = op.name().partition("::")
    return name.split(".")[0] in _PRODUCTS or library == "fusedckpt" or "attention" in name


class ProductWrites(TorchDispatchMode):
    """Finds the units that write the output of a product in place, while a forward runs."""

    def __init__(self) -> None:
        super().__init__()
        # the unit that runs
        self._name = ""
        # the memory of its products' outputs
        self._outputs = set[StorageWeakRef]()
        # the names of units that write some of it
        self.names = set[str]()
        # see `trimmers_of`
        self._trimmers = list[Callable[[], None]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; of one within a unit, note its output, or the tensors that it writes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._name:
            return result
        if schema_of(func).is_mutable:
            written = {storage_ref(x) for x in written_by(func, args, kwargs)}
            if written & self._outputs:
                self.names.add(self._name)
        elif _is_product(func):
            made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            self._outputs.update(map(storage_ref, made))
        return result

    def visit(self, name: str, role: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a unit in its role: a role."""
        self._trimmers += trimmers_of(args, kwargs)
        self._name = name
        try:
            return role(forward, args, kwargs)
        finally:
            self._name = ""
            self._outputs.clear()

    def trim(self) -> None:
        """Remove the items that units added to containers among their arguments."""
        for trim in self._trimmers:
            trim()
