"""Recipes of results by their nodes in the graph, which tell functions, options and tensors.

    y = conv(F.relu(bn(x) + skip))

A layer of ours notes its result at the result's node (`Entry`). Functions that a model's code calls
between two layers are not seen; when a layer reads their result, their nodes tell them: a sum or
product of two tensors, an activation, a batch or group norm, a view of a layer's result, a result
that is larger than its inputs (`grown_results`). If their inputs have recipes, or are saved, the
layer saves the recipe of its input, and so do the functions, in place of tensors that they have
saved before.

A function's inputs may be freed by then, so code may have written to them unseen. All values of a
tensor that a recipe replaces are compared once, in the layer's first call, and samples of it in
each backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, index, levels, private, private_nodes, tracker
from fusedckpt.autograd.dispatch import path_of
from fusedckpt.autograd.index import CHANNELS
from fusedckpt.autograd.phases import only_count
from fusedckpt.autograd.recipes import (
    FINDERS,
    Count,
    Finder,
    Leaf,
    Made,
    View,
    check_of,
    makes_again,
    unpack,
    view_in,
)
from fusedckpt.autograd.replay import PLAIN_TENSORS, Replay, replay_of
from fusedckpt.autograd.storages import write_counter
from fusedckpt.autograd.tracker import LIMIT, SHARE
from fusedckpt.autograd.weak_map import WeakMap
from fusedckpt.blocks import reader
from fusedckpt.recipes import recipe_mode
from fusedckpt.recipes.grown_results import (
    GrownPart,
    MadeOfParts,
    is_grown,
    parts_of_grown,
    replay_of_grown,
)
from fusedckpt.recipes.recipe_kernels import recipe_statistics

# a recipe takes so much less time without a function mode
_TIMES_CHEAPER = 4
# of a concatenation, the largest share that copies of parts may take
_MOST_COPIED = 0.75
# in the metadata of a node: the entry of its result
_ENTRY = "fusedckpt_channels"
# in that of the node of a layer's result that `index` knows, as long as no code has its memory
OF_LAYER = "fusedckpt_layer"
# in that of a linear's result: the result of a few rows, by a weak reference, and its version
_SMALL = "fusedckpt_small"
# the function with a result of half its input's size
_HALVING = "GluBackward"
# by the class of a node, its function, and the options that it has saved: those of the call
_FUNCTIONS_OF_NODES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "ReluBackward": (F.relu, ()),
    "LeakyReluBackward": (F.leaky_relu, ("negative_slope",)),
    "SiluBackward": (F.silu, ()),
    "GeluBackward": (F.gelu, ("approximate",)),
    "MishBackward": (F.mish, ()),
    "HardswishBackward": (F.hardswish, ()),
    "HardsigmoidBackward": (F.hardsigmoid, ()),
    # of ReLU6 too
    "HardtanhBackward": (F.hardtanh, ("min_val", "max_val")),
    "SigmoidBackward": (torch.sigmoid, ()),
    "TanhBackward": (torch.tanh, ()),
    # of SELU too
    "EluBackward": (torch.ops.aten.elu, ("alpha", "scale", "input_scale")),
    "CeluBackward": (F.celu, ("alpha",)),
    "SoftplusBackward": (F.softplus, ("beta", "threshold")),
    _HALVING: (F.glu, ("dim",)),
    # of pools, which are as cheap
    "AvgPool2DBackward": (
        F.avg_pool2d,
        ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    ),
}
# by the class of a node of a sum or product, its name in reports and its function
_FUNCTION_OF_TWO: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "AddBackward0": ("add", torch.add),
    "SubBackward0": ("sub", torch.sub),
    "MulBackward0": ("mul", torch.mul),
    "DivBackward0": ("div", torch.div),
}
# returns, by the functions before a tensor, whether their recipe once made all its values
Compared = Callable[[], dict[Any, bool]]
# as `index.Source`; of a node, for a tensor of its result's shape, where that is freed
Source = Callable[..., Made | None]


class Entry(NamedTuple):
    """A result, as it is found by its node."""

    known: index.Known
    # returns its recipe; None for a result of functions, which their nodes tell
    source: Source | None
    # counts the writes to the result, which may be freed
    counter: Tensor
    # as `known` has them, which loses them with the result
    parameters: Sequence[Tensor | None]
    # how it lies in its storage: shape, strides, dtype
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


class CountedLeaf(Leaf):
    """A tensor that a function of the model's code has saved, and that hooks have counted."""

    def add_reader(self, count: Count) -> None:
        """Do nothing: it is counted, and stays."""


