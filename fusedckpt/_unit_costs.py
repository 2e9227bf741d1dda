"""What one unit of a model costs, measured by calling it again and again: time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedckpt import _roles
from fusedckpt._calls import Bytes, Call, NoGraph, Run
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.chain import Level, Unit
from fusedckpt.units import has_levels

__all__ = ["BUT", "PLAIN", "PRODUCTS", "Costs", "kind_of", "measured"]

# the level of a module without fused layers, and that which keeps the outputs of matrix products
PLAIN, PRODUCTS = "plain", "products"
# between the name of a level and those of parts that run again
BUT = " but "
# other ways to run a unit: as a segment, as the first part of one, and before another one
_AGAIN, _MIDDLE, _END = "again", "middle", "end"
# what running a part again saves at least of what the unit keeps
_WORTH = 0.02


class Costs(NamedTuple):
    """What units that are alike cost, by the name of the level.

    again: what a segment of this unit alone holds. packed: bytes kept where saved tensors go
    through hooks, as in a segment, where norms are not shared. extra: ms that a step takes more
    than at the level that keeps most. writes: whether the unit writes into what it is given.
    flows: see Call. composed: whether it has modules inside.
    """

    levels: dict[str, Bytes]
    again: dict[str, Bytes]
    packed: dict[str, int]
    extra: dict[str, float]
    forward: float
    rerun: float
    tail: float
    input: int
    output: int
    left: int
    writes: bool
    flows: tuple[bool, ...]
    composed: bool

    @property
    def replay(self) -> int:
        """Bytes that a segment keeps of the unit besides its input: random states, statistics."""
        return max(0, 0, *(found.kept - found.input for found in self.again.values()))

    def keeps_input(self, level: str) -> bool:
        """Whether it keeps what it was given, where the unit before is at this level."""
        # PRODUCTS stands beside PRODUCTS alone
        return all(
            found.keeps_input
            for name, found in self.levels.items()
            if (name == PRODUCTS) == (level == PRODUCTS) or len(self.levels) == 1
        )

    def unit(self, name: str, handed_on: Callable[[str], bool], held: int) -> Unit:
        """Return a unit that costs this.

        handed_on: whether, at a level, whoever comes next keeps the output, and so counts it.
        held: bytes of the input that the code before keeps, and so counts.
        """
        shared = {
            level: self.output if found.keeps_output and handed_on(level) else 0
            for level, found in self.levels.items()
        }
        return Unit(
            name,
            tuple(self._level(level, shared[level], held) for level in self.levels),
            forward=self.forward,
            rerun=self.rerun,
            input=self.input - held + self.replay,
            output=self.output,
            tail=self.tail,
            # while it runs again in a segment: the states that are put back afterwards
            forward_transient=self.replay
            + max(
                found.forward + shared[level] - (0 if found.keeps_input else held)
                for level, found in self.levels.items()
                if BUT not in level
            ),
            left=self.left,
            fixed=self.writes,
            composed=self.composed,
        )

    def _level(self, name: str, shared: int, held: int) -> Level:
        found, again, ending = self.levels[name], self.again.get(name), None
        less = shared + (held if found.keeps_input else 0)
        kept, inside = found.kept - less, max(0, self.packed.get(name, found.kept) - less)
        given = self.input - held + self.replay
        # of a unit that does not keep its input, who knows how long it lives in a longer segment
        if again is not None and self.input in (found.input, again.input):
            # the segment's input is the unit's
            ending = max(0, given + again.backward - max(inside, given))
        forward = found.forward + shared - (0 if found.keeps_input else held)
        transient = found.backward + shared
        return Level(
            name, kept, self.extra[name], transient, ending, BUT in name, max(0, forward), inside
        )


def kind_of(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what units that cost the same have in common."""
    shapes = [
        (name, tuple(p.shape), p.dtype, p.requires_grad, p.grad is None)
        for name, p in module.named_parameters()
    ]
    modes = [(type(child), child.training) for child in module.modules()]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
        if isinstance(x, Tensor)
        else _name(x)
        for x in leaves
    ]
    return repr(module), tuple(shapes), tuple(modes), tuple(given), str(spec)


