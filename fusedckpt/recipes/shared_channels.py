"""Layers of convolutional nets that save recipes: norms, activations, pools, convolutions.

    y = conv2(relu(batch_norm(conv1(x))))

Autograd saves x, the result z of conv1, which batch norm reads, and that of ReLU, twice. The last
one can be made again from z, which is saved anyway: so ReLU and conv2 save its recipe, and backward
makes it once for both. No function mode looks at functions: `fuse` knows these layers of torch's by
their classes, and each calls one function. The layer's own forward runs; then its node in the graph
shows the tensors that it has saved, and gets recipes in their place.

Functions that code calls between two layers, as the sum of a residual block, are found by their
nodes, see `node_recipes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, index, private, private_nodes, recipes, tracker
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.autograd.index import ACTIVATION, CHANNELS, LINEAR, NORM
from fusedckpt.autograd.phases import only_count, uncounted
from fusedckpt.autograd.recipes import Count, Leaf, Made, View, unpack, view_in
from fusedckpt.recipes import dropouts, recipe_mode
from fusedckpt.recipes.node_recipes import (
    made_of_norm,
    may_have_recipe,
    note_result,
    replay_of_node,
    save_in_place,
    save_input_in_code,
    saved_names,
    tells_function,
    unwritten,
    view_by_node,
)
from fusedckpt.recipes.shared_layers import Shared, SharedActivation, SharedCheap

CONV_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d) + (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class SharedChannels(Shared):
    """Forward of a layer of torch's that reads channels, and calls one function.

    A tensor below a quarter of `recipe_mode.FLOOR_BYTES` is saved: a recipe costs more time.
    """

    # the makers of the inputs that it saves recipes of by its node
    _fusedckpt_follows = CHANNELS, ACTIVATION
    # whether its result may have a recipe where its input has none
    _fusedckpt_begins = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward; save recipes of its input and result, if they are known."""
        if len(args) != 1 or kwargs or torch.compiler.is_compiling() or private.is_tracing():
            return super(Shared, self).forward(*args, **kwargs)
        (x,) = args
        if not may_have_recipe(x):
            in_mode = private.num_function_modes() and tracker.sees_alone()
            if in_mode and tracker.outside_mode(_is_below_floor, x):
                # the mode takes large tensors alone
                return tracker.outside_mode(self.forward, x)
            return super().forward(x)
        hooks = private.top_hooks()
        if hooks is not None and not only_count(hooks):
            return super().forward(x)
        view = index.view_of(x, *self._fusedckpt_follows, is_behind=self._fusedckpt.is_behind)
        # without a call
        if view is None and (x._base is not None or tells_function(x.grad_fn.__class__)):
            count = None if hooks is None else hooks[0]
            view = view_by_node(x, count, partial(getattr, self._fusedckpt, "compared"))
        elif view is None and self._fusedckpt.reads_in_code:
            count = None if hooks is None else hooks[0]
            save_input_in_code(x.grad_fn, count, partial(getattr, self._fusedckpt, "compared"))
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
        input_name, result_name = saved_names(node.__class__)
        raw = input_name and getattr(node, input_name)
        if view is not None and raw and (saved := _view_of_saved(view, x, raw.data, y)) is not None:
            save_in_place(raw, saved, count)
        if not self._makes(y):
            return
        made = None
        if result_name:
            made = None if view is None else self._recipe(node, y, view, ())
            if made is None:
                return
            save_in_place(getattr(node, result_name), view_in(made, y), count)
        if private_nodes.LACKS_EPS:
            private_nodes.tell_eps(node, self)
        source = partial(_made_of, weakref.ref(self))
        note_result(node, y, source, self._vectors(), made)

    def _makes(self, y: Tensor) -> bool:
        """Whether the layer's result is cheap to make again, and fills its storage."""
        return False

    def _vectors(self) -> Sequence[Tensor | None]:
        """Return the parameters and buffers that the recipe of a result reads."""
        return ()

    def _made(self, node: Any, y: Tensor, vectors: Sequence[Tensor | None]) -> Made | None:
        """Return the recipe of a result by its node.

        y: the result, or a tensor of its shape and dtype; vectors: of the call.
        """
        input_name, result_name = saved_names(node.__class__)
        try:
            if result_name:
                saved = getattr(node, result_name).data
                return saved.source if saved.__class__ is View else None
            saved = input_name and getattr(node, input_name).data
            if saved.__class__ is Tensor:
                # raises where it was written since
                saved = Leaf(private_nodes.saved_tensor(node, input_name))
        except RuntimeError:
            # the node has run already
            return None
        return self._recipe(node, y, saved, vectors) if isinstance(saved, (View, Leaf)) else None

    def _recipe(
        self, node: Any, y: Tensor, source: View | Leaf, vectors: Sequence[Tensor | None]
    ) -> Made | None:
        """Return the recipe of a result, made from the input that a source reads."""
        raise NotImplementedError


