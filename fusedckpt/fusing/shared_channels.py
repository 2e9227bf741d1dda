"""Layers of convolutional nets that save recipes: norms, activations, pools, convolutions.

    y = conv2(relu(batch_norm(conv1(x))))

Autograd saves x, the result z of conv1, which batch norm reads, and that of ReLU, twice. The last
one can be made again from z, which is saved anyway: so ReLU and conv2 save its recipe, and backward
makes it once for both. No function mode looks at functions: `fuse` knows these layers of torch's by
their classes, and each calls one function. The layer's own forward runs; then its node in the graph
shows the tensors that it has saved, and gets recipes in their place.

A sum between two layers, as that of a residual block, saves nothing, and its node in the graph
tells both of its parts. A layer behind it reads its recipe if both have one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import ScriptModule

from fusedckpt.autograd import dispatch, index, levels, private, recipes, tracker
from fusedckpt.autograd.dispatch import autocast_dtype, path_of
from fusedckpt.autograd.index import ACTIVATION, CHANNELS
from fusedckpt.autograd.phases import only_count, uncounted
from fusedckpt.autograd.recipes import Count, Leaf, Made, View, check_of, unpack, view_in
from fusedckpt.autograd.replay import Replay, replay_of
from fusedckpt.autograd.tracker import LIMIT
from fusedckpt.fusing import dropouts, recipe_mode
from fusedckpt.fusing.recipe_kernels import recipe_statistics
from fusedckpt.fusing.shared_layers import Shared, SharedActivation, SharedCheap

# a recipe takes so much less time without a function mode
_TIMES_CHEAPER = 4
# in the metadata of a node: the entry of its result, and a weak reference to the layer
_ENTRY = "fusedckpt_channels"

# by the class of a layer, the function of its input that it calls, and the attributes it passes
_ACTIVATION_CALLS: dict[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.ReLU: (F.relu, ()),
    nn.ReLU6: (F.relu6, ()),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    nn.SiLU: (F.silu, ()),
    nn.GELU: (F.gelu, ("approximate",)),
    nn.Mish: (F.mish, ()),
    nn.Hardswish: (F.hardswish, ()),
    nn.Hardsigmoid: (F.hardsigmoid, ()),
    nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.ELU: (F.elu, ("alpha",)),
    nn.CELU: (F.celu, ("alpha",)),
    nn.SELU: (F.selu, ()),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
}
# of pools, which are as cheap
_POOL_CALLS: dict[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.AvgPool2d: (
        F.avg_pool2d,
        ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    ),
}
_CALLS = _ACTIVATION_CALLS | _POOL_CALLS
_CONV_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d) + (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class _Entry(NamedTuple):
    """The result of a layer, as a sum finds it by the result's node."""

    layer: weakref.ref[SharedChannels]
    known: index.Known
    shape: torch.Size
    dtype: torch.dtype


