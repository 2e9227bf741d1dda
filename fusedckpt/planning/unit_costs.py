"""What one unit of a model costs at each of its levels, measured by calling it: bytes and ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning import roles
from fusedckpt.planning.calls import Bytes, Call, NoGraph, Run, Times, calls_of, once
from fusedckpt.planning.chain import Level, Unit
from fusedckpt.planning.chunks import chunks_in, has_mlps, in_less, kept_in
from fusedckpt.planning.plan_record import BUT, PLAIN, PRODUCTS
from fusedckpt.planning.repeats import check_repeats, states_of

__all__ = ["Costs", "measured"]

# more bytes than random states take
_STATES = 2**14
# what running a part again saves at least of what the unit keeps
_WORTH = 0.02
# ways to run a unit: as a segment of its own, as one whose recompute does not stop early, and in
# as many chunks as are tried
_AGAIN, _WHOLE, _CHUNKED = "again", "whole", "chunked"
# what keeps less takes more than that by so much of the time at least: less is noise
_NOT_FREE = 0.01


class Ways(NamedTuple):
    """Which ways to run a unit are measured besides its levels: at PRODUCTS, and in chunks."""

    selective: bool = False
    chunked: bool = False


class Ms(NamedTuple):
    """What a unit takes, in ms.

    extra: by level, how much longer a step takes than at the level that keeps most. rerun: the same
    where it is in a segment; alone: where it ends the segment, whose recompute stops early.
    """

    extra: dict[str, float]
    forward: float
    rerun: float
    alone: float


class Costs(NamedTuple):
    """What units that are alike cost, by the name of the level.

    again: bytes of a segment of this unit alone. packed: bytes made where saved tensors go through
    hooks, as in a segment, where norms are not shared. given: bytes of arguments that require grad;
    flows: whether each was made for this unit alone. writes: whether it writes into them. reached:
    names of parameters that got a gradient. leaves: see `leaf_bytes`. returned: which tensors that
    it made and returned require grad. repeats: whether its forward is the same twice.
    """

    levels: dict[str, Bytes]
    again: dict[str, Bytes]
    packed: dict[str, int]
    ms: Ms
    given: tuple[int, ...]
    output: int
    writes: bool
    composed: bool
    reached: frozenset[str]
    leaves: int
    returned: tuple[bool, ...]
    flows: tuple[bool, ...] = ()
    repeats: bool = True

    def not_recomputed(self) -> Costs:
        """Return the costs of a unit that may not be recomputed."""
        levels = {x: y for x, y in self.levels.items() if x != PRODUCTS and BUT not in x}
        return self._replace(levels=levels, again={}, repeats=False)

    def own(self, given: Sequence[int]) -> int:
        """Return the bytes, of those of each argument, that are of arguments for this unit."""
        return sum(nbytes for nbytes, flows in zip(given, self.flows, strict=True) if flows)

    def differentiable(self, made: list[Tensor]) -> list[Tensor]:
        """Return what requires grad of the tensors that another call made and returned."""
        if len(made) != len(self.returned):
            return made
        return [x for x, requires_grad in zip(made, self.returned, strict=True) if requires_grad]

    @property
    def replay(self) -> int:
        """Bytes that a segment keeps of the unit besides its input: random states, statistics."""
        return 0 if self.hoards else self._beside

    @property
    def hoards(self) -> bool:
        """Whether it holds so much outside saved tensors that a segment of it would spare nothing.

        Such as gradients, made in forward, in attributes of an autograd function.
        """
        spares = any(self._kept(x) < self._kept(self.levels[n]) for n, x in self.again.items())
        return self._beside > _STATES and not spares

    @property
    def _beside(self) -> int:
        return max(0, 0, *(found.made for found in self.again.values()))

    def _kept(self, found: Bytes) -> int:
        return found.made + self.own(found.given)

    def keeps_input(self, level: str) -> bool:
        """Whether it keeps what it was given, where the unit before is at this level."""
        # PRODUCTS stands beside PRODUCTS alone
        return all(
            any(found.given[:1])
            for name, found in self.levels.items()
            if (name == PRODUCTS) == (level == PRODUCTS) or len(self.levels) == 1
        )

    def unit(
        self,
        name: str,
        handed_on: Callable[[str], list[bool]],
        known: Sequence[bool],
        held: int,
        left: int,
    ) -> Unit:
        """Return a unit that costs this.

        handed_on: which outputs, at a level, whoever comes next keeps, and so counts. known: which
        are counted already where it begins.
        held: bytes of the input that the code before keeps, and so counts. left: see Unit.
        """
        levels = {
            x: self._level(
                x, _counted(found.returned, handed_on(x)), _counted(found.returned, known), held
            )
            for x, found in self.levels.items()
        }
        most = max(x.forward_transient or 0 for x in levels.values() if not x.nested)
        for x, level in levels.items():
            if level.chunks > 1:
                running = self.replay + (level.forward_transient or 0)
                levels[x] = replace(level, running=running)
        return Unit(
            name,
            tuple(levels.values()),
            forward=self.ms.forward,
            input=self.own(self.given) - held + self.replay,
            output=self.output,
            tail=self.ms.rerun - self.ms.alone,
            rerun=self.ms.rerun,
            # while it runs again in a segment: the states that are put back afterwards
            forward_transient=self.replay + most,
            left=left,
            fixed=self.writes or self.hoards or not self.repeats,
            composed=self.composed,
        )

    def _level(self, name: str, shared: int, known: int, held: int) -> Level:
        found, again, ending = self.levels[name], self.again.get(name), None
        given, own = self.own(self.given), self.own(found.given)
        counted = held if any(found.given[:1]) else 0
        beside = own - shared - known - counted
        made = found.made, self.packed.get(name, found.made)
        kept, inside = (max(0, x + beside) for x in made)
        # of a unit that does not keep its input, who knows how long it lives in a longer segment
        if again is not None and given in (own, self.own(again.given)):
            # the segment's input is the unit's
            begins = given - held + self.replay
            ending = max(0, begins + again.backward - known - max(inside, begins))
        forward = max(0, found.forward + given - own) + shared - (held - counted)
        return Level(
            name,
            kept,
            self.ms.extra[name],
            found.backward + shared,
            ending=ending,
            nested=BUT in name,
            forward_transient=max(0, forward),
            again=inside,
            chunks=chunks_in(name),
        )


def _counted(sizes: Sequence[int], by_others: Sequence[bool]) -> int:
    """Return the bytes that others count, if these are the same tensors."""
    same = len(sizes) == len(by_others)
    return sum(n for n, is_counted in zip(sizes, by_others, strict=False) if is_counted and same)


def measured(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    kind: Any,
    parts: Sequence[str],
    besides: Ways,
    used: tuple[bool, ...] | None,
) -> Costs:
    """Measure one call of a unit at each of its levels.

    kind: what units that cost the same have in common: they are timed once, so that plans stay the
    same. parts: names of modules inside that may run again on their own. used: see `Call`.

    Raises:
        NoGraph: it returns nothing that requires a gradient.
        Unclear: it returns several tensors that do, and `used` is ().
        ValueError: a call changes an object among the arguments, so that no two are alike.
    """
    call = Call(module, args, kwargs, used)
    levels = _distinct(_taken(call, forward, args, kwargs))
    runs: dict[str, Run] = {level: partial(roles.save_at(level), forward) for level in levels}
    plain = sorted(levels, key=lambda name: -_all(levels[name]))
    most, least = plain[0], plain[-1]
    if besides.selective and not call.writes:
        runs[PRODUCTS] = partial(roles.keep_products, forward)
        levels[PRODUCTS] = call.bytes(runs[PRODUCTS])
    # a segment cannot keep an argument that its own forward overwrites
    segments = {} if call.writes else {x: partial(roles.again(x), forward) for x in plain}
    hooked = segments if call.is_fused else ()
    packed = {name: call.bytes(partial(_packed, runs[name])).made for name in hooked}
    ways = {name: runs[name] for name in levels}
    if segments:
        ways |= {_AGAIN: segments[most], _WHOLE: partial(_whole, most, forward)}
    again = {name: call.bytes(run) for name, run in segments.items()}
    is_cut = besides.chunked and segments and has_mlps(module)
    cuts = in_less(call, forward, least, levels[least], rerun=again[least]) if is_cut else {}
    for name, found in cuts.items():
        ways[_CHUNKED] = kept_in(name, forward)
        levels[name], again[name], packed[name] = *found, packed.get(least, found[0].made)
    ms = _ms(_timed(kind, call, ways), plain, [*cuts])
    cut_up = _with_parts(module, call, runs[least], _all(levels[least]), parts=parts, kind=kind)
    for name, (found, more) in cut_up.items():
        name = least + BUT + name
        levels[name], ms.extra[name] = found, ms.extra[least] + more
    seen = call.given, call.output, call.writes, any(module.children()), frozenset(call.reached)
    return Costs(levels, again, packed, ms, *seen, call.leaves, call.differentiable)


def _taken(call: Call, forward: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Bytes]:
    """Return what a call holds at each level; refuse one that changes what it is given."""
    before, taken = states_of(args, kwargs), dict[str, Bytes]()
    for name in LEVELS:
        taken[name] = call.bytes(partial(roles.save_at(name), forward))
        # before the next call, which would find another argument
        check_repeats(before, states_of(args, kwargs))
        if not call.is_fused:
            # no level tells it anything
            return {PLAIN: taken[name]}
    return taken


def _distinct(taken: dict[str, Bytes]) -> dict[str, Bytes]:
    """Return of levels that keep the same the first one."""
    first = {_all(found): name for name, found in reversed(taken.items())}
    return {name: found for name, found in taken.items() if name in first.values()}


def _ms(times: Mapping[str, Times], plain: Sequence[str], cuts: Sequence[str]) -> Ms:
    """Return what was timed, by level.

    plain: levels, those that keep most first. cuts: levels in chunks, of which the last was timed.
    """
    extra, least, forward = {plain[0]: 0.0}, 0.0, times[plain[0]].forward
    for name in plain[1:]:
        extra[name] = least = max(least, _more(times, name, plain[0]))
    for name in cuts:
        share = (chunks_in(name) - 1) / (chunks_in(cuts[-1]) - 1)
        extra[name] = least + share * _more(times, _CHUNKED, plain[-1])
    if PRODUCTS in times:
        extra[PRODUCTS] = _more(times, PRODUCTS, plain[0])
    if _AGAIN not in times:
        return Ms(extra, forward, forward, forward)
    rerun, alone = (_more(times, way, plain[0]) for way in (_WHOLE, _AGAIN))
    return Ms(extra, forward, max(forward, rerun), alone)


def _more(times: Mapping[str, Times], way: str, than: str) -> float:
    """Return the ms that one way to run takes more than another that keeps more."""
    return max(times[way].both - times[than].both, _NOT_FREE * times[than].both)


def _all(found: Bytes) -> int:
    return found.made + sum(found.given)


def _packed(run: Run, args: Any, kwargs: Any) -> Any:
    """Run where saved tensors go through hooks, as inside a segment."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return run(args, kwargs)


