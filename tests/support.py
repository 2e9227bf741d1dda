"""What the tests measure with: error against float64 beside eager's, bytes, FLOPs, launches, calls.

Nothing here reads a clock: work is counted, so that a busy machine changes no result.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import quick_interpreter
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from fusedckpt.fusing.accuracy import FEWEST, Errors, bound
from fusedckpt.kernels import gemm
from fusedckpt.memory import peak_bytes, saved_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = (torch.bfloat16, torch.float16)
# seconds that a test waits for another process or thread before it fails instead of hanging
HANGS = 600
# modules that a server of ranks imports once, where they are installed
IMPORTED = [
    *("support", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
]

# inductor's code for a CPU is C++, which it compiles with this
needs_inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)

# torch 2.11 begins no backward at the node of an autograd Function, as zero-bubble schedules do
SPLITS_BACKWARD = torch.__version__ >= "2.12"
splits_backward = pytest.mark.skipif(not SPLITS_BACKWARD, reason="this torch cannot")

Inputs = Sequence[Tensor | None]
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def randn(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    """Draw a leaf of order one on the device under test."""
    x = torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)
    return x.requires_grad_(requires_grad)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def leaves_of(inputs: Inputs) -> list[Tensor]:
    """Return those inputs that require grad."""
    return [x for x in inputs if x is not None and x.requires_grad]


def results(fn: Function, inputs: Inputs, douts: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs, then the gradient of every input that requires one."""
    return outputs_and_gradients(as_tuple(fn(*inputs)), inputs, douts)


def outputs_and_gradients(
    outputs: Sequence[Tensor], inputs: Inputs, douts: Sequence[Tensor]
) -> list[Tensor]:
    """Return outputs, then their gradients of every input that requires one."""
    wanted = leaves_of(inputs)
    grads = []
    if wanted:
        pairs = [
            (y, dout.to(y.dtype)) for y, dout in zip(outputs, douts, strict=True) if y.requires_grad
        ]
        grads = torch.autograd.grad([y for y, _ in pairs], wanted, [dout for _, dout in pairs])
        assert all(grad.dtype == x.dtype for grad, x in zip(grads, wanted, strict=True))
    return [*(y.detach() for y in outputs), *grads]


def in_float64(inputs: Inputs) -> list[Tensor | None]:
    return [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs
    ]