def note_result(
    node: Any,
    y: Tensor,
    source: Source | None,
    parameters: Sequence[Tensor | None],
    made: Made | None,
) -> None:
    """Note the recipe of a result, None for one that the first reader makes."""
    known = index.put(y, CHANNELS, source, *parameters)
    if made is not None:
        made.result = partial(unwritten, weakref.ref(y), y._version)
        known.made = weakref.ref(made)
    layout = y.shape, y.stride(), y.dtype
    node.metadata[_ENTRY] = Entry(known, source, write_counter(y), known.parameters, layout)


def unwritten(reference: weakref.ref[Tensor], version: int) -> Tensor | None:
    """Return a result that other code keeps, as it was."""
    y = reference()
    return y.detach() if y is not None and y._version == version else None


@cache
def saved_names(kind: type) -> tuple[str, str]:
    """Return the attributes by which a node's class has its input and its result, "" for none."""
    names = private_nodes.names_of_saved(kind)
    inputs = [name for name in ("_raw_saved_input", "_raw_saved_self") if name in names]
    return inputs[0] if inputs else "", "_raw_saved_result" if "_raw_saved_result" in names else ""


def save_in_place(raw: Any, view: View, count: Count) -> None:
    """Let a node save a view in place of a tensor."""
    raw.register_hooks(view.replacing, unpack)
    view.source.add_reader(count)


@cache
def _function_of(kind: type) -> tuple[Callable[..., Tensor] | None, tuple[str, ...]]:
    """Return the function of a node's class, and its options; (None, ()) for other nodes."""
    return _FUNCTIONS_OF_NODES.get(private_nodes.name_of_kind(kind), (None, ()))


def replay_of_node(node: Any, device: torch.device) -> Replay | None:
    """Return a call of a node's function with the options of its call; None for other nodes."""
    func, names = _function_of(node.__class__)
    if func is None:
        return None
    if not names:
        return _replay(func, (), (), device)
    return _replay(func, names, private_nodes.saved_options(node, names), device)


@cache
def _replay(
    func: Callable[..., Tensor],
    names: tuple[str, ...],
    values: tuple[Any, ...],
    device: torch.device,
    num_tensors: int = 1,
) -> Replay:
    tensors = [torch.empty(0, device=device)] * num_tensors
    replay, _ = replay_of(func, tensors, dict(zip(names, values, strict=True)))
    # the tensors are those that autocast has cast
    replay.autocast = None
    return replay


def made_of_norm(
    node: Any,
    y: Tensor,
    source: View | Leaf,
    vectors: tuple[Tensor | None, Tensor | None],
    running: Sequence[Tensor | None],
    *,
    is_copied: bool,
) -> Made | None:
    """Return the recipe of a batch or group norm's result by its node, None for other nodes.

    y: the result, or a tensor of its shape and dtype; source: how to read the input; vectors: the
    weight and the bias; running: the running mean and variance; is_copied: whether code may free
    the vectors.
    """
    options = private_nodes.options_of_norm(node)
    weight, bias = vectors
    if options is None:
        return None
    groups, eps, by_batch, dtype = options
    # another dtype is that of a copy that autocast made
    if eps is None or (weight is not None and weight.dtype is not dtype):
        return None
    func: Any = F.group_norm if groups else F.batch_norm
    args: Any = y, groups, weight, bias, eps
    if not groups:
        mean, var = running
        args = recipe_mode.batch_norm_again(y, mean, var, weight, bias, by_batch, 0.0, eps)
    again, tensors = replay_of(func, args, {})
    inputs = [source]
    for t in tensors[1:]:
        inputs.append(Leaf(t.detach().clone() if is_copied else t))
    if path_of(y.device, y.dtype) != "aten":
        known = [t for t in (*running, *tensors[1:]) if t is not None]
        saved = [t for t in private_nodes.saved_by(node) if isinstance(t, Tensor)]
        inputs += map(Leaf, recipe_statistics(func, y, groups, known, saved))
    return Made(func.__name__, again, inputs, [y])


