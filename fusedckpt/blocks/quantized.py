"""Weights that dequantize, by class: a class's name is its rule, so that no library is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import arguments
from fusedckpt.autograd.backward import Versioned

# of a dequantized piece, where a weight can be cut; and into how many, as every piece is one more
# rounding of the gradient of x
PIECE_BYTES = 64 << 20
MOST_PIECES = 4


Dense = Callable[[slice | None], Tensor]
Dequantize = Callable[[Any], Tensor]


class QuantizedWeight(NamedTuple):
    """A frozen weight [N, K], or [E, N, K] of experts, that is dense only while a GEMM reads it.

    Calls check its fields before any work, and each tensor that `dense` returns.
    """

    # of the dense weight
    shape: torch.Size
    # of the dense weight
    dtype: torch.dtype
    # of the dense weight
    device: torch.device
    # called with a slice of rows or experts, or None for all, returns them as a dense tensor of
    # any floating dtype
    dense: Dense
    # whether `dense` accepts a slice
    is_sliceable: bool = False

    def pieces(self, dtype: torch.dtype) -> Iterator[slice | None]:
        """Cut the rows into slices of about PIECE_BYTES when dense; None, all rows, if uncut."""
        n, k = self.shape
        step = max(1, PIECE_BYTES // max(1, k * dtype.itemsize), -(-n // MOST_PIECES))
        if step >= n or not self.is_sliceable:
            yield None
            return
        for start in range(0, n, step):
            yield slice(start, min(start + step, n))

    def checked(self, name: str, key: str, source: str) -> QuantizedWeight:
        """Return the record with a check of each tensor of `dense`; refuse meaningless fields.

        source: the name of `dense` in errors.
        """
        if not isinstance(self.shape, (tuple, list)) or len(self.shape) not in (2, 3):
            expected = "two sizes, [N, K], or three of experts"
            arguments.wrong_value(name, f"{key}.shape", expected, self.shape)
        shape = torch.Size([arguments.integer(name, f"{key}.shape", n) for n in self.shape])
        arguments.dtype(name, self.dtype, f"{key}.dtype")
        arguments.device(name, self.device, f"{key}.device")
        if not callable(self.dense):
            arguments.wrong_type(name, f"{key}.dense", "a function", self.dense)
        is_sliceable = arguments.flag(name, f"{key}.is_sliceable", self.is_sliceable)
        device = torch.device(self.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())

        def dense(rows: slice | None) -> Tensor:
            part: Any = self.dense(rows)
            wanted = [shape[0] if rows is None else rows.stop - rows.start, *shape[1:]]
            expected = f"a dense floating-point tensor {wanted} on {device}"
            if not isinstance(part, Tensor):
                came = type(part).__name__
                raise TypeError(f"{name}: {source} must return {expected}, got {came}")
            fits = part.layout == torch.strided and not part.is_nested
            fits = fits and part.is_floating_point() and part.device == device
            if not fits or list(part.shape) != wanted:
                came = f"{part.dtype} {list(part.shape)} on {part.device}"
                raise ValueError(f"{name}: {source} must return {expected}, got {came}")
            return part

        return QuantizedWeight(shape, self.dtype, device, dense, is_sliceable)

    def half(self, index: int) -> QuantizedWeight:
        """Return the first or second half of the rows."""
        f = self.shape[0] // 2

        def dense(rows: slice | None) -> Tensor:
            start, stop = (0, f) if rows is None else (rows.start, rows.stop)
            rows = slice(index * f + start, index * f + stop)
            return self.dense(rows) if self.is_sliceable else self.dense(None)[rows]

        return self._replace(shape=torch.Size((f, self.shape[1])), dense=dense)


class EachExpert:
    """The weights [E, K, N] of a quantized one, of which each is dense while a GEMM reads it.

    turns: whether the quantized one lies as [E, N, K].
    """

    def __init__(self, weight: QuantizedWeight, turns: bool, dtype: torch.dtype):
        self.weight = weight
        self.turns = turns
        self.dtype = dtype
        e, *sizes = weight.shape
        self.shape = (e, *sizes[::-1]) if turns else (e, *sizes)
        self.whole = None if weight.is_sliceable else weight.dense(None)

    def __getitem__(self, expert: int) -> Tensor:
        if self.whole is None:
            part = self.weight.dense(slice(expert, expert + 1))[0]
        else:
            part = self.whole[expert]
        return part.to(self.dtype).t() if self.turns else part.to(self.dtype)


_registered: dict[type, tuple[Dequantize, bool]] = {}


def register_quantized(
    kind: type[Tensor], dequantize: Dequantize, *, is_sliceable: bool = False
) -> None:
    """Let fused layers take weights of a tensor class, and dequantize them where they are used.

    Args:
        kind: the class; its shape, dtype and device are those of the dense weight.
        dequantize: called with a weight, returns it as a dense tensor of its shape, of any floating
            dtype. Each call of a layer checks it.
        is_sliceable: whether `weight[start:stop]` is a weight of the class with those rows or
            experts; then large weights are dequantized in pieces, experts one by one.

    F.linear of such a weight must equal F.linear of the dense one. torchao's weight-only classes of
    8 bits, NF4, and bitsandbytes' 4-bit and 8-bit parameters need no registration.

    Raises:
        TypeError: `kind` is not a subclass of Tensor, `dequantize` is not callable, or
            `is_sliceable` is not a flag.
    """
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        arguments.wrong_type("register_quantized", "kind", "a subclass of Tensor", kind)
    if not callable(dequantize):
        arguments.wrong_type("register_quantized", "dequantize", "a function", dequantize)
    is_sliceable = arguments.flag("register_quantized", "is_sliceable", is_sliceable)
    _registered[kind] = dequantize, is_sliceable


def quantized(weight: Any) -> QuantizedWeight | None:
    """Describe a weight that dequantizes, None for any other."""
    if isinstance(weight, QuantizedWeight):
        return weight
    kind = type(weight)
    if not isinstance(weight, Tensor) or kind in (Tensor, torch.nn.Parameter):
        return None
    # nothing is asked about a weight of a class that is not known to dequantize
    library = kind.__module__.partition(".")[0]
    if library == "bitsandbytes":
        return _of_bitsandbytes(kind.__name__, weight)
    registered = _registered.get(kind)
    if registered is None and library == "torchao" and kind.__name__ in _TORCHAO:
        method, is_sliceable = _TORCHAO[kind.__name__]
        registered = getattr(kind, method), is_sliceable
    if registered is None or weight.requires_grad or why_left(weight) is not None:
        return None
    dequantize, is_sliceable = registered

    def dense(rows: slice | None) -> Tensor:
        return dequantize(weight if rows is None else weight[rows])

    flatten: Any = getattr(weight, "__tensor_flatten__", lambda: ((), None))
    checked = _unless_changed(dense, weight, *(getattr(weight, part) for part in flatten()[0]))
    return QuantizedWeight(
        weight.shape, weight.dtype, weight.device, checked, is_sliceable=is_sliceable
    )


# torchao's classes with a linear equal to that of the tensor a method of theirs returns, unless
# `why_left` names a difference; and whether slices of rows are weights of the class
_TORCHAO = {
    "Int8Tensor": ("dequantize", True),
    "Float8Tensor": ("dequantize", True),
    "IntxUnpackedToInt8Tensor": ("dequantize", True),
    "NF4Tensor": ("get_original_weight", False),
}
# attributes of weights that also quantize or scale activations
_TO_ACTIVATIONS = (
    "act_quant_kwargs",
    "act_quant_scale",
    "act_pre_scale",
    "activation_quantization",
)


def why_left(weight: Any) -> str | None:
    """Say why a quantized weight must be left to its own class; None where that is not known."""
    if any(getattr(weight, key, None) is not None for key in _TO_ACTIVATIONS):
        return f"{type(weight).__name__} also quantizes or scales activations"
    return None


def _unless_changed(dense: Dense, *tensors: Any) -> Dense:
    """Return `dense`, but for raising where one of the tensors was written since now."""
    if torch.compiler.is_compiling():
        return dense
    held = Versioned(*[t for t in tensors if isinstance(t, Tensor)])

    def checked(rows: slice | None) -> Tensor:
        held.read()
        return dense(rows)

    return checked


def _of_bitsandbytes(name: str, weight: Any) -> QuantizedWeight | None:
    device = weight.device
    state = getattr(weight, "quant_state", None)
    if name == "Params4bit" and state is not None:
        if getattr(state, "packing_format_for_cpu", False):
            return None

        def dense(rows: slice | None) -> Tensor:
            # the weight's own library
            functional = importlib.import_module("bitsandbytes.functional")
            return functional.dequantize_4bit(weight.data, weight.quant_state)

        checked = _unless_changed(dense, weight, state.absmax)
        return QuantizedWeight(torch.Size(state.shape), state.dtype, device, checked)
    if name == "Int8Params" and getattr(weight, "SCB", None) is not None:
        return int8(weight.data, weight.SCB)
    return None


def int8(data: Tensor, row_maxima: Tensor) -> QuantizedWeight:
    """Describe an int8 weight [N, K] with rows that were divided by their maxima [N] and times 127.

    bitsandbytes' Linear8bitLt keeps these in `weight.data` and, once it was called, `state.SCB`.
    """

    def dense(rows: slice | None) -> Tensor:
        part, scale = (data, row_maxima) if rows is None else (data[rows], row_maxima[rows])
        return part * (scale / 127).unsqueeze(-1)

    checked = _unless_changed(dense, data, row_maxima)
    dtype = row_maxima.dtype
    return QuantizedWeight(data.shape, dtype, data.device, checked, is_sliceable=True)
