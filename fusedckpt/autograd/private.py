"""Every private touch of torch, each with a probe and a fallback that is slower or plainer.

A name is looked up when this module is imported, and where the torch that runs has none the
fallback takes its place: `PROBED` says which. The comment above a name states the loss then: time
or memory, never a right gradient.

Names that only reports of memory need are in `private_memory`. No other file names anything private
of torch, but for the dicts of a module (`_parameters`, `_forward_hooks`, ...) and a tensor's
`_version` and `_base`.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn.attention
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.utils import _pytree as pytree
except ImportError:
    from torch.utils import pytree  # type: ignore[attr-defined, no-redef]  # noqa: F401

# names that were looked up, and whether this torch has them
PROBED: dict[str, bool] = {}
Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def _probe(path: str, fallback: Any, of: Any = torch) -> Any:
    """Return the object that a path names, the fallback where there is no such name."""
    PROBED[path] = True
    try:
        return attrgetter(path)(of)
    except AttributeError:
        PROBED[path] = False
        return fallback


def _none(*_: Any) -> Any:
    return None


def _true(*_: Any) -> bool:
    return True


# the node that autograd's engine runs in this thread. Without it a backward computes all gradients
# that may be wanted, and in the recompute of a reentrant checkpoint layers save by their level
current_node: Callable[[], Any] = _probe("_C._current_autograd_node", _none)
# whether this backward runs a node. Without it all gradients that may be wanted are computed
will_execute: Callable[[Any], bool] = _probe("_C._will_engine_execute_node", _true)


def adds_to_grad(leaf_node: Any) -> bool:
    """Whether this backward adds to the `.grad` of a parameter; without torch's name, none does."""
    try:
        return PROBED["_C._will_engine_execute_node"] and will_execute(leaf_node)
    except RuntimeError:
        # torch.autograd.grad asks for it
        return False


# the hook that unpacks a packed tensor of a node, None for one that no hooks have packed: they may
# return another in its place. Without it recipes of attention in a module that sets hooks raise
unpack_hook: Callable[[Any], Any] = _probe("_C._autograd.SavedTensor.unpack_hook.fget", _none)
# whether this backward retains the graph. Without it nothing saved is written over
keeps_graph: Callable[[], bool] = _probe("_C._autograd._get_current_graph_task_keep_graph", _true)
# several calls of backward may be a group, of which each node runs once: not in every torch
_exec_group: Callable[[], Any] = _probe("_C._get_graph_exec_group", _none)
_task_id: Callable[[], int] = _probe("_C._current_graph_task_id", lambda: -1)
_queue: Any = _probe("autograd.Variable._execution_engine.queue_callback", None)


def backward_id() -> int:
    """Return a number that tells one backward from another, -1 outside of any.

    Without it a segment is recomputed for each of its saved tensors.
    """
    group = _exec_group()
    if group is not None:
        return id(group)
    return -1 if _queue is None else _task_id()


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Call back at the end of this backward, or of its GraphExecGroup.

    Without it memory that would be freed then is freed with its owner.
    """
    group = _exec_group()
    if group is not None:
        weakref.finalize(group, callback)
    elif _queue is not None:
        _queue(callback)


def ends_backward() -> bool:
    """Whether the end of the backward that runs can raise: a group's is that of an object."""
    return _queue is not None and _exec_group() is None and _task_id() != -1


# the CUDA graph that is captured, from torch 2.14 on. Before, no random state can be read meanwhile
captured_graph: Callable[[], Any] = _probe("cuda.CUDAGraph.get_currently_capturing_graph", _none)
# asserts a flag on its device. Without it nothing is asserted where a CUDA graph is captured, and
# torch.compile's code of experts does not refuse a negative index, which adds nothing
assert_later: Callable[[Tensor, str], None] = _probe("_assert_async", _none)


