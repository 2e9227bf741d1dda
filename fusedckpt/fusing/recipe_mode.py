"""A function mode that lets the functions of a forward save recipes.

It sees each torch function that the forward calls, in a module or between two. A function runs as
it is, once; hooks on its saved tensors replace a tensor that cheap functions made by their recipe
(`autograd/recipes.py`). Cheap are functions whose cost is a few operations for each element: they
are run again in backward, GEMMs, convolutions and attention never are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fusedckpt.autograd import phases, private
from fusedckpt.autograd.dispatch import autocast_dtype, is_recorded
from fusedckpt.autograd.recipes import (
    Leaf,
    Stored,
    Tracker,
    View,
    active,
    key_of,
    tensors_in,
    tracking,
)
from fusedckpt.fusing.forwards import Swap
from fusedckpt.fusing.fuse_report import RECIPES
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.sharing import cast_by
from fusedckpt.fusing.subclass import made_of, subclass

# functions of smaller tensors run as they are: a recipe costs more time than it saves bytes
FLOOR_BYTES = 1 << 20

# by name, of torch, its functional module and Tensor; pointwise ones also with an underscore
_POINTWISE = """
    add sub subtract rsub mul multiply div divide true_divide neg negative pow square sqrt rsqrt exp
    log log1p abs sign clamp where lerp addcmul masked_fill reciprocal sin cos
    to float half bfloat16 double type type_as
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
    __truediv__ __rtruediv__ __itruediv__ __pow__ __neg__
    relu silu gelu sigmoid tanh softplus softsign mish hardswish hardsigmoid hardtanh relu6
    leaky_relu elu glu logsigmoid threshold selu celu prelu tanhshrink
"""
_OTHERS = """
    layer_norm group_norm rms_norm batch_norm instance_norm local_response_norm normalize
    softmax mean sum var var_mean
    contiguous clone reshape flatten cat concat stack interpolate pad pixel_shuffle pixel_unshuffle
    roll repeat repeat_interleave avg_pool1d avg_pool2d avg_pool3d
"""
# functions that autocast runs in its lower precision; they save recipes, and have none
_GEMMS = """
    linear bilinear matmul __matmul__ __rmatmul__ bmm baddbmm addmm addbmm mm einsum
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention
"""
# others that save recipes, and have none
_READERS = """
    max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d
    cross_entropy mse_loss l1_loss smooth_l1_loss binary_cross_entropy_with_logits embedding
"""


def _functions(names: str, suffix: str = "") -> frozenset[Any]:
    """Return torch's functions and methods of these names."""
    keys = [name + suffix for name in names.split()]
    return frozenset(
        getattr(owner, key) for key in keys for owner in (torch, F, Tensor) if hasattr(owner, key)
    )


_CHEAP = _functions(_POINTWISE) | _functions(_POINTWISE, "_") | _functions(_OTHERS)
_KINDS = {
    **dict.fromkeys(_CHEAP, "cheap"),
    **dict.fromkeys(_functions(_READERS), "reader"),
    **dict.fromkeys(_functions(_GEMMS), "gemm"),
    F.batch_norm: "batch_norm",
    F.dropout: "dropout",
}
_PLAIN = frozenset((Tensor, nn.Parameter))


def _is_large(args: Any) -> bool:
    """Whether one of a function's first tensors is worth a recipe."""
    for x in args:
        if isinstance(x, Tensor):
            if x.nbytes >= FLOOR_BYTES:
                return True
        elif type(x) in (list, tuple) and any(
            isinstance(part, Tensor) and part.nbytes >= FLOOR_BYTES for part in x
        ):
            return True
    return False


