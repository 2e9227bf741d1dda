"""Count the bytes that models save, before and after `fuse`.

A language model's layer: the bytes of four layers less those of two, so that embeddings, the last
norm and the head do not count; `--whole` counts whole models with head and loss, at their published
depth. Models have D = 256 with the ratios of their published configurations.

A model of another group (hybrids, diffusion, images, encoders, audio) is measured whole, also with
recipes, with its peak, its FLOPs and the elements that it writes. Layers go to one file, other
models to another. Models are in bfloat16 and in training mode with their dropouts; attention is
torch's fused one, without dropout, which a CPU cannot fuse. Models of a package that is not
installed are left out, and named.
"""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.env import environment
from bench.options import Options
from bench.results import MIB, Row, append
from bench.shapes import DENSE, EXPERTS, HARDER, TOKENS, WHOLE, D, Shape, model_of
from bench.survey import DTYPE, Cost, measured_step, obstacle
from bench.tables import Columns, show
from bench.zoo import OWN, ZOO
from bench.zoo.model import Model
from fusedckpt import fuse
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.memory import SavedTensors, saved_tensors
from fusedckpt.reporting.progress import progress

LANGUAGE: Mapping[str, Shape] = {**DENSE, **HARDER, **EXPERTS}
# bytes of D values of every token, in bfloat16
UNIT = TOKENS * D * 2
FILE = "shares.jsonl"
LAYERS_FILE = "layers.jsonl"
WHOLE_FILE = "whole.jsonl"
OWN_FILE = "own.jsonl"


