"""RMSNorm with a gate, of mixers' results: saves only x and the gate.

It is one step, which reads x and the gate: norm(x) * act(gate), or norm(x * act(gate)). Backward
recomputes statistics, the normalized rows and the gate's activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.autograd.dispatch import Context, Operand
from fusedckpt.blocks import compiled, validate
from fusedckpt.blocks.builder import Builder
from fusedckpt.blocks.call import Layout
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import gated_norm as kernels
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.gated_norm import GatedNormRule
from fusedckpt.layers.norm import NormSpec, check_norm, sums_dtype

SLOTS = ("r0", "r1", "p0")


@dataclass(frozen=True)
class GatedNorm(Op):
    """y of x and a gate: see GatedNormRule. Statistics and the activation are recomputed.

    sums: the dtype of the weight's gradient; kernel: "aten" or "triton".
    """

    rule: GatedNormRule
    dtype: torch.dtype | None = None
    sums: torch.dtype | None = None
    kernel: str = "aten"
    is_joint = True
    gradients = (("r0", SLOTS), ("r1", SLOTS), ("p0", SLOTS))

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y."""
        fn = kernels.gated_norm_aten if self.kernel == "aten" else kernels.gated_norm
        return [code.call(fn, *reads, *params, self.rule, self.dtype)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradients of x, the gate and the weight."""
        needs = tuple([slot in grad.gives for slot in SLOTS])
        fn = kernels.gated_norm_grad_aten if self.kernel == "aten" else kernels.gated_norm_grad
        operands = grad.reads["r0"], grad.reads["r1"], grad.reads.get("p0")
        sums = None if code.adds else self.sums
        node = code.call(fn, grad.dy, *operands, self.rule, needs, sums)
        parts = zip(SLOTS, code.items(node, 3), strict=True)
        return {slot: part for slot, part in parts if slot in grad.gives}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return y in torch's ops."""
        return eager_gated_norm(self.rule, *reads, *params)


def eager_gated_norm(rule: GatedNormRule, x: Tensor, gate: Tensor, weight: Any) -> Tensor:
    """Return the norm of x with a gate, by torch's own ops."""
    wide = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    value = ACTIVATIONS[rule.activation].eager(gate.to(wide))
    row = x.to(wide)
    row = (row * value if rule.gates_first else row).unflatten(-1, (rule.groups, -1))
    xhat = (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + rule.eps)).flatten(-2)
    if rule.cast == "llama":
        xhat = xhat.to(x.dtype)
        scaled = xhat if weight is None else (weight + rule.offset) * xhat
    else:
        scaled = xhat if weight is None else xhat * (weight.to(wide) + rule.offset)
    y = scaled if rule.gates_first else scaled * value
    return y if rule.cast == "llama" and rule.gates_first else y.to(x.dtype)