class RecipeMode(TorchFunctionMode):
    """The functions called inside save recipes; `tracker` has them."""

    def __init__(self, tracker: Tracker):
        super().__init__()
        self.tracker = tracker
        # those around the forward: with others, such as a checkpoint's, a function runs as it is
        self._hooks = private.top_hooks()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and save recipes for it."""
        kind = _KINDS.get(func)
        if kind is None or torch.compiler.is_compiling() or not _is_large(args):
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if not self._takes(args, kwargs):
            return func(*args, **kwargs)
        if kind == "dropout":
            return self._dropout(*args, **kwargs)
        if kind == "gemm":
            args = [self._cast(x) for x in args]
        again = func if kind == "cheap" else _batch_norm if kind == "batch_norm" else None
        return self._run(_Function(func, args, kwargs, again))

    def _takes(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call's tensors are plain, and nothing else watches it."""
        if "out" in kwargs or not torch.is_grad_enabled() or private.top_hooks() != self._hooks:
            return False
        tensors = tensors_in((*args, *kwargs.values()))
        return all(type(t) in _PLAIN and t.layout is torch.strided for t in tensors)

    def _cast(self, x: Any) -> Any:
        """Cast an activation as autocast does, where the cast is known."""
        if type(x) is not Tensor or x.is_leaf or x.dtype != torch.float32:
            return x
        to = autocast_dtype(x.device)
        return x if to is None else self._run(_Function(Tensor.to, (x, to), {}, Tensor.to))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Run dropout as torch does, with the same random numbers.

        On a CPU autograd saves the noise, as large as the input: its recipe is the random state.
        Elsewhere it saves a mask of one byte for each element.
        """
        if not training or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        if input.device.type != "cpu":
            run = _Function(F.dropout, (input, p, True, inplace), {}, None)
            return self._run(run._replace(drops=p))
        state = torch.get_rng_state()
        like = torch.empty_like(input, device="meta")

        def noise() -> Tensor:
            return torch.empty_like(like, device="cpu").bernoulli_(1 - p).div_(1 - p)

        def again() -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                return noise()

        drawn = self._run(_Function(noise, (), {}, again))
        multiply = Tensor.mul_ if inplace else Tensor.mul
        return self._run(_Function(multiply, (input, drawn), {}, Tensor.mul))

    def _run(self, function: _Function) -> Any:
        """Run a function and save recipes."""
        tracker, inputs = self.tracker, function.tensors
        overwritten = tracker.find(inputs[0]) if inputs else None
        version = inputs[0]._version if inputs else 0
        packed: list[Stored] = []

        def pack(tensor: Tensor) -> Stored:
            packed.append(Stored(tensor))
            return packed[-1]

        with saved_tensors_hooks(pack, Stored.read):
            y = function.func(*function.args, **function.kwargs)
        saved = [*packed]
        # autograd keeps the pack hook, which must keep no tensor
        packed.clear()
        results = tensors_in(y)
        made_here = {key_of(t) for t in results}
        writes = bool(inputs) and y is inputs[0] and y._version != version
        if not writes or (overwritten is not None and isinstance(overwritten.source, Leaf)):
            # a leaf that is overwritten cannot be read
            overwritten = None
        if overwritten is not None:
            self._note_copies(saved, inputs, overwritten)
        of_results = [one for one in saved if key_of(one.tensor) in made_here]  # type: ignore[arg-type]  # not resolved
        # first the inputs that it saves, as recipes read them, then the results that it saves
        mask = next((one.tensor for one in saved if one.tensor.dtype == torch.bool), None)  # type: ignore[union-attr]
        tracker.resolve([one for one in saved if one not in of_results])
        is_new = made_here.isdisjoint(map(key_of, inputs))
        if function.drops and mask is not None:
            scale = 1 / (1 - function.drops)
            again = functools.partial(masked, scale)
            tracker.note_made(again, [*inputs, mask], results, overwritten)
        elif function.again is not None and (is_new or overwritten is not None):
            tracker.note_made(function.call(writes), inputs, results, overwritten)
        tracker.resolve(of_results)
        return y

    def _note_copies(self, saved: list[Stored], inputs: list[Tensor], overwritten: View) -> None:
        """Note the recipe of copies that a function saved of the input that it wrote over."""
        x, keys = inputs[0], {key_of(t) for t in inputs}
        for one in saved:
            t: Any = one.tensor
            is_like_x = (t.shape, t.dtype, t.stride()) == (x.shape, x.dtype, x.stride())
            if is_like_x and key_of(t) not in keys:
                self.tracker.note_made(_itself, [x], [t], overwritten)


class _Function(NamedTuple):
    """A call of a torch function."""

    # the function, and its arguments
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    # the same for its recipe; None where its results have none
    again: Callable[..., Any] | None
    # the rate of a dropout that saves its mask
    drops: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return tensors_in((*self.args, *self.kwargs.values()))

    def call(self, writes: bool) -> Callable[..., Any]:
        """Return `again` as a function of the tensors alone, under the autocast of now.

        writes: it writes over its first tensor, so that it gets a copy. The result holds no tensor
        of this call.
        """
        names, rest = tuple(self.kwargs), _filled((*self.args, *self.kwargs.values()), iter(()))
        first, again = self.tensors[:1], self.again
        device = first[0].device if first else torch.device("cpu")
        cast = autocast_dtype(device)
        num_args = len(rest) - len(names)
        assert again is not None

        def call(*tensors: Tensor) -> Any:
            if writes:
                tensors = tensors[0].clone(), *tensors[1:]
            values = _filled(rest, iter(tensors))
            by_name = dict(zip(names, values[num_args:], strict=True))
            with cast_by(device, cast):
                return again(*values[:num_args], **by_name)

        return call


# in place of a tensor
_HOLE = object()


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value with other tensors in it, or with holes where there are none."""
    if isinstance(value, Tensor) or value is _HOLE:
        return next(tensors, _HOLE)
    if type(value) in (list, tuple):
        return type(value)([_filled(part, tensors) for part in value])
    return value


