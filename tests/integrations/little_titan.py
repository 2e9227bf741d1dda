"""A stand-in for torchtitan, where it is not installed: the parts that our overrides use.

Its full activation checkpointing applies in both forms that torchtitan has had: it puts the module
that `_wrap_block` returns in the block's place, or drops it, as `_wrap_block` sets the block's
forward, and then has no random state to preserve.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

OURS = "fusedckpt.integrations.torchtitan"
D, F = 6, 8


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **kwargs)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


class TransformerBlock(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dropout: float = 0.0

    def __init__(self, config: Any):
        super().__init__()
        self.norm, self.w1, self.w2 = nn.RMSNorm(D), nn.Linear(D, F), nn.Linear(F, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.w2(self.dropout(self.w1(self.norm(x)).relu()))


class GroupedExperts(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int = 3

    def __init__(self, config: Any):
        super().__init__()
        first, last = (config.num_experts, F, D), (config.num_experts, D, F)
        for name, shape in {"w1_EFD": first, "w2_EDF": last, "w3_EFD": first}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 3))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return routed(x_RD, num_tokens_per_expert_E.tolist(), *self.parameters())


def routed(x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
    """Loop over experts in bfloat16, as torchtitan multiplies; in float64 for a truth."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
    rows = x.to(dtype).split([*counts, len(x) - sum(counts)])
    experts = zip(rows, *(w.to(dtype) for w in weights), strict=False)
    found = [(nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in experts]
    return torch.cat([*found, torch.zeros_like(rows[-1])]).type_as(x)


class Model(nn.Module):
    def __init__(self, config: Any, count: int = 2):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): config.build() for i in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Registering(Configurable):
    """As released: 0.2 and 0.3."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

    def __init__(self, config: Any, dump_folder: str = ""):
        self.config = config

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        raise NotImplementedError

    def apply(self, model: nn.Module) -> None:
        layers = model.get_submodule("layers")
        for name, block in layers.named_children():
            layers.register_module(name, self._wrap_block(block, base_fqn=f"layers.{name}"))


class Dropping(Registering):
    """As after it: on torch_remat, whose checkpoint is set as the block's forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Registering.Config):
        preserve_rng_state: bool = False

        def __post_init__(self) -> None:
            if self.preserve_rng_state or self.debug:
                raise ValueError("not supported")

    def apply(self, model: nn.Module, *, block_container_fqns: Any = ("layers",)) -> None:
        for fqn in block_container_fqns:
            for name, block in model.get_submodule(fqn).named_children():
                self._wrap_block(block, base_fqn=f"{fqn}.{name}")


def derive(source: Any, target: type) -> Any:
    return target(**{f.name: getattr(source, f.name) for f in dataclasses.fields(source)})


def override(*, target: type, description: str = "") -> Callable[[Any], Any]:
    return lambda factory: factory


@contextmanager
def installed(full: type) -> Iterator[Any]:
    """Let our overrides be imported with this form of full activation checkpointing."""
    parts = {
        "torchtitan": {},
        "torchtitan.config": {"derive": derive, "override": override},
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": {"FullAC": full},
        "torchtitan.models": {},
        "torchtitan.models.common": {"TransformerBlock": TransformerBlock},
        "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts},
        "torchtitan.tools": {},
        "torchtitan.tools.logging": {"logger": logging.getLogger("titan")},
    }
    names = [OURS, *(name for name in sys.modules if name.split(".")[0] == "torchtitan")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    for name, values in parts.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    try:
        yield SimpleNamespace(ours=importlib.import_module(OURS), config=full.Config)
    finally:
        for name in (OURS, *parts):
            sys.modules.pop(name, None)
        sys.modules.update(before)
