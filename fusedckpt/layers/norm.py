"""RMSNorm and LayerNorm that save only x: backward recomputes mean and rstd from it.

The residual-add forms save the new residual, which is one of their outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch, private, tracker
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.blocks import compiled, reader, validate
from fusedckpt.blocks.builder import Builder
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.steps import Add
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import norm as norm_triton
from fusedckpt.kernels import norm_aten
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import HALF, column_sums
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import NO_NOTES, NOTES, notes_of

Shape = int | Sequence[int]
# before, torch's rms_norm was not among the functions that autocast widens
_AUTOCASTS_RMS = torch.__version__ >= "2.12"
CASTS = ("torch", "llama", "gemma")
# F.rms_norm takes them
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
# of torch's norms
_RMS_FORWARD = dispatch.own_forward(nn.RMSNorm)
_LAYER_FORWARD = dispatch.own_forward(nn.LayerNorm)
# the functions that they call
_RMS_FUNCTION = dispatch.own_function(F, "rms_norm")
_LAYER_FUNCTION = dispatch.own_function(F, "layer_norm")


class NormSpec(NamedTuple):
    """The norm of a layer, over the last dimension of its input.

    `NormOptions` are the options of a norm that is called by itself; the kernels get a `NormRule`.
    """

    # "rms" or "layer"
    kind: str
    # [D] or None
    weight: Tensor | None = None
    # [D] or None, of a layer norm
    bias: Tensor | None = None
    # None for the default of F.rms_norm, or 1e-5 of a layer norm
    eps: float | None = None
    # added to the weight, as in `functional.rms_norm`
    offset: float = 0.0
    # where half precision is rounded, as in `functional.rms_norm`
    cast: str = "torch"


def split_norm(norm: Any) -> tuple[Any, tuple[type, ...], tuple[Any, ...]]:
    """Return a record without its tensors, the types in it, and these tensors."""
    if norm is None:
        return None, (), ()
    if not isinstance(norm, NormSpec):
        # refused
        return norm, (), (None, None)
    bare = norm._replace(weight=None, bias=None)
    return bare, tuple(map(type, bare)), (norm.weight, norm.bias)


def widens_norm(autocast: torch.dtype | None, device: torch.device, kind: str) -> bool:
    """Whether autocast runs a norm in float32: not on a CPU, and RMSNorm since torch 2.12."""
    return autocast is not None and device.type != "cpu" and (kind == "layer" or _AUTOCASTS_RMS)


def output_dtype(
    rule: NormRule | NormSpec, x: Meta, weight: Any, autocast: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a norm's result: its input's, but for Llama's cast and GPU autocast."""
    if rule.cast == "llama" and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    if rule.cast != "torch" or x.dtype == torch.float64:
        return x.dtype
    return torch.float32 if widens_norm(autocast, x.device, rule.kind) else x.dtype


