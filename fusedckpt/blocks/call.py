"""A checked call of a fused layer: its program, how it runs, and its schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fusedckpt.blocks import derive
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.steps import Norm
from fusedckpt.blocks.writer import Flags, Schedule
from fusedckpt.kernels.runtime import as_vector, as_weight


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


class Saved(NamedTuple):
    """The tensors that a call saves for the gradients that may be wanted.

    inputs, params, results, extras: places among the call's tensors and the forward's results, -1
    for a product that is not saved; names: of these; unread: places of parameters that only second
    derivatives read; likes: shape and dtype of the products that a checkpoint counts on, or None;
    forward: computes results and products; constant: places of results without a gradient.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    params: tuple[int, ...]
    names: tuple[Any, ...]
    unread: tuple[int, ...]
    likes: tuple[Any, ...]
    forward: Schedule
    extras: tuple[int, ...]
    constant: tuple[int, ...]


class Call:
    """A checked call, settled once for calls that are alike.

    metas: shapes, dtypes and devices of inputs and parameters; others: numbers of the parameters
    that are no tensors; level: what it saves; inside: what it saves and recomputes in a checkpoint,
    None for what the phase says; direct: whether nothing traces or watches ops; read: the dtype
    that x is cast to first, None for none; adds_after: whether x is added to the result outside, in
    another dtype.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        layouts: tuple[Layout, ...],
        metas: Sequence[Any],
        *,
        others: tuple[int, ...] = (),
        level: str = "inputs",
        inside: str | None = None,
        chunks: int = 1,
        direct: bool = False,
        read: torch.dtype | None = None,
        adds_after: bool = False,
        num_seeds: int = 0,
    ):
        self.name = name
        self.program = program
        self.layouts = layouts
        self.metas = metas
        self.others = others
        self.level = level
        self.inside = inside
        self.chunks = chunks
        self.direct = direct
        self.read = read
        self.adds_after = adds_after
        self.num_seeds = num_seeds
        # whether it may save a norm's input in place of the norm's output, or a stand-in for x
        is_one = len(program.results) == 1
        is_norm = isinstance(program.steps[0].op, Norm)
        self.shares = is_one and not is_norm
        self.is_norm = is_one and is_norm
        self.num_inputs = len(program.inputs)
        self.num_dims = program.num_dims
        # places of weights with a gradient that is computed late
        late = [step.params[0] for step in program.steps if getattr(step.op, "is_late", False)]
        self.late = tuple([self.num_inputs + n for n in late if n is not None])
        self.names = (*program.inputs, *range(len(program.params)))
        self.dtypes = tuple([None if meta is None else meta.dtype for meta in metas])
        # the name by which ops find it: a description, and a number, as shapes are not described
        self.key = f"{name} #{next(_numbers)}: {(program, layouts, self.dtypes, chunks)!r}"
        CALLS[self.key] = self
        self._saved: dict[Any, Saved] = {}
        self._backward: dict[Any, Schedule] = {}

    def flags_of(self, level: str) -> Flags:
        """Return which products a level saves; of a packed one, "gate" saves it all."""
        count = len(self.program.products)
        return tuple([level == "preact" or (level == "gate" and i == 0) for i in range(count)])

    def saved(self, needs: Flags, levels: tuple[str, str] | None) -> Saved:
        """Return the tensors to save; levels: a phase's, None for the call's own."""
        key = needs, levels
        if key not in self._saved:
            if levels is None:
                levels = self.level, self.level
            elif self.inside is not None:
                levels = self.inside, self.inside
            self._saved[key] = self._settled(needs, *levels)
        return self._saved[key]

    def _settled(self, needs: Flags, counted: str, computed: str) -> Saved:
        program = self.program
        count = self.num_inputs
        every = self._with(needs, self.flags_of("preact"))
        likes = tuple([name in every.names("value") for name in program.products])
        keeps, runs = (
            tuple([a and b for a, b in zip(self.flags_of(level), likes, strict=True)])
            for level in (counted, computed)
        )
        backward = self._with(needs, keeps)
        whole = self._with(needs, self.flags_of("inputs"))
        values = [name for name in backward.names("value") if name not in program.products]
        params = list(backward.names("param"))
        last = len(program.params) - 1
        if self.num_seeds and last not in params:
            # second derivatives draw the same
            params.append(last)
        unread = [n for n in whole.names("param") if n not in (*params, *self.others)]
        forward = self.forward(runs)
        names = forward.results
        inputs = [name for name in values if name in program.inputs]
        results = [name for name in values if name not in program.inputs]
        return Saved(
            tuple(map(program.inputs.index, inputs)),
            tuple(map(names.index, results)),
            tuple([count + n for n in params]),
            (*inputs, *results, *params, *program.products),
            tuple([count + n for n in unread]),
            self._likes(likes),
            forward,
            tuple([names.index(n) if n in names else -1 for n in program.products]),
            tuple([i for i, name in enumerate(program.results) if name not in backward.flows]),
        )

    def _with(self, needs: Flags, products: Flags) -> Schedule:
        return self.backward(needs, products, (True,) * len(self.program.results), False)

    def _likes(self, flags: Flags) -> tuple[Any, ...]:
        if not self.program.products:
            return ()
        leading = self.metas[0].shape[:-1]
        pairs = zip([self.described[name] for name in self.program.products], flags, strict=True)
        return tuple(
            [
                ((*leading, described[0]), described[1]) if flag else None
                for described, flag in pairs
            ]
        )

    def forward(self, products: Flags) -> Schedule:
        """Return the schedule of a forward that gives the products that are flagged."""
        return derive.forward(self.program, products, self.chunks > 1)

    def backward(self, wanted: Flags, products: Flags, dys: Flags, donates: bool) -> Schedule:
        """Return the schedule of a backward."""
        key = wanted, products, dys, donates
        if key not in self._backward:
            flags = (wanted, products, dys, donates, self.chunks > 1)
            self._backward[key] = derive.backward(self.program, *flags)
        return self._backward[key]

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
        if meta is None or name in self.others:
            return None
        # not made from a gradient, which may be a batch of them
        return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)

    def shape(self, like: Sequence[int], features: int) -> tuple[int, ...]:
        """Return the shape of a result or gradient beside one of shape `like`."""
        if self.num_dims > 1:
            return tuple(like)
        return (*like[:-1], features)


# by key; a call lives as long as one may be run again
CALLS: WeakValueDictionary[str, Call] = WeakValueDictionary()
