"""Mixtures of experts: a step saves the tokens once, for any number of experts.

    python -m bench.examples.moe

Prints the report of `fuse` for a Qwen3-MoE of transformers, the bytes that a step saves with 2, 4
and 8 experts a token before and after it, and the loss, which stays the same. Without `fuse` bytes
grow with the experts of a token; fused layers save the input of the experts, and some bytes each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fusedckpt
from fusedckpt.memory import saved_tensors

LAYERS, DIM, SEQ, VOCAB, EXPERTS = 2, 64, 64, 128, 8


def build(experts_per_token: int) -> Any:
    """Return a model of a few layers."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": DIM, "moe_intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS}
    sizes |= {"num_experts_per_tok": experts_per_token, "use_cache": False}
    config = Qwen3MoeConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, **sizes)
    return Qwen3MoeForCausalLM(config)


def main() -> dict[int, tuple[int, int]]:
    """Return the saved bytes before and after, by the number of experts of a token."""
    ids = torch.arange(SEQ)[None] % VOCAB
    sizes = {}
    for count in (2, 4, 8):
        model = build(count)
        fused = copy.deepcopy(model)
        report = fusedckpt.fuse(fused)
        steps = []
        for way in (model, fused):
            with saved_tensors() as saved:
                loss = way(input_ids=ids, labels=ids).loss
            steps.append((saved.nbytes, loss.item()))
            loss.backward()
        (before, loss), (after, fused_loss) = steps
        sizes[count] = before, after
        if count == 2:
            print(report)
        print(f"{count} of {EXPERTS} experts: {before:,} bytes before, {after:,} after, ", end="")
        print(f"loss {loss:.4f} and {fused_loss:.4f}")
    return sizes


if __name__ == "__main__":
    main()
