"""The path of a call: eager reference, Triton (compiled or interpreted) or ATen.

Triton runs float32, bfloat16 and float16 tensors on a GPU, and on a CPU when Triton's interpreter
is on; everything else runs on ATen, with the same saved tensors. FUSEDCKPT_DISABLE=1, read once at
import, runs every eager reference instead. So do programs that are recorded, as by `torch.export`:
they consist of torch's own ops.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fusedckpt.autograd import arguments, levels, phases, private, tracker
from fusedckpt.autograd.phases import SavePhase
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED, KERNEL_DTYPES, arch

logger = logging.getLogger("fusedckpt")

# read once: the variant of every layer that has it, unless a call names one
_PREFERRED = os.environ.get("FUSEDCKPT_KERNEL") or None
if _PREFERRED not in (None, "split", "hybrid", "fused"):
    raise ValueError(f"FUSEDCKPT_KERNEL must be one of split, hybrid, fused, got {_PREFERRED!r}")

DISABLED = os.environ.get("FUSEDCKPT_DISABLE", "0") not in ("", "0")

_forced: str | None = None


def path_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton", "interpreter" or "aten" for tensors of this device and dtype."""
    if _forced == "aten" or not HAS_TRITON or dtype not in KERNEL_DTYPES:
        return "aten"
    if IS_INTERPRETED:
        return "interpreter" if device.type == "cpu" else "aten"
    # meta tensors get here only where launches are compiled without running
    return "triton" if device.type == "cuda" or _forced == "triton" else "aten"


