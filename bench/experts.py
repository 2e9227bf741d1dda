"""`python -m bench.experts`: a mixture of experts beside transformers' own, on a CPU or GPU.

Bytes that a forward saves and the peak of a backward, per token, and the median time of both in
turns; Qwen3-30B-A3B's ratios (F = .375 D, 8 experts a token) with 16 experts.
"""

from __future__ import annotations

import copy
import platform
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fusedckpt
from fusedckpt.memory import peak_bytes, saved_tensors

D, F, EXPERTS, TOP_K, TOKENS, ROUNDS = 512, 192, 16, 8, 1024, 15


def ways(dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Return transformers' experts by two implementations, and fused at three levels."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    found = {}
    for name in ("eager", "grouped_mm"):
        config = copy.copy(config)
        config._experts_implementation = name
        torch.manual_seed(0)
        found[name] = Qwen3MoeExperts(config).to(device, dtype)
        for parameter in found[name].parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for level in ("preact", "gate", "inputs"):
        found[level] = copy.deepcopy(found["eager"])
        fusedckpt.fuse(found[level], save=level, verify=False)
    return found


def step(module: nn.Module, inputs: list[Tensor], dy: Tensor) -> None:
    """Run forward and backward."""
    x, scores, index = inputs
    torch.autograd.grad(module(x, index, scores), [x, scores, *module.parameters()], dy)


def main() -> None:
    """Print a table for each dtype."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{platform.processor() or device}, torch {torch.__version__}; D={D} F={F} T={TOKENS}")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(TOKENS, D, device=device).to(dtype).requires_grad_()
        scores, index = torch.rand(TOKENS, EXPERTS, device=device).topk(TOP_K)
        inputs, found = [x, scores.requires_grad_(), index], ways(dtype, device)
        dy, times = torch.randn_like(x), {name: list[float]() for name in found}
        for module in list(found.values()) * ROUNDS:
            name = next(name for name, one in found.items() if one is module)
            start = time.perf_counter()
            step(module, inputs, dy)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
        eager = median(times["eager"][1:])
        print(
            f"{dtype}: eager takes {1e3 * eager:.0f} ms\n{'':12}{'saved':>9}{'peak':>9}{'time':>7}"
        )
        for name, module in found.items():
            with saved_tensors() as saved:
                y = module(x * 1, index, scores * 1)
            del y
            peak = peak_bytes(partial(step, module, inputs, dy), device)
            sizes = f"{saved.nbytes / TOKENS:9,.0f}{peak / TOKENS:9,.0f}"
            print(f"{name:12}{sizes}{median(times[name][1:]) / eager:7.2f}", flush=True)


if __name__ == "__main__":
    main()
