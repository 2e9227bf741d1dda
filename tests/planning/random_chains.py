"""Random chains of units."""

import random

from fusedckpt.planning.chain import Chain, Level, Unit


def random_chain(draw: random.Random, count: int, most: int = 60) -> Chain:
    """Draw units of one to three levels, some of which cannot be joined, or recomputed."""
    fixed = [draw.random() < 0.15 for _ in range(count)]

    def unit(i: int) -> Unit:
        forward, begin = draw.randrange(1, 30), draw.randrange(most)
        levels = tuple(
            Level(
                f"level{k}",
                draw.randrange(-most // 3, most),
                0.0 if k == 0 else draw.randrange(1, 20),
                begin + draw.randrange(most),
                draw.randrange(2 * most),
            )
            for k in range(draw.choice((1, 2, 2, 3)))
        )
        again = Level("again", 0, draw.randrange(1, 30), begin + draw.randrange(most),
                      draw.randrange(2 * most))  # fmt: skip
        joined = i > 0 and draw.random() < 0.8 and not (fixed[i] or fixed[i - 1])
        return Unit(
            f"unit{i}",
            levels,
            None if fixed[i] else again,
            Level(
                "inside",
                draw.randrange(-most // 3, most),
                0.0,
                begin + draw.randrange(most),
                draw.randrange(2 * most),
            ),
            forward,
            forward + draw.randrange(3),
            input=draw.randrange(most // 2),
            freed=draw.randrange(most // 2) if joined else 0,
            begin=begin,
            between=begin + draw.randrange(most),
            arrives=draw.randrange(most),
            joined=joined,
            fixed="modifies its input" if fixed[i] else "",
        )

    units = tuple(unit(i) for i in range(count))
    before, after, states = (draw.randrange(size) for size in (most, most, 4))
    return Chain(units, draw.randrange(most), before, after, states)


def llama_like(num_layers: int, noise: float = 0.1) -> Chain:
    """Attention and MLP in turn: 8192 tokens of width 4096, hidden 14336, in bfloat16.

    Times are those of the GEMMs at 400 TFLOP/s, each layer's off by up to half of `noise`.
    """
    draw = random.Random(0)
    x, hidden, key_value = (8192 * width * 2 for width in (4096, 14336, 2048))
    units = []
    for i in range(num_layers):
        slow = 1 + noise * (draw.random() - 0.5)
        begin, here = x * (i + 1), x * (i + 2)
        # ms of the projections in and out, of attention, of one GEMM of the MLP
        qkv, out, attention, up = (slow * ms for ms in (1.03, 0.69, 0.69, 2.4))
        if i % 2:
            name, forward, tail = f"mlp{i}", 3 * up, up
            found = (
                ("preact", 2 * hidden, 0.0, 2 * hidden, 2 * x + 4 * hidden),
                ("gate", hidden, up, 2 * hidden, 2 * x + 4 * hidden),
                ("inputs", 0, 2 * up, 2 * hidden, 2 * x + 4 * hidden),
            )
            again = Level("again", 0, forward - tail, begin + 2 * hidden, here + 4 * hidden)
        else:
            name, forward, tail = f"attention{i}", qkv + attention + out, out
            found = (
                ("preact", 3 * x + key_value, 0.0, 4 * x, 6 * x + key_value),
                ("gate", x + key_value, attention, 4 * x, 6 * x + key_value),
                ("inputs", 0, qkv + attention, 4 * x, 6 * x + key_value),
            )
            again = Level("again", 0, forward - tail, begin + 4 * x, here + 6 * x)
        levels = tuple(
            Level(level, kept, extra, begin + runs, begin + back)
            for level, kept, extra, runs, back in found
        )
        units.append(
            Unit(
                name,
                levels,
                again,
                levels[0],
                forward,
                forward,
                x,
                x if i else 0,
                begin,
                here,
                here,
                joined=i > 0,
            )
        )
    return Chain(tuple(units))