def saved_by(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SavedTensors:
    """Return the tensors that one forward in training saves."""
    with saved_tensors() as saved:
        y = model(*args, **kwargs)
    del y
    return saved


class Share(NamedTuple):
    """The values that a layer of a model saves, in units of D per token."""

    before: float
    after: float
    # size and shape of the storages that it still saves -> their number, twice
    left: Counter[tuple[float, tuple[int, ...]]]
    report: FuseReport

    @property
    def gone(self) -> float:
        """The share of saved bytes that is gone."""
        return 1 - self.after / self.before


def measured(shape: Shape) -> Share:
    """Return the values that a model's layer saves before and after `fuse`."""
    saved: dict[int, tuple[SavedTensors, SavedTensors]] = {}
    reports: dict[int, FuseReport] = {}
    for layers in (4, 2):
        torch.manual_seed(0)
        model, args, kwargs = model_of(shape, layers)
        model = model.to(torch.bfloat16).train()
        args = tuple(x.bfloat16() if x.is_floating_point() else x for x in args)
        before = saved_by(model, args, kwargs)
        reports[layers] = fuse(model)
        saved[layers] = before, saved_by(model, args, kwargs)
    sizes = [(saved[4][i].nbytes - saved[2][i].nbytes) / (2 * UNIT) for i in (0, 1)]
    counts = [
        Counter((storage.nbytes / UNIT, storage.shape) for storage in saved[layers][1].storages)
        for layers in (4, 2)
    ]
    return Share(sizes[0], sizes[1], counts[0] - counts[1], reports[4])


def measured_whole(name: str) -> tuple[float, float]:
    """Return the bytes that a training step of a model saves before and after `fuse`."""
    whole = WHOLE[name]
    shape = DENSE[name]
    kind = whole.model or shape.model.replace("Model", "ForCausalLM")
    options = {**shape.options, "vocab_size": whole.reduced}
    pairs: list[tuple[int, int]] = []
    for layers in (2, 4):
        torch.manual_seed(0)
        model, (ids,), kwargs = model_of(shape._replace(model=kind, options=options), layers)
        model = model.to(torch.bfloat16).train()
        kwargs = {**kwargs, "labels": ids}
        before = saved_by(model, (ids,), kwargs).nbytes
        fuse(model, head=True)
        pairs.append((before, saved_by(model, (ids,), kwargs).nbytes))
    two, four = pairs
    before, after = (a + (whole.layers - 2) * (b - a) / 2 for a, b in zip(two, four, strict=True))
    return before, after


def options(add: Options) -> None:
    """Add the options."""
    add.add_argument("models", nargs="*", metavar="MODEL", help="models; default: all")
    add.flag("whole", "whole language models with head and loss, the bytes of 64 tokens")
    add.flag("own", "blocks as people write them in repositories of their own")
    add.flag("verbose", "print reports of fuse, too")
    add.place(f"{LAYERS_FILE} and {FILE}, {WHOLE_FILE} or {OWN_FILE}", has_device=False)


def prepare(chosen: Namespace) -> Namespace:
    """Raise ValueError for a model that is unknown."""
    known = [*WHOLE] if chosen.whole else [*OWN] if chosen.own else [*LANGUAGE, *ZOO]
    for name in chosen.models:
        if name not in known:
            raise ValueError(f"MODEL must be one of {', '.join(known)}, got {name!r}")
    chosen.models = chosen.models or known
    return chosen


def run(chosen: Namespace) -> int:
    """Print the tables, and the medians of groups."""
    layers = partial(_layers, is_verbose=chosen.verbose)
    parts = [(LANGUAGE, layers, LAYERS_FILE), (ZOO, partial(_survey, ZOO), FILE)]
    if chosen.whole:
        parts = [(WHOLE, _wholes, WHOLE_FILE)]
    elif chosen.own:
        parts = [(OWN, partial(_survey, OWN), OWN_FILE)]
    for models, measure, file in parts:
        names = [name for name in chosen.models if name in models]
        with quiet_on_one_thread():
            rows = measure(names) if names else []
        if rows:
            append(rows, chosen.out / file)
            print(f"wrote {chosen.out / file}")
    return 0


@contextmanager
def quiet_on_one_thread() -> Iterator[None]:
    """Let libraries not warn of kernels that a CPU has not, and torch take one thread."""
    level = logging.root.manager.disable
    num_threads = torch.get_num_threads()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(num_threads)
        logging.disable(level)


def _wholes(names: Sequence[str]) -> list[Row]:
    """Measure whole language models, print their table and median, and return their rows."""
    wholes = []
    with progress("shares", len(names)) as tick:
        for name in names:
            tick(name)
            wholes.append((name, *measured_whole(name)))
    show("Bytes that a step of 64 tokens saves", _WHOLES, wholes)
    gone = [1 - after / before for _, before, after in wholes]
    print(f"median of {len(gone)}: {median(gone):.1%} gone")
    facts = environment(torch.device("cpu"), DTYPE)
    return [
        _row(name, "a whole model", way, size) | facts
        for name, before, after in wholes
        for way, size in (("eager", before), ("fuse", after))
    ]


def _layers(names: Sequence[str], is_verbose: bool) -> list[Row]:
    """Measure a layer of language models, print their table and medians, and return their rows."""
    shares: dict[str, Share] = {}
    with progress("shares", len(names)) as tick:
        for name in names:
            tick(name)
            shares[name] = measured(LANGUAGE[name])
            if is_verbose:
                print(f"{name}: {shares[name].report}", flush=True)
    show("Values of a layer per token, in units of D", _LAYERS, shares.items())
    for models, kind in ((DENSE, "dense models"), (EXPERTS, "mixtures of experts")):
        gone = [share.gone for name, share in shares.items() if name in models]
        if gone:
            print(f"median of {len(gone)} {kind}: {median(gone):.0%} gone")
    facts = environment(torch.device("cpu"), DTYPE) | {"unit_bytes": UNIT}
    return [
        _row(name, "a layer", way, size * UNIT) | facts
        for name, share in shares.items()
        for way, size in (("eager", share.before), ("fuse", share.after))
    ]


class Surveyed(NamedTuple):
    """A model of the survey, and a step's cost by the way of running it."""

    name: str
    group: str
    costs: Mapping[str, Cost]

    def relative(self, way: str, quantity: str) -> float:
        """Return a quantity of a way's cost, relative to eager's."""
        return getattr(self.costs[way], quantity) / getattr(self.costs["eager"], quantity)


def _survey(by_name: Mapping[str, Model], names: Sequence[str]) -> list[Row]:
    """Measure models of all groups, print their table and medians, and return their rows."""
    models: list[Surveyed] = []
    with progress("shares", len(names)) as tick:
        for name in names:
            tick(name)
            why = obstacle(by_name[name])
            if why is not None:
                print(f"{name}: left out, it {why}", flush=True)
                continue
            models.append(Surveyed(name, by_name[name].group, measured_step(by_name[name])))
    if not models:
        return []
    show("Bytes of a training step, whole models", _BYTES, models, _BYTES_NOTES, words=2)
    show("Work of a training step, relative to eager's", _WORK, models, _WORK_NOTES, words=2)
    by_group: dict[str, list[Surveyed]] = {}
    for model in models:
        by_group.setdefault(model.group, []).append(model)
    show("Medians of bytes", _MEDIAN_BYTES, by_group.items())
    show("Medians of work, relative to eager's", _MEDIAN_WORK, by_group.items())
    facts = environment(torch.device("cpu"), DTYPE)
    return [
        _row(model.name, model.group, way, cost.saved)
        | {"peak_bytes": round(cost.peak), "peak_above": "parameters and gradients"}
        | {"step_flops": round(cost.flops), "written_elements": round(cost.written)}
        | facts
        for model in models
        for way, cost in model.costs.items()
    ]


def _row(name: str, group: str, way: str, saved: float) -> Row:
    """Return a row of a file."""
    return {
        "command": "shares",
        "case": name,
        "group": group,
        "name": way,
        "title": f"{name} ({group})",
        "failure": None,
        "is_wrong": False,
        "dtype": str(DTYPE).removeprefix("torch."),
        "both_ms": None,
        "saved_bytes": round(saved),
        # measured of whole models of other groups alone
        "peak_bytes": None,
    }


def _left(share: Share) -> str:
    """Write the largest tensors that a layer still saves, by number, size and shape."""
    tensors = sorted(share.left.items(), reverse=True)[:9]
    return ", ".join(
        f"{count / 2:g} x {size:.2f} {list(shape)}"
        for (size, shape), count in tensors
        if size > 0.02
    )


_LAYERS: Columns = {
    "model": lambda pair: pair[0],
    "before": lambda pair: f"{pair[1].before:.2f}",
    "after": lambda pair: f"{pair[1].after:.2f}",
    "gone": lambda pair: f"{pair[1].gone:.0%}",
    "left": lambda pair: _left(pair[1]),
}
_WHOLES: Columns = {
    "model": lambda row: row[0],
    "layers": lambda row: f"{WHOLE[row[0]].layers}",
    "classes": lambda row: f"{WHOLE[row[0]].reduced}",
    "KiB\nbefore": lambda row: f"{row[1] / 1024:.0f}",
    "after": lambda row: f"{row[2] / 1024:.0f}",
    "gone": lambda row: f"{1 - row[2] / row[1]:.1%}",
}


def share_gone(ratio: float) -> str:
    """Write the share that is gone of bytes, from their ratio to eager's."""
    # a zero loses its sign
    return f"{round(1 - ratio, 2) + 0.0:.0%}"


def _median_of(pair: tuple[str, Sequence[Surveyed]], way: str, quantity: str) -> float:
    """Return the median of a quantity of a group's models, relative to eager's."""
    return median(model.relative(way, quantity) for model in pair[1])


def _by_way(
    quantity: str,
    label: str,
    write: Callable[[float], str],
    ratio: Callable[[Any, str, str], float] = Surveyed.relative,
) -> Columns:
    """Return columns of a quantity relative to eager's, one for each other way.

    ratio: gets the row, the way and the quantity.
    """

    def column(way: str) -> Callable[[Any], str]:
        return lambda row: write(ratio(row, way, quantity))

    return {f"{label}\n{head}": column(way) for way, head in _HEADS.items()}


# the names of ways -> how heads write them
_HEADS = {"fuse": "fuse", "recipes": "recipes", "fuse+recipes": "both"}
_MODEL: Columns = {"model": lambda model: model.name, "group": lambda model: model.group}
_BYTES: Columns = {
    **_MODEL,
    "saved MiB\neager": lambda model: f"{model.costs['eager'].saved / MIB:.2f}",
    **_by_way("saved", "saved gone", share_gone),
    "peak MiB\neager": lambda model: f"{model.costs['eager'].peak / MIB:.2f}",
    **_by_way("peak", "peak gone", share_gone),
}
_BYTES_NOTES = (
    "fuse: fuse(model); recipes: fuse(model, recompute_elementwise=True) with all swaps of layers",
    "off; both: fuse(model, recompute_elementwise=True). Recipes here are for tensors of any size,",
    "as widths are reduced.",
    "saved: for backward; peak: of forward and backward, above parameters and gradients; gone: the",
    "share of eager's. Scans are the references of transformers, which save more than kernels",
)
_WORK: Columns = {
    **_MODEL,
    "GFLOPs\neager": lambda model: f"{model.costs['eager'].flops / 1e9:.2f}",
    **_by_way("flops", "FLOPs", "{:.3f}".format),
    "10^6 written\neager": lambda model: f"{model.costs['eager'].written / 1e6:.1f}",
    **_by_way("written", "written", "{:.2f}".format),
}
_WORK_NOTES = (
    "FLOPs: of GEMMs, convolutions and attention, forward and backward; written: elements of the",
    "results of all other operators. Recomputed work counts in both",
)
_GROUP: Columns = {"group": lambda pair: pair[0], "models": lambda pair: f"{len(pair[1])}"}
_MEDIAN_BYTES: Columns = {
    **_GROUP,
    **_by_way("saved", "saved gone", share_gone, _median_of),
    **_by_way("peak", "peak gone", share_gone, _median_of),
}
_MEDIAN_WORK: Columns = {
    **_GROUP,
    **_by_way("flops", "FLOPs", "{:.3f}".format, _median_of),
    **_by_way("written", "written", "{:.2f}".format, _median_of),
}
