"""Which module is a norm that keeps more than it needs, and by which rule it computes.

torch's own norms, and subclasses that inherit their forward, are known. Any other module with an
epsilon and at most one vector of weights is run on random numbers: it is an RMSNorm if one of the
rules of `functional.rms_norm` gives the same bits, in the dtypes where it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedckpt import parity, reference
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.swapped import FusedRMSNorm, NormPlan, Swap, subclass

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32, torch.float64)
# Llama's and Gemma's first: torch's differs from the third only under autocast on a GPU
_RULES = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"))
# of elements that may differ by a rounding: a rule that rounds elsewhere differs in a tenth of them
_STRAYS = 1 / 50
_ELEMENTS = 4096


def norm_swap(module: nn.Module) -> Swap | str | None:
    """Return how a norm is swapped, the reason why it cannot be, or None for what is no norm."""
    if isinstance(module, (RMSNorm, LayerNorm, FusedRMSNorm)):
        return None
    for original, ours, attributes in (
        (nn.RMSNorm, RMSNorm, {"offset": 0.0, "cast": "torch"}),
        (nn.LayerNorm, LayerNorm, {}),
    ):
        if isinstance(module, original) and type(module).forward is original.forward:
            return _of_torch(module, original, ours, attributes)
    found = _of_any_class(module)
    if found is None and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
        return f"{type(module).__name__} is a subclass of torch's with a forward of its own"
    return found


def _of_torch(
    module: Any, original: type[nn.Module], ours: type[nn.Module], attributes: dict[str, Any]
) -> Swap | str:
    kind = type(module)
    if parametrize.is_parametrized(module):
        return f"{kind.__name__}: a parametrization makes its weights"
    change = f"{kind.__name__} -> {ours.__name__}"
    to = ours if kind is original else subclass(ours, kind)
    if kind is original:
        change = f"nn.{change}"
    return Swap("norm", change, to, attributes, tuple(module.normalized_shape))


def _of_any_class(module: nn.Module) -> Swap | str | None:
    eps = next((n for n in _EPSILONS if isinstance(getattr(module, n, None), float)), None)
    weights = dict(module.named_parameters(recurse=False))
    others = [*module.children(), *module.buffers(recurse=False)]
    if eps is None or others or len(weights) > 1 or any(w.dim() != 1 for w in weights.values()):
        return None
    if not parity.takes_one(module):
        return None
    name, weight = next(iter(weights.items()), (None, None))
    width = 64 if weight is None else weight.shape[0]
    if width == 0:
        return None
    plan = _plan(module, name, eps, width)
    kind = type(module).__name__
    if plan is None:
        # without weights it need not be a norm at all
        return f"{kind} is no RMSNorm of a known rule" if weight is not None else None
    own = torch.float32 if weight is None else weight.dtype
    if (own, own) not in plan.dtypes:
        return f"{kind} is an RMSNorm of a known rule, but computes {own} otherwise"
    rule = f"{plan.cast} cast" + (f", offset {plan.offset:g}" if plan.offset else "")
    to = subclass(FusedRMSNorm, type(module))
    attributes = {"_fusedckpt_plan": plan}
    return Swap("norm", f"{kind} -> rms_norm ({rule})", to, attributes, (width,))


def _plan(module: nn.Module, name: str | None, eps: str, width: int) -> NormPlan | None:
    """Find the rule that gives the module's bits in half precision and in float32."""
    draws = _Draws(module, name, width)
    expected = {pair: draws.run(pair) for pair in draws.pairs}
    code = getattr(type(module).forward, "__code__", None)
    calls_torch = code is not None and "rms_norm" in code.co_names
    rules = ((0.0, "torch"), *_RULES) if calls_torch else _RULES
    best: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    found = None
    for offset, cast in rules:
        if offset and name is None:
            continue
        plan = NormPlan(name, eps, offset, cast, ())
        proven = tuple(
            pair
            for pair, y in expected.items()
            if y is not None and _same(draws.twin(plan, getattr(module, eps), pair), y)
        )
        if {(d, d) for d in (*_HALF, torch.float32)} <= set(proven) and len(proven) > len(best):
            best, found = proven, plan._replace(dtypes=proven)
    return found


class _Draws:
    """A norm's input and weight, and what it makes of them in any pair of dtypes."""

    def __init__(self, module: nn.Module, name: str | None, width: int):
        draw = parity.Draw(module, (width,), rows=max(6, _ELEMENTS // width // 2 * 2))
        self.module = module
        self.x = draw.x
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0
        self.weight = None if name is None else next(iter(draw.values.values()))
        self.key = None if name is None else next(iter(draw.values))
        both = [(x, w) for x in _DTYPES for w in _DTYPES]
        self.pairs = [(d, d) for d in _DTYPES] if self.weight is None else both

    def run(self, pair: tuple[torch.dtype, torch.dtype]) -> Tensor | None:
        """Return what the module computes, None where it cannot."""
        values = {} if self.weight is None else {self.key: self.weight.to(pair[1])}
        clone = parity.replica(self.module, values)  # type: ignore[arg-type]  # a key where a weight is
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            try:
                return parity.call(clone, self.x.to(pair[0]))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def twin(self, plan: NormPlan, eps: float, pair: tuple[torch.dtype, torch.dtype]) -> Tensor:
        """Return what a rule computes."""
        x = self.x.to(pair[0])
        weight = None if self.weight is None else self.weight.to(pair[1])
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            return reference.rms_norm(
                x, x.shape[-1:], weight, eps, offset=plan.offset, cast=plan.cast
            )


def _same(found: Tensor, expected: Any) -> bool:
    """Whether two results are equal: in half precision but for stray roundings."""
    if not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype:
        return False
    if found.dtype in _HALF:
        return (found != expected).double().mean().item() <= _STRAYS
    tol = 8 * torch.finfo(found.dtype).eps
    return torch.allclose(found, expected, rtol=tol, atol=tol)
