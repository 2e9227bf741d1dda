"""Random chains of units, and one of a transformer's sizes."""

import random
from dataclasses import replace

from fusedckpt.planning.chain import Chain, Level, SharedConstant, Unit


def random_chain(draw: random.Random, count: int, most: int = 60) -> Chain:
    """Draw units of one to three levels, some of which cannot be joined, or recomputed."""
    fixed = [draw.random() < 0.15 for _ in range(count)]

    def level(name: str, begin: int, extra: float) -> Level:
        kept = draw.randrange(-most // 3, most)
        return Level(name, kept, extra, begin + draw.randrange(most), draw.randrange(2 * most))

    def unit(i: int) -> Unit:
        forward, begin = draw.randrange(1, 30), draw.randrange(most)
        extras = [0.0, *(draw.randrange(1, 20) for _ in range(draw.choice((0, 1, 1, 2))))]
        levels = tuple(level(f"level{k}", begin, extra) for k, extra in enumerate(extras))
        again = replace(level("again", begin, draw.randrange(1, 30)), added_bytes=0)
        joined = i > 0 and draw.random() < 0.8 and not (fixed[i] or fixed[i - 1])
        return Unit(
            f"unit{i}",
            levels,
            None if fixed[i] else again,
            level("inside", begin, 0.0),
            forward,
            input_bytes=draw.randrange(most // 2),
            freed_in_segment=draw.randrange(most // 2) if joined else 0,
            live_at_begin=begin,
            peak_until_next=begin + draw.randrange(most),
            live_at_gradient=draw.randrange(most),
            joined=joined,
            fixed="modifies its input" if fixed[i] else "",
            unsaved_input=draw.choice((0, 0, draw.randrange(most // 2))),
            unsaved_constants=draw.choice((0, 0, draw.randrange(most // 4))),
        )

    units = tuple(unit(i) for i in range(count))
    before, after, states = (draw.randrange(size) for size in (most, most, 4))
    chain = Chain(units, draw.randrange(most), before, after, states)
    return with_shared(chain, draw, most) if draw.random() < 0.6 else chain


def with_shared(chain: Chain, draw: random.Random, most: int) -> Chain:
    """Let units get one or two constants, which some of their levels do not save."""
    units, shared = [*chain.units], list[SharedConstant]()
    for k in range(draw.randint(1, 2)):
        takers = [i for i in range(len(units)) if draw.random() < 0.7]
        for i in takers:
            levels = tuple(
                replace(level, unsaved_shared=(*level.unsaved_shared, k))
                if draw.random() < 0.7
                else level
                for level in units[i].levels
            )
            units[i] = replace(units[i], levels=levels, shared=(*units[i].shared, k))
        since = next((i for i in takers if not units[i].fixed), len(units))
        nbytes = draw.randrange(most // 2)
        shared.append(SharedConstant(nbytes, since))
        if since < len(units):
            first_saved = units[since].first_saved + nbytes
            units[since] = replace(units[since], first_saved=first_saved)
    behind = draw.randrange(2 * most)
    return replace(chain, units=tuple(units), shared=tuple(shared), peak_returned=behind)


def llama_like(num_layers: int, noise: float = 0.1) -> Chain:
    """Attention and MLP in turn: 8192 tokens of width 4096, hidden 14336, in bfloat16.

    Times are those of the GEMMs at 400 TFLOP/s, each layer's off by up to half of `noise`.
    """
    draw = random.Random(0)
    x, hidden, key_value = (8192 * width * 2 for width in (4096, 14336, 2048))
    # name; of each level bytes kept and ms; bytes that forward and backward take; ms of the forward
    # and of its last GEMM, which no recompute runs
    kinds = [
        (
            "attention",
            ((3 * x + key_value, 0.0), (x + key_value, 0.69), (0, 1.72)),
            (4 * x, 6 * x + key_value),
            (2.41, 0.69),
        ),
        (
            "mlp",
            ((2 * hidden, 0.0), (hidden, 2.4), (0, 4.8)),
            (2 * hidden, 2 * x + 4 * hidden),
            (7.2, 2.4),
        ),
    ]
    units = []
    for i in range(num_layers):
        name, found, (runs, back), (forward, tail) = kinds[i % 2]
        slow, begin = 1 + noise * (draw.random() - 0.5), x * (i + 1)
        levels = tuple(
            Level(level, kept, slow * extra, begin + runs, begin + back)
            for level, (kept, extra) in zip(("preact", "gate", "inputs"), found, strict=True)
        )
        again = Level("again", 0, slow * (forward - tail), begin + runs, begin + x + back - x)
        given = (slow * forward, x, x if i else 0, begin, begin + x, begin + x)
        units.append(Unit(f"{name}{i}", levels, again, levels[0], *given, joined=i > 0))
    return Chain(tuple(units))
