"""Bytes that a whole model saves for backward, before and after `fuse`: measured on meta tensors.

Copies of the model run once, on inputs guessed from its forward: token ids, images, or rows of its
first weight's width. Attention counts as fused, as on a GPU. Where the copy cannot run, nothing is
said: `fusedckpt.report` measures any model on its own inputs.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from fusedckpt.fusing.held import MARK
from fusedckpt.fusing.replica import Path, replica, undisturbed
from fusedckpt.memory import saved_tensors

_TOKENS = 64
_LARGEST = 5
_CONTAINERS = (list, dict, set)
# by a part of a class's name: how its bytes go
_REMEDIES = (
    ("attention", "fusedckpt.checkpoint of the layer recomputes them"),
    ("norm", "the residual stream: fusedckpt.checkpoint saves it once for each segment"),
    ("dropout", "masks: a rate of 0 saves none"),
    ("forcausallm", "logits: head=True computes the loss without them"),
)


class Left(NamedTuple):
    """Modules that save: their names, with * for numbers of layers, class, and bytes per token."""

    name: str
    kind: str
    saved: float


class Whole(NamedTuple):
    """Bytes per token that a model saves before and after, and the modules that save most now."""

    before: float
    after: float
    left: tuple[Left, ...]

    def lines(self, unfused: Collection[str]) -> Iterator[str]:
        """Yield the first lines of a report; unfused: the classes that it names below as left."""
        gone = 1 - self.after / self.before if self.before else 0.0
        sizes = f"{self.before:,.0f} -> {self.after:,.0f}"
        yield f"the model saves {sizes} bytes per token, {gone:.0%} gone"
        for name, kind, saved in self.left:
            found = (remedy for part, remedy in _REMEDIES if part in kind.lower())
            remedy = next(found, "fusedckpt.checkpoint recomputes them")
            remedy = f"left below says why; {remedy}" if kind in unfused else remedy
            yield f"  {saved:10,.0f} {name or 'root'} ({kind}): {remedy}"


def whole(model: nn.Module) -> Whole | None:
    """Return the bytes a fused model saves, and saved before; None where its copy cannot run."""
    inputs = _inputs(model)
    if inputs is None:
        return None
    found = []
    with undisturbed("meta"):
        for is_fused in (False, True):
            try:
                found.append(_saved(model, inputs, is_fused))
            except Exception:  # arbitrary code of others, on a device that it may not know
                return None
    (before, _), (after, owners) = found
    if not after:
        return None
    kinds = {name: _kind(module).__name__ for name, module in model.named_modules()}
    sums: Counter[tuple[str, str]] = Counter()
    for name, nbytes in owners.items():
        sums[re.sub(r"\b\d+\b", "*", name), kinds.get(name, "")] += nbytes
    left = [Left(*key, nbytes / _TOKENS) for key, nbytes in sums.most_common(_LARGEST)]
    return Whole(before / _TOKENS, after / _TOKENS, tuple(left))


def _inputs(model: nn.Module) -> Callable[[], dict[str, Any]] | None:
    try:
        names = [*inspect.signature(model.forward).parameters]
    except (TypeError, ValueError):
        return None
    weight = next((p for p in model.parameters() if p.dim() >= 2), None)
    if not names or weight is None:
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    first = next((m for m in model.modules() if m._parameters), None)
    if "input_ids" in names or isinstance(first, nn.Embedding):
        name = "input_ids" if "input_ids" in names else names[0]
        given = [name, *(["labels"] if "labels" in names else [])]
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        return lambda: {**dict.fromkeys(given, ids), **more}
    shape = (1, _TOKENS, weight.shape[-1])
    size = getattr(getattr(model, "config", None), "image_size", None)
    if "pixel_values" in names and isinstance(size, int):
        names, shape = ["pixel_values"], (1, 3, size, size)
    return lambda: {names[0]: torch.empty(shape, dtype=dtype, device="meta")}


def _kind(module: nn.Module) -> type[nn.Module]:
    return module.__dict__[MARK].kind if MARK in module.__dict__ else type(module)


def _saved(
    model: nn.Module, inputs: Callable[[], dict[str, Any]], is_fused: bool
) -> tuple[int, Counter[str]]:
    """Return the bytes that a copy saves, and those of every module, by its name."""
    made: dict[int, Tensor] = {}

    def parameter(p: Tensor, path: Path) -> Tensor:
        like = torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.requires_grad)
        return made.setdefault(id(p), like)

    def enter(part: nn.Module, path: Path) -> tuple[type, dict[str, Any]]:
        own = {n: copy.copy(v) for n, v in vars(part).items() if type(v) in _CONTAINERS}
        own = {n: v for n, v in own.items() if not n.startswith("_")}
        buffers = {n: None if b is None else b.to("meta") for n, b in part._buffers.items()}
        return type(part) if is_fused else _kind(part), {**own, "_buffers": buffers}

    clone = replica(model, parameter, training=True, enter=enter)
    names = {id(module): name for name, module in clone.named_modules()}
    inside = [""]
    counted = saved_tensors(owner=lambda: inside[-1])
    with _entered(names, inside), _Kernels(), counted as saved:
        y = clone(**inputs())
    owners: Counter[str] = Counter()
    for storage in saved.storages:
        owners[storage.owner] += storage.nbytes
    del y
    return saved.nbytes, owners


@contextmanager
def _entered(names: dict[int, str], inside: list[str]) -> Iterator[None]:
    """Keep the name of the running module of a copy at the end of a list."""
    hooks = [
        register_module_forward_pre_hook(
            lambda module, _: inside.append(names.get(id(module), inside[-1]))
        ),
        register_module_forward_hook(lambda *_: inside.__delitem__(-1), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# meta tensors have no values: transformers asks whether ids hold padding, and whether all sequences
# are whole
_ANSWERS = {Tensor.__contains__: False, Tensor.__bool__: True}
# of the library: a checkpoint that saves attention replaces the name for its time
_ATTENTION = F.scaled_dot_product_attention


class _Kernels(TorchFunctionMode):
    """Runs attention and grouped products that save what kernels on a device save."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            return _Kernel.apply(_attended, True, given["query"], given["key"], given["value"])
        if getattr(func, "__name__", "") == "_grouped_mm":
            # which refuses dtypes on meta tensors that it multiplies on a CPU
            return _Kernel.apply(_multiplied, False, *args[:2], kwargs.get("offs"))
        answer = _ANSWERS.get(func)
        return func(*args, **kwargs) if answer is None else answer


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a result of the right shape, transposed as kernels return it."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])
    return q.new_empty(shape).transpose(-2, -3)


def _multiplied(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return a result of the right shape, of [rows, in] and [experts, in, out]."""
    return x.new_empty(x.shape[0], weight.shape[-1])


class _Kernel(torch.autograd.Function):
    """An op that saves its operands, and its result if asked to; its backward is never run."""

    @staticmethod
    def forward(ctx: Any, make: Any, saves_result: bool, *given: Tensor) -> Tensor:
        """Return the result that `make` returns."""
        y = make(*given)
        ctx.save_for_backward(*given, *([y] if saves_result else []))
        return y