def _whole(level: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a unit as in the middle of a segment, whose recompute needs all of it."""
    segment = roles.HandingOn(roles.OPTIONS._replace(early_stop=False))
    return segment.go_on(forward, args, kwargs, level)


def _timed(kind: Any, call: Call, runs: Mapping[str, Run]) -> dict[str, Times]:
    """Return the times that were found first for units of this kind."""
    key = kind, call.device, torch.get_num_threads(), *runs
    return once(key, lambda: call.times(runs))


def _with_parts(
    module: nn.Module, call: Call, run: Run, kept: int, parts: Sequence[str], kind: Any
) -> dict[str, tuple[Bytes, float]]:
    """Return bytes and ms where parts run again, each on its own, one more each time.

    What costs least for what it saves comes first. kept: bytes that the run keeps otherwise.
    """
    if not parts or call.writes:
        return {}
    modules = {name: module.get_submodule(name) for name in parts}

    def bytes_with(chosen: Sequence[str]) -> Bytes:
        with roles.assigned({modules[name]: roles.again() for name in chosen}):
            return call.bytes(run)

    costs: dict[str, tuple[float, float]] = {}
    for name, seen in calls_of(modules, lambda: call.once(run)).items():
        # one without a graph of its own is none
        with suppress(NoGraph):
            for forward, *given in seen if len(seen) == 1 else ():
                part = Call(modules[name], *given)
                ways = {PLAIN: partial(roles.save_at(PLAIN), forward)}
                saves = part.bytes(ways[PLAIN]).made
                # what it is given it keeps either way
                if saves > _WORTH * kept:
                    ways[_AGAIN] = partial(roles.again(), forward)
                    ms = _more(_timed((kind, name), part, ways), _AGAIN, PLAIN)
                    costs[name] = ms / saves, ms
    found: dict[str, tuple[Bytes, float]] = {}
    chosen, least, ms = list[str](), kept, 0.0
    for name in sorted(costs, key=lambda name: costs[name]):
        # what it is given, or returns, may be written into
        with suppress(RuntimeError):
            taken = bytes_with([*chosen, name])
            if least - _all(taken) > _WORTH * kept:
                chosen, least, ms = [*chosen, name], _all(taken), ms + costs[name][1]
                found[", ".join(chosen)] = taken, ms
    return found
