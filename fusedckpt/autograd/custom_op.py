"""How a kernel becomes a torch op: schema, implementation, fake, FLOP formula, and a guard.

The ops are not differentiable; the autograd Functions over them are. A CPU implementation made of
ATen calls would be differentiable by accident, and hide a missing gradient formula, so an op called
with grad mode on and inputs that require grad raises.

Ops are there for what traces or watches them. Where nothing does, a Function calls the
implementation itself, which spares two ways through torch's dispatcher and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("fusedckpt", "DEF")

# what implementations run below: autograd, where a result that is a view of its own could not be
# written in place by the caller, and autocast, which would cast the GEMMs inside once more
with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowADInplaceOrView():
    BELOW = torch._C._dispatch_tls_local_exclude_set()
below: Callable[[Any], Any] = torch._C._ExcludeDispatchKeyGuard


class Op(NamedTuple):
    """An op, and its implementation for calls that nothing traces or watches.

    They take the same arguments. For a result that is not wanted, the implementation returns None,
    and the op an empty tensor, as it returns a fixed number of them.
    """

    overload: Callable[..., Any]
    direct: Callable[..., Any]


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
) -> Op:
    """Define `fusedckpt::<schema>` for every backend.

    `implementation` computes inside of `below(BELOW)`; `fake` takes the same arguments and returns
    empty tensors of the result's shape and dtype; `flops` takes the arguments with shapes in place
    of tensors and returns the GEMM FLOPs.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.fusedckpt, name).default

    def fixed(*args: Any) -> Any:
        like = next(arg for arg in args if isinstance(arg, Tensor))
        return tuple([absent(like) if found is None else found for found in implementation(*args)])

    def refuse(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in args
        ):
            raise RuntimeError(
                f"fusedckpt::{name} has no autograd formula: call fusedckpt.functional instead"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    _library.impl(name, fixed, "CompositeExplicitAutograd")
    _library.impl(name, refuse, "Autograd")
    torch.library.register_fake(f"fusedckpt::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.fusedckpt, name))(flops)
    return Op(overload, implementation)


def define_donating(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], flops: Any
) -> tuple[Op, Op]:
    """Define an op, and one that writes over the arguments whose type ends in {} in `schema`.

    The second is called <name>_donating and calls `implementation` with `donates=True`. Neither
    counts the arguments' versions up: `donation.run` does, before it calls the second.
    """
    name = schema[: schema.index("(")]
    marks = (f"({letter}!)" for letter in "ab")
    written = re.sub(re.escape("{}"), lambda _: next(marks), schema)
    return (
        define(schema.replace("{}", ""), implementation, fake, flops),
        define(
            written.replace(name, f"{name}_donating", 1),
            partial(implementation, donates=True),
            fake,
            flops,
        ),
    )


def absent(x: Tensor) -> Tensor:
    """Stand in for a result that is not wanted, since an op returns a fixed number of tensors."""
    return x.new_empty(0)