@cache
def tells_function(kind: type) -> bool:
    """Whether a class of nodes tells the function of code, and its inputs."""
    if (
        is_grown(kind)
        or private_nodes.is_sum(kind)
        or private_nodes.is_product(kind)
        or private_nodes.tells_norm(kind)
    ):
        return True
    return _function_of(kind)[0] not in (None, F.avg_pool2d)


def may_have_recipe(x: Any) -> bool:
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


def note_small(y: Tensor) -> None:
    """Note a linear's result for a batch of vectors: a shift of a norm's result may be a part."""
    node: Any = y.grad_fn
    if node is not None:
        node.metadata[_SMALL] = weakref.ref(y), y._version


# by an object of a layer, see `view_by_node`
_COMPARED = WeakMap[Any, dict[Any, bool]]()


def _compared_of(owner: Any) -> dict[Any, bool]:
    compared = _COMPARED.get(owner)
    return _COMPARED.put(owner, {}) if compared is None else compared


def found_by_node(x: Any, owner: Any) -> View | None:
    """Return how to read a layer's input, as `view_by_node`, where the layer may save a recipe.

    owner: the layer's module, or a parameter of it.
    """
    hooks = private.top_hooks()
    if not may_have_recipe(x) or not (hooks is None or only_count(hooks)):
        return None
    # looked up where a recipe is compared
    compared = partial(_compared_of, owner)
    return view_by_node(x, None if hooks is None else hooks[0], compared)


def view_by_node(x: Tensor, count: Count, compared: Compared) -> View | None:
    """Return how to read a result of functions of the model's code, or a view of it.

    None to save it, as a result of an activation below `FLOOR_BYTES`: samples of it take most of
    the time.

    count: see `Count`; for tensors of which the functions save recipes then. compared: see
    `Compared`.
    """
    whole = x if x._base is None else x._base
    node: Any = whole.grad_fn
    if not tells_function(node.__class__):
        return None
    if not private_nodes.is_sum(node.__class__) and x.nbytes < recipe_mode.FLOOR_BYTES:
        return None
    entry: Entry | None = node.metadata.get(_ENTRY)
    if OF_LAYER in node.metadata or (entry is not None and entry.source is not None):
        # a layer's, which `index` refuses
        return None
    if private.hooks_of(x) or private.hooks_of(whole):
        return None
    if whole.untyped_storage().nbytes() != whole.nbytes:
        return None
    walk = _Walk(whole, count, compared)
    made = walk.combined(node, 1)
    if made is None or made.depth > LIMIT or not walk.is_unwritten():
        return None
    if not walk.makes(made, whole, is_counted=walk.counts_writes()):
        return None
    view = view_in(made, whole)
    # code of the model has run since the parts were made
    view.check = check_of(made, whole)
    walk.save_result(node, view)
    note_result(node, whole, None, (), made)
    if x is not whole:
        check = view.check
        view = view_in(made, x)
        view.check = check
    return view


def save_input_in_code(node: Any, count: Count, compared: Compared) -> None:
    """Let a convolution or max pool that code calls save the recipe of its input, if that is known.

    node: of its result, or of that of another function; count, compared: see `view_by_node`.
    """
    if not private_nodes.reads_channels(node.__class__):
        return
    name, _ = saved_names(node.__class__)
    try:
        is_tensor = getattr(node, name).data.__class__ in PLAIN_TENSORS
        x = private_nodes.saved_tensor(node, name) if is_tensor else None
    except RuntimeError:
        # it was written
        return
    if x is not None and not private.hooks_of(x):
        _Walk(x, count, compared)._input(node, 0)


