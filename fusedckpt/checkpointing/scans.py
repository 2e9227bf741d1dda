"""Functions of mixers: scans, which need not run again, and convolutions, which do.

Known are transformers' kernels with a fallback (mamba_chunk_scan_combined, selective_scan_fn,
chunk_gated_delta_rule, ...) and the autograd Functions of fla and mamba_ssm. A function that
`region(fn, "scan")` returned is one by itself. Nothing is imported for that: models that use these
functions have done so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from types import FunctionType
from typing import Any

import torch

SCAN = "scan"
CONVOLUTION = "convolution"
# transformers' kernel of tokens near each other
_CONVOLUTION = "causal_conv1d_fn"
# parts of the names of transformers' kernels of decoding
_DECODING = ("update", "recurrent")
# packages of scans: their autograd Functions, but for those of norms and activations
_PACKAGES = ("fla.ops.", "mamba_ssm.ops.")
_NO_SCANS = ("norm", "activation")


def kind_of(fn: Any) -> str | None:
    """Return SCAN or CONVOLUTION for a function of a mixer, None for any other."""
    if isinstance(fn, partial):
        # of `region`: the function and the region's name
        is_region = getattr(fn.func, "is_region", False)
        return fn.args[1] if is_region and fn.args[1] == SCAN else None
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        return SCAN if _is_of_package(fn) else None
    if not isinstance(fn, FunctionType):
        return None
    if _is_of_package(fn):
        return SCAN
    kernel = _kernel_of(fn)
    if kernel is None or any(word in kernel for word in _DECODING):
        return None
    return CONVOLUTION if kernel == _CONVOLUTION else SCAN


def _is_of_package(fn: Any) -> bool:
    where = fn.__module__ or ""
    return where.startswith(_PACKAGES) and not any(word in where for word in _NO_SCANS)


def _kernel_of(fn: FunctionType) -> str | None:
    """Return the name of the kernel that transformers looks up for a function."""
    code = fn.__code__
    if not code.co_filename.endswith("hub_kernels.py") or "func_name" not in code.co_freevars:
        return None
    return fn.__closure__[code.co_freevars.index("func_name")].cell_contents  # type: ignore[index]


def places(*kinds: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the functions of these kinds that models call: their table, name in it, and kind."""
    for name in _modules(len(sys.modules), next(reversed(sys.modules))):
        module = sys.modules.get(name)
        if module is not None:
            table = vars(module)
            yield from ((table, key, kind) for key, kind in _names(module) if kind in kinds)


@lru_cache(1)
def _modules(*_: Any) -> list[str]:
    """Return the modules with such functions, again where modules were added."""
    return [
        name
        for name in [*sys.modules]
        if name.startswith(_PACKAGES) or (name.startswith("transformers") and ".modeling_" in name)
    ]


@cache
def _names(module: Any) -> list[tuple[str, str]]:
    is_package = module.__name__.startswith(_PACKAGES)
    # of a package its Functions, as its functions may be imported by name
    table = [(n, fn) for n, fn in [*vars(module).items()] if isinstance(fn, type) == is_package]
    return [(n, kind) for n, fn in table if (kind := kind_of(fn)) is not None]
