"""Which kernels of the compile guard the emulator runs: by their labels, without compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedckpt.kernels import routed
from tests.kernels.compile_launches import everything
from tests.kernels.compile_only import label_of
from tests.ptx.emulator.launching import compiling_for
from tests.ptx.judging import KernelCase


class Variant(NamedTuple):
    """One specialization of a kernel."""

    kernel: str
    dtypes: frozenset[str]
    absent: frozenset[str]
    constexprs: frozenset[str]

    def contains(self, other: Variant) -> bool:
        """Whether the other is this without some operands: the same code with less in it."""
        return (
            (self.kernel, self.constexprs) == (other.kernel, other.constexprs)
            and self.absent <= other.absent
            and self.dtypes >= other.dtypes
        )


def variant_of(label: str) -> Variant:
    """Read a label of the compile guard."""
    kernel, _, rest = label.removesuffix("]").partition("[")
    words = rest.split(", ")
    absent = frozenset(word for word in words if word.endswith("=None") and word[0].islower())
    dtypes = frozenset(word for word in words if "=" not in word)
    return Variant(kernel, dtypes, absent, frozenset(words) - absent - dtypes)


@contextmanager
def noted(arch: str) -> Iterator[dict[str, Variant]]:
    """Note the variants of the launches inside by label; they do nothing."""
    variants: dict[str, Variant] = {}

    def note(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        label = label_of(function, args, kwargs)
        variants[label] = variant_of(label)

    with compiling_for(arch), patch.object(JITFunction, "run", note):
        yield variants


def not_run(arch: str, cases: Iterable[KernelCase]) -> list[str]:
    """Return the kernels that the guard compiles for a chip, and that are in none of the cases'."""
    precision = torch.backends.cuda.matmul.fp32_precision
    with noted(arch) as compiled:
        everything()
    torch.backends.cuda.matmul.fp32_precision = precision
    with noted(arch) as run:
        for case in cases:
            launch_only(case.compute)
    executed = set(run.values())
    return sorted(
        label
        for label, variant in compiled.items()
        if not any(other.contains(variant) for other in executed)
    )


def launch_only(compute: Callable[[], Any]) -> None:
    """Call a case whose kernels do nothing: the rule of errors says that its numbers are wrong."""
    sort = routed.sorted_rows

    def sorted_by_none(index: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        # ATen reads them
        return tuple(t.zero_() for t in sort(index, num_experts))

    with suppress(AssertionError), patch.object(routed, "sorted_rows", sorted_by_none):
        compute()
