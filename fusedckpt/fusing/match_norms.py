"""Which module is a norm that keeps more than it needs, and by which rule it computes.

torch's own norms, and subclasses that inherit their forward, are known. Any other module with at
most two vectors of weights is recorded: it is a LayerNorm if its forward is one layer_norm of its
input. With at most one vector it is run on random numbers: it is an RMSNorm if one of the rules of
`functional.rms_norm` gives the same bits, in the dtypes where it does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fusedckpt import reference
from fusedckpt.fusing import parity
from fusedckpt.fusing.held import Held
from fusedckpt.fusing.recording import Recording, record
from fusedckpt.fusing.swapped import FusedRMSNorm, NormPlan, Swap, subclass
from fusedckpt.layers.norm import LayerNorm, RMSNorm

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32, torch.float64)
# Llama's and Gemma's first: torch's differs from the third only under autocast on a GPU
_RULES = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"))
# of elements that may differ by a rounding: a rule that rounds elsewhere differs in a tenth of them
_STRAYS = 1 / 50
_ELEMENTS = 4096
# F.normalize's, of a row's norm
_LEAST = 1e-12


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
    swap = _of_any_class(module)
    if swap is None and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
        return f"{type(module).__name__} is a subclass of torch's with a forward of its own"
    return swap


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
    given = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    names, weights = [*given], [*given.values()]
    if module._modules or [*module.buffers(recurse=False)] or len(weights) > 2:
        return None
    if any(w.dim() != 1 or w.shape[0] == 0 for w in weights) or not parity.takes_one(module):
        return None
    shape = getattr(module, "normalized_shape", None)
    is_one = isinstance(shape, (tuple, list)) and len(shape) == 1
    width = weights[0].shape[0] if weights else int(shape[0]) if is_one else 64  # type: ignore[index]  # a tuple
    eps = next((n for n in _EPSILONS if isinstance(getattr(module, n, None), float)), None)
    if not weights and eps is None:
        return None
    recordings = [record(module, (2, 3, width), training=training) for training in (False, True)]
    stop = next((r.log.stop for r in recordings if r.log.stop is not None), None)
    kind = type(module).__name__
    if stop is not None:
        return f"{kind}: {stop}" if eps is not None else None
    layer = _layer_norm(recordings, width)
    if layer is None and len(weights) > 1:
        return None
    plan = _proven(module, layer, names, width) if layer else _plan(module, names, eps, width)
    own = weights[0].dtype if weights else torch.float32
    if plan is None:
        # without weights it need not be a norm at all
        return f"{kind} is no RMSNorm of a known rule" if weights and eps is not None else None
    if (own, own) not in plan.dtypes:
        return f"{kind} is an RMSNorm of a known rule, but computes {own} otherwise"
    held = _held(recordings)
    # an epsilon is read in every call
    reads = tuple(read for read in held.reads if read[0] != (plan.eps,))
    return _swap(module, plan._replace(held=(held._replace(reads=reads),)), width)


def _held(recordings: list[Recording]) -> Held:
    """Return what must hold of a module without children."""
    log = recordings[0].log
    for path, reads in recordings[1].log.reads.items():
        log.reads.setdefault(path, {}).update(reads)
    (held,) = log.held(set())
    return held


def _swap(module: nn.Module, plan: NormPlan, width: int) -> Swap:
    rule = f"{plan.cast} cast" + (f", offset {plan.offset:g}" if plan.offset else "")
    change = f"rms_norm ({rule})" if plan.kind == "rms" else "layer_norm"
    to = subclass(FusedRMSNorm, type(module))
    kind = type(module).__name__
    return Swap("norm", f"{kind} -> {change}", to, {"_fusedckpt_plan": plan}, (width,))


def _layer_norm(recordings: list[Recording], width: int) -> NormPlan | None:
    """Return the plan of a forward that is one layer_norm of its input, None for any other."""
    plans = set()
    for recording in recordings:
        y = recording.y
        if y is None or y.kind != "other" or y.name != "native_layer_norm":
            return None
        x, shape, weight, bias, eps = y.args
        given = [None if one is None else one.path for one in (weight, bias)]
        is_own = all(one is None or one.kind == "weight" for one in (weight, bias))
        if x.kind != "x" or list(shape) != [width] or not is_own:
            return None
        names = [path and path[0] for path in given]
        plans.add(NormPlan(names[0], eps, 0.0, "torch", (), "layer", names[1]))
    return plans.pop() if len(plans) == 1 else None


def _proven(module: nn.Module, plan: NormPlan, names: list[str], width: int) -> NormPlan | None:
    """Return the plan with the dtypes in which it gives the module's bits, None for none."""
    draws = _Draws(module, names, width)
    found = tuple(pair for pair in draws.pairs if _same(draws.twin(plan, pair), draws.run(pair)))
    return plan._replace(dtypes=found, casts_back=draws.casts_back()) if found else None


