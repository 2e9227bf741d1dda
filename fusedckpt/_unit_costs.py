"""What one unit of a model costs, measured by calling it again and again: time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedckpt import _roles
from fusedckpt._calls import Bytes, Call, Run
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.chain import Level, Unit
from fusedckpt.units import has_levels

__all__ = ["PLAIN", "PRODUCTS", "Costs", "kind_of", "measured"]

# the level of a module without fused layers, and that which keeps the outputs of matrix products
PLAIN, PRODUCTS = "plain", "products"


class Costs(NamedTuple):
    """What units that are alike cost, by the name of the level.

    again: what a segment of this unit alone holds. extra: ms that a step takes more than at the
    level that keeps most. writes: whether the unit writes into what it is given. flows: see Call.
    """

    levels: dict[str, Bytes]
    again: dict[str, Bytes]
    extra: dict[str, float]
    forward: float
    tail: float
    input: int
    output: int
    left: int
    writes: bool
    flows: tuple[bool, ...]

    @property
    def replay(self) -> int:
        """Bytes that a segment keeps of the unit besides its input: random states, statistics."""
        return max(0, 0, *(found.kept - self.input for found in self.again.values()))

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
            input=self.input - held + self.replay,
            output=self.output,
            tail=self.tail,
            # while it runs again in a segment: the states that are put back afterwards
            forward_transient=self.replay
            + max(
                found.forward + shared[level] - (0 if found.keeps_input else held)
                for level, found in self.levels.items()
            ),
            left=self.left,
            fixed=self.writes,
        )

    def _level(self, name: str, shared: int, held: int) -> Level:
        found, again, ending = self.levels[name], self.again.get(name), None
        kept = found.kept - shared - (held if found.keeps_input else 0)
        given = self.input - held + self.replay
        # of a unit that does not keep its input, who knows how long it lives in a longer segment
        if again is not None and found.input == self.input:
            # the segment's input is the unit's
            ending = max(0, given + again.backward - max(kept, given))
        return Level(name, kept, self.extra[name], found.backward + shared, ending)


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
) -> Costs:
    """Measure one call of a unit at each of its levels; if `selective`, at PRODUCTS too.

    `flows` is that of Call.

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
    most = max((name for name in levels if name != PRODUCTS), key=lambda name: levels[name].kept)
    fastest = most if most in alone else next(iter(alone), None)
    timed = {name: runs[name] for name in levels}
    if fastest is not None:
        timed["again"] = alone[fastest]
    flops = {name: call.flops(run) for name, run in timed.items() if name != PRODUCTS}
    shares = {
        name: (count - flops[most]) / max(1, call.forward_flops) for name, count in flops.items()
    }
    forward_ms, extra, tail = _times(call.milliseconds(timed), shares, levels, most)
    return Costs(
        levels, again, extra, forward_ms, tail,
        call.input_bytes, call.output_bytes, call.left_bytes, call.writes,
        tuple(flows),
    )  # fmt: skip


def _alone(level: str, forward: Callable[..., Any]) -> Run:
    chained = _roles.Chained((_roles.inner_level(level),))
    return partial(_roles.Member(chained, 0).call, forward)


def _times(
    times: Mapping[str, list[tuple[float, float]]],
    shares: Mapping[str, float],
    levels: Mapping[str, Bytes],
    most: str,
) -> tuple[float, dict[str, float], float]:
    """Return ms of the forward, extra ms per level, and ms of what a segment does not run again.

    shares: of the forward's FLOPs, what each way computes more than the one that keeps most.
    """
    # the least: what else goes on in the machine only adds to it
    forward = min(ms for name in levels for ms, _ in times[name])
    whole = {name: min(map(sum, rounds)) for name, rounds in times.items()}

    def slower(name: str) -> float:
        # on a noisy machine a product may seem to be free: not below half of what it should take
        return max(0.0, whole[name] - whole[most], shares.get(name, 0.0) * forward / 2)

    # what keeps less does not get faster by it: that would be noise
    falling = sorted(levels.keys() - {PRODUCTS}, key=lambda name: -levels[name].kept)
    extra = dict(zip(falling, accumulate(map(slower, falling), max), strict=True))
    if PRODUCTS in levels:
        extra[PRODUCTS] = slower(PRODUCTS)
    again = slower("again") if "again" in times else forward
    return forward, {name: extra[name] for name in levels}, max(0.0, forward - again)


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
