"""Count the work of a run by its operators: FLOPs of GEMMs, and elements that others write.

torch's own FLOP counter misses a CPU's attention and grouped GEMMs. Fused layers run as operators
of fusedckpt where a mode looks, so that their parts are hidden; here they run as they do in
training, where nothing looks, and each part is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from fusedckpt.autograd import private

_aten = torch.ops.aten
# operators that give memory and write none of it
ALLOCATIONS = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
)

# operators that do not read the tensor that they write
_OVERWRITING = frozenset((_aten.copy_, _aten.fill_, _aten.zero_))


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, for attention and grouped GEMMs on a CPU, too.

    It follows no modules: hooks on their results would let layers that share recipes save them.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    counter.mod_tracker = _NoModules()  # type: ignore[reportAttributeAccessIssue]  # what it calls
    return counter


class _NoModules:
    """Takes the place of the modules that torch's counter follows."""

    parents = frozenset(("Global",))

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class StepWork(NamedTuple):
    """The work of a run."""

    # of GEMMs, convolutions and attention, counted without its mask
    flops: int
    # elements of the results of all other operators, those written in place included
    written: int


def work_of(run: Callable[[], object]) -> StepWork:
    """Return the work of `run()`."""
    with _parts_of_layers(), flop_counter() as counter, _Written() as writes:
        run()
    return StepWork(counter.get_total_flops(), writes.num_elements)


class _Written(TorchDispatchMode):
    """Counts the elements that operators without a FLOP formula write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in flop_registry or packet in _FORMULAS or packet in ALLOCATIONS:
            return results
        inputs: set[int] = set()
        if not func._schema.is_mutable:
            # a result in the storage of an input is a view
            inputs = {_address(x) for x in _tensors((args, kwargs))}
        for result in _tensors(results):
            if _address(result) not in inputs:
                self.num_elements += result.numel()
        return results


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the FLOPs of an operator, None of one that is no GEMM, convolution or attention."""
    packet = func.overloadpacket
    # of products that write another dtype
    args = tuple(x for x in args if not isinstance(x, torch.dtype))
    if packet in _FORMULAS:
        return shape_wrapper(_FORMULAS[packet])(*args, **kwargs, out_val=result)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    return None


def moved(func: Any, args: Any, kwargs: Any, results: Any) -> tuple[int, int]:
    """Return the bytes that an operator reads and writes, each tensor once; of a view none."""
    inputs = _tensors((args[1:] if func.overloadpacket in _OVERWRITING else args, kwargs))
    known = {x.untyped_storage()._cdata for x in inputs}
    outputs = _tensors(results)
    if not func._schema.is_mutable:
        outputs = [x for x in outputs if x.untyped_storage()._cdata not in known]
    if not outputs:
        return 0, 0
    read, written = (
        sum(min(nbytes(x), x.untyped_storage().nbytes()) for x in tensors)
        for tensors in (inputs, outputs)
    )
    return read, written


def nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _parts_of_layers() -> Iterator[None]:
    """Let fused layers run as if no mode looked at their operators."""
    count = private.num_dispatch_modes
    private.num_dispatch_modes = int
    try:
        yield
    finally:
        private.num_dispatch_modes = count


def _attention(query: Any, key: Any, value: Any, *args: Any, **_: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    dy: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(dy, query, key, value)


def _grouped(a: Any, b: Any, *args: Any, **_: Any) -> int:
    """Return the FLOPs of [S, K] by [G, K, N], [M, S] by [S, N], or [G, M, K] by [K, S]."""
    if len(a) == 3 and len(b) == 2:
        return 2 * a[1] * b[0] * b[1]
    rows = a[0] * (a[1] if len(a) == 3 else 1)
    return 2 * rows * a[-1] * b[-1]


_FORMULAS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
}
