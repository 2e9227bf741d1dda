"""The Triton kernels that torch.compile makes of a function, without the GPU that would run them.

The function is lowered by inductor on fake tensors of a card, and the code that inductor writes is
run on meta tensors: it launches each kernel once in each of the configurations that torch.compile
would time to choose one, and runs ops of ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bench.cards import card_of_driver, played

Function = Callable[..., Any]


def source_of(fn: Function, inputs: Sequence[Tensor]) -> str:
    """Return the code that inductor writes for a function of tensors of these shapes and dtypes."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs]
        traced = make_fx(fn, decomposition_table=select_decomp_table())(*fakes)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        post_grad_passes(traced, True)
        graph = GraphLowering(traced, example_inputs=fakes, shape_env=None, is_inference=True)
        with V.set_graph_handler(graph):
            graph.run(*fakes)
            code: Any = graph.codegen()[0]
    return getattr(code, "value", code)


class Kernel:
    """A kernel of inductor's code; `run` launches it in each configuration."""

    def __init__(self, tuner: Any):
        self.tuner = tuner

    def run(self, *args: Any, stream: Any = None) -> None:
        """Launch each configuration."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        tuner = self.tuner
        for config in tuner.configs:
            sizes = dict(zip(tuner.fn.arg_names, args, strict=False)) | config.kwargs
            grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(sizes)
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            tuner.fn[tuple(grid)](*args, **config.kwargs, **options)


def program_of(source: str) -> Function:
    """Return the program in inductor's code, which takes a list of meta tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def kernel(_: Any, name: str, code: str, *args: Any, **kwargs: Any) -> Kernel:
        return Kernel(getattr(PyCodeCache.load(code), name))

    module = ModuleType("inductor_code")
    with patch.object(AsyncCompile, "triton", kernel):
        exec(compile(source, "inductor_code", "exec"), vars(module))
    empty = lambda size, stride, dtype: torch.empty_strided(  # noqa: E731
        size, stride, dtype=dtype, device="meta"
    )
    view = lambda x, size, stride, start=0: x.as_strided(size, stride, start)  # noqa: E731
    vars(module).update(
        empty_strided_cuda=empty,
        reinterpret_tensor=view,
        assert_size_stride=lambda *_, **__: None,
        get_raw_stream=lambda _: 0,
    )
    return module.call  # type: ignore[attr-defined]


def launching(fn: Function, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a call that launches the kernels of torch.compile(fn): compiled, on a GPU.

    On meta tensors for the card for which Triton compiles, each configuration of each kernel.
    """
    if not inputs[0].is_meta:
        return partial(torch.compile(fn, dynamic=False), *inputs)

    def launch() -> None:
        from torch._inductor import config
        from torch._inductor.runtime import triton_helpers

        with (
            played(card_of_driver()),
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
            # one process: others would not see this card
            config.patch({"force_disable_caches": True, "compile_threads": 1}),
        ):
            with _disable_current_modes():
                # a mode counts ops of the program, not of its compilation
                program = program_of(source_of(fn, inputs))
            program([*inputs])

    return launch