class SharedChannels(Shared):
    """Forward of a layer of torch's that reads channels, and calls one function.

    A tensor below a quarter of `recipe_mode.FLOOR_BYTES` is saved: a recipe costs more time.
    """

    # whether its result may have a recipe where its input has none
    _fusedckpt_begins = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward; save recipes of its input and result, if they are known."""
        if len(args) != 1 or kwargs or torch.compiler.is_compiling() or private.is_tracing():
            return super(Shared, self).forward(*args, **kwargs)
        (x,) = args
        if not _may_have_recipe(x):
            return super().forward(x)
        hooks = private.top_hooks()
        if hooks is not None and not only_count(hooks):
            return super().forward(x)
        view = index.view_of(x, CHANNELS, ACTIVATION, is_behind=self._fusedckpt.is_behind)
        if view is None and private.is_sum(x.grad_fn):
            view = _view_of_sum(x)
        if view is None and (not self._fusedckpt_begins or _is_of_others(x)):
            return super().forward(x)
        forward = super(Shared, self).forward
        if hooks is None:
            return self._followed(x, view, forward, None)
        with uncounted() as count:
            is_followed = private.top_hooks() is None
            if is_followed:
                return self._followed(x, view, forward, count)
        return super().forward(x)

    def _followed(
        self, x: Tensor, view: View | None, forward: Callable[..., Any], count: Count
    ) -> Any:
        """Return forward(x), of which autograd saves recipes."""
        version = x._version
        y = forward(x)
        node: Any = y.grad_fn
        if y is not x or x._version != version:
            self._save_recipes(node, x, y, view, count)
        if count is not None:
            _count_saved(node, count)
        return y

    def _save_recipes(
        self, node: Any, x: Tensor, y: Tensor, view: View | None, count: Count
    ) -> None:
        """Put recipes in place of the tensors that a layer's node has saved."""
        input_name, result_name = _saved_names(node.__class__)
        raw = input_name and getattr(node, input_name)
        if view is not None and raw and (saved := _view_of_saved(view, x, raw.data, y)) is not None:
            _replace(raw, saved, count)
        if not self._makes(y):
            return
        made = None
        if result_name:
            made = None if view is None else self._recipe(node, y, view)
            if made is None:
                return
            _replace(getattr(node, result_name), view_in(made, y), count)
        known = index.put(y, CHANNELS, partial(_made_of, weakref.ref(self)), *self._vectors())
        if made is not None:
            made.result = partial(_unwritten, weakref.ref(y), y._version)
            known.made = weakref.ref(made)
        node.metadata[_ENTRY] = _Entry(weakref.ref(self), known, y.shape, y.dtype)

    def _makes(self, y: Tensor) -> bool:
        """Whether the layer's result is cheap to make again, and fills its storage."""
        return False

    def _vectors(self) -> Sequence[Tensor | None]:
        """Return the parameters that the recipe of a result reads."""
        return ()

    def _made(self, node: Any, y: Tensor) -> Made | None:
        """Return the recipe of a result by its node.

        y: the result, or a tensor of its shape.
        """
        input_name, result_name = _saved_names(node.__class__)
        try:
            if result_name:
                saved = getattr(node, result_name).data
                return saved.source if saved.__class__ is View else None
            saved = getattr(node, input_name).data
        except RuntimeError:
            # the node has run already
            return None
        if saved is None:
            return None
        return self._recipe(node, y, saved if saved.__class__ is View else Leaf(saved))

    def _recipe(self, node: Any, y: Tensor, source: View | Leaf) -> Made | None:
        """Return the recipe of a result, made from the input that a source reads."""
        raise NotImplementedError


class _OfChannelsAlone(SharedChannels):
    """Forward of a layer that saves no recipe of a norm or linear beside."""

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Any]) -> Any:
        return forward(x)


class SharedConv(_OfChannelsAlone):
    """Forward of a convolution, or of another layer that saves its input and runs once."""

    def _followed(
        self, x: Tensor, view: View | None, forward: Callable[..., Any], count: Count
    ) -> Any:
        if view is not None and private.is_any_autocast_on() and isinstance(self, _CONV_LAYERS):
            dtype = autocast_dtype(x.device)
            # as autocast does, on a tensor that is known
            to = x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
            x, view = to, recipes.cast(view, x, to)
        return super()._followed(x, view, forward, count)


class SharedChannelNorm(_OfChannelsAlone):
    """Forward of a batch or group norm."""

    _fusedckpt_begins = True

    def _makes(self, y: Tensor) -> bool:
        return y.untyped_storage().nbytes() == y.nbytes

    def _vectors(self) -> Sequence[Tensor | None]:
        # without a call of Python's
        return self._parameters["weight"], self._parameters["bias"]

    def _recipe(self, node: Any, y: Tensor, source: View | Leaf) -> Made | None:
        module: Any = self
        vectors = self._vectors()
        x, by_batch = private.saved_of_norm(node)
        if isinstance(self, nn.GroupNorm):
            func, groups = F.group_norm, self.num_groups
            args: Any = x, groups, *vectors, module.eps
            running = []
        else:
            func, groups = F.batch_norm, 0
            running = [self._buffers["running_mean"], self._buffers["running_var"]]
            args = x, *running, *vectors, by_batch, 0.0, module.eps
            args = recipe_mode.batch_norm_again(*args)
        again, tensors = replay_of(func, args, {})
        inputs = [source]
        # hooks may gather parameters for the call alone
        is_copied = private.has_ranks() or dispatch.has_hooks(self)
        for t in tensors[1:]:
            inputs.append(Leaf(t.detach().clone() if is_copied else t))
        if path_of(x.device, x.dtype) != "aten":
            known = [*tensors, *[t for t in running if t is not None]]
            saved = [t for t in private.saved_by(node) if isinstance(t, Tensor)]
            inputs += map(Leaf, recipe_statistics(func, x, groups, known, saved))
        return Made(func.__name__, again, inputs, [y])


