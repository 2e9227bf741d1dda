"""The protocol of a layer: a record of options, which makes a call from its tensors' shapes.

Read this first. Five records are layers, in files of layers/: `LinearOptions` (linears with a norm
before them, and MLPs), `HeadOptions` and `ExpertOptions`; `NormOptions` and `GatedNormOptions`,
which have no linears. The path of a call:

    run_layer(layer, x, between, linears)         layer_function.py: eager, compiled, or
        dispatch.decide(layer, x, ...)            the decision, remembered for equal records
            layer.make_call(context, *metas)      the program of its steps, checked
        apply(call, phase, x, ...)                autograd's Function runs its schedules

A decision is remembered for equal records, so a record holds all that a decision depends on, and
nothing that cannot be hashed. `make_call`, `check` and `operands` are those of `dispatch.Decided`.

Words of the files that follow: a value is the output of a step, by its name; a parameter has a
number; a product is a GEMM's output, which a save level may save; a schedule is the kernel calls of
a forward or backward, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fusedckpt.autograd.dispatch import Decided

# weights and biases of linears
Pairs = Sequence[tuple[Any, Any]]


class Layer(Decided, Protocol):
    """A layer, as `layer_function.run_layer` runs it."""

    @property
    def linears(self) -> Any:
        """Return the names of its linears, and the parts of adapted and quantized weights."""
        ...

    def reference(self, x: Any, between: Any, linears: Pairs, /) -> Any:
        """Return the result by torch's own ops, which every kernel is compared with."""
        ...


class LinearLayer(Layer, Protocol):
    """A layer of linears."""

    @property
    def num_seeds(self) -> int:
        """Return how many seeds its own dropouts draw for each call."""
        ...

    def split_packed(self, linears: Pairs, saves_half: bool, /) -> tuple[LinearLayer, Pairs] | None:
        """Return the layer of a packed weight's halves, and these; None to run it packed."""
        ...

    def saved_gemms(self, adapters: Sequence[int], /) -> tuple[int, ...]:
        """Return the numbers of the reference's GEMMs that torch.compile saves at its level.

        adapters: how many each linear has.
        """
        ...

    def _replace(self, **fields: Any) -> LinearLayer: ...