class _Walk:
    """Finds the recipe of a tensor x by its node, and those of the functions before it.

    Between two functions code may write to a result, under `no_grad` too. The writes are counted by
    the result, which is found where one of both has saved it. Of a sum that ReLU reads none is.
    """

    def __init__(self, x: Tensor, count: Count, compared: Compared):
        self.x = x
        self.count = count
        self._compared = compared
        # the functions that were found, by the names of their nodes
        self._names: list[str] = []
        # recipes of results that code may have written before they were read
        self._unseen: set[Leaf | Made] = set()
        # the versions that x may have if it is the result of a layer, which functions wrote over
        self._versions: set[int] = set()
        # the most functions in sequence
        self._most = 1

    def is_unwritten(self) -> bool:
        """Whether no code has written to x but the functions that were found."""
        version = self.x._version
        # a new tensor of the first function, to which others may have written
        return version in self._versions if self._versions else version < self._most

    def counts_writes(self) -> bool:
        """Whether `is_unwritten` knows each write to x: all ways to its layer are as long."""
        return len(self._versions) == 1

    def makes(self, made: Made, tensor: Tensor, *, is_counted: bool = False) -> bool:
        """Whether a recipe makes a tensor: where code may have written, they are compared once."""
        version = tensor._version
        if made not in self._unseen and (is_counted or not version):
            return True
        key = (*self._names, version)
        compared = self._compared()
        is_same = compared.get(key)
        if is_same is None:
            is_same = makes_again(made, tensor)
            if is_same is None:
                return False
            compared[key] = is_same
        self._unseen.discard(made)
        return is_same

    def combined(self, node: Any, num_functions: int) -> Made | None:
        """Return the recipe of a function's result, None for one that is not known.

        num_functions: from x to it.
        """
        kind = node.__class__
        made = None
        if private_nodes.is_sum(kind):
            inputs = []
            for part, number in private_nodes.parts_of_sum(node):
                view = self._part(part, number, num_functions)
                inputs.append(self._small(part, number) if view is None else view)
            made = self._of_two(*_FUNCTION_OF_TWO[kind.__name__], inputs)
        elif private_nodes.is_product(kind):
            first, second = private_nodes.FACTORS
            x = self._factor(node, 0, first, num_functions)
            y = self._factor(node, 1, second, num_functions)
            made = self._of_two(*_FUNCTION_OF_TWO[kind.__name__], (x, y))
        elif is_grown(kind):
            made = self._of_parts(node, num_functions)
        elif tells_function(kind):
            made = self._of_one(node, kind, num_functions)
        if made is not None:
            self._names.append(kind.__name__)
            for view in made.inputs:
                if view.source in self._unseen:
                    self._unseen.add(made)
        return made

    def _of_one(self, node: Any, kind: type, num_functions: int) -> Made | None:
        """Return the recipe of a function of one tensor and of parameters."""
        x = self.x
        if private_nodes.name_of_kind(kind) == _HALVING:
            source = self._whole_input(node)
        else:
            source = self._input(node, num_functions)
        if source is None:
            return None
        if private_nodes.tells_norm(kind):
            made = _norm_of_code(node, x, source)
            # code may have written to the bias since, which the norm has not saved
            if made is not None and len(made.inputs) > 1:
                self._unseen.add(made)
            return made
        again: Any = replay_of_node(node, x.device)
        return Made(again.func.__name__, again, [source], [x])

    def _of_two(
        self, name: str, func: Callable[..., Tensor], inputs: Sequence[View | Leaf | None]
    ) -> Made | None:
        """Return the recipe of a function of two tensors, None where one is not known."""
        sources = list[View | Leaf]()
        for view in inputs:
            if view is None:
                return None
            sources.append(view)
        if len(sources) < 2:
            return None
        return Made(name, _replay(func, (), (), self.x.device, 2), sources, [self.x])

    def _of_parts(self, node: Any, num_functions: int) -> Made | None:
        """Return the recipe of a result that is larger than its inputs."""
        parts = parts_of_grown(node, self.x)
        inputs = [self._of_part(part, num_functions + 1) for part in parts]
        copied = 0
        views = list[View | Leaf | Tensor]()
        for part, source in zip(parts, inputs, strict=True):
            if source is None:
                # behind other functions x has no values of this one
                if part.view is None or num_functions > 1:
                    return None
                source = part.view(self.x)
                copied += source.nbytes
            views.append(source)
        if not views or copied > _MOST_COPIED * self.x.nbytes:
            return None
        sources = [Leaf(view.clone()) if isinstance(view, Tensor) else view for view in views]
        again: Any = replay_of_grown(node, self.x, len(views))
        return MadeOfParts(again.func.__name__, again, sources, [self.x])

    def _of_part(self, part: GrownPart, num_functions: int) -> View | Leaf | None:
        """Return how to read a part of x, None where that is not known."""
        node, number = part.node, part.number
        if node is None:
            return None
        kind = node.__class__
        if not (_ENTRY in node.metadata or tells_function(kind) or private_nodes.is_view(kind)):
            return None
        return self._of(part.layout_in(self.x))._part(node, number, num_functions)

    def _of(self, x: Tensor) -> _Walk:
        """Return a walk from another tensor, that is part of this one."""
        walk = _Walk(x, self.count, self._compared)
        walk._names = self._names
        walk._unseen = self._unseen
        return walk

    def _factor(self, node: Any, place: int, name: str, num_functions: int) -> View | Leaf | None:
        """Return how to read a factor of a product, which may save it."""
        parent, number = node.next_functions[place]
        raw = getattr(node, name)
        if raw.data is None:
            return self._part(parent, number, num_functions)
        saved = self._saved(node, name, is_like=False)
        if not isinstance(saved, Tensor):
            return saved
        if saved.shape != self.x.shape or saved.dtype is not self.x.dtype:
            return CountedLeaf(saved)
        view = self._part(parent, number, num_functions, _version_of(saved, parent))
        return self._saving(raw, saved, view or _view_of_norm(parent, saved))

    def _small(self, node: Any, number: int) -> Leaf | None:
        """Return a small part of a sum: a parameter, or a view of a linear's result.

        number: of the node's results.
        """
        part = _viewed_again(node, number)
        is_parameter = part is None and _is_of_parameter(node)
        if is_parameter:
            part = node.variable.detach()
        x = self.x
        if part is None or part.dtype is not x.dtype or part.nbytes > x.nbytes // SHARE:
            return None
        # `torch.broadcast_shapes` takes 50 calls of Python
        shape = x.shape[max(0, x.dim() - part.dim()) :]
        for size, size_of_x in zip(part.shape, shape, strict=False):
            if size not in (1, size_of_x):
                return None
        if part.dim() > x.dim():
            return None
        # a copy, as code may write to a tensor that autograd does not save
        leaf = Leaf(part.clone())
        if is_parameter:
            # code may have written there since the sum
            self._unseen.add(leaf)
        return leaf

    def _part(
        self, node: Any, number: int, num_functions: int, version: int | None = None
    ) -> View | Leaf | None:
        """Return how to read a result of a node, which functions up to x read.

        number: of the node's results. version: of the result when it was read, None where its
        reader does not tell it.
        """
        if node is None or num_functions > LIMIT:
            return None
        entry: Entry | None = node.metadata.get(_ENTRY)
        if entry is not None and (entry.source is not None or entry.known.made() is not None):
            made = self._noted(node, entry, num_functions)
            return None if made is None else _whole(made)
        if private_nodes.is_view(node.__class__):
            return self._view_of_part(node, number, num_functions)
        if not tells_function(node.__class__):
            save_input_in_code(node, self.count, self._compared)
            return None
        self._most = max(self._most, num_functions + 1)
        _, name = saved_names(node.__class__)
        saved = self._saved(node, name) if name else None
        if isinstance(saved, View):
            # another reader of the result has put it there
            self._unseen.add(saved.source)
            return saved
        if name and saved is None:
            return None
        made = self.combined(node, num_functions + 1)
        is_other = isinstance(saved, Tensor) and saved.stride() != self.x.stride()
        if made is None or made.depth > LIMIT or is_other:
            return None if saved is None else CountedLeaf(saved)
        view = _whole(made)
        if isinstance(saved, Tensor):
            if not self.makes(made, saved):
                return CountedLeaf(saved)
            view.check = check_of(made, saved)
            self.save_result(node, view)
        elif version != 0:
            self._unseen.add(made)
        return view

    def _view_of_part(self, node: Any, number: int, num_functions: int) -> View | None:
        """Return how to read a view of a result, as a slice; number: of the node's results."""
        views = []
        while node is not None and private_nodes.is_view(node.__class__):
            views.append((node, number))
            node, number = node.next_functions[0]
        if node is None or not (_ENTRY in node.metadata or tells_function(node.__class__)):
            return None
        whole = self._base(node, number, num_functions)
        if whole is None or not isinstance(whole.source, Made):
            return None
        part = base = torch.empty_strided(*whole.source.layouts[0][:2], device="meta")
        for view, number in reversed(views):
            again = private_nodes.view_of_node(view, number)
            assert again is not None
            part = again(part)
        return view_in(whole.source, part) if part._base is base else None

    def _base(self, node: Any, number: int, num_functions: int) -> View | Leaf | None:
        """Return how to read the result of which others are views, None where no node tells it."""
        entry: Entry | None = node.metadata.get(_ENTRY)
        if entry is not None:
            shape, _, dtype = entry.layout
            if dtype is not self.x.dtype:
                return None
            # of its shape, without its memory
            like = self.x.new_empty(()).expand(shape)
            made = self._of(like)._noted(node, entry, num_functions)
            return None if made is None else _whole(made)
        meta = private_nodes.meta_of_result(node, number)
        if meta is None or meta.dtype is not self.x.dtype or len(meta.shape) != self.x.dim():
            return None
        # its strides do not matter where its values are made again; it has no memory to copy
        like = GrownPart(node, number, torch.Size(meta.shape), None).layout_in(self.x)
        return self._of(like)._part(node, number, num_functions + 1)

    def _noted(self, node: Any, entry: Entry, num_functions: int) -> Made | None:
        """Return the recipe of a noted result, None where it was written before, or has none."""
        known = entry.known
        result = known()
        version = known.version
        if result is self.x:
            version += num_functions
            self._versions.add(version)
        elif result is not None and private.hooks_of(result):
            return None
        self._most = max(self._most, num_functions)
        shape, _, dtype = entry.layout
        if shape != self.x.shape or dtype is not self.x.dtype:
            return None
        is_written = entry.counter._version != version
        if is_written or not index.are_as_before(entry.parameters, known.versions):
            return None
        made = known.made()
        if made is None:
            made = entry.source and entry.source(self.x, entry.parameters, node)
            if made is None:
                return None
            # other readers take views of the result
            made.layouts[0] = entry.layout
            known.made = weakref.ref(made)
        return made if isinstance(made, Made) and made.is_current() else None

    def _whole_input(self, node: Any) -> View | Leaf | None:
        """Return how to read an input of another shape than x, which its function saves."""
        name, _ = saved_names(node.__class__)
        saved = self._saved(node, name, is_like=False)
        return self._of(saved)._input(node, 0) if isinstance(saved, Tensor) else saved

    def _input(self, node: Any, num_functions: int) -> View | Leaf | None:
        """Return how to read the input of an activation, which may save it."""
        name, _ = saved_names(node.__class__)
        saved = self._saved(node, name) if name else None
        if name and (saved is None or isinstance(saved, View)):
            return saved
        ((parent, number), *_) = node.next_functions
        version = _version_of(saved, parent) if isinstance(saved, Tensor) else None
        view = self._part(parent, number, num_functions, version)
        if isinstance(saved, Tensor):
            return self._saving(getattr(node, name), saved, view)
        return view

    def _saving(self, raw: Any, saved: Tensor, view: View | Leaf | None) -> View | Leaf:
        """Return how to read a tensor that a function has saved; let it save a recipe, if known."""
        if not isinstance(view, View) or view.stride != saved.stride():
            return CountedLeaf(saved)
        source = view.source
        if isinstance(source, Made) and source in self._unseen:
            is_part = (view.size, view.stride) != source.layouts[view.place][:2]
            # of a part no values are compared
            if is_part or not self.makes(source, saved):
                return CountedLeaf(saved)
        if view.check is None:
            view.check = check_of(source, saved)
        self._save(raw, view)
        return view

    def _saved(self, node: Any, name: str, *, is_like: bool = True) -> View | Tensor | None:
        """Return what a node has saved; None where it is freed or was written.

        is_like: return None where it has another shape or dtype than x.
        """
        try:
            saved = getattr(node, name).data
            if saved.__class__ in PLAIN_TENSORS:
                saved = private_nodes.saved_tensor(node, name)
        except RuntimeError:
            return None
        x = self.x
        if isinstance(saved, View):
            return saved if saved.size == x.shape or not is_like else None
        if saved.__class__ not in PLAIN_TENSORS:
            return None
        is_other = saved.shape != x.shape or saved.dtype is not x.dtype
        return None if is_like and is_other else saved

    def save_result(self, node: Any, view: View) -> None:
        """Let a function that saves its result save a view in its place."""
        _, name = saved_names(node.__class__)
        if name and getattr(node, name).data.__class__ is not View:
            self._save(getattr(node, name), view)

    def _save(self, raw: Any, view: View) -> None:
        """Let a function save a view in place of a tensor."""
        tensor = raw.data
        try:
            save_in_place(raw, view, self.count)
        except RuntimeError:
            # hooks that count have it
            discount = getattr(getattr(self.count, "__self__", None), "discount", None)
            if discount is not None:
                discount(tensor)


