"""Which module is a norm that keeps more than it needs, and by which rule it computes.

torch's own norms, and subclasses that inherit their forward, are known. Any other module with at
most two vectors of weights is recorded: it may be a LayerNorm if its forward is one layer_norm of
its input, an RMSNorm if it has at most one vector. It is one if a rule of `functional` gives the
same bits on random numbers, in the dtypes where it does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fusedckpt import reference
from fusedckpt.autograd.subclass import subclass
from fusedckpt.fusing.forwards import FusedNorm, NormMatch, Swap
from fusedckpt.fusing.recording import Recording, record
from fusedckpt.fusing.replica import Draw, call, replica, takes_one, undisturbed
from fusedckpt.fusing.spying import held_by
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
    if isinstance(module, (RMSNorm, LayerNorm)):
        return None
    kind = type(module).__name__
    for original, ours, attributes in (
        (nn.RMSNorm, RMSNorm, {"offset": 0.0, "cast": "torch"}),
        (nn.LayerNorm, LayerNorm, {}),
    ):
        if isinstance(module, original) and type(module).forward is original.forward:
            return _of_torch(module, original, ours, attributes)
    swap = _of_any_class(module, kind)
    if swap is None and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
        return f"{kind} is a subclass of torch's with its own forward"
    return swap


def _of_torch(
    module: Any, original: type[nn.Module], ours: type[nn.Module], attributes: dict[str, Any]
) -> Swap | str:
    kind = type(module)
    if parametrize.is_parametrized(module):
        return f"{kind.__name__}: its weights are parametrized"
    is_plain = kind is original
    change = f"{'nn.' if is_plain else ''}{kind.__name__} -> {ours.__name__}"
    to = ours if is_plain else subclass(ours, kind)
    return Swap("norm", change, to, attributes, features=tuple(module.normalized_shape))


def _of_any_class(module: nn.Module, kind: str) -> Swap | str | None:
    given = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    weights = [*given.values()]
    if module._modules or [*module.buffers(recurse=False)] or len(weights) > 2:
        return None
    if any(w.dim() != 1 or w.shape[0] == 0 for w in weights) or not takes_one(module):
        return None
    shape: Any = getattr(module, "normalized_shape", None)
    is_one = isinstance(shape, (tuple, list)) and len(shape) == 1
    width = weights[0].shape[0] if weights else int(shape[0]) if is_one else 64
    eps = next((n for n in _EPSILONS if isinstance(getattr(module, n, None), float)), None)
    if not weights and eps is None:
        return None
    recordings = [record(module, (2, 3, width), training=training) for training in (False, True)]
    stop = next((r.log.stop for r in recordings if r.log.stop is not None), None)
    if stop is not None:
        return f"{kind}: {stop}" if eps is not None else None
    candidates = _candidates(module, recordings, [*given], eps, width=width)
    if candidates is None:
        return None
    match = _proven(_Draws(module, [*given], width), candidates)
    own = weights[0].dtype if weights else torch.float32
    if match is None:
        # without weights it need not be a norm at all
        return f"{kind} is not a known form of RMSNorm" if weights and eps is not None else None
    if (own, own) not in match.dtypes:
        return f"{kind} is a known form of RMSNorm, but not in {own}"
    # an epsilon is read in every call
    held = held_by([r.log for r in recordings], [((), str(match.eps))])
    rule = f"{match.cast} cast" + (f", offset {match.offset:g}" if match.offset else "")
    change = f"rms_norm ({rule})" if match.kind == "rms" else "layer_norm"
    attributes = {"_fusedckpt_match": match._replace(held=held)}
    to = subclass(FusedNorm, type(module))
    return Swap("norm", f"{kind} -> {change}", to, attributes, features=(width,))


def _candidates(
    module: nn.Module, recordings: list[Recording], names: list[str], eps: str | None, width: int
) -> list[NormMatch] | None:
    """Return the rules that a module may compute by, None for what cannot be a norm."""
    layers = {_layer_norm(recording, width) for recording in recordings}
    if None not in layers:
        return [*layers] if len(layers) == 1 else []  # type: ignore[list-item]  # none of them None
    if len(names) > 1:
        return None
    name = names[0] if names else None
    code = getattr(type(module).forward, "__code__", None)
    calls_torch = code is not None and "rms_norm" in code.co_names
    rules = ((0.0, "torch"), *_RULES) if calls_torch else _RULES
    # without an epsilon the root is clamped, as F.normalize does
    found = [
        NormMatch(name, eps or _LEAST**2 / width, offset, cast, dtypes=()) for offset, cast in rules
    ]
    return [match for match in found if name is not None or not match.offset]


def _layer_norm(recording: Recording, width: int) -> NormMatch | None:
    """Return the match of a forward that is one layer_norm of its input, None for any other."""
    y = recording.y
    if y is None or y.kind != "other" or y.name != "native_layer_norm":
        return None
    x, shape, weight, bias, eps = y.args
    is_own = all(one is None or one.kind == "weight" for one in (weight, bias))
    if x.kind != "x" or list(shape) != [width] or not is_own:
        return None
    names = [None if one is None else one.path[0] for one in (weight, bias)]
    return NormMatch(names[0], eps, 0.0, "torch", dtypes=(), kind="layer", bias=names[1])


def _proven(draws: _Draws, candidates: list[NormMatch]) -> NormMatch | None:
    """Return the rule that gives a module's bits in most dtypes, and these, float32 among them."""
    expected = {pair: draws.run(pair) for pair in draws.pairs}
    found = None
    for match in candidates:
        proven = tuple(p for p, y in expected.items() if _same(draws.twin(match, p), y))
        # half precision alone proves little: it rounds away how a rule differs
        is_proven = (torch.float32, torch.float32) in proven
        if is_proven and (found is None or len(proven) > len(found.dtypes)):
            found = match._replace(dtypes=proven)
    if found is not None and found.kind == "layer":
        return found._replace(casts_back=draws.casts_back())
    return found


