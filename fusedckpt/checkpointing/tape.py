"""What the forward of a segment leaves for its recompute."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from fusedckpt.autograd.saved_tensor import version_of
from fusedckpt.autograd.surroundings import Surroundings, objects_in
from fusedckpt.checkpointing.determinism import Run
from fusedckpt.checkpointing.saved import Argument, Dropped, stale

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Options(NamedTuple):
    """Those of `checkpoint`."""

    preserve_rng_state: bool = True
    preserve_python_rng: bool = False
    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False
    context_fn: Callable[[], Contexts] = noop_context_fn

    @property
    def stops(self) -> bool:
        """Whether a recompute runs only when, and as far as, backward needs it; not with debug."""
        return self.early_stop and not self.debug


class Call:
    """A call of a segment, to be made again with the same objects in the same surroundings."""

    # what fused layers keep in the recompute
    level = "preact"

    def __init__(
        self, fn: Any, args: Any, kwargs: Any, options: Options, hold: Callable[[Tensor], Argument]
    ):
        values = [*args, *kwargs.values()]
        self.fn, self._names = fn, tuple(kwargs)
        self._held = [hold(x) if isinstance(x, Tensor) else x for x in values]
        objects, held = [*objects_in(values)], {id(x) for x in values}
        self.surroundings = Surroundings(objects, *options[:2])
        # of tensors that containers keep; the others are Arguments
        inner = [x for x in objects if isinstance(x, Tensor) and id(x) not in held]
        self.versions = [(x, version_of(x)) for x in inner]

    def again(self, made: dict[Any, Any]) -> Any:
        """Call `fn` again; in `made` the calls of one recompute leave what they like for others."""
        values = [x.tensor(made) if isinstance(x, Argument) else x for x in self._held]
        count = len(values) - len(self._names)
        kwargs = dict(zip(self._names, values[count:], strict=True))
        return self.fn(*values[:count], **kwargs)


class Tape:
    """The calls of a segment, and what autograd saved in them, in order.

    saved: what stands for each tensor; metas: what each was like; slots: the fused layers by name,
    each with what waits for its GEMM outputs; is_complete: whether the last call has returned.
    """

    def __init__(self, options: Options):
        self.options, self.contexts = options, options.context_fn()
        self.run: Run | None = None
        self.calls: list[Call] = []
        self.saved: list[weakref.ref[Dropped]] = []
        self.metas: list[Any] = []
        self.slots: list[tuple[str, weakref.ref[Any]]] = []
        self.is_complete = False

    def alive(self) -> list[Dropped]:
        """Return what stands for tensors that autograd still wants."""
        return [entry for ref in self.saved if (entry := ref()) is not None]

    def check(self) -> None:
        """Raise where a tensor in a container among the arguments was written in place since."""
        for call in self.calls:
            for tensor, version in call.versions:
                if version_of(tensor) != version:
                    raise RuntimeError(stale("an argument", tensor))