class _OfChannelsAlone(SharedChannels):
    """Forward of a layer that saves no recipe of a norm or linear beside."""

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Any]) -> Any:
        return forward(x)


class SharedConv(_OfChannelsAlone):
    """Forward of a convolution, or of another layer that saves its input and runs once."""

    _fusedckpt_follows = CHANNELS, ACTIVATION, NORM, LINEAR

    def _followed(
        self, x: Tensor, view: View | None, forward: Callable[..., Any], count: Count
    ) -> Any:
        if view is not None and view.source.name == "linear" and _is_narrow(view.source):
            # not worth a GEMM
            view = None
        if view is not None and private.is_any_autocast_on() and isinstance(self, CONV_LAYERS):
            dtype = autocast_dtype(x.device)
            # as autocast does, on a tensor that is known
            to = x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
            x, view = to, recipes.cast(view, x, to)
        return super()._followed(x, view, forward, count)


def _is_narrow(source: Leaf | Made) -> bool:
    """Whether the result of a linear is no wider than its input."""
    assert isinstance(source, Made)
    out_features, in_features = source.inputs[1].size
    return out_features <= in_features


# of a norm that has no buffers
_NONE_RUNNING = None, None


class SharedChannelNorm(_OfChannelsAlone):
    """Forward of a batch or group norm."""

    _fusedckpt_begins = True

    def _makes(self, y: Tensor) -> bool:
        # pruning and parametrizations compute them
        return "weight" in self._parameters and "bias" in self._parameters

    def _vectors(self) -> Sequence[Tensor | None]:
        # without a call of Python's
        parameters, buffers = self._parameters, self._buffers
        vectors = parameters["weight"], parameters["bias"]
        if self.training or not buffers:
            return vectors
        # a forward in training writes the statistics without a version, and counts itself
        names = "running_mean", "running_var", "num_batches_tracked"
        return *vectors, *map(buffers.get, names)

    def _recipe(
        self, node: Any, y: Tensor, source: View | Leaf, vectors: Sequence[Tensor | None]
    ) -> Made | None:
        weight, bias, *buffers = vectors
        # those of training tell their dtype, and which vectors of the node are its own statistics
        running = buffers[:2] or _NONE_RUNNING
        table = self._buffers
        if running is _NONE_RUNNING and "running_mean" in table and "running_var" in table:
            # without a call
            running = table["running_mean"], table["running_var"]
        # hooks may gather parameters for the call alone
        is_copied = private.has_ranks() or dispatch.has_hooks(self)
        return made_of_norm(node, y, source, (weight, bias), running, is_copied=is_copied)