# modes, tracers and transforms around a call. Without them each call is taken to be watched, and
# goes through torch's ops; or to be under torch.func, and runs its eager reference
num_dispatch_modes: Callable[[], int] = _probe("_C._len_torch_dispatch_stack", _true)
num_function_modes: Callable[[], int] = _probe("_C._len_torch_function_stack", _true)
# all function modes; the innermost one, None outside of any; and a context without it
function_modes: Callable[[], list[Any]] = _probe("overrides._get_current_function_mode_stack", list)
function_mode: Callable[[], Any] = _probe("overrides._get_current_function_mode", _none)
without_function_mode: Any = _probe("overrides._pop_mode_temporarily", nullcontext)
# removes the innermost one and adds it again. Without them it sees the reads of our code, too
pop_function_mode: Callable[[], Any] = _probe("_C._pop_torch_function_stack", _none)
push_function_mode: Callable[[Any], None] = _probe("_C._push_on_torch_function_stack", _none)
is_profiled: Callable[[], bool] = _probe("autograd._profiler_enabled", _true)
are_transforms_active: Callable[[], bool] = _probe("_C._are_functorch_transforms_active", _true)
is_any_autocast_on: Callable[[], bool] = _probe("_C._is_any_autocast_enabled", _true)
# the level of forward-mode AD, negative outside of it
forward_level: Callable[[], int] = lambda: 0  # noqa: E731
if _probe("_current_level", None, forward_ad) is not None:
    forward_level = partial(getattr, forward_ad, "_current_level")
# torch.compiler.is_exporting() is true under any torch.compile of torch 2.11. Without it strict
# export keeps our autograd Functions
is_exporting: Callable[[], bool] = _none
if _probe("_is_exporting_flag", None, torch.compiler) is not None:
    is_exporting = partial(getattr, torch.compiler, "_is_exporting_flag")
is_tracing: Callable[[], bool] = _probe("_C._is_tracing", torch.jit.is_tracing)  # type: ignore[reportPrivateImportUsage]
# hides ops from dispatch modes. Without it a checkpoint's phases are not looked for, see below
disable_current_modes: Callable[[], AbstractContextManager[Any]] = _probe(
    "utils._python_dispatch._disable_current_modes", nullcontext
)


_AS_THEY_ARE = nullcontext()


def unseen() -> AbstractContextManager[Any]:
    """Hide ops from dispatch modes, such as those that count a segment's."""
    return disable_current_modes() if num_dispatch_modes() else _AS_THEY_ARE


# whether functions are seen by classes of tensors: not inside of one that has seen a function, as
# the backward of its loss. Without them a recompute there computes plain tensors
are_subclasses_asked: Callable[[], bool] = _probe("_C._is_torch_function_enabled", _true)
_asks: Any = _probe("_C._EnableTorchFunction", nullcontext)
_asks_none: Any = _probe("_C.DisableTorchFunctionSubclass", nullcontext)


def asking_subclasses(are_asked: bool) -> AbstractContextManager[Any]:
    """Let classes of tensors see functions inside, or not."""
    return _asks() if are_asked else _asks_none()


# sees every op. Without it a checkpoint's debug=True names none, and fuse recognizes no forward
TorchDispatchMode: Any = _probe("utils._python_dispatch.TorchDispatchMode", nullcontext)

_ExcludedKeys: Any = _probe("_C._ExcludeDispatchKeyGuard", None)
_keys_below: Any = _probe("_C._dispatch_tls_local_exclude_set", None)
_below_views: Any = _probe("_C._AutoDispatchBelowADInplaceOrView", None)
_no_autocast: Any = _probe("_C._DisableAutocast", None)
# runs an op below autograd. Without it an op of ours called with gradients does not raise
below_autograd: Any = _probe("_C._AutoDispatchBelowAutograd", None)
# a context without graphs, of no calls of Python where torch has the name
unrecorded: Callable[[], AbstractContextManager[Any]] = below_autograd or torch.no_grad