def _name(leaf: Any) -> Any:
    # a flag may choose another way through the module
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def measured(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    flows: Sequence[bool],
    selective: bool,
    parts: Sequence[str],
    kind: Any,
) -> Costs:
    """Measure one call of a unit at each of its levels; if `selective`, at PRODUCTS too.

    `flows` is that of Call. parts: names of modules inside that may run again on their own. kind:
    what units that cost the same have in common: they are timed once, so that plans stay the same.

    Raises:
        NoGraph: it returns nothing that requires a gradient.
        ValueError: a call changes an object among the arguments, so that no two are alike.
    """
    call = Call(module, args, kwargs, flows)
    runs: dict[str, Run] = {
        level or PLAIN: partial(_roles.Keeping(level).call, forward)
        for level in (LEVELS if has_levels(module) else (None,))
    }
    _check_repeats(call, next(iter(runs.values())), args, kwargs)
    if selective and not call.writes:
        runs[PRODUCTS] = partial(_roles.Selecting().call, forward)
    taken = {name: call.bytes(run) for name, run in runs.items()}
    # of levels that keep the same, the first one
    distinct = {(name == PRODUCTS, found.kept): name for name, found in reversed(taken.items())}
    levels = {name: taken[name] for name in sorted(distinct.values(), key=list(runs).index)}
    # a segment cannot keep an argument that its own forward overwrites
    alone = {} if call.writes else {name: _alone(name, forward) for name in levels}
    alone.pop(PRODUCTS, None)
    again = {name: call.bytes(run) for name, run in alone.items()}
    packed = {}
    for name in again if has_levels(module) else ():
        found = call.bytes(partial(_packed, runs[name]))
        packed[name] = found.kept - found.input + levels[name].input
    plain = sorted(levels.keys() - {PRODUCTS}, key=lambda name: -levels[name].kept)
    most, least = plain[0], plain[-1]
    fastest = most if most in alone else next(iter(alone), None)
    timed = {name: runs[name] for name in levels}
    if fastest is not None:
        timed[_AGAIN] = alone[fastest]
        timed[_MIDDLE], timed[_END] = (
            partial(_middle, fastest, forward),
            partial(_end, runs[fastest]),
        )
    flops = {name: call.flops(run) for name, run in timed.items() if name != PRODUCTS}
    times = _Times(
        _timed(kind, call, timed),
        {name: n / max(1, call.forward_flops) for name, n in flops.items()},
    )
    # what keeps less does not get faster by it: that would be noise
    slower = accumulate((times.slower(name, most) for name in plain), max)
    extra = dict(zip(plain, slower, strict=True))
    if PRODUCTS in levels:
        extra[PRODUCTS] = times.slower(PRODUCTS, most)
    forward = times.forward(levels)
    rerun = tail = 0.0
    if fastest is not None:
        rerun = times.slower(_MIDDLE, _END)
        tail = rerun - times.slower(_AGAIN, most)
    if parts and not call.writes:
        finer = _Parts(module, call, least, runs[least], kind)
        for name, (found, ms) in finer.levels(parts, levels[least].kept).items():
            levels[name], extra[name] = found, extra[least] + ms
    return Costs(
        levels, again, packed, extra, forward, rerun, tail,
        call.input_bytes, call.output_bytes, call.left_bytes, call.writes,
        tuple(flows), any(module.children()),
    )  # fmt: skip


