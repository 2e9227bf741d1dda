"""A small Llama, texts, and a Trainer for them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers")
VOCAB, LAYERS = 64, 3


def build(dropout: float = 0.0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class Texts(Dataset):
    def __init__(self, count: int = 16):
        self.ids = torch.randint(3, VOCAB, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


# of a Trainer of two steps
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "use_cpu": True,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
}


def trainer(folder: Any, **options: Any):
    """Return a Trainer of two steps, each of two micro-batches."""
    given = {name: options.pop(name) for name in ("model", "model_init") if name in options}
    callbacks = options.pop("callbacks", None)
    given_or_ours = {**ARGUMENTS, "gradient_accumulation_steps": 2, **options}
    arguments = transformers.TrainingArguments(output_dir=folder, **given_or_ours)
    return transformers.Trainer(args=arguments, train_dataset=Texts(), callbacks=callbacks, **given)


def history(trained: Any) -> Tensor:
    """Train, and return each step's loss and norm of the gradients."""
    trained.train()
    rows = [row for row in trained.state.log_history if "loss" in row]
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows])
