"""Train with transformers' Trainer: one callback fuses, checkpoints by ours and reports.

    python -m bench.examples.trainer

Prints the report of `fuse`, then the bytes that a step of the first batch saves by module, then
the losses of four steps, which fall. `activation_checkpointing=True` asks for checkpoints; in older
releases of transformers it is called `gradient_checkpointing`. They do not run attention again.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fusedckpt.integrations.transformers import FuseCallback

STEPS, SEQ, VOCAB = 4, 64, 128


def arguments(folder: str) -> TrainingArguments:
    """Return the arguments of a short run on a CPU."""
    names = inspect.signature(TrainingArguments).parameters
    new = "activation_checkpointing"
    options: dict[str, Any] = {new if new in names else "gradient_checkpointing": True}
    return TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def main() -> list[float]:
    """Train a tiny Llama, and return its losses."""
    sizes: Any = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes))
    ids = torch.arange(SEQ) % VOCAB
    data: Any = [{"input_ids": ids, "labels": ids}] * 4 * STEPS
    callback = FuseCallback(save_regions=["attention"], report=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, arguments(folder), train_dataset=data, callbacks=[callback])
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("losses:", main())
