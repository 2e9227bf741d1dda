"""A function mode that lets the functions of a forward save recipes.

It sees each torch function that the forward calls, in a module or between two. A function runs as
it is, once; hooks on its saved tensors replace a tensor that cheap functions made by their recipe
(`autograd/recipes.py`). Cheap are functions whose cost is a few operations for each element: they
are run again in backward, GEMMs, convolutions and attention never are.
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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd import private
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.autograd.recipes import Leaf, Stored, View, key_of, tensors_in, unpack
from fusedckpt.autograd.replay import Replay
from fusedckpt.autograd.tracker import Tracker
from fusedckpt.fusing.chain_kernels import chain_statistics
from fusedckpt.fusing.cheap_functions import KINDS, SAVES_NOTHING, WRITES

# functions of smaller tensors run as they are: a recipe costs more time than it saves bytes
FLOOR_BYTES = 1 << 20

_PLAIN = frozenset((Tensor, nn.Parameter))
_SEQUENCES = frozenset((list, tuple))
# without a call of Python's
_IS_TRUE = partial(operator.is_, True)


class RecipeMode(TorchFunctionMode):
    """The functions called inside save recipes; `tracker` has them.

    floor: the bytes of a tensor that is worth a recipe.
    """

    def __init__(self, tracker: Tracker, floor: int):
        super().__init__()
        self.tracker, self.floor = tracker, floor
        # those around the forward: with others, such as a checkpoint's, a function runs as it is
        self._hooks = private.top_hooks()
        # the tensors that a function has saved: autograd keeps the pack hook, which must keep no
        # tensor
        self._packed: list[tuple[Stored, Tensor]] = []
        self._saving = saved_tensors_hooks(partial(_pack, self._packed), unpack)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and save recipes for it."""
        kind = KINDS.get(func)
        if kind is not None:
            floor = self.floor
            # without a call of Python's where the first tensor is small
            for x in args:
                if x.__class__ in _PLAIN:
                    if x.nbytes >= floor:
                        break
                elif x.__class__ in _SEQUENCES and _is_large(x, floor):
                    break
            else:
                kind = None
        if kind is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        inputs = _inputs(args, kwargs)
        if not self._takes(inputs, kwargs):
            return func(*args, **kwargs)
        if kind == "cheap":
            return self._cheap(func, args, kwargs, inputs)
        if kind == "batch_norm":
            return self._batch_norm(inputs, *args, **kwargs)
        if kind == "dropout":
            return self._dropout(*args, **kwargs)
        if kind == "gemm" and private.is_any_autocast_on():
            args = [self._cast(x) for x in args]
        y, saved = self._run(func, args, kwargs)
        for stored, tensor in saved:
            self.tracker.save(stored, tensor)
        return y

    def _takes(self, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether a call's tensors are plain, and nothing else watches it."""
        if not torch.is_grad_enabled() or private.top_hooks() != self._hooks or "out" in kwargs:
            return False
        for t in inputs:
            if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_inference():
                return False
        return True

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[tuple[Stored, Tensor]]]:
        """Run a function; return its result, and the tensors that it has saved."""
        packed = self._packed
        try:
            with self._saving:
                return func(*args, **kwargs), [*packed]
        finally:
            packed.clear()

    def _cheap(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run a cheap function; its result has a recipe."""
        if func in WRITES or kwargs.get("inplace") or any(map(_IS_TRUE, args)):
            return self._writing(func, args, kwargs, inputs)
        if func not in SAVES_NOTHING:
            y, saved = self._run(func, args, kwargs)
            if func is F.group_norm:
                groups = args[1] if len(args) > 1 else kwargs["num_groups"]
                inputs = [*inputs, *_statistics(func, args[0], groups, inputs, saved)]
            self._note(Replay(func, args, kwargs, inputs[0].device), inputs, y, saved)
            return y
        y = func(*args, **kwargs)
        # a view of an input is known by its storage
        if not isinstance(y, Tensor) or key_of(y) not in [key_of(x) for x in inputs]:
            self._note(Replay(func, args, kwargs, inputs[0].device), inputs, y, ())
        return y

    def _note(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        y: Any,
        saved: Sequence[tuple[Stored, Tensor]],
        *,
        overwritten: View | None = None,
        name: str | None = None,
    ) -> None:
        """Note the recipe of a function's results, and save recipes in place of tensors."""
        tracker = self.tracker
        results = [y] if y.__class__ is Tensor else tensors_in(y)
        keys = [key_of(t) for t in results] if saved else []
        of_results = []
        # first the inputs that it saves, as recipes read them, then the results that it saves
        for stored, tensor in saved:
            if tensor.nbytes >= self.floor and key_of(tensor) in keys:
                of_results.append((stored, tensor))
            else:
                tracker.save(stored, tensor)
        name = again.func.__name__ if isinstance(again, Replay) else name or ""
        tracker.make(name, again, inputs, results, overwritten)
        for stored, tensor in of_results:
            tracker.save(stored, tensor)

    def _writing(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run a function that may write over its first tensor."""
        x = inputs[0]
        before, version = self.tracker.find(x), x._version
        y, saved = self._run(func, args, kwargs)
        writes = y is x and x._version != version
        overwritten = None
        if writes and before is not None and not isinstance(before.source, Leaf):
            # a leaf that is overwritten cannot be read
            overwritten = before
            self._note_copies(saved, inputs, overwritten)
        elif writes:
            overwritten = self._saved_copy(saved, inputs)
        is_view = isinstance(y, Tensor) and key_of(y) in [key_of(t) for t in inputs]
        if is_view and overwritten is None:
            for stored, tensor in saved:
                self.tracker.save(stored, tensor)
            return y
        again = Replay(func, args, kwargs, x.device, writes)
        self._note(again, inputs, y, saved, overwritten=overwritten)
        return y

    def _saved_copy(self, saved: list[tuple[Stored, Tensor]], inputs: list[Tensor]) -> View | None:
        """Return how to read the copy that a function saved of the input that it wrote over."""
        x, keys = inputs[0], [key_of(t) for t in inputs]
        for stored, t in saved:
            is_like_x = (t.shape, t.dtype, t.stride()) == (x.shape, x.dtype, x.stride())
            if is_like_x and key_of(t) not in keys:
                saved.remove((stored, t))
                self.tracker.save(stored, t)
                return self.tracker.find(t)
        return None

    def _note_copies(
        self, saved: list[tuple[Stored, Tensor]], inputs: list[Tensor], overwritten: View
    ) -> None:
        """Note the recipe of copies that a function saved of the input that it wrote over."""
        x, keys = inputs[0], {key_of(t) for t in inputs}
        for _, t in saved:
            is_like_x = (t.shape, t.dtype, t.stride()) == (x.shape, x.dtype, x.stride())
            if is_like_x and key_of(t) not in keys:
                self.tracker.make("clone", _itself, [x], [t], overwritten)

    def _cast(self, x: Any) -> Any:
        """Cast an activation as autocast does, where the cast is known."""
        if type(x) is not Tensor or x.is_leaf or x.dtype != torch.float32:
            return x
        to = autocast_dtype(x.device)
        return x if to is None else self._cheap(Tensor.to, (x, to), {}, [x])

    def _batch_norm(
        self,
        inputs: list[Tensor],
        x: Tensor,
        mean: Any,
        var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run batch norm; its recipe leaves the running statistics as they are."""
        args = x, mean, var, weight, bias, training, momentum, eps
        y, saved = self._run(F.batch_norm, args, {})
        if training:
            args = x, None, None, *args[3:]
        given = _inputs(args, {})
        if training:
            given += _statistics(F.batch_norm, x, 0, inputs, saved)
        self._note(Replay(F.batch_norm, args, {}, x.device), given, y, saved)
        return y

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Run dropout as torch does, with the same random numbers.

        On a CPU autograd saves the noise, as large as the input, elsewhere a mask of one byte for
        each element. Their recipe is the random state; but on other devices than CUDA, and in a
        graph that is captured, whose random state is on the device, the mask is saved.
        """
        if not training or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        if input.device.type != "cpu":
            state = _cuda_state(input)
            y, saved = self._run(F.dropout, (input, p, True, inplace), {})
            mask = next((tensor for _, tensor in saved if tensor.dtype == torch.bool), None)
            if mask is None or inplace:
                for stored, tensor in saved:
                    self.tracker.save(stored, tensor)
                return y
            if state is not None:
                self._note(_Mask(input, p, state), [], mask, (), name="dropout")
            again = partial(masked, 1 / (1 - p))
            self._note(again, [input, mask], y, saved, name="dropout")
            return y
        again = _Noise(input, p)
        drawn = again.draw()
        self._note(again, [], drawn, (), name="dropout")
        multiply = Tensor.mul_ if inplace else Tensor.mul
        return self._cheap(multiply, (input, drawn), {}, [input, drawn])


def _is_large(parts: Sequence[Any], floor: int) -> bool:
    return any(part.__class__ in _PLAIN and part.nbytes >= floor for part in parts)


def _statistics(
    func: Any, x: Tensor, num_groups: int, inputs: Sequence[Tensor], saved: Any
) -> list[Tensor]:
    """Return the statistics that a norm saved, for a kernel that runs it again without them."""
    return chain_statistics(func, x, num_groups, inputs, [tensor for _, tensor in saved])


def _pack(packed: list[tuple[Stored, Tensor]], tensor: Tensor) -> Stored:
    stored = Stored()
    packed.append((stored, tensor))
    return stored


def _inputs(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among a call's arguments."""
    inputs: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            inputs.append(x)
        elif type(x) in _SEQUENCES:
            inputs += tensors_in(x)
    for x in kwargs.values():
        if isinstance(x, Tensor):
            inputs.append(x)
        elif isinstance(x, (list, tuple)):
            inputs += tensors_in(x)
    return inputs


class _Noise:
    """The noise by which dropout multiplies on a CPU, and its random state."""

    def __init__(self, input: Tensor, p: float):
        self.state, self.p = torch.get_rng_state(), p
        self.like = torch.empty_like(input, device="meta")

    def draw(self) -> Tensor:
        """Return noise of the state of now."""
        keep = 1 - self.p
        return torch.empty_like(self.like, device="cpu").bernoulli_(keep).div_(keep)

    def __call__(self) -> Tensor:
        """Return the noise again."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.draw()


def _cuda_state(x: Tensor) -> Tensor | None:
    """Return CUDA's random state, None where dropout of x cannot be drawn again by it."""
    # where the data do not begin at 16 bytes, the kernel draws in another order
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    if x.device.type != "cuda" or not is_aligned or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.get_rng_state(x.device)


class _Mask:
    """The mask of dropout's kernel, and its random state."""

    def __init__(self, input: Tensor, p: float, state: Tensor):
        self.state, self.p, self.device = state, p, input.device
        self.like = torch.empty_like(input, device="meta")

    def __call__(self) -> Tensor:
        """Return the mask again: the numbers are drawn for the same layout, whatever the data."""
        x = torch.empty_like(self.like, device=self.device)
        before = torch.cuda.get_rng_state(self.device)
        torch.cuda.set_rng_state(self.state, self.device)
        try:
            return torch.native_dropout(x, self.p, True)[1]
        finally:
            torch.cuda.set_rng_state(before, self.device)


def _itself(x: Tensor) -> Tensor:
    return x.clone()


def masked(scale: float, x: Tensor, mask: Tensor) -> Tensor:
    """Return a dropout's result, from its mask."""
    return torch.ops.aten.native_dropout_backward(x, mask, scale)


@contextmanager
def every_function(tracker: Tracker) -> Iterator[None]:
    """Let functions of any size that are called inside save recipes, unknown ones too."""
    # autograd keeps the hook as long as the saved tensors: it must not keep the tracker
    pack = partial(_save_now, weakref.ref(tracker))
    with saved_tensors_hooks(pack, unpack), RecipeMode(tracker, 0):
        yield


def _save_now(reference: weakref.ref[Tracker], tensor: Tensor) -> Stored:
    stored, tracker = Stored(), reference()
    assert tracker is not None
    tracker.save(stored, tensor)
    return stored
