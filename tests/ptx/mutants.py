"""Kernels with a barrier, wait or fence taken out: a run must notice.

A mutant runs warp by warp with races checked, once with late copies, once with early ones and the
last warp first, both without errors of approximate instructions, so that the two runs of a kernel
as it is give the same bits. It is noticed by a fault or by other numbers. Some are harmless: Triton
sets barriers where none is needed, as before the first store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache

import torch
from torch import Tensor

from fusedckpt.kernels import cross_entropy, gated_norm, linear, norm
from fusedckpt.kernels.norm_kernels import NormGrad
from tests.ptx.emulator import Fault, Hostility, Instruction, Program, parse_instruction
from tests.ptx.emulator.launching import Emulator

# by kind, the instructions that order what warps, copies and products do
KINDS = {
    "barrier": r"bar\.sync",
    "copies": r"cp\.async\.wait_group",
    "tiles": r"mbarrier\.try_wait",
    "products": r"wgmma\.wait_group",
    "registers": r"wgmma\.fence",
    "proxy": r"fence\.proxy",
}
RUNS = {
    "late copies": Hostility(by_warp=True, races=True, seed=None),
    "early copies, the last warp first": Hostility(
        by_warp=True,
        races=True,
        early=True,
        order=lambda count: range(count - 1, -1, -1),
        seed=None,
    ),
}


def gemm() -> list[Tensor]:
    """Launch a pipelined product and its epilogue."""
    return _linear(64, 64, 272)


def unaligned() -> list[Tensor]:
    """Launch a product whose operands pass through registers into shared memory."""
    return _linear(64, 99, 75)


def _linear(m: int, n: int, k: int) -> list[Tensor]:
    x, w, b = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (n,)))
    return [t for t in linear.linear_then_act(x, w, b, "silu", keep_z=True) if t is not None]


def norm_grad() -> list[Tensor]:
    """Launch a norm's gradient: reductions over warps, loads under way."""
    m, n = 14, 1008
    x, w, dy = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((m, n), (n,), (m, n)))
    rule = norm.NormRule("layer", 1e-6)
    return [t for t in norm.norm_grad(dy, dy, x, w, rule, (True, True, True)) if t is not None]


def split_norm_grad() -> list[Tensor]:
    """Launch the gradient of rows of two parts, narrower than those that need them."""
    m, n = 3, 4096
    x, w, dy = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((m, n), (n,), (m, n)))
    dx, dw, db = torch.empty_like(x), torch.empty(1, n), torch.empty(1, n)
    t = NormGrad(dy, dy, x, w, dx, dw, db, n, n, n)
    norm.launch_split(t, (m, n, 1e-6, 0.0), norm.NormRule("layer", 1e-6), parts=2, programs=1)
    return [dx, dw, db]


def warp_norm_grad() -> list[Tensor]:
    """Launch the gradient of rows of which a warp has one each, in four turns."""
    m, n = 27, norm.WARP_COLUMNS
    x, w, dy = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((m, n), (n,), (m, n)))
    rule = norm.NormRule("layer", 1e-6)
    return [t for t in norm.norm_grad(dy, dy, x, w, rule, (True, True, True)) if t is not None]


def gated_norm_grad() -> list[Tensor]:
    """Launch the gradient of a norm with a gate: rows are read again while others load."""
    m, n = 70, 208
    shapes = (m, n), (m, n), (m, n), (n,)
    dy, x, gate, w = (torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes)
    rule = gated_norm.GatedNormRule(1e-5, gates_first=True)
    grads = gated_norm.gated_norm_grad(dy, x, gate, w, rule, (True, True, True))
    return [t for t in grads if t is not None]


def statistics() -> list[Tensor]:
    """Launch the statistics of logits: each thread's sums join in one reduction at the end."""
    u, target = torch.randn(2, 4609, dtype=torch.bfloat16), torch.tensor([[3], [7]])
    rule = cross_entropy.LogitRule(entropy=True)
    return [cross_entropy.statistics(u, target, rule, "triton")]


# the launches by name, and the kernel that is weakened
KERNELS: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "gemm": (gemm, "gemm_kernel"),
    "unaligned": (unaligned, "gemm_kernel"),
    "norm_grad": (norm_grad, "norm_grad_kernel"),
    "split_norm_grad": (split_norm_grad, "split_norm_grad_kernel"),
    "warp_norm_grad": (warp_norm_grad, "warp_norm_grad_kernel"),
    "gated_norm_grad": (gated_norm_grad, "gated_norm_grad_kernel"),
    "statistics": (statistics, "cross_entropy_kernel"),
}


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of an instruction that orders others, None of any other."""
    name = instruction.name
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), None)


def weaken(program: Program, number: int) -> None:
    """Take out an instruction that orders others, or let its wait end early."""
    before = program.instructions[number]
    text = before.text.split(" ", 1)[-1] if before.predicate else before.text
    if "wait_group" in text:
        more = 2 if before.opcode == "cp" else 1
        text = re.sub(r"\d+$", lambda count: str(int(count[0]) + more), text)
    elif "try_wait" in text:
        text = f"mov.pred {before.operands[0]}, 1"
    else:
        text = "bar.warp.sync -1"
    after = parse_instruction(text)
    after.predicate, after.negated = before.predicate, before.negated
    program.instructions[number] = after


def run(
    arch: str, kernel: str, how: Hostility, change: Callable[[Program], None] | None = None
) -> tuple[list[Tensor], Program]:
    """Run a kernel on the same data as ever; return its results and its program."""
    torch.manual_seed(0)
    emulator, (launch, name) = Emulator(arch, how, change), KERNELS[kernel]
    with emulator.launches():
        tensors = launch()
    (program,) = [p for p in emulator.programs.values() if p.name == name]
    return tensors, program


@cache
def truth(arch: str, kernel: str, name: str) -> list[Tensor]:
    """Return the results of a kernel as it is."""
    return run(arch, kernel, RUNS[name])[0]


def is_repeatable(arch: str, kernel: str) -> bool:
    """Return whether a kernel as it is gives the same bits in both runs."""
    late, early = (truth(arch, kernel, name) for name in RUNS)
    return all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


def orders(arch: str, kernel: str) -> list[tuple[int, str]]:
    """Return the instructions of a kernel that order others: number and kind."""
    _, program = run(arch, kernel, Hostility())
    kinds = [(number, kind_of(i)) for number, i in enumerate(program.instructions)]
    return [(number, kind) for number, kind in kinds if kind is not None]


def outcome(arch: str, kernel: str, numbers: Collection[int]) -> str | None:
    """Return how a kernel with some instructions weakened is noticed, None if it is not."""

    def change(program: Program) -> None:
        if program.name == KERNELS[kernel][1]:
            for number in numbers:
                weaken(program, number)

    for name, how in RUNS.items():
        try:
            tensors, _ = run(arch, kernel, how, change)
        except Fault as fault:
            return f"fault with {name}: ...{str(fault)[-70:]}"
        if not all(
            torch.equal(a, b) for a, b in zip(tensors, truth(arch, kernel, name), strict=True)
        ):
            return f"other numbers with {name}"
    return None
