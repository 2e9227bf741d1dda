"""Real transformers models of tiny random configurations, and what each is fed. No downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import DEVICE

transformers = pytest.importorskip("transformers")

VOCAB = 64
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64, **IDS}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# F = 48, so that no width is another's double
DECODER = {**TEXT, **SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
VISION = {**SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 8}


def tokens(length: int = 10) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, device=DEVICE)


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": pixels(), "labels": torch.tensor([0, 1], device=DEVICE)}


def pair() -> dict[str, Any]:
    ids = tokens()["input_ids"]
    return {"input_ids": ids, "pixel_values": pixels(), "return_loss": True}


def speech() -> dict[str, torch.Tensor]:
    features = torch.randn(2, 8, 16, device=DEVICE)
    return {"input_features": features, "labels": tokens(6)["labels"]}


@dataclass(frozen=True)
class Model:
    """A model class and its configuration.

    swapped: change -> how often; left: module name -> the reason's key.
    """

    model: str
    config: str
    options: dict[str, Any]
    swapped: dict[str, int]
    left: dict[str, str] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] = tokens
    generates: bool = True

    def build(self, **more: Any) -> Any:
        """Make the model anew, with random weights that are no ones and zeros."""
        config = getattr(transformers, self.config)(**{**self.options, **more})
        model = getattr(transformers, self.model)(config).to(DEVICE)
        with torch.no_grad():
            for parameter in model.parameters():
                # norms start as identities, biases as zeros: neither would tell anything
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model


def decoder(name: str, swapped: dict[str, int], **more: Any) -> Model:
    return Model(f"{name}ForCausalLM", more.pop("config", f"{name}Config"), DECODER | more, swapped)


def llama_like(name: str, norms: int = 5, act: str = "silu", **more: Any) -> Model:
    swapped = {
        f"{name}RMSNorm -> rms_norm (llama cast)": norms,
        f"{name}MLP -> gated_mlp ({act})": 2,
    }
    return decoder(name, swapped, **more)


def moe_like(
    name: str, norms: int, *shared: str, act: str = "silu", cast: str = "llama", **more: Any
) -> Model:
    swapped = {
        f"{name}RMSNorm -> rms_norm ({cast} cast)": norms,
        f"{name}Experts -> experts ({act})": 2,
        **dict.fromkeys(shared, 2),
    }
    options = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, **more}
    return decoder(name, swapped, experts_implementation="eager", **options)


def gemma_like(name: str, norms: int, **more: Any) -> Model:
    swapped = {
        f"{name}RMSNorm -> rms_norm (gemma cast, offset 1)": norms,
        f"{name}MLP -> gated_mlp (gelu_tanh)": 2,
    }
    return decoder(name, swapped, head_dim=8, **more)


def bert_like(name: str, left: dict[str, str]) -> Model:
    swapped = {NORM: 6, f"{name}Intermediate -> linear_act (gelu)": 2}
    options = {**TEXT, **SIZES, "intermediate_size": 48}
    return Model(f"{name}ForMaskedLM", f"{name}Config", options, swapped, left, generates=False)


NORM = "nn.LayerNorm -> LayerNorm"
SEQ2SEQ = {"vocab_size": VOCAB, "decoder_start_token_id": 1, **IDS}
T5 = {
    **SEQ2SEQ,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
CLIP = {
    "text_config": {**TEXT, **SIZES, "intermediate_size": 48},
    "vision_config": VISION,
    "projection_dim": 16,
}

GLM4_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0}
GLM4_MOE |= {"head_dim": 8, "n_group": 1, "topk_group": 1}
MODELS = {
    "llama": llama_like("Llama"),
    "qwen2": llama_like("Qwen2"),
    "qwen3": llama_like("Qwen3", norms=9, head_dim=8),
    "gemma": gemma_like("Gemma", 5),
    "gemma2": gemma_like("Gemma2", 9),
    "gemma3": gemma_like("Gemma3", 13, config="Gemma3TextConfig"),
    "phi3": decoder(
        "Phi3",
        {
            "Phi3RMSNorm -> rms_norm (llama cast)": 5,
            "Phi3MLP -> gated_mlp (silu, packed, gate first)": 2,
        },
    ),
    "olmo2": decoder(
        "Olmo2",
        {"Olmo2RMSNorm -> rms_norm (gemma cast)": 9, "Olmo2MLP -> gated_mlp (silu)": 2},
    ),
    "mixtral": moe_like("Mixtral", 5, num_local_experts=4),
    "qwen3_moe": moe_like("Qwen3Moe", 9, num_experts=4, head_dim=8),
    # its routers save the norm's input
    "glm4_moe": moe_like("Glm4Moe", 5, "Glm4MoeMLP -> gated_mlp (silu)", **GLM4_MOE),
    "gpt_oss": moe_like(
        "GptOss",
        5,
        cast="gemma",
        act="clamped SwiGLU, weights as [in, out]",
        num_local_experts=4,
        head_dim=8,
    ),
    "gpt2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, **IDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
        {NORM: 5, "GPT2MLP -> mlp (gelu_tanh, weights as [in, out])": 2},
    ),
    "gpt_neox": Model(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**TEXT, **SIZES, "intermediate_size": 48},
        {NORM: 5, "GPTNeoXMLP -> mlp (gelu)": 2},
    ),
    "opt": Model(
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        {NORM: 5},
    ),
    "apertus": decoder(
        "Apertus",
        {"ApertusRMSNorm -> rms_norm (llama cast)": 9, "ApertusMLP -> recomputed": 2},
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "bitnet": decoder(
        "BitNet", {"BitNetRMSNorm -> rms_norm (llama cast)": 7, "BitNetMLP -> recomputed": 2}
    ),
    "nemotron": decoder(
        "Nemotron",
        {
            "NemotronLayerNorm1P -> layer_norm (offset 1)": 5,
            "NemotronMLP -> mlp (relu2)": 2,
        },
        head_dim=8,
    ),
    "cohere2": decoder(
        "Cohere2",
        {"Cohere2LayerNorm -> layer_norm": 3, "Cohere2MLP -> gated_mlp (silu)": 2},
        head_dim=8,
    ),
    "seed_oss": decoder(
        "SeedOss",
        {"SeedOssRMSNorm -> rms_norm (llama cast)": 5, "SeedOssMLP -> gated_mlp (silu)": 2},
        head_dim=8,
    ),
    "bert": bert_like("Bert", {"cls.predictions.transform": "ops"}),
    "roberta": bert_like("Roberta", {"lm_head": "beside"}),
    "vit": Model(
        "ViTForImageClassification",
        "ViTConfig",
        VISION,
        {NORM: 5, "ViTMLP -> mlp (gelu)": 2},
        inputs=image,
        generates=False,
    ),
    "clip": Model(
        "CLIPModel",
        "CLIPConfig",
        CLIP,
        {NORM: 11, "CLIPMLP -> mlp (quick_gelu)": 4},
        inputs=pair,
        generates=False,
    ),
    "t5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        {
            "T5LayerNorm -> rms_norm (llama cast)": 12,
            "T5DenseActDense -> mlp (relu)": 4,
        },
    ),
    "t5_gated": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu"},
        {
            "T5LayerNorm -> rms_norm (llama cast)": 12,
            "T5DenseGatedActDense -> gated_mlp (gelu_tanh)": 4,
        },
    ),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        {NORM: 12},
        inputs=speech,
    ),
}
