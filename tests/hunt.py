"""Hunt for modules that fuse swaps, and that compute something else afterwards.

    python -m tests.hunt [--library timm ...] [--left] [--seconds 60]

Builds every module class of libraries that can be built tiny, by guessing what its constructor
takes, fuses it, and runs each swapped module beside a copy that is not, forward and backward, on
inputs of 1, 10, 100 and 1000 times the scale, in training and not. Libraries that are not there are
skipped. Exit status 1 if a swap is false. Not run by pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import os
import pkgutil
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt import fuse
from fusedckpt.fusing.swap import original_of
from fusedckpt.layers.notes import notes_of
from tests.tiny import WIDTH, build

LIBRARIES = ["torch.nn", "transformers", "timm", "diffusers", "torchvision"]
LIBRARIES += ["torchtune", "torchtitan", "x_transformers", "open_clip"]
SCALES = (1, 10, 100, 1000)
# what differs by more is no rounding: some compute parts of it in float32
TOL = 1e-4


class Found(NamedTuple):
    """What was found in a library: counts by column, what is false, and why classes were left."""

    counts: Counter[str]
    lines: list[str]
    left: Counter[str]


COLUMNS = ["classes", "built", "swapped", "modules", *(f"false x{scale}" for scale in SCALES)]


def main() -> int:
    """Hunt, print a row for each library and whatever is false; return whether anything is."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--library", nargs="*", default=LIBRARIES)
    parser.add_argument("--left", action="store_true", help="print why classes were left, too")
    parser.add_argument("--seconds", type=float, default=3600, help="for each library")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'library':16}", *(f"{name:>11}" for name in COLUMNS), flush=True)
    is_false = False
    for name in options.library:
        found = hunt(name, options.seconds)
        if found is None:
            print(f"{name:16} is not installed", flush=True)
            continue
        print(f"{name:16}", *(f"{found.counts[key]:11}" for key in COLUMNS), flush=True)
        is_false |= any(found.counts[key] for key in COLUMNS if "false" in key)
        print(*(f"  {line}\n" for line in found.lines), sep="", end="")
        for reason, count in found.left.most_common() if options.left else ():
            print(f"  left {count:4d} x {reason}")
    return int(is_false)


def hunt(library: str, seconds: float) -> Found | None:
    """Try every class of a library."""
    with _quiet():
        _without_compiled_ops()
        try:
            package = importlib.import_module(library)
        except ImportError:
            return None
    found, start = Found(Counter(), [], Counter()), time.monotonic()
    for kind in _classes(package, library):
        if time.monotonic() - start > seconds:
            found.lines.append(f"stopped after {seconds:.0f} s")
            break
        found.counts["classes"] += 1
        with _quiet():
            module = build(kind)
            if module is not None:
                try_one(kind, module, found)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# it defines its ops for as long as it lives
_OPS = torch.library.Library("torchvision", "FRAGMENT")


def _without_compiled_ops() -> None:
    """Let torchvision be imported where its compiled ops do not fit this torch."""
    with contextlib.suppress(Exception):
        importlib.import_module("torchvision")
        return
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            _OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _classes(package: Any, library: str) -> Iterator[type[nn.Module]]:
    seen: set[type] = set()
    for module in [package, *_submodules(package)]:
        for kind in list(vars(module).values()):
            if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind in seen:
                continue
            seen.add(kind)
            if kind.__module__.split(".")[0] == library.split(".")[0] and not _is_model(kind):
                yield kind


def _is_model(kind: type[nn.Module]) -> bool:
    # of transformers: their layers are classes, too
    return any(base.__name__ in ("PreTrainedModel", "ModelMixin") for base in kind.__mro__)


def _submodules(package: Any) -> Iterator[types.ModuleType]:
    for entry in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        parts = entry.name.split(".")
        is_left = {"test", "tests", "testing", "cli", "__main__", "scripts"} & {*parts}
        # of transformers, only what has layers
        if is_left or (
            package.__name__ == "transformers"
            and ".models." in entry.name
            and not entry.ispkg
            and ".modeling_" not in entry.name
        ):
            continue
        with contextlib.suppress(BaseException), _quiet():
            yield importlib.import_module(entry.name)