def _plan(module: nn.Module, names: list[str], eps: str | None, width: int) -> NormPlan | None:
    """Find the rule that gives the module's bits in most dtypes, its own among them."""
    draws = _Draws(module, names, width)
    name = names[0] if names else None
    expected = {pair: draws.run(pair) for pair in draws.pairs}
    code = getattr(type(module).forward, "__code__", None)
    calls_torch = code is not None and "rms_norm" in code.co_names
    rules = ((0.0, "torch"), *_RULES) if calls_torch else _RULES
    found = None
    for offset, cast in rules:
        if offset and name is None:
            continue
        # without one the root is clamped, as F.normalize does
        plan = NormPlan(name, eps or _LEAST**2 / width, offset, cast, ())
        proven = tuple(
            pair
            for pair, y in expected.items()
            if y is not None and _same(draws.twin(plan, pair), y)
        )
        # half precision alone proves little: it rounds away how a rule differs
        if (torch.float32, torch.float32) in proven and len(proven) > len(
            found.dtypes if found else ()
        ):
            found = plan._replace(dtypes=proven)
    return found


class _Draws:
    """A norm's input and weights, and what it makes of them in any pair of dtypes."""

    def __init__(self, module: nn.Module, names: list[str], width: int):
        draw = parity.Draw(module, (width,), rows=max(6, _ELEMENTS // width // 2 * 2))
        self.module = module
        self.x = draw.x
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0
        self.x[1] *= 100.0
        self.keys = {name: id(module._parameters[name]) for name in names}
        self.values = draw.values
        both = [(x, w) for x in _DTYPES for w in _DTYPES]
        self.pairs = both if names else [(d, d) for d in _DTYPES]

    def run(self, pair: tuple[torch.dtype, torch.dtype]) -> Tensor | None:
        """Return what the module computes, None where it cannot."""
        values = {key: value.to(pair[1]) for key, value in self.values.items()}
        clone = parity.replica(self.module, values)
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            try:
                return parity.call(clone, self.x.to(pair[0]))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def twin(self, plan: NormPlan, pair: tuple[torch.dtype, torch.dtype]) -> Tensor | None:
        """Return what a rule computes, None where it cannot."""
        x = self.x.to(pair[0])
        eps = getattr(self.module, plan.eps) if isinstance(plan.eps, str) else plan.eps
        weight, bias = (
            None if name is None else self.values[self.keys[name]].to(pair[1])
            for name in (plan.weight, plan.bias)
        )
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            if plan.kind == "rms":
                return reference.rms_norm(
                    x, x.shape[-1:], weight, eps, offset=plan.offset, cast=plan.cast
                )
            try:
                return reference.layer_norm(x, x.shape[-1:], weight, bias, eps)
            except RuntimeError:
                return None

    def casts_back(self) -> bool:
        """Whether a layer_norm that widens, as under autocast, leaves the result in x's dtype."""
        with _Widened():
            y = self.run((torch.float32, torch.float32))
        return y is None or y.dtype == torch.float32


class _Widened(TorchFunctionMode):
    """Has layer_norm give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y.double() if func in (F.layer_norm, torch.layer_norm) else y


def _same(found: Any, expected: Any) -> bool:
    """Whether two results are equal: in half precision but for stray roundings."""
    if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
        return False
    if found.shape != expected.shape:
        return False
    if found.dtype != expected.dtype:
        return False
    if found.dtype in _HALF:
        return (found != expected).double().mean().item() <= _STRAYS
    tol = 8 * torch.finfo(found.dtype).eps
    return torch.allclose(found, expected, rtol=tol, atol=tol)