def _packed(run: Run, args: Any, kwargs: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return run(args, kwargs)


def _alone(level: str, forward: Callable[..., Any]) -> Run:
    chained = _roles.Chained((_roles.inner_level(level),))
    return partial(_roles.Member(chained, 0).call, forward)


# by kind and names of the ways to run it, what was timed
_known: dict[Any, dict[str, list[tuple[float, float]]]] = {}


def _timed(kind: Any, call: Call, runs: Mapping[str, Run]) -> dict[str, list[tuple[float, float]]]:
    """Return what `Call.milliseconds` returned first for units of this kind."""
    key = kind, call.device, torch.get_num_threads(), tuple(runs)
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = call.milliseconds(runs)
    return _known[key]


class _Needed(torch.autograd.Function):
    """Hands on a tensor that its backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]  # one tensor
        _ = ctx.saved_tensors
        return dx


def _needed(output: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: _Needed.apply(x) if x.requires_grad else x, output
    )


def _middle(level: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    chained = _roles.Chained((_roles.inner_level(level), "preact"))
    return chained.run(1, _needed, (chained.run(0, forward, args, kwargs),), {})


def _end(run: Run, args: Any, kwargs: Any) -> Any:
    return _roles.Chained(("preact",)).run(0, _needed, (run(args, kwargs),), {})


class _Parts:
    """Levels at which parts of a unit run again, each on its own, the rest as at another level."""

    def __init__(self, module: nn.Module, call: Call, level: str, run: Run, kind: Any):
        self._module, self._call, self._level, self._run = module, call, level, run
        self._kind = kind

    def levels(self, parts: Sequence[str], kept: int) -> dict[str, tuple[Bytes, float]]:
        """Return the bytes and ms of these levels, with one part more each.

        What costs least for what it saves comes first. kept: bytes that the unit keeps otherwise.
        """
        costs = self._costs(parts, kept)
        found: dict[str, tuple[Bytes, float]] = {}
        ms, chosen = 0.0, ()
        for part in sorted(costs, key=lambda part: costs[part][1] / costs[part][0]):
            chosen, ms = (*chosen, part), ms + costs[part][1]
            taken = self._call.bytes(partial(self._with, chosen))
            if taken.kept < kept:
                found[f"{self._level}{BUT}{', '.join(chosen)}"], kept = (taken, ms), taken.kept
        return found

    def _costs(self, parts: Sequence[str], kept: int) -> dict[str, tuple[int, float]]:
        """Return what running each part again saves in bytes and takes in ms, if it is worth it."""
        calls: dict[str, list[Any]] = {part: [] for part in parts}
        modules = {part: self._module.get_submodule(part) for part in parts}
        with _roles.assigned({m: _roles.Noting(calls[part]) for part, m in modules.items()}):
            self._call.run(self._run)
        found = {}
        for part, seen in calls.items():
            if len(seen) != 1:
                continue
            try:
                saved = kept - self._call.bytes(partial(self._with, (part,))).kept
                if saved > _WORTH * kept:
                    found[part] = saved, self._ms(part, modules[part], *seen[0])
            except (NoGraph, RuntimeError):
                # it has no graph of its own; what it is given or returns is written into
                continue
        return found

    def _ms(self, name: str, part: nn.Module, forward: Any, args: Any, kwargs: Any) -> float:
        """Return the ms by which one part is slower."""
        call = Call(part, args, kwargs, None)
        level = _roles.Keeping(self._level if self._level in LEVELS else None)

        def again(args: Any, kwargs: Any) -> Any:
            return level.call(partial(_roles.again().call, forward), (args, kwargs), {})

        runs = {PLAIN: partial(level.call, forward), _AGAIN: again}
        return _Times(_timed((self._kind, name), call, runs), {}).slower(_AGAIN, PLAIN)

    def _with(self, parts: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        roles = {self._module.get_submodule(part): _roles.again() for part in parts}
        with _roles.assigned(roles):
            return self._run(args, kwargs)


class _Times:
    """What was timed, round by round: ms of forward and backward of each way to run a unit.

    forwards: FLOPs of each way, in those of the forward.
    """

    def __init__(
        self, rounds: Mapping[str, list[tuple[float, float]]], forwards: Mapping[str, float]
    ):
        self._rounds, self._forwards = rounds, forwards

    def forward(self, names: Iterable[str]) -> float:
        """Return the ms of the forward of these ways."""
        return median(ms for name in names for ms, _ in self._rounds[name])

    def slower(self, name: str, than: str) -> float:
        """Return the ms by which one way is slower than another, not below 0."""
        # round by round: what slows the machine down slows all ways
        both = zip(self._rounds[name], self._rounds[than], strict=True)
        found = median(sum(ours) - sum(theirs) for ours, theirs in both)
        # on a noisy machine a product may seem to be free: not below half of what it should take
        more = self._forwards.get(name, 0.0) - self._forwards.get(than, 0.0)
        return max(0.0, found, more * self.forward([than]) / 2)


def _check_repeats(call: Call, run: Run, args: Any, kwargs: Any) -> None:
    """Refuse a unit that changes an object it is given, such as a cache of keys and values."""
    given = [*enumerate(args), *kwargs.items()]
    objects = {name: x for name, x in given if hasattr(x, "__dict__") and not _is_known(x)}
    before = {name: list(_state(x)) for name, x in objects.items()}
    call.dry(run)
    for name, found in objects.items():
        if list(_state(found)) != before[name]:
            raise ValueError(
                "plan: expected units that do the same each time they are called, one changes its "
                f"argument {name}, a {type(found).__name__}: for a cache of keys and values, pass "
                "use_cache=False to the model"
            )


def _is_known(value: Any) -> bool:
    return isinstance(value, (Tensor, nn.Module))


def _state(value: Any, depth: int = 5) -> Iterator[Any]:
    """Yield what tells whether an object was changed."""
    if isinstance(value, Tensor):
        yield id(value), value._version
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield value
    elif depth and not isinstance(value, nn.Module):
        is_list = isinstance(value, (list, tuple))
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for part in value if is_list else parts.values():
            yield from _state(part, depth - 1)