class GatedNormOptions(NamedTuple):
    """The options of a norm with a gate; see `functional.gated_rms_norm`."""

    # one size, as it was given; checked by `make_call`, as are all options
    normalized_shape: Any
    # None for the default
    eps: Any
    # of the gate, by any of its names
    activation: Any
    # into how many groups a row is cut, each with statistics of its own
    groups: Any
    # whether the gate multiplies x before the norm, not after it
    gates_first: Any
    # added to the weight
    offset: Any
    # where half precision is rounded
    cast: Any
    # the function, in errors
    name: str = "gated_rms_norm"
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # the tensors of a call
    operands = (Operand("x"), Operand("gate"), Operand("weight", is_optional=True))
    # it has none
    linears = ()

    def check(self, override: str | None, weight: Any = True) -> str:
        """Return the activation; refuse options that mean nothing."""
        check_norm(self.name, NormSpec("rms", weight, None, self.eps, self.offset, self.cast))
        arguments.integer(self.name, "groups", self.groups, 1)
        arguments.flag(self.name, "gates_first", self.gates_first)
        return validate.activation(self.name, self.activation)

    def rule(self, dtype: torch.dtype, activation: str) -> GatedNormRule:
        """Return the constants of checked options for inputs of a dtype."""
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        return GatedNormRule(
            float(eps),
            activation,
            self.groups,
            bool(self.gates_first),
            offset=float(self.offset),
            cast=self.cast,
        )

    def reference(self, x: Any, between: Sequence[Any], linears: Any = ()) -> Tensor:
        """Return the result by torch's own ops; between: the gate and the weight."""
        gate, weight = between
        rule = self.rule(x.dtype, self.check(None, weight))
        return compiled.run_norm(partial(eager_gated_norm, rule, weight=weight), x, gate)

    def make_call(self, context: Context, *metas: Any) -> Any:
        """Refuse arguments that do not fit; return None where only eager may run."""
        x, gate, weight = metas
        name = self.name
        activation = self.check(context.level, weight)
        (width,) = self.sizes()
        validate.check_tensors(name, self.operands, (x, gate, weight))
        if not x.shape or x.shape[-1] != width:
            raise ValueError(f"{name}: x must end in [{width}], got {list(x.shape)}")
        validate.check_shape(name, "gate", gate, *x.shape, must="must have the shape of x,")
        validate.check_shape(name, "weight", weight, width)
        if context.reference_only:
            return None
        dtypes = (x.dtype,) if weight is None else (x.dtype, weight.dtype)
        widens = self.cast == "llama" and self.gates_first
        dtype = torch.promote_types(dtypes[0], dtypes[-1]) if widens else x.dtype
        paths = [dispatch.is_aten(x.device, t.dtype, *x.shape) for t in (x, gate)]
        kernel = "aten" if any(paths) or dtype == torch.float64 else "triton"
        rule = self.rule(x.dtype, activation)
        sums = sums_dtype(x, weight, None)
        builder = Builder(context, x.dtype)
        number = builder.param("weight", Layout(1), weight)
        y = builder.add(GatedNorm(rule, dtype, sums, kernel), "y", ("x", "gate"), (number,))
        return builder.build(name, {"x": x, "gate": gate}, [y], {})

    def sizes(self) -> tuple[int]:
        """Return the one size that is normalized; refuse others."""
        shape = validate.normalized_shape(self.name, self.normalized_shape)
        if len(shape) != 1:
            arguments.wrong_value(self.name, "normalized_shape", "one size", list(shape))
        if shape[0] % self.groups:
            problem = f"groups must divide normalized_shape, {shape[0]}, got {self.groups}"
            raise ValueError(f"{self.name}: {problem}")
        return shape


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    normalized_shape: int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    groups: int = 1,
    gates_first: bool = False,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return rms_norm(x) * act(gate), or rms_norm(x * act(gate)), saving only x and the gate.

        y = F.rms_norm(x, (normalized_shape,), weight, eps) * F.silu(gate)
        y = F.rms_norm(x * F.silu(gate), (normalized_shape,), weight, eps)  # gates_first

    All is computed in float32, float64 for float64, and rounded once.

    Args:
        x: [..., N], float32, bfloat16, float16 or float64.
        gate: [..., N], the shape of x, of any floating dtype.
        normalized_shape: N.
        weight: [N], of any floating dtype, or None.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype.
        activation: of the gate, see `functional.linear_act`.
        groups: how many groups of N / groups columns are normalized, each by itself.
        gates_first: whether x is multiplied by act(gate) before the norm, as in Mamba 2.
        offset: added to the weight.
        cast: "llama" rounds the normalized x to x's dtype before the weight; where the gate is
            first, the result has the promoted dtype then. "torch" and "gemma" round at the end.

    Returns:
        The shape and dtype of x, but for `cast`.

    Raises:
        ValueError: shapes that do not fit each other, or invalid options.
        TypeError: tensors are not dense or not floating point, or an argument has another type.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060 (Mamba 2's gated norm).
    """
    options = GatedNormOptions(
        normalized_shape, eps, activation, groups, gates_first, offset=offset, cast=cast
    )
    return run_layer(options, x, (gate, weight))


class GatedRMSNorm(nn.Module):
    """An RMSNorm with a gate that saves only x and the gate, 2 N elements a row.

    `functional.gated_rms_norm` as a module, with a weight [N] that starts at 1 - offset.
    """

    # fused, but without a choice
    save_levels = ()

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
        groups: int = 1,
        gates_first: bool = False,
        offset: float = 0.0,
        cast: str = "torch",
    ):
        super().__init__()
        name = "GatedRMSNorm"
        affine = arguments.flag(name, "elementwise_affine", elementwise_affine)
        arguments.factory(name, device, dtype)
        options = GatedNormOptions(
            normalized_shape,
            eps,
            activation,
            groups,
            gates_first,
            offset=offset,
            cast=cast,
            name=name,
            is_module=True,
        )
        options.check(None, affine or None)
        self.normalized_shape = options.sizes()
        self.options = options._replace(normalized_shape=self.normalized_shape)
        weight = torch.empty(self.normalized_shape, device=device, dtype=dtype) if affine else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale, weight + offset, to one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.options.offset)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize x [..., N] with a gate [..., N]."""
        tensors = gate, self.weight
        y = run_layer(self.options, x, tensors)
        return self.options.reference(x, tensors) if y is None else y

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def extra_repr(self) -> str:
        """Describe the options."""
        options = self.options
        order = "norm(x * act(gate))" if options.gates_first else "norm(x) * act(gate)"
        words = f"{self.normalized_shape[0]}, eps={options.eps}, groups={options.groups}"
        return f"{words}, {order}, activation={options.activation}, cast={options.cast}"
