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
import dataclasses
import enum
import importlib
import inspect
import io
import os
import pkgutil
import sys
import time
import types
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusedckpt import fuse

LIBRARIES = ["torch.nn", "transformers", "timm", "diffusers", "torchvision"]
LIBRARIES += ["torchtune", "torchtitan", "x_transformers", "open_clip"]
SCALES = (1, 10, 100, 1000)
WIDTH, HIDDEN, HEADS = 16, 32, 2
LARGEST = 2_000_000
# what differs by more is no rounding: some compute parts of it in float32
TOL = 1e-4
# by what a constructor's argument is called, the first that fits
GUESSES: tuple[tuple[str, Any], ...] = (
    ("vocab num_embeddings num_classes num_labels", 32),
    ("eps epsilon", 1e-5),
    ("drop rate prob", 0.0),
    ("layer_idx layer_id layer_number index block_idx", 0),
    ("num_layers n_layer depth num_blocks layers", 1),
    ("head_dim", WIDTH // HEADS),
    ("heads n_head num_kv", HEADS),
    ("bias", True),
    ("norm_layer", nn.LayerNorm),
    ("act_layer activation_layer activation_constructor", nn.GELU),
    ("activation act_fn hidden_act act", "gelu"),
    (
        "hidden_features intermediate hidden_dim ffn mlp_dim inner_dim dim_feedforward ff_dim",
        HIDDEN,
    ),
    ("resolution image_size img_size window", 8),
    ("patch_size kernel stride num_groups groups", 1),
    ("mult ratio expansion multiple", 2),
    ("dim features hidden channels width size in_ out_ embed d_model n_embd n_state nf", WIDTH),
    ("max seq length position num", 16),
)
# and those of configurations
SMALL = (
    ("head_dim kv_channels", WIDTH // HEADS),
    ("intermediate ffn_dim inner n_inner d_ff mlp_dim feedforward ff_", HIDDEN),
    ("num_hidden_layers num_layers n_layer _layers depth", 1),
    ("heads n_head", HEADS),
    ("hidden_size d_model n_embd dim embed width channels", WIDTH),
    ("experts", 2),
    ("vocab_size", 32),
)


@dataclass
class Count:
    """What was found in a library."""

    seen: int = 0
    built: int = 0
    swapped: int = 0
    modules: int = 0
    false: Counter[int] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Hunt, print a row for each library and whatever is false; return whether anything is."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--library", nargs="*", default=LIBRARIES)
    parser.add_argument("--left", action="store_true", help="print why classes were left, too")
    parser.add_argument("--seconds", type=float, default=3600, help="for each library")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'library':16} {'classes':>7} {'built':>6} {'swapped':>8} {'modules':>8}", end="")
    print("".join(f" {f'false x{scale}':>11}" for scale in SCALES), flush=True)
    is_false = False
    for name in options.library:
        found = hunt(name, options.seconds)
        if found is None:
            print(f"{name:16} is not installed", flush=True)
            continue
        counts = f"{found.seen:7d} {found.built:6d} {found.swapped:8d} {found.modules:8d}"
        print(f"{name:16} {counts}", end="")
        print("".join(f" {found.false[scale]:11d}" for scale in SCALES), flush=True)
        is_false = is_false or bool(found.false)
        for line in found.lines:
            print(f"  {line}")
        if options.left:
            for reason, count in found.left.most_common():
                print(f"  left {count:4d} x {reason}")
    return int(is_false)


def hunt(library: str, seconds: float) -> Count | None:
    """Try every class of a library."""
    with _quiet():
        _without_compiled_ops()
    try:
        with _quiet():
            package = importlib.import_module(library)
    except ImportError:
        return None
    found, start = Count(), time.monotonic()
    for kind in _classes(package, library):
        if time.monotonic() - start > seconds:
            found.lines.append(f"stopped after {seconds:.0f} s")
            break
        found.seen += 1
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


def build(kind: type[nn.Module]) -> nn.Module | None:
    """Return a tiny instance of a class, None where none could be guessed."""
    for config in _configs(kind):
        with contextlib.suppress(BaseException), torch.random.fork_rng():
            torch.manual_seed(0)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(**_arguments(kind, config)).parameters())
            if size > LARGEST:
                return None
            module = kind(**_arguments(kind, config))
            _fill(module)
            return module.eval()
    return None


def _fill(module: nn.Module) -> None:
    """Give parameters values that reach whatever limits there are."""
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1))
    module.to(torch.float32)