class _SharedFunction(SharedChannels):
    """Forward of a layer that calls a function of its input and of its own attributes."""

    def _makes(self, y: Tensor) -> bool:
        return y.untyped_storage().nbytes() == y.nbytes

    def _recipe(self, node: Any, y: Tensor, source: View | Leaf) -> Made | None:
        func, names = _function_of(type(self))
        values = tuple([getattr(self, name) for name in names])
        dtype = autocast_dtype(y.device) if private.is_any_autocast_on() else None
        return Made(func.__name__, _replay(func, names, values, y.device, dtype), [source], [y])


class SharedChannelActivation(_SharedFunction, SharedActivation):
    """Forward of an activation of torch's: beside linears it is that of `SharedActivation`."""


class SharedInputActivation(SharedChannelActivation):
    """Forward of an activation of torch's that saves its input, where it does not write there."""

    _fusedckpt_begins = True


class SharedPool(_SharedFunction, _OfChannelsAlone):
    """Forward of a pool that is as cheap as an activation."""

    _fusedckpt_begins = True


class SharedChannelDropout(SharedChannels, SharedCheap):
    """Forward of a dropout: its mask is saved as ever."""

    def _save_recipes(
        self, node: Any, x: Tensor, y: Tensor, view: View | None, count: Count
    ) -> None:
        name = _MASKS.get(node.name())
        raw = name and getattr(node, name)
        if view is None or not raw or y.untyped_storage().nbytes() != y.nbytes:
            return
        mask = raw.data
        again: Any
        if mask is None:
            return
        if mask.dtype is torch.bool:
            again = partial(dropouts.masked, 1 / (1 - cast(Any, self).p))
        else:
            again = _multiply
        made = Made("dropout", again, [view, Leaf(mask)], [y])
        saved = view_in(Leaf(mask), mask)
        # as long as the mask
        saved.alive = made
        raw.register_hooks(saved.replacing, unpack)
        known = index.put(y, CHANNELS, partial(_made_of, weakref.ref(self)))
        known.made = weakref.ref(made)
        made.result = partial(_unwritten, weakref.ref(y), y._version)
        node.metadata[_ENTRY] = _Entry(weakref.ref(self), known, y.shape, y.dtype)

    def _made(self, node: Any, y: Tensor) -> Made | None:
        return None


# the masks that nodes of dropouts have saved
_MASKS = {"MulBackward0": "_raw_saved_other", "NativeDropoutBackward0": "_raw_saved_result1"}
_OF_RESULT = nn.ReLU, nn.Sigmoid, nn.Tanh
_CLASSES: dict[tuple[type[nn.Module], ...], type[SharedChannels]] = {
    _CONV_LAYERS: SharedConv,
    (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool2d): SharedConv,
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm): SharedChannelNorm,
    _OF_RESULT: SharedChannelActivation,
    tuple(kind for kind in _ACTIVATION_CALLS if kind not in _OF_RESULT): SharedInputActivation,
    tuple(_POOL_CALLS): SharedPool,
    (nn.Dropout, nn.Dropout2d): SharedChannelDropout,
}


def channels_class_of(module: nn.Module) -> type[SharedChannels] | None:
    """Return our class of a layer of torch's that reads channels, None for other modules."""
    if isinstance(module, ScriptModule) or getattr(module, "padding_mode", "zeros") != "zeros":
        # one function more pads the input
        return None
    for kinds, ours in _CLASSES.items():
        for kind in kinds:
            if isinstance(module, kind) and type(module).forward is dispatch.own_forward(kind):
                return ours
    return None


def _may_have_recipe(x: Any) -> bool:
    """Whether a layer's functions may save recipes in this call, and its input is large enough."""
    if x.__class__ is not Tensor or x.grad_fn is None or not torch.is_grad_enabled():
        return False
    if x.numel() * x.itemsize * _TIMES_CHEAPER < recipe_mode.FLOOR_BYTES:
        return False
    if private.num_function_modes() and (tracker.active() or tracker.has_foreign_modes()):
        # a mode of recipes sees the layer's function
        return False
    if private.are_transforms_active() or levels.override.level not in (None, "inputs"):
        return False
    # make_fx pushes a mode of dispatch
    return not (private.num_dispatch_modes() and dispatch.is_traced(x))


def _is_of_others(x: Tensor) -> bool:
    """Whether another way makes a tensor again, by a norm or a linear."""
    known = index.known_of(x)
    return known is not None and known.maker is not None