def try_one(kind: type[nn.Module], module: nn.Module, found: Found) -> None:
    """Fuse a module, and run what was swapped beside what was not."""
    found.counts["built"] += 1
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        eager = copy.deepcopy(module)
    except Exception:
        return
    before, wrong = _state(module), None
    try:
        report = fuse(module)
    except Exception as error:
        wrong = f"fuse raised {type(error).__name__}: {error}"
    else:
        wrong = None if before == _state(module) else "fuse changed its parameters or buffers"
    if wrong is not None:
        found.lines.append(f"{name}: {wrong}")
        found.counts["false x1"] += 1
        return
    found.left.update(f"{reason}   ({name})" for reason in report.left.values())
    swapped = [n for n, m in module.named_modules() if original_of(m) is not None]
    found.counts["swapped"] += bool(report.swapped)
    found.counts["modules"] += len(swapped)
    for path, scale in product(swapped, SCALES):
        wrong = difference(module.get_submodule(path), eager.get_submodule(path), scale)
        if wrong is not None:
            found.counts[f"false x{scale}"] += 1
            change = report.swapped.get(path, "")
            found.lines.append(f"{name} {path} x{scale}: {change}: {wrong}")


def _state(module: nn.Module) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    return [
        (t._version, t.double().nan_to_num().sum().item()) for t in tensors if not t.is_complex()
    ]


def difference(ours: nn.Module, eager: nn.Module, scale: int) -> str | None:
    """Return how two modules' results differ, None where they do not.

    An error may be TOL of what is there, or a few times that of the module itself, as gradients
    that cancel have it.
    """
    width = _width(ours)
    for training in (False, True):
        truth = _run(eager, width, scale, torch.float64, training)
        for dtype in (torch.float32, torch.float64):
            found, expected = (_run(m, width, scale, dtype, training) for m in (ours, eager))
            wrong = _compared(found, expected, truth)
            if wrong is not None and training:
                # masks are drawn in another way
                pair = _without_dropout(ours), _without_dropout(eager)
                found, expected = (_run(m, width, scale, dtype, training) for m in pair)
                wrong = _compared(found, expected, expected)
            if wrong is not None:
                return f"{wrong} ({dtype}, {'training' if training else 'eval'})"
    return None


def _without_dropout(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return twin


def _run(module: nn.Module, width: int, scale: int, dtype: torch.dtype, training: bool) -> Any:
    """Return output and gradients, or the error that it raises."""
    twin = copy.deepcopy(module).to(dtype).train(training)
    torch.manual_seed(1)
    x = (torch.randn(2, 5, width) * scale).to(dtype).requires_grad_(True)
    try:
        y = twin(x)
        weights = torch.cos(torch.arange(y.numel())).view_as(y).to(y)
        wanted = [x, *(p for p in twin.parameters() if p.requires_grad)]
        grads = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return [y.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def _compared(ours: Any, eager: Any, truth: Any) -> str | None:
    if isinstance(ours, str) or isinstance(eager, str):
        return None if isinstance(eager, str) else f"ours {ours[:100]}"
    truth = eager if isinstance(truth, str) else truth
    for index, (a, b, t) in enumerate(zip(ours, eager, truth, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {index} is {a.dtype} {[*a.shape]}, was {b.dtype} {[*b.shape]}"
        if torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            continue
        error, own = ((r - t).abs().max().item() for r in (a, b))
        if not error <= TOL * t.abs().max().item() and not error <= 8 * own + 1e-30:
            return f"result {index}: error {error:.2g} of {t.abs().max().item():.2g}"
    return None


def _width(module: nn.Module) -> int:
    match: Any = notes_of(module).match
    if hasattr(match, "pattern") and match.pattern.linears:
        path, _, transposed = match.pattern.linears[0]
        weight = module.get_parameter(".".join(path))
        return weight.shape[0 if transposed else 1]
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return layer.in_features
        shape: Any = getattr(layer, "normalized_shape", None)
        if shape is not None:
            return shape[-1]
    return next((p.shape[-1] for p in module.parameters()), WIDTH)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main())