def sums_dtype(x: Meta, weight: Any, bias: Any) -> torch.dtype:
    """Return the dtype of their gradients: the one that they share, or else at least float32."""
    dtypes = {t.dtype for t in (weight, bias) if t is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.promote_types(x.dtype, torch.float32)


def norm_rule_of(norm: NormSpec, dtype: torch.dtype) -> NormRule:
    """Return the constants of a checked record for inputs of `dtype`.

    eps None is the machine epsilon of an RMSNorm's statistics.
    """
    if norm.kind == "layer":
        return NormRule("layer", 1e-5 if norm.eps is None else float(norm.eps))
    eps = norm.eps
    if eps is None:
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return NormRule("rms", float(eps), float(norm.offset), norm.cast)


def check_norm(name: str, spec: NormSpec, prefix: str = "") -> None:
    """Refuse a norm that means nothing."""
    arguments.choice(name, f"{prefix}kind", spec.kind, ("rms", "layer"))
    if spec.eps is not None:
        arguments.number(name, f"{prefix}eps", spec.eps, 0)
    arguments.number(name, f"{prefix}offset", spec.offset)
    arguments.choice(name, f"{prefix}cast", spec.cast, CASTS)
    if spec.kind == "rms" and spec.bias is not None:
        raise ValueError(f"{name}: {prefix}bias must be None, as an RMSNorm has none")
    if spec.offset and spec.weight is None:
        raise ValueError(f"{name}: {prefix}offset={spec.offset} needs {prefix}weight, got none")
    if spec.kind == "layer" and (spec.offset or spec.cast != "torch"):
        raise ValueError(f"{name}: norm.offset and norm.cast are RMSNorm's, norm.kind is 'layer'")


def norm_dtype(
    name: str, x: Meta, spec: NormSpec, shape: tuple[int, ...], context: Context, prefix: str = ""
) -> torch.dtype:
    """Return the dtype of norm(x); refuse arguments that F.rms_norm or F.layer_norm would.

    spec: with metas in place of its tensors; shape: normalized_shape.
    """
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: x must end in normalized_shape {list(shape)}, got {list(x.shape)}"
        )
    by_name = {f"{prefix}weight": spec.weight, f"{prefix}bias": spec.bias}
    for key, value in by_name.items():
        validate.check_shape(name, key, value, *shape)
    param_dtypes = {value.dtype for value in by_name.values() if value is not None}
    # a CPU's F.layer_norm reads float32 parameters beside half precision, and autocast widens all
    fits_cpu = x.device.type == "cpu" and x.dtype in HALF and param_dtypes == {torch.float32}
    widens = widens_norm(context.autocast, x.device, "layer")
    is_cast = widens and torch.float64 not in (x.dtype, *param_dtypes)
    if spec.kind == "layer" and not (x.device.type == "meta" or is_cast or fits_cpu):
        validate.check_dtypes(name, context._replace(autocast=None), x.dtype, by_name)
    return output_dtype(spec, x, spec.weight, context.autocast)


def eager_norm(
    rule: NormRule | Any, x: Tensor, shape: int | Sequence[int], weight: Any, bias: Any = None
) -> Tensor:
    """Return x through the norm that a rule, or a record with its fields, describes.

    Half precision is rounded once, at the end, by "torch" and "gemma"; "llama" rounds the
    normalized x before the weight, and its result has the promoted dtype.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    eps = rule.eps
    if rule.kind == "layer":
        return F.layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
    if rule.cast == "torch":
        scale = weight + rule.offset if weight is not None and rule.offset else weight
        # on CUDA torch.compile passes a size that it left open to torch's op as an address
        return F.rms_norm(x, tuple(map(operator.index, shape)), scale, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    mean_square = wide.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
    xhat = wide * torch.rsqrt(mean_square + eps)
    if rule.cast == "llama":
        xhat = xhat.to(x.dtype)
        if weight is None:
            return xhat
        return (weight + rule.offset if rule.offset else weight) * xhat
    return (xhat if weight is None else xhat * (rule.offset + weight.to(wide.dtype))).to(x.dtype)


@dataclass(frozen=True)
class Norm(Op):
    """y = norm(x), or norm(x + residual) and the sum: see NormRule. Statistics are recomputed."""

    # which norm
    rule: NormRule
    # of y, None for that of x
    dtype: torch.dtype | None = None
    # the dtype of the gradients of weight and bias
    sums: torch.dtype | None = None
    # "aten" or "triton"
    kernel: str = "aten"
    # how many dimensions are normalized together
    num_dims: int = 1
    adds = is_joint = is_norm = True
    gradients = (("r0", ("r0", "p0")), ("p0", ("r0",)), ("p1", ()))

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y, and the sum where a residual is read."""
        x, residual = reads if len(reads) > 1 else (*reads, None)
        fn = norm_aten.norm if self.kernel == "aten" else norm_triton.norm
        return code.items(code.call(fn, x, residual, *params, self.rule, self.dtype), len(reads))

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write dx, added to a gradient of x that exists, and the parameters' gradients."""
        if grad.gives == ("p1",):
            return {"p1": code.call(column_sums, grad.dy)}
        slots = ("r0", "p0", "p1")
        needs = tuple([slot in grad.gives for slot in slots])
        fn = norm_aten.norm_grad if self.kernel == "aten" else norm_triton.norm_grad
        x = grad.reads["r0"]
        weight = grad.reads.get("p0")
        sums = None if code.adds else self.sums
        node = code.call(fn, grad.dy, grad.total, x, weight, self.rule, needs, sums)
        nodes = zip(slots, code.items(node, 3), strict=True)
        return {slot: part for slot, part in nodes if slot in grad.gives}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return norm(x) in torch's ops."""
        y = eager_norm(self.rule, reads[0], reads[0].shape[-self.num_dims :], *params)
        return y if self.dtype is None else y.to(self.dtype)


