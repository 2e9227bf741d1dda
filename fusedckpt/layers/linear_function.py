"""Linear with its activation, as torch ops and as an autograd Function that saves only x."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import backward, custom_op, dispatch, donation, levels
from fusedckpt.autograd.custom_op import BELOW, below
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.double_backward import stand_in, twin_gradients
from fusedckpt.autograd.lora import LoRA
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.versions import Versioned
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.products import Product, product_for
from fusedckpt.kernels.runtime import as_dense, as_matrix, as_vector, as_weight
from fusedckpt.layers import adapted, norm_sharing, validate
from fusedckpt.layers.adapted_call import AdaptedCall

LEVELS = ("inputs", "preact")


class Call(NamedTuple):
    """The decision for a call.

    dtypes: of x in the GEMMs, weight and bias. Where ops are not traced or watched: variant, that
    of the kernels, and product, the GEMM for the gradient of weight.
    """

    activation: str
    level: str
    kernel: str | None
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    variant: str | None = None
    product: Product = torch.mm


def variant_of(
    x: Tensor | Meta, activation: str, kernel: str | None, weight: tuple[int, ...]
) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    (n, k), rows = weight, math.prod(x.shape[:-1])
    # an identity has nothing to fuse
    kernel = "split" if activation == "identity" and kernel is None else kernel
    return dispatch.variant_for(
        "linear_act", x, x.dtype, (rows, n, k), kernel=kernel, fused="fused"
    )


def _forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    activation: str,
    keep_z: bool,
    kernel: str | None,
    variant: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return h, and the pre-activation z if keep_z."""
    with below(BELOW):
        x2, w, b = as_matrix(x), as_weight(w, x.dtype), as_vector(b, x.dtype)
        variant = variant or variant_of(x, activation, kernel, w.shape)
        h, z = kernels.linear_act(x2, w, b, activation, keep_z=keep_z, kernel=variant)
        if x2 is x:
            return h, z
        shape = (*x.shape[:-1], w.shape[0])
        return h.view(shape), None if z is None else z.view(shape)


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    h = x.new_empty((*x.shape[:-1], w.shape[0]))
    return h, torch.empty_like(h) if keep_z else custom_op.absent(x)