def _norm_of_code(node: Any, x: Tensor, source: View | Leaf) -> Made | None:
    """Return the recipe of a norm that code calls with parameters; x: as `made_of_norm`'s y."""
    try:
        vectors = private_nodes.vectors_of_norm(node)
        running = private_nodes.running_of_norm(node)
    except RuntimeError:
        # one was written since
        return None
    if vectors is None or not index.are_as_before(vectors, index.versions_of(*vectors)):
        return None
    return made_of_norm(node, x, source, vectors, running, is_copied=private.has_ranks())


def _view_of_norm(node: Any, saved: Tensor) -> View | None:
    """Return how to read the result of a fused norm that a product has saved, by the norm's node.

    None for a result that was written since.
    """
    if saved._version or node is None:
        return None
    made = reader.made_of_plain_norm(node, saved)
    return None if made is None else _whole(made)


def _viewed_again(node: Any, number: int) -> Tensor | None:
    """Return a view of a small result of a linear by its node; None where that was written."""
    if node is None:
        return None
    noted = node.metadata.get(_SMALL)
    if noted is not None:
        reference, version = noted
        y = reference()
        return y.detach() if y is not None and y._version == version else None
    view = private_nodes.view_of_node(node, number)
    if view is None:
        return None
    base = _viewed_again(*node.next_functions[0])
    return None if base is None else view(base)


def _is_of_parameter(node: Any) -> bool:
    """Whether a node is that of a parameter."""
    # that of another class may be sharded
    return getattr(node, "variable", None).__class__ is nn.Parameter


def _version_of(saved: Tensor, node: Any) -> int | None:
    """Return how often a node's result was written when another function saved it.

    None for a copy, which a function saves that writes over its input.
    """
    return saved._version if saved.grad_fn is node else None


def _whole(made: Made) -> View:
    """Return how to read a recipe's one result."""
    shape, stride, _ = made.layouts[0]
    return View(made, 0, shape, stride, 0)


_FLOOR = partial(getattr, recipe_mode, "FLOOR_BYTES")
FINDERS.append(Finder(found_by_node, tells_function, _FLOOR))
