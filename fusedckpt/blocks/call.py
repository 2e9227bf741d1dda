"""A checked call of a fused layer: its program, how it runs, and its schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fusedckpt.autograd.phases import PhaseLevels
from fusedckpt.blocks import derive
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.writer import Flags, Schedule
from fusedckpt.kernels.int8 import PackedRows
from fusedckpt.kernels.runtime import as_matrix, as_vector, as_weight


class Layout(NamedTuple):
    """How kernels take a parameter: as a vector (1), a weight (2) or unchanged (0); its dtype."""

    num_dims: int
    dtype: torch.dtype | None = None

    def of(self, param: Any) -> Any:
        """Return a parameter so laid out."""
        num_dims, dtype = self
        if num_dims == 0 or (
            param.dim() == num_dims
            and (dtype is None or param.dtype == dtype)
            and param.is_contiguous()
        ):
            return param
        return as_vector(param, dtype) if num_dims == 1 else as_weight(param, dtype or param.dtype)


_numbers = itertools.count()


class Product(NamedTuple):
    """A GEMM output that a save level may keep."""

    # the name of the value
    name: str
    # as the call returns it, leading dimensions included
    shape: tuple[int, ...]
    # of the value
    dtype: torch.dtype
    # whether a backward reads it where it is saved; a checkpoint counts on such a product
    is_read: bool
    # its place among the results of the forward, -1 where the level does not save it
    place: int


class Places(NamedTuple):
    """Where the tensors are that a call saves besides products: inputs, results, parameters."""

    # names of values and numbers of parameters, in this order
    names: tuple[Any, ...]
    # places of inputs among the call's tensors
    inputs: tuple[int, ...]
    # places of results, such as a sum, among those of the forward
    results: tuple[int, ...]
    # places of parameters among the call's tensors
    params: tuple[int, ...]


class SaveSpec:
    """The tensors that a call saves for the gradients that may be wanted."""

    def __init__(
        self,
        forward: Schedule,
        places: Places,
        products: tuple[Product, ...],
        for_second_derivatives: tuple[int, ...],
        constant: tuple[int, ...],
    ):
        # computes the results, and the products that the level saves
        self.forward = forward
        # of the inputs, for each call
        self.inputs = places.inputs
        self.results = places.results
        self.params = places.params
        # of all saved tensors, products last
        self.names = (*places.names, *[product.name for product in products])
        self.products = products
        self.product_places = tuple([product.place for product in products])
        # shape and dtype of the products that a checkpoint counts on, None for others
        self.product_metas = tuple(
            [(product.shape, product.dtype) if product.is_read else None for product in products]
        )
        # places of parameters that only second derivatives read
        self.for_second_derivatives = for_second_derivatives
        # places of results without a gradient
        self.constant = constant


@dataclass(eq=False, repr=False)
class LayerCall:
    """A checked call, made once for calls that are alike."""

    # the function or class, for errors
    name: str
    program: Program
    # how kernels take each parameter
    layouts: tuple[Layout, ...]
    # shapes, dtypes and devices of inputs and parameters, None for absent ones
    metas: Sequence[Any]
    _: KW_ONLY
    # numbers of the parameters that are no tensors
    quantized_params: tuple[int, ...] = ()
    # its save level
    level: str = "inputs"
    # its level in a checkpoint, None for that of the phase
    level_in_checkpoint: str | None = None
    # into how many chunks of rows it is cut
    chunks: int = 1
    # whether nothing traces or watches ops
    is_unwatched: bool = False
    # the dtype that x is cast to first, None for none
    input_dtype: torch.dtype | None = None
    # whether x is added to the result outside, in another dtype
    adds_residual_outside: bool = False
    # how many seeds its dropouts draw
    num_seeds: int = 0
    # how it keeps x, None for as it is, and whether `saving` may say so
    store: str | None = None
    may_round: bool = False

    def __post_init__(self) -> None:
        """Derive the facts that a call reads from the program."""
        program = self.program
        # whether it may save a norm's input in place of the norm's output, or a stand-in for x
        is_one = len(program.results) == 1
        begins_with_norm = program.steps[0].op.is_norm
        self.shares = is_one and not begins_with_norm
        # whether it is a norm alone
        self.is_norm = is_one and begins_with_norm and len(program.steps) == 1
        self.num_inputs = len(program.inputs)
        self.num_dims = program.num_dims
        # places of weights with a gradient that is computed late
        late = [step.params[0] for step in program.steps if getattr(step.op, "is_late", False)]
        self.late = tuple([self.num_inputs + n for n in late if n is not None])
        self.names = (*program.inputs, *range(len(program.params)))
        self.dtypes = tuple([None if meta is None else meta.dtype for meta in self.metas])
        # the name by which ops find it: a description, and a number, as shapes are not described
        description = program, self.layouts, self.dtypes, self.chunks
        self.key = f"{self.name} #{next(_numbers)}: {description!r}"
        CALLS[self.key] = self
        # by the gradients that may be wanted, and a phase's levels
        self.save_specs: dict[tuple[Flags, PhaseLevels | None], SaveSpec] = {}
        self._backward: dict[Any, Schedule] = {}

    def flags_of(self, level: str) -> Flags:
        """Return which products a level saves; of a packed one, "gate" saves it all."""
        count = len(self.program.gemm_outputs)
        return tuple([level == "preact" or (level == "gate" and i == 0) for i in range(count)])

    def save_spec(self, needs: Flags, levels: PhaseLevels | None) -> SaveSpec:
        """Plan the tensors to save, once; levels: a phase's, None for the call's own."""
        key = needs, levels
        has_beside = levels is None and bool(self.program.saved_beside)
        if levels is None:
            levels = PhaseLevels(self.level, self.level)
        elif self.level_in_checkpoint is not None:
            levels = PhaseLevels(self.level_in_checkpoint, self.level_in_checkpoint)
        self.save_specs[key] = self._save_spec(needs, levels, has_beside)
        return self.save_specs[key]

    def _save_spec(self, needs: Flags, levels: PhaseLevels, has_beside: bool) -> SaveSpec:
        """Plan the tensors to save."""
        is_read = self._read_products(needs)
        counts = [a and b for a, b in zip(self.flags_of(levels.counted), is_read, strict=True)]
        computes = [a and b for a, b in zip(self.flags_of(levels.computed), is_read, strict=True)]
        forward = self.forward(tuple(computes))
        backward = self._with(needs, tuple(counts), has_beside)
        places = self._places(forward, backward)
        return SaveSpec(
            forward,
            places,
            self._products(forward, is_read),
            self._for_second_derivatives(needs, places),
            tuple([i for i, name in enumerate(self.program.results) if name not in backward.flows]),
        )

    def _read_products(self, needs: Flags) -> Flags:
        """Return which products a backward reads that is given all."""
        values = self._with(needs, self.flags_of("preact")).names("value")
        return tuple([name in values for name in self.program.gemm_outputs])

    def _places(self, forward: Schedule, backward: Schedule) -> Places:
        """Return the places of the tensors that a backward reads, but for products."""
        program = self.program
        values = [name for name in backward.names("value") if name not in program.gemm_outputs]
        params = list(backward.names("param"))
        last = len(program.params) - 1
        if self.num_seeds and last not in params:
            # second derivatives draw the same
            params.append(last)
        inputs = [name for name in values if name in program.inputs]
        results = [name for name in values if name not in program.inputs]
        return Places(
            names=(*inputs, *results, *params),
            inputs=tuple(map(program.inputs.index, inputs)),
            results=tuple(map(forward.results.index, results)),
            params=tuple([self.num_inputs + number for number in params]),
        )

    def _products(self, forward: Schedule, is_read: Flags) -> tuple[Product, ...]:
        """Return the program's products, and which of them a forward returns."""
        products = []
        for name, read in zip(self.program.gemm_outputs, is_read, strict=True):
            width, dtype = self.described[name]
            shape = (*self.metas[0].shape[:-1], width)
            place = forward.results.index(name) if name in forward.results else -1
            products.append(Product(name, shape, dtype, read, place))
        return tuple(products)

    def _for_second_derivatives(self, needs: Flags, places: Places) -> tuple[int, ...]:
        """Return the places of parameters that a backward without products reads in addition."""
        known = (*places.names, *self.quantized_params)
        whole = self._with(needs, self.flags_of("inputs"))
        return tuple([self.num_inputs + n for n in whole.names("param") if n not in known])

    def _with(self, needs: Flags, products: Flags, has_beside: bool = False) -> Schedule:
        dys = (True,) * len(self.program.results)
        return self.backward(needs, products, dys, False, has_beside)

    def forward(self, products: Flags) -> Schedule:
        """Return the schedule of a forward that gives the products that are flagged."""
        return derive.forward_schedule(self.program, products, self.chunks > 1)

    def backward(
        self,
        wanted: Flags,
        products: Flags,
        dys: Flags,
        donates: bool,
        has_beside: bool = False,
        adds: bool = False,
    ) -> Schedule:
        """Return the schedule of a backward; adds: whether it adds to parameters' gradients."""
        key = wanted, products, dys, donates, has_beside, adds
        if key not in self._backward:
            flags = (wanted, products, dys, donates, adds or self.chunks > 1, has_beside)
            self._backward[key] = derive.backward_schedule(self.program, *flags)
        return self._backward[key]

    def has_beside(self, saved: Mapping[Any, Any]) -> bool:
        """Whether results that are saved beside the inputs are among the saved tensors."""
        return any(saved.get(name) is not None for name in self.program.saved_beside)

    @cached_property
    def reads_packed(self) -> bool:
        """Whether kernels of its backward read x in nine bits: only a norm's read x there."""
        first, *others = self.program.steps
        x = self.program.inputs[0]
        readers = [step.op for step in others if x in step.reads]
        return (
            first.op.is_norm
            and getattr(first.op, "kernel", "aten") != "aten"
            and first.reads == (x,)
            # a sum reads nothing in backward
            and not any(op.gradients for op in readers)
            and (self.num_dims, self.chunks, self.input_dtype) == (1, 1, None)
        )

    def rows_of(self, key: str, value: Tensor) -> Any:
        """Return a value of one dimension as rows: one, or those of an x in nine bits."""
        if value.dtype is not torch.int8 or key != self.program.inputs[0]:
            return as_matrix(value, self.num_dims)
        *sizes, width = self.metas[0].shape
        return PackedRows(value, math.prod(sizes), width, self.metas[0].dtype)

    @cached_property
    def described(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return the features and the dtype of every value."""
        shapes: list[Any] = [() if meta is None else meta.shape for meta in self.metas]
        inputs = shapes[: self.num_inputs]
        params = shapes[self.num_inputs :]
        widths = self.program.widths([shape[-1] for shape in inputs], params)
        dtypes = self.program.dtypes(self.dtypes[: self.num_inputs])
        return {name: (width, dtypes[name]) for name, width in widths.items()}

    def stand_in(self, name: str | int) -> Tensor | None:
        """Return zeros for an input or parameter, one element in memory; None for an absent one."""
        meta = self.metas[0 if isinstance(name, str) else self.num_inputs + name]
        if meta is None or name in self.quantized_params:
            return None
        # not made from a gradient, which may be a batch of them
        return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)

    def shape(self, like: Sequence[int], features: int) -> tuple[int, ...]:
        """Return the shape of a result or gradient beside one of shape `like`."""
        if self.num_dims > 1:
            return tuple(like)
        return (*like[:-1], features)


# by key; a call lives as long as one may be run again
CALLS: WeakValueDictionary[str, LayerCall] = WeakValueDictionary()