@contextmanager
def _plainly_below() -> Iterator[None]:
    """Turn autocast off. The caller may then not write in place to a result that is a view."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


# kernels of a layer run in this context: below autograd, where a result that is a view of its own
# could not be written in place by the caller, and autocast, which would cast GEMMs inside once more
below: Callable[[], AbstractContextManager[Any]] = _plainly_below
if None not in (_ExcludedKeys, _keys_below, _below_views, _no_autocast):
    with _no_autocast(), _below_views():
        below = partial(_ExcludedKeys, _keys_below())
else:
    # versions count the writes of kernels there, so that nothing saved can be written over
    keeps_graph = _true

# batches of gradients are made by torch.vmap, and by is_grads_batched=True with an older vmap: each
# tells its batches, removes their dimension and adds it. Without them every backward of a layer
# runs its eager reference, which any vmap takes
_VMAPS = [
    [_probe(path, None) for path in (f"_C._functorch.is_{kind}batchedtensor", *names)]
    for kind, names in (
        ("legacy_", ("_remove_batch_dim", "_add_batch_dim")),
        ("", ("_C._functorch._remove_batch_dim", "_C._functorch._add_batch_dim")),
    )
]
SEES_BATCHES = None not in (*_VMAPS[0], *_VMAPS[1])
is_legacy_batch: Callable[[Tensor], bool] = _VMAPS[0][0] if SEES_BATCHES else _none
is_vmap_batch: Callable[[Tensor], bool] = _VMAPS[1][0] if SEES_BATCHES else _none


def batch_of(dy: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]:
    """Return functions that make a batch's dimension the first one and undo that, and its size."""
    _, remove, add = _VMAPS[0 if is_legacy_batch(dy) else 1]
    # torch numbers the levels of vmaps from 1 to 64; that of this thread is not the caller's
    for level in range(64, 0, -1):
        # at another level it would be repeated as often as asked
        size, again = (remove(dy, level, size, 0).shape[0] for size in (1, 2))
        if size == again:
            unbatched = lambda t, at=level, count=size: remove(t, at, count, 0)  # noqa: E731
            return unbatched, lambda t, at=level: add(t, 0, at), size
    raise AssertionError("a batch without a level")


# hide the vmap of a backward from ops that ran outside of it, such as a recompute's random ops,
# which it refuses: torch.vmap, and is_grads_batched=True. Without them such ops raise
outside_vmap: Callable[[], AbstractContextManager[Any]] = _probe(
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack", nullcontext
)
outside_legacy_vmap: Callable[[], AbstractContextManager[Any]] = nullcontext
_keys_of = _probe("_C.DispatchKeySet", None)
_key_of = _probe("_C._parse_dispatch_key", None)
if None not in (_ExcludedKeys, _keys_of, _key_of):
    outside_legacy_vmap = partial(_ExcludedKeys, _keys_of(_key_of("VmapMode")))


@contextmanager
def outside_vmaps() -> Iterator[None]:
    """Hide all vmaps of a backward: torch.vmap's too, where transforms are active."""
    with outside_vmap(), outside_legacy_vmap():
        yield


# the hooks that saved tensors go through, innermost first. Without them layers save by their level
# in a checkpoint too, and write over nothing that they saved
_top_hooks: Any = _probe("_C._autograd._top_saved_tensors_default_hooks", None)
SEES_HOOKS = _top_hooks is not None and disable_current_modes is not nullcontext
top_hooks: Callable[[], Hooks | None] = partial(_top_hooks or _none, False)


# returns why no such hooks may be set, None where they may: the message of
# `torch.autograd.graph.disable_saved_tensors_hooks`
why_no_hooks: Callable[[], str | None] = _probe(
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message", _none
)

# returns the user's hooks, below those of checkpoints, for selective checkpoints. Before torch 2.14
# these ask for none, and no hook has to name its owner
user_hooks: Any = _probe("utils.checkpoint._current_user_saved_tensors_hooks", None)


def respect_hooks(context: Any, respects: bool | None) -> None:
    """Tell the forward's context of a selective checkpoint whether its tensors go through hooks.

    Before torch 2.14 they never do.
    """
    if hasattr(context, "respect_saved_tensors_hooks"):
        context.respect_saved_tensors_hooks = respects


