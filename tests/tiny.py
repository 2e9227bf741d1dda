"""Tiny instances of module classes, whatever their constructors take: by guessing."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import sys
import typing
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WIDTH, HIDDEN, HEADS = 16, 32, 2
LARGEST = 2_000_000
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
    options = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "config" in name or name in ("args", "model_args", "cfg"):
            options[name] = config
        elif parameter.default is parameter.empty:
            options[name] = _guess(name, parameter.annotation)
    return options


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