class _Draws:
    """A norm's input and weights, and what it makes of them in any pair of dtypes."""

    def __init__(self, module: nn.Module, names: list[str], width: int):
        draw = Draw(module, (width,), rows=max(6, _ELEMENTS // width // 2 * 2))
        self.module = module
        self.x = draw.x
        # rows so small that epsilon counts, and large ones
        self.x[:, 0] *= 1e-3
        self.x[:, -1] *= 30.0
        self.x[1] *= 100.0
        self.values = draw.values
        both = [(x, w) for x in _DTYPES for w in _DTYPES]
        self.pairs = both if names else [(d, d) for d in _DTYPES]

    def run(self, pair: tuple[torch.dtype, torch.dtype]) -> Tensor | None:
        """Return what the module computes, None where it cannot."""
        clone = replica(self.module, lambda p, _: self.values[id(p)].to(pair[1]))
        with undisturbed("cpu"), torch.no_grad():
            try:
                return call(clone, self.x.to(pair[0]))
            except Exception:  # arbitrary code of others, in dtypes that it may not take
                return None

    def twin(self, match: NormMatch, pair: tuple[torch.dtype, torch.dtype]) -> Tensor | None:
        """Return what a rule computes, None where it cannot."""
        x, parameters = self.x.to(pair[0]), self.module._parameters
        shape = x.shape[-1:]
        eps = getattr(self.module, match.eps) if isinstance(match.eps, str) else match.eps
        weight, bias = (
            None if name is None else self.values[id(parameters[name])].to(pair[1])
            for name in (match.weight, match.bias)
        )
        options: Any = {"offset": match.offset, "cast": match.cast}
        with undisturbed("cpu"), torch.no_grad():
            try:
                if match.kind == "rms":
                    return reference.rms_norm(x, shape, weight, eps, **options)
                return reference.layer_norm(x, shape, weight, bias, eps=eps)
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
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.dtype in _HALF:
        return (found != expected).double().mean().item() <= _STRAYS
    tol = 8 * torch.finfo(found.dtype).eps
    return torch.allclose(found, expected, rtol=tol, atol=tol)
