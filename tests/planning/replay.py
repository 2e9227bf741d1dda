"""A step under a plan, acted out tensor by tensor, beside which `simulate` is tested."""

from fusedckpt.planning.chain import Chain, Keep, Level, Segment, Unit


class Memory:
    """Named tensors that come and go; the peak of their sum."""

    def __init__(self):
        self.live, self.peak = {}, 0

    def put(self, name, size):
        assert name not in self.live
        self.live[name] = size
        self.peak = max(self.peak, sum(self.live.values()))

    def drop(self, name):
        del self.live[name]

    def pulse(self, size):
        self.put("pulse", size)
        self.drop("pulse")


def running(unit: Unit, name: str) -> int:
    """Return what a unit's forward needs in a segment."""
    (found,) = (level.running for level in unit.levels if level.name == name)
    return unit.forward_transient if found is None else found


def replay(chain: Chain, items) -> tuple[int, float]:
    """Return peak and extra time of a plan by acting out what becomes of each tensor."""
    memory = Memory()
    memory.put("base", chain.base)
    for item in items:
        run(memory, chain, item, again=False)
    extra = sum([go_back(memory, chain, item) for item in items[::-1]])
    assert set(memory.live) <= {"base", *(("left", i) for i in range(len(chain.units)))}
    return memory.peak, extra


def level_of(chain: Chain, item: Keep) -> Level:
    return {level.name: level for level in chain.units[item.start].levels}[item.level]


def run(memory: Memory, chain: Chain, item, again: bool, kept: int = 0):
    """Run an item, again within a segment, for which it keeps so much at least."""
    unit = chain.units[item.start]
    if isinstance(item, Keep):
        level = level_of(chain, item)
        own = level.kept if level.again is None or not again else level.again
        memory.put(("kept", item.start), max(own, kept))
        transient = level.forward_transient
        transient = unit.forward_transient if transient is None else transient
        memory.pulse(running(unit, item.level) if again else transient)
        return
    memory.put(("input", item), unit.input)
    for i, name in enumerate(item.levels, item.start):
        memory.pulse(running(chain.units[i], name))
        # replaces the tensor that flowed into this unit
        if ("flow", i - 1) in memory.live:
            memory.drop(("flow", i - 1))
        if i + 1 < item.stop:
            memory.live["flow", i] = chain.units[i].output


def go_back(memory: Memory, chain: Chain, item, is_run: bool = True) -> float:
    """Let an item's backward run, and what that runs again; return the ms that it adds.

    is_run: the moment of the backward itself is yet to come.
    """
    if isinstance(item, Keep):
        level = level_of(chain, item)
        if is_run:
            memory.pulse(level.transient)
        memory.drop(("kept", item.start))
        memory.live["left", item.start] = chain.units[item.start].left
        return level.extra
    inner = item.inner or [Keep(i, name) for i, name in enumerate(item.levels, item.start)]
    times = [u.forward if u.rerun is None else u.rerun for u in chain.units]
    memory.drop(("input", item))
    memory.live["dy", item] = chain.units[item.stop - 1].output
    # of which the input is a part, if it is no less
    kept = [chain.units[item.start].input] + [0] * len(inner)
    for part, least in zip(inner[:-1], kept, strict=False):
        run(memory, chain, part, again=True, kept=least)
    extra, last, least = sum(times[item.start : item.stop]), inner[-1], kept[len(inner) - 1]
    ending = level_of(chain, last).ending if isinstance(last, Keep) else None
    if isinstance(last, Segment):
        # whose input is all that the recompute is for
        memory.drop(("dy", item))
        memory.put(("input", last), chain.units[last.start].input)
        extra -= sum(times[last.start : last.stop])
    else:
        extra -= chain.units[last.start].tail
        if ending is None:
            run(memory, chain, last, again=True, kept=least)
            memory.drop(("dy", item))
        else:
            memory.drop(("dy", item))
            level = level_of(chain, last)
            own = level.kept if level.again is None else level.again
            memory.put(("kept", last.start), max(own, least))
            memory.pulse(ending)
    for part in inner[::-1]:
        extra += go_back(memory, chain, part, is_run=part is not last or ending is None)
    return extra