def _flops(x: Any, w: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(x) * w[0]


_forward_op = custom_op.define(
    "linear_act(Tensor x, Tensor w, Tensor? b, str activation, bool keep_z, str? kernel)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _flops,
)


def _backward(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    activation: str,
    needs: list[bool],
    kernel: str | None,
    call: Call | None = None,
    donates: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the wanted gradients of x, w and b; `donates`: z may be overwritten."""
    variant, product = (None, torch.mm) if call is None else (call.variant, call.product)
    with below(BELOW):
        x2, z = None if x is None else as_matrix(x), None if z is None else as_dense(z)
        w, b = None if w is None else as_weight(w, dy.dtype), as_vector(b, dy.dtype)
        variant = variant or variant_of(dy, activation, kernel, (1, 1) if w is None else w.shape)
        rows, dx, dw = as_matrix(dy), None, None
        dz, db = kernels.linear_act_dz(
            rows,
            x2,
            w,
            b,
            z=z,
            activation=activation,
            needs_db=needs[2],
            kernel=variant,
            donates=donates,
        )
        if needs[0] and w is not None:
            dx = torch.mm(dz, w)
            dx = dx if rows is dy else dx.view(*dy.shape[:-1], w.shape[1])
        if needs[1] and x2 is not None:
            dw = product(dz.t(), x2)
        return dx, dw, db


def _backward_fake(
    dy: Tensor, x: Any, w: Any, b: Any, z: Any, activation: str, needs: list[bool], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    n = dy.shape[-1]
    wide = torch.promote_types(dy.dtype, torch.float32)
    absent = custom_op.absent(dy)
    return (
        dy.new_empty((*dy.shape[:-1], w.shape[1])) if needs[0] and w is not None else absent,
        dy.new_empty((n, x.shape[-1])) if needs[1] and x is not None else absent,
        dy.new_empty((n,), dtype=wide) if needs[2] else absent,
    )


def _backward_flops(
    dy: Any, x: Any, w: Any, b: Any, z: Any, activation: str, needs: list[bool], *_: Any, **__: Any
) -> int:
    recomputes = z is None and activation != "identity"
    k = x[-1] if x is not None else w[1] if w is not None else 0
    return 2 * math.prod(dy) * k * (recomputes + needs[0] + needs[1])


_backward_ops = custom_op.define_donating(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? w, Tensor? b, Tensor{}? z, str activation,"
    " bool[] needs, str? kernel) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _backward_flops,
)


class LinearOptions(NamedTuple):
    """The options of a call."""

    name: str
    activation: str | None
    save: str | None
    default: str = "inputs"
    kernel: str | None = None
    is_module: bool = False
    names: tuple[str, ...] = ("x", "weight", "bias?")

    def chosen(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse those and kernels that there are not."""
        level = levels.chosen(self.name, (self.save, override, self.default), LEVELS)
        activation = validate.activation(self.name, self.activation)
        validate.kernel(self.name, self.kernel, "fused")
        return activation, level

    def settle(self, around: Around, x: Any, weight: Any, bias: Any) -> Call | None:
        """Refuse what F.linear would refuse."""
        name = self.name
        activation, level = self.chosen(around.level)
        validate.tensors(name, self.names, (x, weight, bias))
        validate.linear(name, x.shape, (weight, bias))
        dtype = validate.multiplied(name, around, x.dtype, {"weight": weight, "bias": bias})
        validate.runs(name, self.kernel, "fused", x, dtype=dtype)
        if around.twin:
            return None
        read, level = x._replace(dtype=dtype), level if around.grad else "inputs"
        dtypes = dtype, weight.dtype, None if bias is None else bias.dtype
        call = Call(activation, level, self.kernel, dtypes)
        if not around.direct:
            return call
        variant = variant_of(read, activation, self.kernel, weight.shape)
        return call._replace(variant=variant, product=product_for(x.device, dtype, weight.dtype))

    def adapted(self, around: Around, x: Any, _: Any, linears: Any) -> AdaptedCall | None:
        """Settle a call with adapters by what these are beside."""
        # what is direct has a kernel chosen for it, which adapters have no use for
        call = self.settle(around._replace(direct=False), x, *linears[0])
        if call is None:
            return None
        activation = None if call.activation == "identity" else call.activation
        return AdaptedCall(call.dtypes[0], activation=activation, level=call.level)


class _LinearAct(torch.autograd.Function):
    """Keeps x, and z at level preact; each tensor only where a gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, call: Call, phase: Phase | None
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        has_z, keeps, runs = call.activation != "identity", call.level, call.level
        phase = phase if any(ctx.needs_input_grad) else None
        if phase is not None:
            keeps, runs = phase.levels or (keeps, runs)
        recomputes = has_z and keeps == "inputs"
        given = (
            x if recomputes or needs_dw else None,
            w if recomputes or needs_dx else None,
            b if recomputes else None,
        )
        like = ((*x.shape[:-1], w.shape[0]), x.dtype) if has_z and phase is not None else None
        if phase is not None:
            phase.enter(given, (like,))
        keep_z = has_z and runs == "preact"
        args = (x, w, b, call.activation, keep_z, call.kernel)
        h, z = (
            _forward(*args, call.variant)
            if call.variant is not None
            else _forward_op.overload(*args)
        )
        z = z if keep_z else None
        if phase is None:
            ctx.save_for_backward(*given, z)
            ctx.recall, ctx.owns_extras = None, True
        else:
            phase.save(ctx, "linear_act", given, (z,), (like,))
        ctx.set_materialize_grads(False)
        ctx.call = call
        # gradients do not read it, only theirs do, which a compiled graph has none of
        is_unread = has_z and not recomputes and not torch.compiler.is_compiling()
        ctx.unread = Versioned(b) if is_unread else None
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        begun = backward.begin(ctx, dy)
        if begun is None:
            return (None,) * 5
        assert dy is not None
        (*needs, _, _), (x, w, b, z), direct = begun
        call: Call = ctx.call
        if torch.is_grad_enabled():
            return (*_double_backward(ctx, x, w, b, dy=dy, needs=needs), None, None)
        args = (dy, x, w, b, z, call.activation, needs, call.kernel)
        if z is None and direct:
            found: Any = _backward(*args, call)
        else:
            ops, settled = _backward_ops, call if direct else None
            found = donation.run(ctx, ops, (z,), args, settled=settled)
        dx, dw, db = found
        # autograd casts them to the dtypes of what they are of
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            db if needs[2] else None,
            None,
            None,
        )


def _double_backward(
    ctx: Any, x: Any, w: Any, b: Any, dy: Any, needs: list[bool]
) -> list[Tensor | None]:
    call: Call = ctx.call
    _, w_dtype, b_dtype = call.dtypes
    if call.activation != "identity" and (x is None or w is None):
        raise RuntimeError(
            "linear_act: create_graph=True needs x and weight, which save='preact' does not keep "
            "where one of them is frozen: use save='inputs'"
        )
    # what an identity did not keep, its gradients do not depend on
    if x is None:
        shape = (*dy.shape[:-1], w.shape[1] if w is not None else 0)
        x = stand_in(shape, dy.dtype, dy.device)
    if w is None:
        w = stand_in((dy.shape[-1], x.shape[-1]), w_dtype, dy.device)
    if ctx.unread is not None:
        (b,) = ctx.unread.read()
    elif b is None and b_dtype is not None:
        b = stand_in(dy.shape[-1:], b_dtype, dy.device)

    def twin(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else b.to(x.dtype)
        return reference.linear_act(x, w.to(x.dtype), b, call.activation)

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(twin, (x, w, b), needs, (dy,))


def run(options: LinearOptions, x: Tensor, weight: Tensor | LoRA, bias: Tensor | None) -> Tensor:
    """Run the Function for a call, or its eager reference."""
    call, phase = dispatch.settled(options, x, weight, bias)
    if call is None:
        y = adapted.run(options, ("weight",), x, (None, None), linears=[(weight, bias)])
        return reference.linear_act(x, weight, bias, options.activation) if y is None else y
    read = x.to(call.dtypes[0])
    if phase is None and not torch.compiler.is_compiling() and hasattr(x.grad_fn, "source"):
        return norm_sharing.apply(_LinearAct, x, read, weight, bias, call, phase)
    return _LinearAct.apply(read, weight, bias, call, phase)
