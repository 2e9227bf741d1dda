"""Fine-tune adapters of peft on a frozen model: a fused layer saves its input for all of them.

    python -m bench.examples.finetune_lora

Prints the report of `fuse`, the bytes that a step saves before and after it, and losses that fall.
`fuse` works before or after peft; here it is after, so that it sees the adapters.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedckpt
from fusedckpt.memory import saved_tensors


def saved_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that a forward saves for backward."""
    with saved_tensors() as saved:
        output = model(**batch)
    del output
    return saved.nbytes


def main() -> tuple[int, int, list[float]]:
    """Return the saved bytes before and after, and the losses of some steps."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, use_cache=False, **sizes)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    base: Any = LlamaForCausalLM(config)
    model = peft.get_peft_model(base, lora)
    ids = torch.randint(128, (2, 64))
    batch = {"input_ids": ids, "labels": ids}
    before = saved_bytes(model, batch)
    print(fusedckpt.fuse(model))
    after = saved_bytes(model, batch)
    print(f"a step saves {before:,} bytes before, {after:,} after")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
    return before, after, losses


if __name__ == "__main__":
    main()