def compare(
    fused: Function,
    eager: Function,
    make_inputs: Callable[[], Inputs],
    make_douts: Callable[[Tensor], Tensor] = torch.randn_like,
    slack: float = 2.0,
) -> float:
    """Assert that `fused` is as near to eager in float64 as eager in the same dtype is.

    Errors are root mean squares over draws of at least 256 elements together, or 16 draws. Each
    output and gradient must hold err(fused) <= slack * err(eager) + 8 eps max(1, rms(truth)), eps
    that of float32 for half precision too, and be finite where eager is. Returns the worst
    err(fused) / err(eager) where eager errs at all.
    """
    sums: list[Errors] = []
    number, draws = 0, 1
    while number < draws:
        inputs = make_inputs()
        outputs = as_tuple(eager(*inputs))
        douts = [make_douts(y.detach()) for y in outputs]
        ours, theirs = results(fused, inputs, douts), outputs_and_gradients(outputs, inputs, douts)
        truth = results(eager, in_float64(inputs), douts)
        sums = sums or [Errors(t.dtype) for t in ours]
        for errors, a, b, t in zip(sums, ours, theirs, truth, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            errors.add(a, b, t)
        smallest = min((t.numel() for t in ours if t.numel()), default=256)
        number, draws = number + 1, min(16, math.ceil(256 / smallest))
    worst = 0.0
    for index, errors in enumerate(sums):
        problem = errors.problem(slack=slack)
        assert problem is None, f"result {index}: {problem}"
        worst = max(worst, errors.sizes().ratio)
    return worst


def assert_near(
    ours: Tensor,
    eager: Tensor,
    truth: Tensor,
    dtype: torch.dtype | None = None,
    floor: float = 8.0,
) -> None:
    """Hold one draw of a result to the error rule; fewer than 16 elements to a bound of the dtype.

    dtype: that of the computation, where it is not the result's: a loss in float32 of a model in
    bfloat16; floor: the bound in epsilons of that dtype.
    """
    assert ours.shape == eager.shape == truth.shape
    assert ours.dtype == eager.dtype
    if 0 < truth.numel() < FEWEST:
        error, size = ((x.double()).abs().max().item() for x in (ours - truth, truth))
        limit = bound(size, dtype or ours.dtype, floor=floor)
        assert error <= limit, f"error {error:.3g} where {limit:.3g} is allowed"
        return
    errors = Errors(ours.dtype)
    errors.add(ours.detach(), eager.detach(), truth.detach())
    assert errors.problem() is None, errors.problem()


def squared(error: Tensor) -> float:
    """Sum the squares of what is finite."""
    return error.double().nan_to_num(0, 0, 0).square().sum().item()


def saved_bytes(fn: Function, inputs: Inputs) -> int:
    """Return the bytes that one call keeps, its inputs counted as intermediates of a model."""
    inner = [x if x is None or isinstance(x, torch.nn.Parameter) else x * 1 for x in inputs]
    with saved_tensors() as saved:
        outputs = fn(*inner)
    del outputs
    return saved.nbytes


def peak_of_step(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the peak of a forward and backward of a model, its input counted as an intermediate.

    Run it before once, so that the gradients of parameters are there.
    """

    def step() -> None:
        model(x.detach().requires_grad_() * 1).square().mean().backward()

    step()
    return peak_bytes(step, x.device)


class Watched(TorchDispatchMode):
    """Notes the ops that run, with their arguments; with `copies`, as they are before an op."""

    def __init__(self, copies: bool = False):
        super().__init__()
        self.copies, self.seen = copies, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, tree_map(copied, args) if self.copies else args))
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[Any]:
        """Return those of fusedckpt."""
        return [(func, args) for func, args in self.seen if func.namespace == "fusedckpt"]


def copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def flops(fn: Callable[[], Any]) -> int:
    """Return the GEMM FLOPs that `fn` runs."""
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def gemms(fn: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """Return m, n, k of the GEMMs that a CPU really runs, from the profiler's shapes."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        fn()
    sizes = []
    # as they were recorded: profiler.events() takes longer than what it is asked about
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() in ("aten::mm", "aten::addmm", "aten::addmm_"):
            first = 0 if event.name() == "aten::mm" else 1
            (m, k), (_, n) = event.shapes()[first : first + 2]
            sizes.append((m, n, k))
    return sizes


def gemm_flops(fn: Callable[[], Any]) -> int:
    """Return the FLOPs of the GEMMs that a CPU really runs."""
    return sum(2 * m * n * k for m, n, k in gemms(fn))


def calls(fn: Callable[[], Any]) -> int:
    """Return how many functions, of Python or C, are called from Python while `fn` runs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count kernel launches by kernel name."""
    counts: Counter[str] = Counter()
    kind = type(gemm.gemm_kernel)
    # the interpreter's kernels have no launcher of ours
    name = "launch" if hasattr(kind, "launch") else "run"
    launch = getattr(kind, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.__name__] += 1
        return launch(self, *args, **kwargs)

    setattr(kind, name, counted)
    try:
        yield counts
    finally:
        setattr(kind, name, launch)


def run_ranks(main: Callable[[int], None], folder: Path, count: int = 2) -> list[str]:
    """Call `main` with its number on each rank of a gloo group, assert that all succeed.

    Ranks are forked from a server that has imported IMPORTED. Returns what each wrote.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    outputs = [folder / f"rank{rank}" for rank in range(count)]
    ranks = [
        context.Process(target=_be_rank, args=(main, rank, count, folder / "store", output))
        for rank, output in enumerate(outputs)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(HANGS)
    finally:
        for rank in ranks:
            rank.kill()
    written = [output.read_text("utf-8") for output in outputs]
    assert [rank.exitcode for rank in ranks] == [0] * count, "\n".join(written)
    return written


def _be_rank(main: Callable[[int], None], rank: int, count: int, store: Path, output: Path) -> None:
    with output.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    quick_interpreter.patch()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count
    )
    main(rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    # gloo's threads may abort while a busy interpreter takes itself down
    os._exit(0)
