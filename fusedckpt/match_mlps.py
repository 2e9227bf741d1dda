"""Which module is an MLP, gated MLP or linear with its activation, and what it computes exactly.

Any module with one to four matrices may be one. Its forward is recorded, in several shapes and
dtypes, in training and not; the recording says which linears there are, what stands between them
and what else is read. No class and no attribute is known by its name. What was found is then held
against the module's own results, on random numbers of several scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fusedckpt import parity
from fusedckpt.held import Held, Path, child_at
from fusedckpt.inlined import activations_of, beside, linears_fit, unfit_children
from fusedckpt.recording import Recording, record
from fusedckpt.spying import rates_of
from fusedckpt.structure import NONE, Block, block_of, features_of, is_like_one, sizes_of
from fusedckpt.swapped import FusedMLP, MLPPlan, Swap, subclass

# within which results are the same in float64: some compute parts of it in float32
_TOL = 1e-5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# leading shapes: one token, several, so many that some would cut them, and rows
_SHAPES = ((2, 3), (1, 1), (3, 4096))
_MODULES = 16


# what a module was found to compute on numbers, by all that it depends on
Confirmed = dict[Any, "MLPPlan | str"]


def mlp_swap(module: nn.Module, save: str, confirmed: Confirmed | None = None) -> Swap | str | None:
    """Return how an MLP is swapped, the reason why it cannot be, or None for what is none.

    confirmed: what earlier calls found; a module that is provably the same is not run again.
    """
    if isinstance(module, (FusedMLP, nn.ModuleList, nn.ModuleDict)):
        return None
    if type(module).forward is nn.Linear.forward or any(map(_is_lazy, module.parameters())):
        return None
    named = activations_of(module)
    acts = any(known not in (None, "identity") for known in named.values())
    if not _may_be_block(module):
        return beside(module, named, is_small=False)
    obstacle = unfit_children(module, named)
    if obstacle is not None:
        return obstacle
    if not parity.takes_one(module):
        return f"the forward of {type(module).__name__} takes more than an input" if acts else None
    proof = _proof(module, acts or (bool(named) and linears_fit(module)))
    if isinstance(proof, str):
        strange = [name for name, known in named.items() if known in (None, "identity")]
        if proof.endswith(NONE) and strange:
            return f"{strange[0]}: {getattr(module, strange[0])} {NONE}"
        is_named = isinstance(proof, _Refused)
        return proof if is_named else beside(module, named, is_small=True) or proof
    if proof is None or any(_is_alone(child, module) for child in module.children()):
        return None
    swap = _swap(module, proof, save)
    plan = _recalled(module, swap, {} if confirmed is None else confirmed)
    if isinstance(plan, str):
        return plan
    return replace(swap, attributes=swap.attributes | {"_fusedckpt_plan": plan})


def _recalled(module: nn.Module, swap: Swap, confirmed: Confirmed) -> MLPPlan | str:
    plan: MLPPlan = swap.attributes["_fusedckpt_plan"]
    shapes = tuple((path, p.shape, p.dtype) for path, p in _parameters(module))
    tied = len({id(p) for p in module.parameters()})
    rates = tuple(getattr(child_at(module, path), name) for path, name in plan.rates)
    # 1 and True are equal, but not in writing
    key = (type(module), plan, repr(plan.held), shapes, tied, rates)
    try:
        hash(key)
    except TypeError:
        return _confirmed(module, swap)
    if key not in confirmed:
        confirmed[key] = _confirmed(module, swap)
    return confirmed[key]


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, UninitializedParameter)


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has as many parameters as a block, and few layers."""
    layers = [*module.modules()]
    slots = [p for layer in layers[:_MODULES] for p in layer._parameters.values() if p is not None]
    dims = [p.dim() for p in slots]
    return (
        len(layers) <= _MODULES
        and 1 <= dims.count(2) <= 4
        and dims.count(1) <= 4
        and len(dims) == dims.count(1) + dims.count(2)
        and all(0 not in p.shape for p in slots)
    )


def _is_alone(child: nn.Module, parent: nn.Module) -> bool:
    """Whether a child has all parameters and is a block itself: then it is the one to swap."""
    own = {id(p) for p in parent.parameters()}
    if own != {id(p) for p in child.parameters()} or not _may_be_block(child):
        return False
    return parity.takes_one(child) and isinstance(_proof(child, False), _Proof)


class _Refused(str):
    """What a forward does that no recording covers."""

    __slots__ = ()


@dataclass(frozen=True)
class _Proof:
    """What recordings of a module say.

    rates: paths and names of numbers by which it drops while training.
    """

    block: Block
    held: tuple[Held, ...]
    dtypes: tuple[torch.dtype, ...]
    rates: tuple[tuple[Path, str], ...]


def _proof(module: nn.Module, named: bool) -> _Proof | str | None:
    """Record a module; return its block, why it is none, or None where it does not look like one.

    named: whether it holds an activation.
    """
    first = _first_recording(module)
    if first is None:
        return None
    block = block_of(first)
    if first.log.stop is not None and named:
        return _Refused(first.log.stop)
    if isinstance(block, str):
        return block if named or is_like_one(first) else None
    width = first.shapes[0][-1:]
    others = [record(module, (*shape, *width)) for shape in _SHAPES[1:]]
    training = [record(module, (*shape, *width), training=True) for shape in _SHAPES[::2]]
    for found, when in ((others, "for other shapes"), (training, "while training")):
        for recording in found:
            if recording.log.stop is not None:
                return _Refused(f"{recording.log.stop} {when}")
            if block_of(recording) != block:
                return f"{type(module).__name__} computes something else {when}"
    own = next(module.parameters()).dtype
    dtypes = {own: first}
    for dtype in _DTYPES:
        recording = record(module, (*_SHAPES[0], *width), dtype)
        if dtype != own and block_of(recording) == block:
            dtypes[dtype] = recording
    return _pinned(module, block, [*others, *training, *dtypes.values()], tuple(dtypes))


