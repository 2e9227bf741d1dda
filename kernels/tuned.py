"""What `python -m bench tune` measured on this user's machine: read once, over what is shipped.

The file is `$FUSEDCKPT_CACHE`, else `fusedckpt/tuned.json` in the user's cache folder; an empty
FUSEDCKPT_CACHE is none. It is read at the first choice that a process makes and never again, so
that no choice changes within a run. A file that `bench tune` did not write is ignored, with a
warning.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .runtime import HAS_TRITON, triton

MARK = "fusedckpt tuned"
FORMAT = f"{MARK} 2"
SLOTS = ("long", "short", "hybrid_long", "hybrid_short", "pointers")
VARIANTS = ("split", "hybrid", "fused")
TILE_FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "slices")

# architecture, bytes per element, slot of tiles.Tiles
TileKey = tuple[str, int, str]
# op, architecture, bytes per element, the GEMM's n and k, and the power of two below its rows
VariantKey = tuple[str, str, int, int, int, int]


class Tuned(NamedTuple):
    """Measured choices: tiles as the fields of tiles.Tile, and variants."""

    tiles: dict[TileKey, tuple[int, ...]]
    variants: dict[VariantKey, str]

    def tile(self, arch: str, itemsize: int, slot: str) -> tuple[int, ...] | None:
        """Return a tile's fields, None where none was measured."""
        return self.tiles.get((arch, itemsize, slot))

    def variant(self, op: str, arch: str, itemsize: int, sizes: tuple[int, int, int]) -> str | None:
        """Return the variant of the GEMM [m, n, k] measured at the number of rows nearest to m."""
        m, n, k = sizes
        rows = [key[5] for key in self.variants if key[:5] == (op, arch, itemsize, n, k)]
        if not rows:
            return None
        nearest = min(rows, key=lambda power: (abs(power - power_below(m)), power))
        return self.variants[op, arch, itemsize, n, k, nearest]


NOTHING = Tuned({}, {})
_given: Tuned | None = None
# counts how often that changed, so that what was chosen before is told from what is chosen now
generation = 0


def power_below(m: int) -> int:
    """Return the exponent of the greatest power of two that m >= 1 holds."""
    return m.bit_length() - 1


def cache_path() -> Path | None:
    """Return the file, None for none."""
    given = os.environ.get("FUSEDCKPT_CACHE")
    if given is not None:
        return Path(given) if given else None
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "fusedckpt" / "tuned.json"


def tuned() -> Tuned:
    """Return what is in effect: given by `using`, else what the file holds."""
    return _from_file() if _given is None else _given


@contextmanager
def using(choices: Tuned) -> Iterator[None]:
    """Put choices in effect inside instead of the file's, to measure them."""
    global _given, generation
    before, _given = _given, choices
    generation += 1
    try:
        yield
    finally:
        _given = before
        generation += 1


@cache
def _from_file() -> Tuned:
    path = cache_path()
    return NOTHING if path is None else load(path)


def load(path: Path) -> Tuned:
    """Read a file; nothing, with a warning, where it is not ours or of another Triton."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        warnings.warn(f"fusedckpt ignores {path}: {error}", RuntimeWarning, stacklevel=2)
        return NOTHING


def is_ours(text: str) -> bool:
    """Whether a file was written by `store`, of whatever version, and damaged or not."""
    return re.match(rf'\s*{{\s*"format":\s*"{MARK} ', text) is not None


def parse(text: str) -> Tuned:
    """Read what `dump` wrote. Raises ValueError for anything else."""
    try:
        record = json.loads(text)
        found, made = record["format"], record["triton"]
        if found != FORMAT or made != _version():
            raise ValueError(f"it is {found!r} of Triton {made}, not {FORMAT!r} of {_version()}")
        tiles, variants = record["tiles"].items(), record["variants"].items()
        return Tuned(dict(map(_tile, tiles)), dict(map(_variant, variants)))
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"it is not what bench tune writes: {error!r}") from error


def _tile(item: tuple[str, Any]) -> tuple[TileKey, tuple[int, ...]]:
    (arch, itemsize, slot), tile = item[0].split("/"), item[1]
    values = tuple(tile[name] for name in TILE_FIELDS)
    block_m, block_n, block_k, num_warps, num_stages, slices = values
    powers = (block_m, block_n, block_k, num_warps, slices)
    if not (
        itemsize in ("2", "4")
        and slot in SLOTS
        and all(type(value) is int and 0 < value <= 1024 for value in values)
        and all(value & (value - 1) == 0 for value in powers)
        and min(block_m, block_k, block_n // slices) >= 16
        and num_warps <= 32
        and num_stages <= 8
    ):
        raise ValueError(f"no kernel takes {item[0]!r}, {tile}")
    return (arch, int(itemsize), slot), values


def _variant(item: tuple[str, Any]) -> tuple[VariantKey, str]:
    (op, arch, *sizes), variant = item[0].split("/"), item[1]
    itemsize, n, k, rows = map(int, sizes)
    if variant not in VARIANTS:
        raise ValueError(f"{item[0]!r} has no variant {variant!r}")
    return (op, arch, itemsize, n, k, rows), variant


def dump(choices: Tuned) -> str:
    """Write choices as JSON that `parse` reads."""
    tiles = {key: dict(zip(TILE_FIELDS, tile, strict=True)) for key, tile in choices.tiles.items()}
    named = {
        name: {"/".join(map(str, key)): value for key, value in chosen.items()}
        for name, chosen in (("tiles", tiles), ("variants", choices.variants))
    }
    return json.dumps({"format": FORMAT, "triton": _version(), **named}, indent=1) + "\n"


def store(choices: Tuned, path: Path) -> None:
    """Replace the file at once: who reads it meanwhile finds the old one, or the new one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dump(choices))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _version() -> str | None:
    return triton.__version__ if HAS_TRITON else None
