"""Train the language model of a vision-language model whose tower is frozen.

    python -m bench.examples.vision_language

A frozen tower saves nothing: `skip` leaves it out, `only` names the part to fuse instead. Prints
the reports, the bytes that a step saves, and losses that fall.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import fusedckpt
from fusedckpt.memory import saved_tensors

IMAGE = 127
SIZES: Any = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}


def build() -> Any:
    """Return a small LLaVA with a frozen tower."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(num_hidden_layers=2, image_size=32, patch_size=8, **SIZES)
    text = LlamaConfig(vocab_size=128, num_hidden_layers=2, use_cache=False, **SIZES)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def main() -> dict[str, tuple[Any, int, list[float]]]:
    """Return the report, the saved bytes and the losses of each way."""
    # an image of 16 patches, and text
    ids = torch.cat((torch.full((2, 16), IMAGE), torch.randint(100, (2, 48))), 1)
    labels, image = ids.masked_fill(ids == IMAGE, -100), torch.randn(2, 3, 32, 32)
    batch = {"input_ids": ids, "labels": labels, "pixel_values": image}
    ways: Any = {"skip": {"skip": "*vision_tower*"}, "only": {"only": "model.language_model*"}}
    results = {}
    for name, options in (("eager", None), *ways.items()):
        model = build()
        report = None if options is None else fusedckpt.fuse(model, **options)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with saved_tensors() as saved:
            losses = [model(**batch).loss]
        for _ in range(2):
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(model(**batch).loss)
        results[name] = (report, saved.nbytes, [loss.item() for loss in losses])
        print(f"{name}: {report or ''} saves {saved.nbytes:,} bytes, losses {results[name][2]}")
    return results


if __name__ == "__main__":
    main()