_STOCK_HOOKS = {"_checkpoint_hook": "forward", "_recomputation_hook": "recompute"}
_PHASES = {f"{name}.__init__.<locals>.pack_hook": phase for name, phase in _STOCK_HOOKS.items()}
if None in [_probe(f"utils.checkpoint.{name}", None) for name in _STOCK_HOOKS]:
    _PHASES = {}


def stock_phase(pack: Any) -> str | None:
    """Return "forward" or "recompute" for a hook of torch's checkpoint; None without its names."""
    is_stock = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    return _PHASES.get(pack.__qualname__) if is_stock else None


def is_save_on_cpu(pack: Any) -> bool:
    """Whether a hook is that of torch's save_on_cpu; without its name it is any other hook."""
    name = getattr(pack, "__qualname__", "")
    is_torchs = getattr(pack, "__module__", None) == "torch.autograd.graph"
    return is_torchs and name == "save_on_cpu.__init__.<locals>.pack_to_cpu"


def variable_of(function: Any, name: str) -> Any:
    """Return a variable that a function closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def stock_frame(pack: Any) -> Any:
    """Return the object of a call of torch's checkpoint by a hook of it, None without its names."""
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    try:
        if stock_phase(pack) == "forward":
            return variable_of(pack, "frame")
        return variable_of(pack, "target_frame_ref")()
    except (AttributeError, TypeError, ValueError):
        return None


def num_wanted(pack: Any) -> int | None:
    """Return how many tensors a recompute of torch's ends after; None, and more is computed."""
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    try:
        frame = variable_of(pack, "target_frame_ref")()
        backward = variable_of(pack, "gid")
        count = len(frame.weak_holders)
        done = frame.recomp_counter[backward]
        return count - done if frame.early_stop else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def written_entry(error: BaseException) -> Any:
    """Return the operation of which a selective checkpoint saved a result that was written since.

    None for other errors; without the names of torch's frames the error is not explained.
    """
    if "selective activation checkpoint has been mutated" not in str(error):
        return None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "__torch_dispatch__" and "func" in frame.f_locals:
            return frame.f_locals["func"]
        trace = trace.tb_next
    return None


def stock_switches() -> tuple[bool | None, bool | None]:
    """Return the values of set_checkpoint_debug_enabled and set_checkpoint_early_stop, if any."""
    switches = torch.utils.checkpoint
    return (
        getattr(switches, "_checkpoint_debug_enabled", None),
        getattr(switches, "_enable_checkpoint_early_stop", None),
    )


class _Keep(torch.autograd.Function):
    """Saves a tensor, as any function does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


class SavedTensor:
    """torch's SavedTensor, made of public parts, which take some microseconds more."""

    _anchor = torch.empty(0, requires_grad=True)

    def __init__(self, tensor: Tensor, is_output: bool):
        with torch.enable_grad():
            self._output = _Keep.apply(self._anchor, tensor)

    def unpack(self) -> Tensor:
        """Return the tensor; raise if it was modified in place since."""
        return self._output.grad_fn.saved_tensors[0]


# a tensor saved as autograd saves one, outside of any function; not in torch 2.11
make_saved: Callable[..., Any] = _probe("_C._autograd._make_saved_tensor", SavedTensor)
# the packed tensors of a Function's node; none, and no norm is shared, without torch's name
raw_saved: Callable[[Any], Any] = _probe(
    "_C._FunctionBase._raw_saved_tensors.__get__", lambda node: ()
)
# the process groups. Without it each process is taken for one of several
_GROUPS: Any = _probe("distributed.distributed_c10d._pg_map", (None,))


def has_ranks() -> bool:
    """Whether this process is one of several that train together."""
    return bool(_GROUPS)


def calls_as(base: type[nn.Module], kind: type[nn.Module]) -> bool:
    """Whether a subclass of a convolution of torch's has the method that the forward calls."""
    return getattr(kind, "_conv_forward", None) is getattr(base, "_conv_forward", None)


# hooks on a tensor. Without them each is taken to have some, and no norm's result is shared
hooks_of: Callable[[Tensor], Any] = _probe("_backward_hooks.__get__", _true, Tensor)