@cache
def _saved_names(kind: type) -> tuple[str, str]:
    """Return the attributes by which a node's class has its input and its result, "" for none."""
    names = private.names_of_saved(kind)
    inputs = [name for name in ("_raw_saved_input", "_raw_saved_self") if name in names]
    return inputs[0] if inputs else "", "_raw_saved_result" if "_raw_saved_result" in names else ""


def _view_of_saved(view: View, x: Tensor, tensor: Any, y: Tensor) -> View | None:
    """Return how to read the tensor that a layer has saved as its input, None to leave it.

    view: how to read the input.
    """
    if tensor is x and y is not x:
        return view
    if tensor is None or tensor.shape != x.shape or tensor.stride() != x.stride():
        return None
    if y is x and tensor.dtype is x.dtype and tensor is not x:
        # a copy from before the function wrote there
        copy = view_in(view.source, tensor, view.place)
        copy.check = view.check
        return copy
    if tensor.dtype is not x.dtype:
        return recipes.cast(view, x, tensor)
    return None


def _replace(raw: Any, view: View, count: Count) -> None:
    """Let a node save a view in place of a tensor."""
    view.source.add_reader(count)
    raw.register_hooks(view.replacing, unpack)


def _count_saved(node: Any, count: Callable[[Tensor], Any]) -> None:
    """Count the tensors that a layer's node has saved as they are."""
    for saved in private.saved_by(node):
        if isinstance(saved, Tensor):
            count(saved)
        elif saved.__class__ is View and saved.source.__class__ is Leaf:
            saved.source.add_reader(count)


@cache
def _function_of(kind: type[nn.Module]) -> tuple[Callable[..., Tensor], tuple[str, ...]]:
    return next(function for base, function in _CALLS.items() if issubclass(kind, base))


@cache
def _replay(
    func: Callable[..., Tensor],
    names: tuple[str, ...],
    values: tuple[Any, ...],
    device: torch.device,
    autocast: torch.dtype | None,
    num_tensors: int = 1,
) -> Replay:
    """Return a call of a function under this autocast, which is that of now."""
    tensors = [torch.empty(0, device=device)] * num_tensors
    return replay_of(func, tensors, dict(zip(names, values, strict=True)))[0]


def _multiply(x: Tensor, noise: Tensor) -> Tensor:
    return x * noise


def _made_of(layer: weakref.ref[SharedChannels], y: Tensor, _: Any) -> Made | None:
    """Return the recipe of the result of a layer."""
    module = layer()
    made = None if module is None else module._made(y.grad_fn, y)
    if made is not None and made.result is NoneType:
        made.result = partial(_unwritten, weakref.ref(y), y._version)
    return made


def _unwritten(reference: weakref.ref[Tensor], version: int) -> Tensor | None:
    """Return a result that other code keeps, as it was."""
    y = reference()
    return y.detach() if y is not None and y._version == version else None


def _view_of_sum(x: Tensor) -> View | None:
    """Return how to read the sum of two tensors that have recipes."""
    parts = private.parts_of_sum(x.grad_fn)
    if not parts or private.hooks_of(x) or x.untyped_storage().nbytes() != x.nbytes:
        return None
    views = []
    for part in parts:
        made = None if part is None else _made_of_part(part, x)
        if made is None:
            return None
        shape, stride, _ = made.layouts[0]
        views.append(View(made, 0, shape, stride, 0))
    dtype = autocast_dtype(x.device) if private.is_any_autocast_on() else None
    made = Made("add", _replay(torch.add, (), (), x.device, dtype, 2), views, [x])
    if made.depth > LIMIT or not made.is_current():
        return None
    view = view_in(made, x)
    # code of the model has run since the parts were made
    view.check = check_of(made, x)
    return view


def _made_of_part(node: Any, x: Tensor) -> Made | None:
    """Return the recipe of a part of the sum x by its node.

    None where the part is known to be written before. One that is gone was perhaps written, too,
    which the sum's samples show.
    """
    entry: _Entry | None = node.metadata.get(_ENTRY)
    module = None if entry is None else entry.layer()
    if entry is None or module is None or entry.shape != x.shape or entry.dtype is not x.dtype:
        return None
    part = entry.known()
    # x may be the part, which the sum was written to
    if part is not None and part._version != entry.known.version + (part is x):
        return None
    made = entry.known.made()
    if made is None:
        made = module._made(node, x)
        if made is None:
            return None
        entry.known.made = weakref.ref(made)
    return made if isinstance(made, Made) else None