def is_aten(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether tensors of these sizes run on ATen, as all without elements do."""
    return 0 in sizes or path_of(device, dtype) == "aten"


@contextmanager
def forced_path(path: str | None) -> Iterator[None]:
    """Override the path inside, for tests: "aten" anywhere, "triton" to compile on meta tensors."""
    global _forced
    before = _forced
    _forced = path
    try:
        yield
    finally:
        _forced = before


class Meta(NamedTuple):
    """The properties of a dense tensor that decide a call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Context(NamedTuple):
    """The state that decides a call besides its options and tensors."""

    # grad mode
    grad: bool
    # autocast's dtype for the first tensor's device, None where it is off
    autocast: torch.dtype | None
    # the level of `saving`
    level: str | None
    # whether the eager reference alone may run
    reference_only: bool
    # whether nothing traces or watches ops
    is_unwatched: bool
    # the path and the variant that are forced, or None
    forced: tuple[str | None, ...]

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that nn.Linear multiplies an input of `dtype` in."""
        return dtype if self.autocast is None or dtype == torch.float64 else self.autocast


def variant_for(
    op: str,
    x: Tensor | Meta,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    kernel: str | None,
    fused: str,
) -> str:
    """Return the variant of a layer on tensors like x: "aten", "split", or `fused`.

    kernel: the call's choice. Next comes the environment's, then "split", or `fused` in the
    interpreter, so that tests run those kernels. The choice is logged at level DEBUG.
    """
    if is_aten(x.device, dtype, *sizes):
        return "aten"
    if kernel is None and _PREFERRED in ("split", fused):
        kernel = _PREFERRED
    kernel = kernel or (fused if IS_INTERPRETED else "split")
    logger.debug("%s %s %s on %s: %s", op, "x".join(map(str, sizes)), dtype, arch(), kernel)
    return kernel


def is_traced(x: Any) -> bool:
    """Whether the ops on x are written down, by torch.export, jit.trace, fx or make_fx.

    Not by torch.compile; before torch 2.13, strict export cannot be told from it.
    """
    if isinstance(x, Proxy) or private.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    # `is_recorded`, without a call
    if private.is_tracing():
        return True
    has_modes = private.num_dispatch_modes() or private.num_function_modes()
    return bool(has_modes) and get_proxy_mode() is not None


def is_recorded() -> bool:
    """Whether jit.trace or make_fx write down the ops of a call that no compiler traces."""
    if private.is_tracing():
        return True
    # make_fx pushes a mode of either kind; its own look-up takes six calls
    has_modes = private.num_dispatch_modes() or private.num_function_modes()
    return bool(has_modes) and get_proxy_mode() is not None


# torch's own classes that take any op: those of tracing, and of a result that a collective fills
_TRANSPARENT = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")
_OVERRIDES = ("__torch_function__", "__torch_dispatch__")


def is_plain(kind: type[Tensor]) -> bool:
    """Whether a tensor class overrides no op."""
    if kind is Tensor or kind is nn.Parameter or kind.__name__ in _TRANSPARENT:
        return True
    return all(getattr(kind, hook) is getattr(nn.Parameter, hook) for hook in _OVERRIDES)


def are_plain(*values: Any) -> bool:
    """Whether the kernels accept these tensors: dense, and of no class that overrides ops.

    A value that is not a tensor passes: a later check refuses it by name.
    """
    if private.num_function_modes() and tracker.sees_alone():
        return tracker.outside_mode(are_plain, *values)
    for value in values:  # a generator costs more
        if isinstance(value, Tensor):
            kind = type(value)
            if not (kind is nn.Parameter or kind is Tensor or is_plain(kind)):
                phases.OF_OTHERS.note(kind)
                return False
            if value.layout != torch.strided or value.is_nested:
                return False
    # without a call of Python's outside of hooks
    is_used = phases.OF_OTHERS.is_used and private.top_hooks() is not None
    return not (is_used and phases.OF_OTHERS.is_recomputed())


def has_hooks(*layers: nn.Module) -> bool:
    """Whether other code needs layers' own calls: by a hook, or a forward that replaced theirs."""
    # usually there are no global hooks, and this test calls nothing
    has_global_hooks = not torch.compiler.is_compiling() and any(private.GLOBAL_HOOKS)
    if has_global_hooks and private.has_foreign_global_hooks():
        return True
    for layer in layers:
        hooks = layer._forward_hooks or layer._forward_pre_hooks
        if hooks or layer._backward_hooks or layer._backward_pre_hooks or "forward" in vars(layer):
            return True
    return False


def own_forward(kind: type[nn.Module]) -> Any:
    """Return a class's forward, None where code outside of the class's file replaced it."""
    forward: Any = kind.forward
    is_own = getattr(forward, "__globals__", {}).get("__name__") == kind.__module__
    return forward if is_own else None


def own_function(namespace: Any, name: str) -> Any:
    """Return a function of torch's, None where other code replaced it."""
    function = getattr(namespace, name)
    is_own = (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"
    return function if is_own else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this device, None where it is off."""
    # meta has none to ask; whether a device has, torch.compile of torch 2.11 cannot
    is_on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def cast_by(device: torch.device, to: torch.dtype | None) -> AbstractContextManager[Any]:
    """Let autocast cast to a dtype, or, for None, not at all."""
    if autocast_dtype(device) == to:
        return nullcontext()
    return torch.autocast(device.type, to, enabled=to is not None)


class Operand(NamedTuple):
    """A tensor of a call."""

    # the argument, in errors
    name: str
    # whether it may be None
    is_optional: bool = False


class Decided(Protocol):
    """A record of options, from which `decide` makes calls; `blocks/layer.py` has the story."""

    @property
    def name(self) -> str:
        """Return the function or class, for errors."""
        ...

    @property
    def is_module(self) -> bool:
        """Whether a module asks: it may run its own forward instead."""
        ...

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the tensors of a call, x first."""
        ...

    def check(self, override: str | None, /) -> Any:
        """Return the options checked, the save level among them; raise for a wrong one."""
        ...

    def make_call(self, context: Context, /, *metas: Any) -> Any:
        """Return the call; None to run the reference, OWN_FORWARD for that of the module."""
        ...


# returned by `make_call` where a module calls the forward of its own class, and its children's
OWN_FORWARD = "own forward"


class Decision(NamedTuple):
    """The decision for a call: the checked call and its phase; None to run the eager reference.

    runs_own_forward: whether a module runs the forward of its own class instead, as for tensors of
    other classes and where a program is recorded.
    """

    call: Any = None
    phase: SavePhase | None = None
    runs_own_forward: bool = False


def decide(options: Decided, *tensors: Any) -> Decision:
    """Return the decision for a call, which is remembered for equal options, tensors and state."""
    if is_traced(tensors[0]):
        return Decision(runs_own_forward=options.is_module)
    if torch.compiler.is_compiling():
        return _decided_anew(options, tensors, reference_only=True)
    grad = torch.is_grad_enabled()
    # no hooks on saved tensors, and no backward that may be a checkpoint's: no phase to look for
    is_free = private.SEES_HOOKS and private.top_hooks() is None and private.current_node() is None
    phase = phases.phase_of_layer() if grad and not is_free else None
    if phase is not None and phases.OF_OTHERS.is_used and phases.OF_OTHERS.is_recomputed():
        return Decision(None, phase, options.is_module)
    num_function_modes = private.num_function_modes()
    reference_only = (
        DISABLED
        or private.are_transforms_active()
        or private.forward_level() >= 0
        or (num_function_modes > 0 and tracker.has_foreign_modes())
    )
    # quicker than appending
    metas: list[Any] = [None] * len(tensors)
    for place, t in enumerate(tensors):
        if t is None:
            continue
        if not (
            (type(t) is Tensor or type(t) is nn.Parameter)
            and t.layout is torch.strided
            and not (t.is_nested or (grad and t.is_inference()))
        ):
            return _decided_anew(options, tensors, reference_only)._replace(phase=phase)
        metas[place] = t.shape, t.dtype, t.device
    has_modes = private.num_dispatch_modes() or (num_function_modes and tracker.num_other_modes())
    context = (
        grad,
        autocast_dtype(tensors[0].device) if metas[0] and private.is_any_autocast_on() else None,
        levels.override.level,
        reference_only,
        not (has_modes or private.is_profiled()),
        (_forced, _PREFERRED),
    )
    try:
        decision = _remembered(context, tuple(metas), type(options), *options)  # type: ignore[misc]  # a NamedTuple
    except TypeError:
        # an option that cannot be hashed is invalid: this raises
        decision = _decided_anew(options, tensors, reference_only)
    return decision if phase is None else decision._replace(phase=phase)


# by types too: True equals 1
@lru_cache(maxsize=8192, typed=True)
def _remembered(state: tuple[Any, ...], metas: tuple[Any, ...], kind: Any, *options: Any) -> Any:
    x, *others = [None if meta is None else Meta(*meta) for meta in metas]
    context = Context(*state)
    if x is not None and x.device.type == "meta":
        # only its ops matter
        context = context._replace(is_unwatched=False)
    # promote_types is an op, and a checkpoint that compares its recompute with its forward sees ops
    with private.disable_current_modes():
        return _checked(kind(*options), context, (x, *others))


def _checked(options: Any, context: Context, metas: Any) -> Decision:
    call = options.make_call(context, *metas)
    return Decision(runs_own_forward=True) if call is OWN_FORWARD else Decision(call)


def _decided_anew(options: Any, tensors: tuple[Any, ...], reference_only: bool) -> Decision:
    level = levels.override.level
    runs_own_forward = options.is_module and not are_plain(*tensors)
    pairs = zip(options.operands, tensors, strict=True)
    by_name = {operand.name: t for operand, t in pairs if t is not None}
    if runs_own_forward or not takes_all(options.name, by_name):
        options.check(level)
        return Decision(runs_own_forward=runs_own_forward)
    autocast = autocast_dtype(tensors[0].device) if tensors[0] is not None else None
    grad = torch.is_grad_enabled()
    context = Context(
        grad, autocast, level, reference_only=reference_only, is_unwatched=False, forced=()
    )
    metas = [None if t is None else Meta(t.shape, t.dtype, t.device) for t in tensors]
    return _checked(options, context, metas)


def takes_all(name: str, tensors: dict[str, Any]) -> bool:
    """Whether the kernels take a call's tensors; raise for those that eager refuses too."""
    # each may raise
    plain = False not in [takes(name, key, t) for key, t in tensors.items()]
    if not plain or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return plain
    return not any(t.is_inference() for t in tensors.values())


# classes of torch's with parts that a function could be called with
_PARTED = ("DTensor", "NestedTensor")


def takes(name: str, key: str, value: Any) -> bool:
    """Whether the kernels take a tensor; raise for one that eager refuses too."""
    if not isinstance(value, Tensor):
        arguments.wrong_type(name, key, "a tensor", value)
    if not is_plain(type(value)):
        phases.OF_OTHERS.note(type(value))
        kind = type(value).__name__
        if kind in _PARTED:
            raise TypeError(
                f"{name}: {key} must be a dense tensor, got a {kind}: pass its local tensor, or "
                "call the module, which then runs in eager"
            )
        return False
    if value.layout != torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(
            f"{name}: {key} must be a dense tensor, got {layout}: pass a padded or dense copy"
        )
    return True