class NormOptions(NamedTuple):
    """The options of a norm."""

    # the function, for errors
    name: str
    # "rms" or "layer"
    kind: str
    # as it was given; checked by `make_call`
    normalized_shape: Any
    # None for the default
    eps: float | None
    # added to the weight
    offset: float = 0.0
    # where half precision is rounded
    cast: str = "torch"
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # whether a residual is added to x first; the sum is a result, too
    adds: bool = False
    # how x is kept for backward, None for as it is; a sum is, as the caller has it
    store: str | None = None
    # it has none
    linears = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        parameters = [Operand(key, is_optional=True) for key in ("weight", "bias")]
        return (Operand("x"), *([Operand("residual")] if self.adds else []), *parameters)

    def check(self, override: str | None, weight: Any = True) -> None:
        """Refuse options that mean nothing."""
        if self.kind == "layer":
            arguments.number(self.name, "eps", self.eps, 0)
        check_norm(self.name, self._spec(weight, None))

    def _spec(self, weight: Any, bias: Any) -> NormSpec:
        return NormSpec(self.kind, weight, bias, self.eps, self.offset, self.cast)

    def reference(self, x: Any, between: Sequence[Any], linears: Any = ()) -> Any:
        """Return the results by torch's own ops; between: a residual, weight and bias."""
        *residuals, weight, bias = between
        shape = self.normalized_shape
        if not dispatch.is_traced(x):
            # torch's own takes no numbers of numpy
            shape = validate.normalized_shape(self.name, shape)
        total = x + residuals[0] if residuals else x
        norm = partial(eager_norm, self, shape=shape, weight=weight, bias=bias)
        y = compiled.run_norm(norm, total)
        return (y, total) if residuals else y

    def make_call(self, context: Context, x: Any, *metas: Any) -> Any:
        """Refuse arguments that the eager norm would refuse."""
        *residuals, weight, bias = metas
        name = self.name
        spec = self._spec(weight, bias)
        self.check(context.level, weight)
        shape = validate.normalized_shape(name, self.normalized_shape)
        if self.is_module and self.kind == "rms" and getattr(x, "dtype", None) in COMPLEX:
            return dispatch.OWN_FORWARD
        validate.check_tensors(name, self.operands, (x, *metas))
        b = Builder(context, x.dtype)
        inputs = {"x": x}
        reads = "x"
        keeps = ()
        for residual in residuals:
            must = "must have the shape of x,"
            validate.check_shape(name, "residual", residual, *x.shape, must=must)
            inputs["residual"] = residual
            if x.dtype != residual.dtype:
                x = x._replace(dtype=torch.promote_types(x.dtype, residual.dtype))
            reads = b.add(Add(), "total", ("x", "residual"))
            keeps = (reads,)
        dtype = norm_dtype(name, x, spec, shape, context)
        if context.reference_only:
            return None
        kernel = kernel_of_norm(x, x.dtype)
        sums = sums_dtype(x, weight, bias)
        op = Norm(norm_rule_of(spec, x.dtype), dtype, sums, kernel, len(shape))
        b.norm(op, weight, bias, reads, out="y")
        return b.build(
            name,
            inputs,
            ["y", *keeps],
            {"saved_results": keeps, "num_dims": len(shape)},
            store=None if self.adds else self.store,
            may_round=not self.adds,
        )


