"""Draw a results file: bars, and time against memory; or the figure of a training command.

Nothing is measured.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import figures, records
from bench.options import Options
from bench.results import Row, groups, is_capacity, read

Rows = Sequence[Row]
Drawing = tuple[str, Callable[[Path], None]]


def options(add: Options) -> None:
    """Add the options."""
    text = "results of bench run, capacity, demo, finetune, paper, classics or ways"
    add.add_argument("file", help=text, type=Path, metavar="FILE")
    add.one("out", "folder for the figures; default: the file's", type=Path, metavar="DIR")


def prepare(chosen: Namespace) -> Namespace:
    """Read the file. Raises ValueError where there is nothing to draw, OSError as reading does."""
    chosen.out = chosen.out or chosen.file.parent
    try:
        record = json.loads(chosen.file.read_bytes())
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and "parts" in record:
        chosen.drawings = [(f"{chosen.file.stem}.png", partial(records.draw, record))]
        return chosen
    timed = [[row for row in rows if row["both_ms"]] for rows in groups(read(chosen.file))]
    chosen.drawings = [*_of_cases([rows for rows in timed if rows])]
    if not chosen.drawings:
        raise ValueError(f"{chosen.file}: nothing was measured")
    return chosen


def _of_cases(found: Sequence[Rows]) -> Iterator[Drawing]:
    """Yield bars for each case, and for each size the front of time and memory."""
    sets: dict[Any, list[Rows]] = {}
    names = ("device", "size", "dim", "tokens", "dtype")
    for rows in found:
        first = rows[0]
        if is_capacity(first):
            sizes = "-".join(str(first[n]) for n in ("case", "size", "dim", "memory", "dtype"))
            yield f"capacity-{sizes}.png", partial(figures.draw_capacity, rows)
        else:
            sets.setdefault(tuple(first[name] for name in names), []).append(rows)
    are_several = len({device for device, *_ in sets}) > 1
    for number, ((_, *sizes), members) in enumerate(sets.items()):
        name = "-".join(map(str, sizes)) + (f"-{number}" if are_several else "")
        for rows in members:
            yield f"{rows[0]['case']}-{name}.png", partial(figures.draw_bars, rows)
        # norms have nothing to trade
        traded = [rows for rows in members if rows[0]["flops"]] or members
        yield f"pareto-{name}.png", partial(figures.draw_pareto, traded)


def run(chosen: Namespace) -> int:
    """Draw every figure; returns 2 where a record is damaged."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, draw in chosen.drawings:
        try:
            draw(path=chosen.out / name)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            print(f"{chosen.file}: not a result of the bench ({error!r})", file=sys.stderr)
            return 2
        print(f"drew {name} in {chosen.out}")
    return 0