def _first_recording(module: nn.Module) -> Recording | None:
    """Return a recording for the first width that the forward takes, the inner ones last."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.dim() == 2]
    widths = dict.fromkeys([*(s[1] for s in shapes), *(s[0] for s in shapes)])
    stopped = None
    for width in widths:
        found = record(module, (*_SHAPES[0], width))
        if found.y is not None:
            return found
        if found.log.stop is not None:
            stopped = stopped or found
    return stopped


def _pinned(
    module: nn.Module, block: Block, recordings: list[Recording], dtypes: tuple[torch.dtype, ...]
) -> _Proof | str:
    """Return the proof with all that the recordings read."""
    log = recordings[0].log
    for recording in recordings[1:]:
        for path, reads in recording.log.reads.items():
            log.reads.setdefault(path, {}).update(reads)
    rates = [
        (path, name)
        for path in log.kinds
        for name in rates_of(child_at(module, path) or module)
        if (name,) in log.reads.get(path, {})
    ]
    return _Proof(block, log.held({*rates}), dtypes, tuple(rates))


def _swap(module: nn.Module, proof: _Proof, save: str) -> Swap:
    block = proof.block
    plan = MLPPlan(
        block.kind,
        block.linears,
        block.activation,
        block.packed,
        proof.held,
        proof.rates,
        None,
        proof.dtypes,
    )
    details = [block.activation, *([f"packed, {block.packed} first"] if block.packed else [])]
    details += ["weights as [in, out]"] if any(one.transposed for one in block.linears) else []
    parameters = dict(_parameters(module))
    shapes = {path: tuple(p.shape) for path, p in parameters.items()}
    small = sizes_of(block, shapes)
    numbers = _numbers(proof, shapes, small)
    return Swap(
        "linear" if block.kind == "linear_act" else "mlp",
        f"{type(module).__name__} -> {block.kind} ({', '.join(details)})",
        subclass(FusedMLP, type(module)),
        {"_fusedckpt_plan": plan, "save": save},
        (features_of(block, shapes),),
        (features_of(block, small),),
        {id(parameters[path]): shape for path, shape in small.items()},
        numbers,
    )


def _parameters(module: nn.Module, path: Path = ()) -> Iterator[tuple[Path, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield (*path, name), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, (*path, name))


def _numbers(
    proof: _Proof, shapes: dict[Path, tuple[int, ...]], small: dict[Path, tuple[int, ...]]
) -> dict[tuple[Path, str], Any]:
    """Return the sizes among the numbers that a forward reads, as small as the parameters are."""
    sizes: dict[int, int] = {}
    for path, shape in small.items():
        sizes.update(zip(shapes[path], shape, strict=True))
    half = {size // 2: to // 2 for size, to in sizes.items() if size % 2 == to % 2 == 0}
    return {
        (held.path, names[0]): (half | sizes)[value]
        for held in proof.held
        for names, value in held.reads
        if len(names) == 1 and type(value) is int and value in (half | sizes) and value > 1
    }


def _confirmed(module: nn.Module, swap: Swap) -> MLPPlan | str:
    """Return the plan that gives the module's results, with its place for a dropout after it."""
    plan: MLPPlan = swap.attributes["_fusedckpt_plan"]
    none = dict.fromkeys(plan.rates, 0.0)
    probe = _Probe(module, swap)
    if not all(probe.is_equal(plan, training, none) for training in (False, True)):
        return f"{type(module).__name__} does not compute on numbers what its recording says"
    for rate in plan.rates:
        path, _ = rate
        last = plan._replace(last=path, rates=tuple(one for one in plan.rates if one != rate))
        is_child = bool(path) and isinstance(child_at(module, path), nn.Dropout)
        if is_child and probe.is_equal(last, True, none | {rate: 0.5}):
            return last
    return plan


class _Probe:
    """A module's results on random numbers in float64, and whether swapping changes them."""

    def __init__(self, module: nn.Module, swap: Swap):
        self.module, self.swap = module, swap
        rows = parity.ROWS * len(parity.SCALES)
        self.draws = [parity.Draw(module, swap.small, swap.sizes, rows, seed) for seed in range(2)]
        for draw in self.draws:
            for index, scale in enumerate(parity.SCALES):
                draw.x[:, index :: len(parity.SCALES)] *= scale

    def is_equal(self, plan: MLPPlan, training: bool, rates: dict[tuple[Path, str], float]) -> bool:
        """Whether the swapped module computes the same where it drops by these rates."""
        attributes = self.swap.numbers | rates
        swap = replace(self.swap, attributes=self.swap.attributes | {"_fusedckpt_plan": plan})
        for draw in self.draws:
            eager = parity.replica(self.module, draw.values, training, attributes)
            ours = parity.swapped_replica(swap, self.module, draw.values, training, attributes)
            found, expected = (self._run(each, draw.x) for each in (ours, eager))
            if found is None or expected is None or found.shape != expected.shape:
                return False
            # of every row by itself: they are of several scales
            room = _TOL * expected.abs().amax(-1, keepdim=True).clamp_min(1.0)
            if not ((found - expected).abs() <= room).all():
                return False
        return True

    def _run(self, clone: nn.Module, x: Tensor) -> Tensor | None:
        with parity.undisturbed(torch.device("cpu")), torch.no_grad():
            torch.manual_seed(0)
            try:
                y = parity.call(clone, x)
            except Exception:  # arbitrary code of others, on numbers that may not fit it
                return None
        return y if isinstance(y, Tensor) else None
