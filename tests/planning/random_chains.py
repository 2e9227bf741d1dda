"""Random chains of units."""

import random
from dataclasses import replace

from fusedckpt.planning.chain import Chain, Level, Unit


def random_chain(draw: random.Random, count: int, most: int = 60) -> Chain:
    """Draw units of one to three levels, with transients, tails and gradients left behind."""

    def unit(i: int) -> Unit:
        forward = draw.randrange(1, 30)
        nested = [k > 0 and draw.random() < 0.2 for k in range(3)]
        levels = tuple(
            Level(
                f"level{k}",
                draw.randrange(most),
                draw.randrange(12) + 12 * nested[k],
                draw.randrange(most),
                draw.choice((None, draw.randrange(most))),
                nested=nested[k],
                forward_transient=draw.choice((None, draw.randrange(most))),
                again=draw.choice((None, draw.randrange(most))),
            )
            for k in range(draw.choice((1, 2, 2, 3)))
        )
        return Unit(
            f"unit{i}",
            levels,
            forward,
            input=draw.randrange(most // 2),
            output=draw.randrange(most // 2),
            tail=draw.randrange(-3, forward + 1),
            forward_transient=draw.randrange(most),
            left=draw.choice((0, 0, draw.randrange(most))),
            fixed=draw.random() < 0.15,
            rerun=draw.choice((None, forward + draw.randrange(5))),
        )

    return Chain(tuple(unit(i) for i in range(count)), base=draw.randrange(most))


def cut_chain(draw: random.Random, count: int, alike: bool, most: int = 60) -> Chain:
    """Draw units with levels that cut them into chunks: less at work, in more time.

    alike: all need the same to run in so many chunks, and hand nothing on.
    """
    chain = random_chain(draw, count, most)
    runs = {chunks: draw.randrange(1, most) // chunks for chunks in (1, 2, 8)}

    def cut(unit: Unit) -> Unit:
        run = runs if alike else {chunks: draw.randrange(most) // chunks for chunks in runs}
        first = replace(unit.levels[0], nested=False, forward_transient=None)
        chunked = [
            replace(
                first,
                name=f"{first.name} in {chunks}",
                extra=first.extra + draw.randrange(1, 4) * chunks,
                transient=first.transient // chunks,
                ending=None if first.ending is None else first.ending // chunks,
                running=run[chunks],
                chunks=chunks,
            )
            for chunks in draw.choice(((2, 8), (8,), (2,), ()) if not alike else ((2, 8), (8,)))
        ]
        levels = *unit.levels, *chunked
        output = 0 if alike else unit.output
        return replace(unit, levels=levels, forward_transient=run[1], output=output)

    return replace(chain, units=tuple(map(cut, chain.units)))


def llama_like(num_layers: int, noise: float = 0.1) -> Chain:
    """Attention and MLP in turn: 8192 tokens of width 4096, hidden 14336, in bfloat16.

    Times are those of the GEMMs at 400 TFLOP/s, each layer's off by up to half of `noise`.
    """
    draw = random.Random(0)
    x, hidden, key_value = (8192 * width * 2 for width in (4096, 14336, 2048))
    units = []
    for i in range(num_layers):
        slow = 1 + noise * (draw.random() - 0.5)
        # ms of the projections in and out, of attention, of one GEMM of the MLP
        qkv, out, attention, up = (slow * ms for ms in (1.03, 0.69, 0.69, 2.4))
        if i % 2:
            levels = (
                Level("inputs", x, 2 * up, 2 * x + 4 * hidden),
                Level("gate", x + hidden, up, 2 * x + 3 * hidden),
                Level("preact", x + 2 * hidden, 0.0, 2 * x + 2 * hidden),
            )
            unit = Unit(f"mlp{i}", levels, 3 * up, x, x, up, x + hidden)
        else:
            levels = (
                Level("inputs", x, qkv + attention, 5 * x),
                Level("qkv", 2 * x + key_value, attention, 4 * x),
                Level("preact", 4 * x + key_value, 0.0, 3 * x),
            )
            unit = Unit(f"attention{i}", levels, qkv + attention + out, x, x, out, 2 * x)
        units.append(unit)
    return Chain(tuple(units))