# whether a tensor is updated as soon as its gradient is complete, as by an optimizer in backward.
# Without it a later recompute of a fused module raises for such a parameter
_early: Any = _probe("_post_accumulate_grad_hooks.__get__", _none, Tensor)


def hooks_after_accumulation(tensor: Tensor) -> list[Callable[[Any], Any]]:
    """Return the hooks of a parameter that run when its gradient is complete."""
    return [*(_early(tensor) or {}).values()]


def updates_early(tensor: Tensor) -> bool:
    """Whether a parameter has hooks that run when its gradient is complete."""
    return bool(_early(tensor))


def is_replica(module: nn.Module) -> bool:
    """Whether nn.DataParallel made a module for one call on a device."""
    return getattr(module, "_is_replica", False)


def optimizers_in_backward(parameter: Tensor) -> list[Any]:
    """Return the optimizers that torch's own functions step in a parameter's backward."""
    return [*getattr(parameter, "_in_backward_optimizers", ())]


# the module by which Dynamo runs frames, there before Dynamo is imported. Without it torch's
# decorator takes its place, which costs a call more
_frames: Any = _probe("_C._dynamo.eval_frame", None)
_act: Any = _probe("set_code_exec_strategy", None, _frames)
# breaks the graph where a compiled function calls it, which `uncompiled` does not
breaks_graph: Any = _probe("_compile._disable_dynamo", torch.compiler.disable)


def constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply torch.compiler.assume_constant_result, which imports Dynamo; else graphs break."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo compile neither a function nor the functions that it calls."""
    if _act is None:
        return breaks_graph(function)
    skip = _frames._FrameAction.SKIP
    _act(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


# the address of a storage. Without it that of its weak reference, which is the same
storage_key: Callable[[torch.UntypedStorage], int] = _probe(
    "_cdata.__get__", lambda storage: StorageWeakRef(storage).cdata, torch.UntypedStorage
)
# nodes of autograd's graph that this thread has made, and the number of one of them. Without them
# leaves that a segment reads but does not save are not compared, and segments are prefetched in the
# order in which they are found
num_nodes: Callable[[], float] = _probe("autograd._get_sequence_nr", lambda: math.inf)
number_of: Callable[[Any], int] = lambda _: -1  # noqa: E731
if _probe("_C._FunctionBase._sequence_nr", None) is not None:
    number_of = methodcaller("_sequence_nr")
# kernels of scaled_dot_product_attention: whether each is enabled, and its name. Without them a
# recompute takes the kernels that are enabled in backward
sdpa_kernels: list[tuple[Callable[[], bool], str]] = [
    (_probe(f"_C._get_{name}_sdp_enabled", _true), backend)
    for name, backend in _probe("nn.attention._backend_names", {}).items()
]

# the callable that a module's `compile` made, or None; and the name of the child of torch.compile's
# own module. Without it buffers in a compiled module are updated by a recompute too
compiled_call: Callable[[nn.Module], Any] = _none
if _probe("_compiled_call_impl", True, nn.Module) is None:
    compiled_call = attrgetter("_compiled_call_impl")
COMPILED_CHILD = "_orig_mod"
# of `torch.ops.torch_attn`, which torch.nn.attention.varlen calls
VARLEN_ATTENTION = "_varlen_attn"


def function_of(node: Any) -> Any:
    """Return the autograd Function of a node. Without it plans know no layer by its node."""
    return getattr(type(node), "_forward_cls", None)


# of every module, before its class adds its own
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# of these, the dicts of hooks that run in a step
HOOK_ATTRIBUTES = [n for n in sorted(MODULE_ATTRIBUTES) if "_hooks" in n and "state_dict" not in n]
# by kind, the hooks on all modules. Without them fused layers do not call children that such a hook
# of other code would see
_MODULE_FILE = nn.modules.module
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _probe("_global_forward_pre_hooks", {}, _MODULE_FILE),
    _probe("_global_forward_hooks", {}, _MODULE_FILE),
    _probe("_global_backward_pre_hooks", {}, _MODULE_FILE),
    _probe("_global_backward_hooks", {}, _MODULE_FILE),
)
# packages with hooks on all modules, and function modes, that change no result
KNOWN_PACKAGES = "torch.", "fusedckpt."


