"""Language models by the shapes of their published configurations, for `bench shares`.

Models have D = 256 with the ratios of their configurations. Attention is torch's fused one, without
dropout, which a CPU cannot fuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

D = 256
TOKENS = 64
VOCAB = 128
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Shape(NamedTuple):
    """A language model with D = 256."""

    # its class of transformers, or "" for torch's encoder
    model: str
    # the width of its MLPs, in units of D
    hidden: float = 4
    # heads of queries
    heads: int = 8
    # heads of keys and values
    kv: int = 8
    # more options of its configuration
    options: Mapping[str, Any] = MappingProxyType({})


def _experts(top_k: int, num: int = 16) -> dict[str, Any]:
    """Return the options of experts, by all of their names."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {**dict.fromkeys(names, num), "num_experts_per_tok": top_k}


# config.json of the checkpoint named in the comment, widths divided by hidden_size / 256
DENSE: dict[str, Shape] = {
    # meta-llama/Meta-Llama-3-8B
    "llama": Shape("LlamaModel", 3.5, kv=2),
    # mistralai/Mistral-7B-v0.3
    "mistral": Shape("MistralModel", 3.5, kv=2),
    # Qwen/Qwen2.5-7B: 4 of 28 heads
    "qwen2": Shape("Qwen2Model", 5.286, kv=1),
    # Qwen/Qwen3-8B
    "qwen3": Shape("Qwen3Model", 3, kv=2, options={"head_dim": 32}),
    # google/gemma-7b: heads 1.33 D wide
    "gemma": Shape("GemmaModel", 8, options={"head_dim": 42}),
    # google/gemma-2-9b: 8 of 16 heads, 1.14 D wide
    "gemma2": Shape("Gemma2Model", 4, kv=4, options={"head_dim": 36}),
    # google/gemma-3-4b: 4 of 8 heads, 0.8 D wide
    "gemma3": Shape("Gemma3TextModel", 4, kv=4, options={"head_dim": 26}),
    # microsoft/phi-2
    "phi": Shape("PhiModel", 4, options={"resid_pdrop": 0.1}),
    # microsoft/Phi-3-mini-4k-instruct
    "phi3": Shape("Phi3Model", 2.6667),
    # allenai/OLMo-7B-hf
    "olmo": Shape("OlmoModel", 2.6875),
    # allenai/OLMo-2-1124-7B
    "olmo2": Shape("Olmo2Model", 2.6875),
    # ibm-granite/granite-3.1-8b-base
    "granite": Shape("GraniteModel", 3.125, kv=2, options={"residual_multiplier": 0.22}),
    # THUDM/glm-4-9b-hf
    "glm": Shape("GlmModel", 3.344, kv=1, options={"head_dim": 32}),
    # zai-org/GLM-4-9B-0414
    "glm4": Shape("Glm4Model", 3.344, kv=1, options={"head_dim": 32}),
    # bigcode/starcoder2-7b
    "starcoder2": Shape("Starcoder2Model", 4, kv=1),
    # stabilityai/stablelm-2-1_6b
    "stablelm": Shape("StableLmModel", 2.75),
    # openai-community/gpt2
    "gpt2": Shape("GPT2Model", 4),
    # EleutherAI/pythia-6.9b
    "gpt_neox": Shape("GPTNeoXModel", 4),
    # HuggingFaceTB/SmolLM3-3B
    "smollm3": Shape("SmolLM3Model", 5.375, kv=2),
    # LGAI-EXAONE/EXAONE-4.0-32B
    "exaone4": Shape("Exaone4Model", 5.35, kv=2),
}
HARDER: dict[str, Shape] = {
    # facebook/opt-6.7b
    "opt": Shape("OPTModel", 4),
    # openai/whisper-large-v3
    "whisper": Shape("WhisperModel", 4),
    # google-bert/bert-large-uncased
    "bert": Shape("BertModel", 4),
    # torch's default sizes
    "nn.TransformerEncoder": Shape("", 4),
    # swiss-ai/Apertus-8B-2509
    "apertus": Shape("ApertusModel", 5.25, kv=2),
    # microsoft/bitnet-b1.58-2B-4T
    "bitnet": Shape("BitNetModel", 2.7, kv=2),
    # ByteDance-Seed/Seed-OSS-36B-Base
    "seed_oss": Shape("SeedOssModel", 5.4, kv=1, options={"head_dim": 32, "residual_dropout": 0.1}),
    # nvidia/Minitron-4B-Base
    "nemotron": Shape("NemotronModel", 3, kv=2, options={"head_dim": 32}),
    # CohereLabs/c4ai-command-r7b-12-2024
    "cohere2": Shape("Cohere2Model", 3.5, kv=2, options={"head_dim": 32}),
    # tiiuae/falcon-7b, CohereLabs/c4ai-command-r-v01, kyutai/helium-1-2b, tiiuae/Falcon-H1-7B-Base
    "cohere": Shape("CohereModel", 2.75),
    "falcon": Shape("FalconModel", 4),
    "helium": Shape("HeliumModel", 2.75, options={"head_dim": 32}),
    "gptj": Shape("GPTJModel", 4),
    "vit": Shape("ViTModel", 4),
    "t5": Shape("T5EncoderModel", 2.5),
}
# mixtures of experts: hidden is the width of an expert; 16 of their experts at most
EXPERTS: dict[str, Shape] = {
    # Qwen/Qwen3-30B-A3B
    "qwen3_moe": Shape("Qwen3MoeModel", 0.375, kv=1, options={"head_dim": 64} | _experts(8)),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral": Shape("MixtralModel", 3.5, kv=2, options=_experts(2, 8)),
    # allenai/OLMoE-1B-7B-0924
    "olmoe": Shape("OlmoeModel", 0.5, options=_experts(8)),
    # openai/gpt-oss-20b: heads 1.42 D wide, attention that saves its probabilities
    "gpt_oss": Shape("GptOssModel", 1, kv=1, options={"head_dim": 46} | _experts(4)),
    # zai-org/GLM-4.5-Air
    "glm4_moe": Shape(
        "Glm4MoeModel",
        0.34375,
        kv=1,
        options={"head_dim": 96, "first_k_dense_replace": 0, "n_shared_experts": 1} | _experts(8),
    ),
}
# fifteen more by one shape: experts half as wide as the model, 4 of 8 for a token
_SAME = {"first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_SAME |= {"head_dim": 32, "shared_expert_intermediate_size": D // 2, **_experts(4, 8)}
_NAMES = "Qwen2Moe Phimoe GraniteMoe Ernie4_5_Moe HunYuanMoEV1 Dots1 MiniMax MiniMaxM2 FlexOlmo"
_NAMES += " SolarOpen Afmoe ExaoneMoe Qwen3Next JetMoe Llama4Text"
EXPERTS |= {name: Shape(f"{name}Model", 0.5, kv=4, options=_SAME) for name in _NAMES.split()}
# dropouts of attention weights, by all of their names
NO_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def _options(shape: Shape, layers: int) -> dict[str, Any]:
    """Return the options of a model's configuration."""
    hidden = 8 * round(shape.hidden * D / 8)
    heads = shape.heads
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": D,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.kv,
        "max_position_embeddings": TOKENS,
        **IDS,
    }
    if shape.model == "OPTModel":
        options |= {"ffn_dim": hidden, "word_embed_proj_dim": D}
    elif shape.model == "WhisperModel":
        options |= {"d_model": D, "encoder_layers": layers, "decoder_layers": layers}
        options |= {f"{s}_attention_heads": heads for s in ("encoder", "decoder")}
        options |= {f"{s}_ffn_dim": hidden for s in ("encoder", "decoder")}
        options |= {"num_mel_bins": 8, "max_source_positions": TOKENS // 2}
        options |= {"decoder_start_token_id": 1}
    elif shape.model in ("GPT2Model", "GPTJModel"):
        options = {"n_embd": D, "n_layer": layers, "n_head": heads, "vocab_size": VOCAB, **IDS}
        options |= {"rotary_dim": 16} if shape.model == "GPTJModel" else {}
    elif shape.model == "ViTModel":
        options |= {"image_size": 8 * 8, "patch_size": 8}
    elif shape.model == "T5EncoderModel":
        options = {"d_model": D, "d_ff": hidden, "d_kv": 32, "num_layers": layers, **IDS}
        options |= {"num_heads": heads, "vocab_size": VOCAB, "feed_forward_proj": "gated-gelu"}
    return {**options, "moe_intermediate_size": hidden, **shape.options}


def model_of(shape: Shape, layers: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model of some layers and its inputs."""
    if not shape.model:
        layer = nn.TransformerEncoderLayer(D, shape.heads, int(shape.hidden * D), batch_first=True)
        layer.self_attn.dropout = 0.0
        return nn.TransformerEncoder(layer, layers), (torch.randn(1, TOKENS, D),), {}
    import transformers

    kind = getattr(transformers, shape.model)
    config = kind.config_class(**_options(shape, layers))
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if hasattr(config, "layer_types") and config.layer_types is not None:
        config.layer_types = ["full_attention"] * layers
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    ids = torch.randint(3, VOCAB, (1, TOKENS))
    if shape.model == "ViTModel":
        return kind(config), (torch.randn(1, 3, 64, 64, dtype=torch.bfloat16),), {}
    if shape.model == "WhisperModel":
        features = torch.randn(1, 8, TOKENS, dtype=torch.bfloat16)
        return kind(config), (), {"input_features": features, "decoder_input_ids": ids}
    more = {} if shape.model in ("BertModel", "T5EncoderModel") else {"use_cache": False}
    return kind(config), (ids,), more


class Whole(NamedTuple):
    """The sizes of a published language model."""

    layers: int
    features: int
    classes: int
    # the class with a head, where its name is not that of the model without
    model: str | None = None

    @property
    def reduced(self) -> int:
        """As many classes for each of the D features as published."""
        return round(self.classes * D / self.features)


# config.json of the checkpoints named at DENSE
WHOLE = {
    "llama": Whole(32, 4096, 128256),
    "mistral": Whole(32, 4096, 32768),
    "qwen2": Whole(28, 3584, 152064),
    "qwen3": Whole(36, 4096, 151936),
    "gemma": Whole(28, 3072, 256000),
    "gemma2": Whole(42, 3584, 256000),
    "gemma3": Whole(34, 2560, 262208, "Gemma3ForCausalLM"),
    "phi": Whole(32, 2560, 51200),
    "phi3": Whole(32, 3072, 32064),
    "olmo": Whole(32, 4096, 50304),
    "olmo2": Whole(32, 4096, 100352),
    "granite": Whole(40, 4096, 49155),
    "glm": Whole(40, 4096, 151552),
    "glm4": Whole(40, 4096, 151552),
    "starcoder2": Whole(32, 4608, 49152),
    "stablelm": Whole(24, 2048, 100352),
    "gpt2": Whole(12, 768, 50257, "GPT2LMHeadModel"),
    "gpt_neox": Whole(32, 4096, 50432),
    "smollm3": Whole(36, 2048, 128256),
    "exaone4": Whole(64, 5120, 102400),
}