class _SharedFunction(SharedChannels):
    """Forward of a layer that calls a function of its input and of its own attributes."""

    def _makes(self, y: Tensor) -> bool:
        return y.untyped_storage().nbytes() == y.nbytes

    def _recipe(
        self, node: Any, y: Tensor, source: View | Leaf, vectors: Sequence[Tensor | None]
    ) -> Made | None:
        again = replay_of_node(node, y.device)
        return None if again is None else Made(again.func.__name__, again, [source], [y])


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
            (p,) = private_nodes.saved_options(node, ("p",))
            again = partial(dropouts.masked, 1 / (1 - p))
        else:
            again = _multiply
        made = Made("dropout", again, [view, Leaf(mask)], [y])
        saved = view_in(Leaf(mask), mask)
        # as long as the mask
        saved.alive = made
        raw.register_hooks(saved.replacing, unpack)
        source = partial(_made_of, weakref.ref(self))
        note_result(node, y, source, (), made)

    def _made(self, node: Any, y: Tensor, vectors: Sequence[Tensor | None]) -> Made | None:
        return None


# the masks that nodes of dropouts have saved
_MASKS = {"MulBackward0": "_raw_saved_other", "NativeDropoutBackward0": "_raw_saved_result1"}
# activations that save their result; the next ones save their input, if they do not write there
_OF_RESULT = nn.ReLU, nn.Sigmoid, nn.Tanh
_OF_INPUT = (
    *(nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Mish, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU, nn.Softplus),
)
CHANNEL_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm
_CLASSES: dict[tuple[type[nn.Module], ...], type[SharedChannels]] = {
    CONV_LAYERS: SharedConv,
    # each of one node of torch's: MaxPool1d takes three
    (nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool2d): SharedConv,
    CHANNEL_NORMS: SharedChannelNorm,
    _OF_RESULT: SharedChannelActivation,
    _OF_INPUT: SharedInputActivation,
    (nn.AvgPool2d,): SharedPool,
    (nn.Dropout, nn.Dropout2d): SharedChannelDropout,
}


def channels_class_of(module: nn.Module) -> type[SharedChannels] | None:
    """Return our class of a layer of torch's that reads channels, None for other modules."""
    if getattr(module, "padding_mode", "zeros") != "zeros":
        # one function more pads the input
        return None
    for kinds, ours in _CLASSES.items():
        for kind in kinds:
            if isinstance(module, kind) and type(module).forward is dispatch.own_forward(kind):
                return ours if private.calls_as(kind, type(module)) else None
    return None


def _is_below_floor(x: Any) -> bool:
    """Whether a layer may have a recipe of its input, and a mode of recipes takes none."""
    return may_have_recipe(x) and x.nbytes < recipe_mode.FLOOR_BYTES


def _is_of_others(x: Tensor) -> bool:
    """Whether another way makes a tensor again, by a norm or a linear."""
    known = index.known_of(x)
    return known is not None and known.maker is not None


def _view_of_saved(view: View, x: Tensor, tensor: Any, y: Tensor) -> View | None:
    """Return how to read the tensor that a layer has saved as its input, None to leave it.

    view: how to read the input.
    """
    if y is not x:
        # another tensor is a copy that the function has changed, or cast
        return view if tensor is x else None
    if tensor is x or tensor is None or tensor.stride() != x.stride():
        return None
    # a copy from before the function wrote there
    copy = view_in(view.source, tensor, view.place)
    copy.check = view.check
    return copy


def _count_saved(node: Any, count: Callable[[Tensor], Any]) -> None:
    """Count the tensors that a layer's node has saved as they are."""
    for saved in private_nodes.saved_by(node):
        if isinstance(saved, Tensor):
            count(saved)
        elif saved.__class__ is View and saved.source.__class__ is Leaf:
            saved.source.add_reader(count)


def _multiply(x: Tensor, noise: Tensor) -> Tensor:
    return x * noise


def _made_of(
    layer: Callable[[], SharedChannels | None],
    y: Tensor,
    vectors: Sequence[Tensor | None],
    node: Any = None,
) -> Made | None:
    """Return the recipe of the result of a layer; node: of that, where y has its shape alone."""
    module = layer()
    made = None if module is None else module._made(node or y.grad_fn, y, vectors)
    if made is not None and node is None and made.result is NoneType:
        made.result = partial(unwritten, weakref.ref(y), y._version)
    return made
