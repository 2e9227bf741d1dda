"""What one unit of a model costs, measured by calling it again and again: time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning import roles, ways
from fusedckpt.planning.calls import Bytes, Call, Run
from fusedckpt.planning.chain import Level, Unit
from fusedckpt.planning.part_costs import BUT, Parts
from fusedckpt.planning.units import has_levels

__all__ = ["BUT", "PLAIN", "PRODUCTS", "Costs", "kind_of", "measured"]

# the level of a module without fused layers, and that which keeps the outputs of matrix products
PLAIN, PRODUCTS = "plain", "products"
# more bytes than random states take
_STATES = 2**14
# other ways to run a unit: as a segment, as the first part of one, and before another one
_AGAIN, _MIDDLE, _END = "again", "middle", "end"


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
        return 0 if self.hoards else self._beside

    @property
    def hoards(self) -> bool:
        """Whether it holds so much outside saved tensors that a segment of it would spare nothing.

        Such as gradients, made in forward, in attributes of an autograd function.
        """
        spares = any(found.kept < self.levels[x].kept for x, found in self.again.items())
        return self._beside > _STATES and not spares

    @property
    def _beside(self) -> int:
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
            fixed=self.writes or self.hoards,
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
        level or PLAIN: partial(roles.Keeping(level).call, forward)
        for level in (LEVELS if has_levels(module) else (None,))
    }
    _check_repeats(call, next(iter(runs.values())), args, kwargs)
    if selective and not call.writes:
        runs[PRODUCTS] = partial(roles.Selecting().call, forward)
    taken = {name: call.bytes(run) for name, run in runs.items()}
    # of levels that keep the same, the first one
    distinct = {(name == PRODUCTS, found.kept): name for name, found in reversed(taken.items())}
    levels = {name: taken[name] for name in sorted(distinct.values(), key=list(runs).index)}
    runs = {name: runs[name] for name in levels}
    # a segment cannot keep an argument that its own forward overwrites
    segments = {} if call.writes else {x: ways.alone(x, forward) for x in runs if x != PRODUCTS}
    hooked = segments if has_levels(module) else ()
    packed = {name: _packed(call, runs[name], levels[name]) for name in hooked}
    forward_ms, extra, rerun, tail = _times(call, forward, runs, segments, levels, kind)
    if parts and not call.writes:
        least = min(levels.keys() - {PRODUCTS}, key=lambda name: levels[name].kept)
        finer = Parts(module, call, least, runs[least], kind)
        for name, (found, ms) in finer.levels(parts, levels[least].kept).items():
            levels[name], extra[name] = found, extra[least] + ms
    return Costs(
        levels, {name: call.bytes(run) for name, run in segments.items()}, packed,
        extra, forward_ms, rerun, tail,
        call.input_bytes, call.output_bytes, call.left_bytes, call.writes,
        tuple(flows), any(module.children()),
    )  # fmt: skip


def _packed(call: Call, run: Run, level: Bytes) -> int:
    """Return the bytes that a run keeps where saved tensors go through hooks."""
    found = call.bytes(partial(ways.packed, run))
    return found.kept - found.input + level.input


def _times(
    call: Call,
    forward: Callable[..., Any],
    runs: Mapping[str, Run],
    segments: Mapping[str, Run],
    levels: Mapping[str, Bytes],
    kind: Any,
) -> tuple[float, dict[str, float], float, float]:
    """Return ms of the forward, extra ms per level, ms to run it again, and what the last saves."""
    plain = sorted(levels.keys() - {PRODUCTS}, key=lambda name: -levels[name].kept)
    most, every = plain[0], dict(runs)
    if most in segments:
        every[_AGAIN] = segments[most]
        every[_MIDDLE] = partial(ways.middle, most, forward)
        every[_END] = partial(ways.end, runs[most])
    counted = every.keys() - {PRODUCTS, _MIDDLE, _END}
    flops = {name: call.flops(every[name]) for name in counted}
    shares = {name: count / max(1, call.forward_flops) for name, count in flops.items()}
    times = ways.Times(ways.timed(kind, call, every), shares)
    # what keeps less does not get faster by it: that would be noise
    slower = accumulate((times.slower(name, most) for name in plain), max)
    extra = dict(zip(plain, slower, strict=True))
    if PRODUCTS in levels:
        extra[PRODUCTS] = times.slower(PRODUCTS, most)
    rerun = tail = 0.0
    if most in segments:
        rerun = max(times.slower(_MIDDLE, _END), times.forward(levels) / 2)
        tail = rerun - times.slower(_AGAIN, most)
    return times.forward(levels), extra, rerun, tail


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
