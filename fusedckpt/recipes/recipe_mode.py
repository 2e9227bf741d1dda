"""A function mode that lets the functions of a forward save recipes.

It sees each torch function that the forward calls, in a module or between two. A function runs as
it is, once; hooks on its saved tensors replace a tensor that cheap functions made by their recipe
(`autograd/recipes.py`). A function is cheap if it takes a few operations for each element. Cheap
functions run again in backward; GEMMs, convolutions and attention never do.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd import index, private
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.autograd.recipes import Leaf, View, tensors_in, unfilled, unpack
from fusedckpt.autograd.replay import PLAIN_TENSORS, Replay, replay_of
from fusedckpt.autograd.tracker import Saved, Tracker
from fusedckpt.recipes import dropouts
from fusedckpt.recipes.cheap_functions import KINDS, WRITES
from fusedckpt.recipes.recipe_kernels import recipe_statistics

# functions of smaller tensors run as they are: a recipe costs more time than it saves bytes
FLOOR_BYTES = 1 << 20

_EXPOSING = frozenset(("exposes", "shows"))
_SEQUENCES = frozenset((list, tuple))
# without a call of Python's
_IS_TRUE = partial(operator.is_, True)


class RecipeMode(TorchFunctionMode):
    """The functions called inside save recipes; `tracker` has them.

    floor: the bytes of a tensor that is worth a recipe.
    """

    def __init__(self, tracker: Tracker, floor: int):
        super().__init__()
        self.tracker = tracker
        self.floor = floor
        # those around the forward: with others, such as a checkpoint's, a function runs as it is
        self._hooks = private.top_hooks()
        # the tensors that a function has saved: autograd keeps the pack hook, which must keep no
        # tensor
        self._packed: list[Saved] = []
        self._saving = saved_tensors_hooks(partial(_pack, self._packed, floor), unpack)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and save recipes for it."""
        kind = KINDS.get(func)
        if kind is not None:
            floor = self.floor
            # without a call of Python's where the first tensor is small; a compiler, which traces
            # this around a module compiled alone, has no `nbytes` of dynamic shapes
            for x in args:
                if x.__class__ in PLAIN_TENSORS:
                    if x.numel() * x.itemsize >= floor:
                        break
                elif x.__class__ in _SEQUENCES and _is_large(x, floor):
                    break
            else:
                kind = None
        if kind is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if kind in _EXPOSING:
            return _exposing(kind, func, args, kwargs)
        kwargs = kwargs or {}
        again, inputs = replay_of(func, args, kwargs)
        if not self._takes(inputs, kwargs):
            return func(*args, **kwargs)
        if kind == "sum":
            return self._sum(again, args, kwargs, inputs)
        if kind == "cheap":
            return self._cheap(again, args, kwargs, inputs)
        if kind == "writing":
            if func in WRITES or kwargs.get("inplace") or any(map(_IS_TRUE, args)):
                return self._writing(again, args, kwargs, inputs)
            return self._cheap(again, args, kwargs, inputs)
        if kind == "batch_norm":
            return self._batch_norm(inputs, *args, **kwargs)
        if kind == "instance_norm":
            return self._instance_norm(*args, **kwargs)
        if kind == "dropout":
            return self._dropout(*args, **kwargs)
        if kind == "gemm" and private.is_any_autocast_on():
            args = [self._cast(x) for x in args]
        y, saved = self._run(func, args, kwargs)
        for view, tensor in saved:
            self.tracker.save(view, tensor)
        return y

    def _takes(self, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether a call's tensors are plain, and nothing else watches it."""
        if not torch.is_grad_enabled() or private.top_hooks() != self._hooks or "out" in kwargs:
            return False
        for t in inputs:
            if (
                t.__class__ not in PLAIN_TENSORS
                or t.layout is not torch.strided
                or t.is_inference()
            ):
                return False
        return True

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Saved]]:
        """Run a function; return its result, and the tensors that it has saved."""
        packed = self._packed
        try:
            with self._saving:
                return func(*args, **kwargs), [*packed]
        finally:
            packed.clear()

    def _sum(self, again: Replay, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run a cheap function that saves no tensor; its result has a recipe."""
        y = again.func(*args, **kwargs)
        # a view of an input is known by its storage
        if not _is_view(y, inputs):
            self._note(again, inputs, y, ())
        return y

    def _cheap(self, again: Replay, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run a cheap function; its result has a recipe."""
        func = again.func
        y, saved = self._run(func, args, kwargs)
        if func is F.group_norm:
            groups = args[1] if len(args) > 1 else kwargs["num_groups"]
            inputs = [*inputs, *_statistics(func, args[0], groups, inputs, saved)]
        self._note(again, inputs, y, saved)
        return y

    def _note(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        y: Any,
        saved: Sequence[Saved],
        *,
        overwritten: View | None = None,
        name: str = "",
    ) -> None:
        """Note the recipe of a function's results, and save recipes in place of tensors."""
        tracker = self.tracker
        results = [y] if y.__class__ is Tensor else tensors_in(y)
        of_results = []
        # first the inputs that it saves, as recipes read them, then the results that it saves
        for view, tensor in saved:
            if view.__class__ is Leaf:
                # `save`, without a call
                if tracker.count is not None:
                    tracker.count(tensor)
            elif _is_view(tensor, results):
                of_results.append((view, tensor))
            else:
                tracker.save(view, tensor)
        if isinstance(again, Replay):
            name = again.func.__name__
        tracker.make(name, again, inputs, results, overwritten, saved=saved)
        for view, tensor in of_results:
            tracker.save(view, tensor)

    def _writing(self, again: Replay, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run a function that may write over its first tensor."""
        x = inputs[0]
        before = self.tracker.find(x)
        version = x._version
        y, saved = self._run(again.func, args, kwargs)
        writes = y is x and x._version != version
        again.writes = writes
        overwritten = None
        if writes and before is not None and not isinstance(before.source, Leaf):
            # a leaf that is overwritten cannot be read
            overwritten = before
            for _, t in _copies_of(x, inputs, saved):
                self.tracker.make("clone", _itself, [x], [t], overwritten)
        elif writes:
            for pair in _copies_of(x, inputs, saved)[:1]:
                # saved first, so that it is known
                saved.remove(pair)
                self.tracker.save(*pair)
                overwritten = self.tracker.find(pair[1])
        if overwritten is None and _is_view(y, inputs):
            for view, tensor in saved:
                self.tracker.save(view, tensor)
            return y
        self._note(again, inputs, y, saved, overwritten=overwritten)
        return y

    def _cast(self, x: Any) -> Any:
        """Cast an activation as autocast does, where the cast is known."""
        if type(x) is not Tensor or x.is_leaf or x.dtype != torch.float32:
            return x
        to = autocast_dtype(x.device)
        if to is None:
            return x
        again, inputs = replay_of(Tensor.to, (x, to), {})
        return self._sum(again, (x, to), {}, inputs)

    def _batch_norm(
        self,
        inputs: list[Tensor],
        input: Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run batch norm; its recipe leaves the running statistics as they are."""
        args = input, running_mean, running_var, weight, bias, training, momentum, eps
        y, saved = self._run(F.batch_norm, args, {})
        again, tensors = replay_of(F.batch_norm, batch_norm_again(*args), {})
        if training:
            tensors += _statistics(F.batch_norm, input, 0, inputs, saved)
        self._note(again, tensors, y, saved)
        return y

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run instance norm; its recipe leaves the running statistics as they are."""
        args = input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        y, saved = self._run(F.instance_norm, args, {})
        if use_input_stats:
            args = input, None, None, *args[3:]
        self._note(*replay_of(F.instance_norm, args, {}), y, saved)
        return y

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Run dropout as torch does, with the same random numbers.

        On a CPU, and of meta tensors, autograd saves the noise, as large as the input, elsewhere a
        mask of one byte for each element. Their recipe is the random state. The mask is saved on
        devices other than CUDA, and in a graph that is captured, as the random state is then on the
        device.
        """
        if not training or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        if input.device.type in ("cpu", "meta"):
            noise = torch.empty_like(input)
            self._note(dropouts.Noise(noise, p), [], dropouts.drawn(noise, p), (), name="dropout")
            multiply = self._writing if inplace else self._cheap
            args = (input, noise)
            again, inputs = replay_of(Tensor.mul_ if inplace else Tensor.mul, args, {})
            return multiply(again, args, {}, inputs)
        state = dropouts.random_state(input)
        y, saved = self._run(F.dropout, (input, p, True, inplace), {})
        mask = next((tensor for _, tensor in saved if tensor.dtype == torch.bool), None)
        if mask is None or inplace:
            for view, tensor in saved:
                self.tracker.save(view, tensor)
            return y
        if state is not None:
            self._note(dropouts.Mask(input, p, state), [], mask, (), name="dropout")
        masked = partial(dropouts.masked, 1 / (1 - p))
        self._note(masked, [input, mask], y, saved, name="dropout")
        return y


class ExposureMode(TorchFunctionMode):
    """The functions called inside run as they are; those that expose a tensor end its recipe."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        kind = KINDS.get(func)
        if kind in _EXPOSING:
            return _exposing(kind, func, args, kwargs)
        return func(*args, **(kwargs or {}))


def exposing(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return run(*args, **kwargs), code of a model that runs outside of its `RecipeMode`."""
    with ExposureMode():
        return run(*args, **kwargs)


def _exposing(kind: str, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a function by which code gets a tensor's memory, of which other readers have recipes."""
    index.expose(args[0], is_read=kind == "shows")
    return func(*args, **(kwargs or {}))


def batch_norm_again(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Return the arguments with which batch norm runs again, and leaves running statistics.

    Those of evaluation are copies, as a later forward in training writes them without a version.
    """
    statistics: tuple[Tensor | None, ...] = (running_mean, running_var)
    if training:
        if weight is None and running_mean is not None and running_mean.dtype != input.dtype:
            # batch statistics have the dtype of these vectors
            weight = torch.ones_like(running_mean)
        statistics = None, None
    else:
        statistics = tuple(t if t is None else t.clone() for t in statistics)
    return input, *statistics, weight, bias, training, momentum, eps


def _is_large(parts: Sequence[Any], floor: int) -> bool:
    return any(x.__class__ in PLAIN_TENSORS and x.numel() * x.itemsize >= floor for x in parts)


def _statistics(
    func: Any, x: Tensor, num_groups: int, inputs: Sequence[Tensor], saved: Any
) -> list[Tensor]:
    """Return the statistics that a norm saved, for a kernel that runs it again without them."""
    return recipe_statistics(func, x, num_groups, inputs, [tensor for _, tensor in saved])


def _pack(packed: list[Saved], floor: int, tensor: Tensor) -> View | Leaf:
    # a compiler may trace this, and has no `nbytes` of dynamic shapes
    saved = Leaf(tensor) if tensor.numel() * tensor.itemsize < floor else unfilled()
    packed.append((saved, tensor))
    return saved


def _is_view(y: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether a tensor has the storage of one of some tensors."""
    if not isinstance(y, Tensor):
        return False
    storage = y.untyped_storage()
    for x in inputs:  # noqa: SIM110  # without a call of Python's
        if x.untyped_storage() is storage:
            return True
    return False


def _copies_of(x: Tensor, inputs: Sequence[Tensor], saved: Sequence[Saved]) -> list[Saved]:
    """Return the tensors that a function has saved as copies of the input that it wrote over."""
    layout = x.shape, x.dtype, x.stride()
    return [
        (view, t)
        for view, t in saved
        if (t.shape, t.dtype, t.stride()) == layout and not _is_view(t, inputs)
    ]


def _itself(x: Tensor) -> Tensor:
    return x.clone()


@contextmanager
def every_function(tracker: Tracker) -> Iterator[None]:
    """Let functions of any size that are called inside save recipes, unknown ones too."""
    # autograd keeps the hook as long as the saved tensors: it must not keep the tracker
    pack = partial(_save_now, weakref.ref(tracker))
    with saved_tensors_hooks(pack, unpack), RecipeMode(tracker, 0):
        yield


def _save_now(reference: weakref.ref[Tracker], tensor: Tensor) -> View | Leaf:
    tracker = reference()
    assert tracker is not None
    saved = Leaf(tensor) if tensor.nbytes < tracker.floor else unfilled()
    tracker.save(saved, tensor)
    return saved