def has_foreign_global_hooks() -> bool:
    """Whether code beside torch and ours has hooks on all modules, which may change results."""
    modules = (getattr(f, "__module__", None) for kind in GLOBAL_HOOKS for f in kind.values())
    return not all(str(module).startswith(KNOWN_PACKAGES) for module in modules)


def remove_global_hook(handle: Any) -> None:
    """Remove a hook of all modules. torch leaves the mark of one that takes keywords."""
    handle.remove()
    marks = getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {})
    marks.pop(handle.id, None)


def schema_of(op: Any) -> Any:
    """Return an op's schema; an error without it, by which fuse recognizes no forward."""
    return op._schema


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among its arguments that an op modifies."""
    arguments = schema_of(op).arguments
    by_name = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    values = [by_name.get(name) for name in names]
    # some ops modify lists of tensors
    leaves = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return [x for x in leaves if isinstance(x, Tensor)]


# torch 2.11 does not tag them as functions of single elements
_UNTAGGED = {
    f"aten::{name}"
    for name in ("leaky_relu", "leaky_relu_", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "selu_")
}


def is_pointwise(op: Any) -> bool:
    """Whether an op is a function of single elements."""
    return torch.Tag.pointwise in op.tags or op.name() in _UNTAGGED


def fsdp_parameters(module: nn.Module) -> list[Any]:
    """Return the record that FSDP2 has of each parameter of a module; none without its names."""
    return [param for group in _fsdp_groups(_fsdp_state(module)) for param in group.fsdp_params]


def fsdp_lazy_state(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes of FSDP2 that the first forward of a root sets.

    None where that was: its root has been found.
    """
    states = {id(state): state for state in map(_fsdp_state, model.modules())}
    for state in states.values():
        if getattr(state, "_is_root", ...) is None:
            places = [state, *_fsdp_groups(state)]
            names = "_is_root", "_state_ctx", "_comm_ctx", "comm_ctx", "post_forward_mesh_info"
            yield from ((place, name) for place in places for name in names if name in vars(place))


def _fsdp_state(module: nn.Module) -> Any:
    if not hasattr(module, "_get_fsdp_state"):
        return None
    return module._get_fsdp_state()  # type: ignore[operator]


def _fsdp_groups(state: Any) -> list[Any]:
    if state is None:
        return []
    # torch 2.11 has one group
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


def unsharded_of(param: Any) -> Any:
    """Return the whole parameter of a record of FSDP2, None before it is first gathered."""
    return getattr(param, "_unsharded_param", None)


def is_fsdp_managed(module: nn.Module) -> bool:
    """Whether FSDP1 shards a module's parameters. Without the name, fuse does not say so."""
    return getattr(module, "_is_fsdp_managed_module", False)


def is_fsdp2_module(module: nn.Module) -> bool:
    """Whether a module gathers parameters for its calls by FSDP2."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether a module gathers parameters for its calls, by FSDP1 or FSDP2."""
    return is_fsdp2_module(module) or "_fsdp_wrapped_module" in module._modules


class Ranks(NamedTuple):
    """The ranks on which DistributedDataParallel calls a module."""

    group: Any
    device: torch.device

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest of each number on all ranks."""
        mine = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        if numbers:
            torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX, self.group)
        return mine.tolist()


def ranks_of(module: nn.Module) -> Ranks | None:
    """Return the ranks that call a module now, by DistributedDataParallel around it."""
    parallel: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if parallel is None or parallel.module is not module:
        return None
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return Ranks(parallel.process_group, device)


def local_of(tensor: Any) -> Any:
    """Return a DTensor's part on this rank, any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def activation_wrappers() -> tuple[Any, ...]:
    """Return torch's CheckpointWrapper and OffloadWrapper; empty tuples if no program uses them."""
    library = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return tuple(getattr(library, f"{name}Wrapper", ()) for name in ("Checkpoint", "Offload"))
