"""Whether a unit does the same each time it is called, as a recompute expects."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.private import storage_key
from fusedckpt.checkpointing.calls import Argument, Call
from fusedckpt.checkpointing.module_calls import PutsBackBuffers, recomputed
from fusedckpt.memory import nbytes_of, storages_of, strided
from fusedckpt.planning.budget import spare_bytes
from fusedckpt.planning.roles import OPTIONS
from fusedckpt.reporting.trial import is_state, tensors_of

__all__ = ["NOT_THE_SAME", "Repeats", "check_repeats", "cut_off", "states_of"]

NOT_THE_SAME = "its forward is not the same twice"

# the share of the spare memory that calls and their results take at most
_SHARE = 0.25
# by so many eps of the largest value two results may differ where atomics add in any order
_ROUNDING = 64


# where a module has tensors, as attributes or as buffers, and the name of one
_Slot = tuple[dict[str, Any], str]


class _Noted(NamedTuple):
    """A call of a unit, its results, and the tensors of the unit that it writes."""

    call: Call
    module: nn.Module
    results: list[Any]
    written: list[_Slot]


class Repeats:
    """Finds units whose forward is not the same twice.

    Each unit is called twice more, before its own call and after the model's forward, with the same
    arguments and random states, the second time as in a recompute. That call finds counters and
    other generators as the model's forward left them. Of buffers and other tensors that the unit's
    own call writes it finds other values, as they may be what they were: a power iteration may have
    converged, and a state may depend on the last arguments alone.

    On a CPU the bits of outputs and of saved floating-point tensors are compared. On other devices
    outputs are compared up to rounding, as atomics add in any order; saved tensors are not, as
    kernels for attention leave parts of them unwritten. If the calls take too much memory until
    the model's forward ends, they are made again at once.
    """

    def __init__(self):
        self._calls: dict[str, _Noted] = {}
        self._nbytes = 0
        # the unit that runs, and its tensors before that
        self._now: str | None = None
        self._tensors: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        # names of units with equal results, and with others
        self._same: set[str] = set()
        self.others: set[str] = set()

    def begin(self, name: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> None:
        """Note a unit that is about to be called."""
        if name in self.others or any(f"{name}.".startswith(f"{x}.") for x in self._same):
            return
        run = _with_hooks(module, forward)
        call = Call(run, args, kwargs, OPTIONS)
        self._now, tensors = name, _copied(module)
        self._calls[name] = _Noted(call, module, _results(call, module, is_again=False), [])
        # what is made once, and read ever after, is not written by the unit's own call; what hooks
        # write was written before that
        self._tensors = _copied(module) if run is forward else tensors

    def end(self, name: str, output: Any) -> None:
        """Note that a unit returned."""
        if name != self._now:
            return
        noted, outputs = self._calls[name], [*tensors_of([output])]
        written = [
            (place, key)
            for place, key, x in _tensors_in(noted.module)
            if (known := self._tensors.get((id(place), key))) is not None
            # BatchNorm writes without a new version
            if known[0] is not x or known[1] != x._version or not torch.equal(known[2], x)
        ]
        self._calls[name] = noted._replace(written=written)
        self._now, self._tensors = None, {}
        # arguments are about as large
        self._nbytes += 2 * nbytes_of(outputs)
        if outputs and self._nbytes > _SHARE * spare_bytes(outputs[0].device):
            self.finish()

    def finish(self) -> None:
        """Make the calls again, in their order."""
        for name, noted in self._calls.items():
            (self._same if _is_same(noted) else self.others).add(name)
        self._calls, self._nbytes = {}, 0


def _tensors_in(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the floating-point buffers of modules, and such tensors among attributes."""
    for child in module.modules():
        for place in (child._buffers, vars(child)):
            for name, x in place.items():
                if is_state(x) and x.is_floating_point():
                    yield place, name, x


def _copied(module: nn.Module) -> dict[tuple[int, str], tuple[Tensor, int, Tensor]]:
    found = _tensors_in(module)
    return {(id(place), name): (x, x._version, x.clone()) for place, name, x in found}