def _arguments(kind: type[nn.Module], config: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "config" in name or name in ("args", "model_args", "cfg"):
            found[name] = config
        elif parameter.default is parameter.empty:
            found[name] = _guess(name, parameter.annotation)
    return found


def _guess(name: str, annotation: Any) -> Any:
    if annotation in (bool, "bool"):
        return False
    value = _by_name(name, GUESSES)
    is_tuple = "tuple" in str(annotation).lower() or "list" in str(annotation).lower()
    return (value, value) if is_tuple and isinstance(value, int) else value


def _by_name(name: str, table: tuple[tuple[str, Any], ...]) -> Any:
    for parts, value in table:
        if any(part in name for part in parts.split()):
            return value
    return WIDTH


def _configs(kind: type[nn.Module]) -> Iterator[Any]:
    """Yield small configurations that a class may take; None for a class that takes none."""
    try:
        parameters = inspect.signature(kind.__init__).parameters
    except (TypeError, ValueError):
        return
    wanted = [p for n, p in parameters.items() if "config" in n or n in ("args", "cfg")]
    if not wanted:
        yield None
        return
    hints: Any = {}
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(kind.__init__)
    kinds = [hints[p.name] for p in wanted if isinstance(hints.get(p.name), type)]
    package = sys.modules[kind.__module__]
    names = [n for n in vars(package) if n.endswith(("Config", "Args"))]
    kinds += [v for n in names if isinstance(v := getattr(package, n), type)]
    own = getattr(kind, "Config", None)
    for each in [own, *kinds] if isinstance(own, type) else kinds:
        made = None
        with contextlib.suppress(BaseException):
            made = _small(_made(each))
        if made is not None:
            yield made


def _made(kind: Any) -> Any:
    """Make a configuration, and those that it cannot do without."""
    given: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            hints = typing.get_type_hints(kind)
        for each in dataclasses.fields(kind):
            if each.init and {each.default, each.default_factory} == {dataclasses.MISSING}:
                hint: Any = hints.get(each.name)
                is_inner = isinstance(hint, type) and dataclasses.is_dataclass(hint)
                given[each.name] = _made(hint) if is_inner else _guess(each.name, hint)
    make: Any = kind
    return make(**given)


def _small(config: Any, depth: int = 0) -> Any:
    """Make the numbers of a configuration small, as its own name for each allows."""
    names = vars(config) if hasattr(config, "__dict__") else getattr(config, "__slots__", ())
    for name in list(names):
        value = getattr(config, name, None)
        small: Any = value
        if type(value) is int and value > 2 and not name.startswith("_"):
            fits = (to for parts, to in SMALL if any(part in name for part in parts.split()))
            small = min(next(fits, value), value)
        elif type(value) is float and "drop" in name:
            small = 0.0
        elif depth < 3 and not isinstance(value, (type, enum.Enum)) and _is_config(value):
            _small(value, depth + 1)
        if small is not value:
            with contextlib.suppress(BaseException):
                setattr(config, name, small)
    return config


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") or dataclasses.is_dataclass(value)


def try_one(kind: type[nn.Module], module: nn.Module, found: Count) -> None:
    """Fuse a module, and run what was swapped beside what was not."""
    found.built += 1
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        eager = copy.deepcopy(module)
    except Exception:
        return
    before = _state(module)
    try:
        report = fuse(module)
    except Exception as error:
        found.lines.append(f"{name}: fuse raised {type(error).__name__}: {error}")
        found.false[1] += 1
        return
    if before != _state(module):
        found.lines.append(f"{name}: fuse changed its parameters or buffers")
        found.false[1] += 1
    found.left.update(f"{reason}   ({name})" for reason in report.left.values())
    found.swapped += bool(report.swapped)
    swapped = [n for n, m in module.named_modules() if "_fusedckpt_original" in m.__dict__]
    found.modules += len(swapped)
    for path in swapped:
        pair = module.get_submodule(path), eager.get_submodule(path)
        for scale in SCALES:
            wrong = difference(*pair, scale)
            if wrong is not None:
                found.false[scale] += 1
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
            if wrong is not None:
                return f"{wrong} ({dtype}, {'training' if training else 'eval'})"
    return None


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
        error, own = ((r - t).abs().max().item() for r in (a, b))
        if not error <= TOL * t.abs().max().item() and not error <= 8 * own + 1e-30:
            return f"result {index}: error {error:.2g} of {t.abs().max().item():.2g}"
    return None


def _width(module: nn.Module) -> int:
    plan: Any = module.__dict__.get("_fusedckpt_plan")
    if hasattr(plan, "linears"):
        path, _, transposed = plan.linears[0]
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