def kernel_of_norm(x: Meta, dtype: torch.dtype) -> str:
    """Return which kernels normalize tensors like x."""
    return "aten" if dispatch.is_aten(x.device, dtype, *x.shape) else "triton"


def _remembered(shape: Shape) -> Shape:
    """Return a shape by which a decision may be remembered: True equals 1 in a tuple."""
    return list(shape) if isinstance(shape, tuple) and bool in map(type, shape) else shape


def _called(norm: nn.Module, options: NormOptions, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """Run a module's call; note the inputs for readers of its result, or why eager ran."""
    if private.num_function_modes() and tracker.sees_alone():
        return tracker.outside_mode(_called, norm, options, x, weight, bias)
    copies = norm.__dict__.get(NOTES, NO_NOTES).input_copies
    if copies is not None and copies.is_on:
        x = copies.input_of(x)
    y = run_layer(options, x, (weight, bias))
    if y is not None:
        return reader.note_norm(norm, y, weight, bias)
    if sharded.is_sharded(x):
        run = partial(_called, norm, options)
        y = sharded.on_rows(run, len(options.normalized_shape), x, weight, bias)
        if y is not None:
            return y
    is_complex = isinstance(x, Tensor) and x.is_complex()
    if is_complex or not dispatch.are_plain(x, weight, bias):
        fallbacks.note_fallback(norm, fallbacks.fallback_of(x, weight=weight, bias=bias))
    return options.reference(x, (weight, bias))


def is_patched(norm: nn.Module) -> bool:
    """Whether the class of a swapped norm, or torch, has got another forward since."""
    original = norm.__dict__.get(NOTES, NO_NOTES).original
    if original is None:
        return False
    forward = original.kind.forward
    if forward is _LAYER_FORWARD:
        return F.layer_norm is not _LAYER_FUNCTION
    return forward is not _RMS_FORWARD or F.rms_norm is not _RMS_FUNCTION


def _run_patched(norm: nn.Module, x: Tensor) -> Any:
    kind = notes_of(norm).original.kind
    is_own = kind.forward in (_RMS_FORWARD, _LAYER_FORWARD)
    changed = "the function of torch that it calls" if is_own else f"{kind.__name__}.forward"
    fallbacks.note_fallback(norm, NotFused("changed", changed))
    return kind.forward(norm, x)


def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return F.rms_norm(x, normalized_shape, weight + offset, eps), saving only x for backward.

    Args:
        x: [..., *normalized_shape], float32, bfloat16, float16 or float64; statistics are computed
            in float32 (float64 for float64).
        normalized_shape: sizes of the last dimensions, which are normalized together.
        weight: normalized_shape, of any floating dtype, or None.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype.
        offset: added to the weight in float32; Gemma stores w and scales by 1 + w.
        cast: where half precision is rounded. "torch" and "gemma" round once, at the end. "llama"
            rounds the normalized x before the weight, and returns the promoted dtype.

    Returns:
        The shape and dtype of x, but for `cast`; under GPU autocast the dtype of F.rms_norm.

    Raises:
        ValueError: invalid shapes, devices or options.
        TypeError: tensors are not dense or not floating point, or an argument has another type.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    shape = _remembered(normalized_shape)
    options = NormOptions("rms_norm", "rms", shape, eps, offset=offset, cast=cast)
    return run_layer(options, x, (weight, None))


def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm(x, normalized_shape, weight, bias, eps), saving only x for backward.

    Arguments, result and errors are those of `rms_norm`; bias has normalized_shape or is None.
    Dtypes that F.layer_norm rejects on x's device raise.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.
    """
    options = NormOptions("layer_norm", "layer", _remembered(normalized_shape), eps)
    return run_layer(options, x, (weight, bias))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual, ...) and x + residual in one pass.

    Saves only x + residual, the second output. x and residual must have the same shape; dtypes
    promote as in x + residual. For other arguments and errors see `rms_norm`.
    """
    name = "add_rms_norm"
    validate.check_tensor(name, "residual", residual)
    shape = _remembered(normalized_shape)
    options = NormOptions(name, "rms", shape, eps, offset=offset, cast=cast, adds=True)
    return run_layer(options, x, (residual, weight, None))


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return layer_norm(x + residual, ...) and x + residual in one pass.

    Saves only x + residual, the second output. x and residual must have the same shape; dtypes
    promote as in x + residual. For other arguments and errors see `layer_norm`.
    """
    name = "add_layer_norm"
    validate.check_tensor(name, "residual", residual)
    options = NormOptions(name, "layer", _remembered(normalized_shape), eps, adds=True)
    return run_layer(options, x, (residual, weight, bias))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that saves only its input, and recomputes the statistics in backward.

    Constructor, parameters and state_dict are nn.RMSNorm's; `offset` and `cast` are those of
    `functional.rms_norm`. The weight starts at 1 - offset, so that the scale starts at one.
    """

    # fused, but without a choice
    save_levels = ()

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        cast: str = "torch",
    ):
        affine = arguments.flag("RMSNorm", "elementwise_affine", elementwise_affine)
        spec = NormSpec("rms", affine or None, None, eps, offset, cast)  # type: ignore[arg-type]  # no weight yet
        check_norm("RMSNorm", spec)
        arguments.factory("RMSNorm", device, dtype)
        shape = validate.normalized_shape("RMSNorm", normalized_shape)
        self.offset = offset
        super().__init__(shape, eps, affine, device, dtype=dtype)  # type: ignore[arg-type]
        self.cast = cast

    def reset_parameters(self) -> None:
        """Set the scale, weight + offset, to one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., *normalized_shape]."""
        # without a call, as mostly it is torch's
        notes = self.__dict__.get(NOTES, NO_NOTES)
        original = notes.original
        if original is not None and (
            original.kind.forward is not _RMS_FORWARD or F.rms_norm is not _RMS_FUNCTION
        ):
            return _run_patched(self, x)
        # once: a parametrization computes it
        weight = self.weight
        shape = self.normalized_shape
        eps = self.eps
        offset = self.offset
        cast = self.cast
        store = notes.store
        options = NormOptions("rms_norm", "rms", shape, eps, offset, cast, True, store=store)
        return _called(self, options, x, weight, bias=None)

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def extra_repr(self) -> str:
        """Describe the layer as nn.RMSNorm does, with the options that differ from it."""
        offset = f", offset={self.offset}" if self.offset else ""
        cast = f", cast={self.cast}" if self.cast != "torch" else ""
        return super().extra_repr() + offset + cast


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that saves only its input, and recomputes the statistics in backward.

    Constructor, parameters and state_dict are nn.LayerNorm's; errors are those of
    `functional.layer_norm`.
    """

    save_levels = ()

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        shape = validate.normalized_shape("LayerNorm", normalized_shape)
        arguments.number("LayerNorm", "eps", eps, 0)
        affine = arguments.flag("LayerNorm", "elementwise_affine", elementwise_affine)
        bias = arguments.flag("LayerNorm", "bias", bias)
        arguments.factory("LayerNorm", device, dtype)
        super().__init__(shape, eps, affine, bias, device=device, dtype=dtype)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., *normalized_shape]."""
        # without a call, as mostly it is torch's
        notes = self.__dict__.get(NOTES, NO_NOTES)
        original = notes.original
        if original is not None and (
            original.kind.forward is not _LAYER_FORWARD or F.layer_norm is not _LAYER_FUNCTION
        ):
            return _run_patched(self, input)
        # once: a parametrization computes them
        weight = self.weight
        bias = self.bias
        shape = self.normalized_shape
        eps = self.eps
        store = notes.store
        options = NormOptions("layer_norm", "layer", shape, eps, is_module=True, store=store)
        return _called(self, options, input, weight, bias=bias)

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"