def _itself(x: Tensor) -> Tensor:
    return x.clone()


def masked(scale: float, x: Tensor, mask: Tensor) -> Tensor:
    """Return a dropout's result, from its mask."""
    return torch.ops.aten.native_dropout_backward(x, mask, scale)


def _batch_norm(
    x: Tensor, mean: Any, var: Any, *args: Any, training: bool = False, **kwargs: Any
) -> Tensor:
    """Run batch norm; leave the running statistics as they are."""
    if training or (len(args) > 2 and args[2]):
        mean = var = None
    return F.batch_norm(x, mean, var, *args, **({"training": True} if training else {}), **kwargs)


@contextmanager
def recipes_on() -> Iterator[None]:
    """Let the functions called inside save recipes."""
    hooks = private.top_hooks()
    tracker = Tracker(count=None if hooks is None else hooks[0])
    with tracking(tracker), RecipeMode(tracker):
        yield


class WithRecipes(nn.Module):
    """Forward of a model whose functions save recipes."""

    # a Trainer looks a model up by the name of its class
    _fusedckpt_prefix = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of the model's forward."""
        super().__init_subclass__(**kwargs)
        ours, original = made_of(cls) or (nn.Module, nn.Module)
        if ours is not WithRecipes:
            return

        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original.forward(self, *args, **kwargs)
            obstacle = _obstacle(args)
            if torch.is_grad_enabled():
                self.__dict__[RECIPES] = obstacle
            if obstacle is not None:
                return original.forward(self, *args, **kwargs)
            with recipes_on():
                return original.forward(self, *args, **kwargs)

        cls.forward = forward


def find_root(model: nn.Module, search: Search) -> None:
    """Let the forward of a model, which may be a block itself, save recipes."""
    if isinstance(model, WithRecipes):
        return
    off = {RECIPES: None}
    for place, (module, swap) in enumerate(search.swaps):
        if module is model:
            to, attributes = subclass(WithRecipes, swap.to), {**swap.attributes, **off}
            search.swaps[place] = module, replace(swap, to=to, attributes=attributes)
            return
    search.swaps.append((model, Swap("recipes", "", subclass(WithRecipes, type(model)), off)))


def _obstacle(args: Sequence[Any]) -> str | None:
    """Return why functions may not save recipes in this call, None if they may."""
    if not torch.is_grad_enabled():
        return "it ran without gradients"
    if private.are_transforms_active() or is_recorded(args[0] if args else None):
        return "it was traced or transformed"
    if active() is not None:
        return "a model around it has recipes"
    if not (private.SEES_HOOKS and phases.only_count(private.top_hooks())):
        return "saved-tensor hooks of other code take the tensors"
    return None