def _hooked(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield attributes, name and value of weights made by hooks, such as weight_norm's."""
    if module._forward_pre_hooks:
        for child in module.modules():
            for name, x in vars(child).items():
                if isinstance(x, Tensor) and x.grad_fn is not None:
                    yield vars(child), name, x


def cut_off(module: nn.Module) -> None:
    """Detach weights made by hooks, whose graph one backward would free for the next."""
    for attributes, name, x in [*_hooked(module)]:
        attributes[name] = x.detach().requires_grad_()


def _with_hooks(module: nn.Module, forward: Any) -> Any:
    """Return the forward of a module, after the hooks that make its weights, if any do."""
    if next(_hooked(module), None) is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        for key, hook in module._forward_pre_hooks.items():
            if key not in module._forward_pre_hooks_with_kwargs:
                hook(module, args)
        return forward(*args, **kwargs)

    return run


def _is_same(noted: _Noted) -> bool:
    """Whether the second call gives the results of the first."""
    call = noted.call
    try:
        for held in call.held:
            if isinstance(held, Argument):
                held.tensor()
        if call.inner is not None:
            call.inner.read()
    except RuntimeError:
        # an argument was written since: in a segment backward raises for that
        return True
    values = [(place, name, place[name]) for place, name in noted.written if name in place]
    try:
        for place, name, x in values:
            place[name] = 2 * x + 1
        again = _results(call, noted.module, is_again=True)
    except Exception:
        # so would a recompute
        return False
    finally:
        for place, name, x in values:
            place[name] = x
    same = len(again) == len(noted.results)
    return same and all(map(_is_close, again, noted.results))


def _results(call: Call, module: nn.Module, is_again: bool) -> list[Any]:
    """Make a call; return its outputs, or digests of these and of the tensors that it saves."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        # an output packed as it is would hold its own node
        return saved[-1]

    own = [x for _, _, x in _tensors_in(module)]
    with (
        call.surroundings.restored(),
        recomputed(call.fn, PutsBackBuffers()) if is_again else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        found = [part for x in tensors_of([call.again({})]) for part in strided(x.detach())]
    if any(x.device.type != "cpu" for x in [*found, *saved]):
        return [x.clone() for x in found]
    # batch_norm saves running statistics, and does not read them
    own = {storage_key(x) for x in storages_of([*own, *(x for _, _, x in _tensors_in(module))])}
    # integers may be a workspace that nobody wrote; random masks among them change the output
    found += [part for x in saved if x.is_floating_point() for part in strided(x)]
    return [_digest(x) for x in found if storage_key(x.untyped_storage()) not in own]


def _digest(tensor: Tensor) -> Any:
    """Return shape and dtype of a tensor on a CPU, and a checksum of its bits."""
    bits = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.dtype, zlib.crc32(bits.numpy().data)


def _is_close(again: Any, result: Any) -> bool:
    """Whether digests are equal, or tensors but for rounding."""
    if not isinstance(result, Tensor):
        return again == result
    if again.shape != result.shape or again.dtype != result.dtype:
        return False
    atol = 0.0
    if result.numel() and (result.is_floating_point() or result.is_complex()):
        atol = _ROUNDING * torch.finfo(result.dtype).eps * result.abs().max().item()
    return torch.allclose(again, result, rtol=0, atol=atol, equal_nan=True)


def states_of(args: Any, kwargs: Any) -> dict[Any, list[Any]]:
    """Return, by place and kind, what tells whether an object among the arguments was changed."""
    given = [*enumerate(args), *kwargs.items()]
    objects = [(name, x) for name, x in given if hasattr(x, "__dict__")]
    known = (Tensor, nn.Module)
    return {(name, type(x)): [*_state(x)] for name, x in objects if not isinstance(x, known)}


def _state(value: Any, depth: int = 5) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield id(value), value._version
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield value
    elif depth and not isinstance(value, nn.Module):
        is_list = isinstance(value, (list, tuple))
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for part in value if is_list else parts.values():
            yield from _state(part, depth - 1)


def check_repeats(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Refuse a unit that changes an object it is given, such as a cache of keys and values."""
    for (name, kind), state in before.items():
        if after[name, kind] != state:
            raise ValueError(
                "plan: expected units that do the same each time they are called, one changes its "
                f"argument {name}, a {kind.__name__}: for a cache of keys and values, call plan "
                "and the model with (..., use_cache=False)"
            )
