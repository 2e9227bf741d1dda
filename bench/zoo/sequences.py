"""Models that read a sequence: hybrid language models, encoders and audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.zoo.model import HEADS, SIZES, TOKENS, D, Inputs, Model, Options, ids, of_transformers


def _ids() -> Inputs:
    return {"input_ids": ids(), "use_cache": False}


def _text() -> Inputs:
    return {"input_ids": ids()}


def _wave() -> Inputs:
    return {"input_values": torch.randn(1, 8000)}


_HYBRID: Options = {
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": D // HEADS,
    "use_cache": False,
}
_MAMBA: Options = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
}
_DELTA: Options = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_EXPERTS: Options = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": D // 4,
}


def _hybrid(name: str, repeats: int, per_part: int = 1, wide: float = 3.5, **options: Any) -> Model:
    sizes = {"intermediate_size": int(wide * D), **_HYBRID, **options}
    return Model("hybrid", "transformers", repeats, of_transformers(name, per_part, _ids, **sizes))


def _encoder(name: str, repeats: int, **options: Any) -> Model:
    build = of_transformers(name, 1, _text, **SIZES | options)
    return Model("encoder", "transformers", repeats, build)


def _audio(name: str, repeats: int) -> Model:
    # a convolution each
    widths = (2 * D // 3,) * 7
    options = {"conv_dim": widths, "layerdrop": 0.0, "mask_time_prob": 0.0}
    build = of_transformers(name, 1, _wave, **SIZES | options)
    return Model("audio", "transformers", repeats, build)


HYBRID: Mapping[str, Model] = {
    # state-spaces/mamba2-2.7b
    "mamba2": _hybrid(
        "mamba2", 64, num_heads=8, head_dim=32, state_size=32, n_groups=1, chunk_size=32
    ),
    # tiiuae/Falcon-H1-7B-Base
    "falcon_h1": _hybrid("falcon_h1", 44, **_MAMBA, mamba_d_ssm=2 * D),
    # ibm-ai-platform/Bamba-9B: 3 of 32 layers attend
    "bamba": _hybrid("bamba", 4, 8, **_MAMBA, attn_layer_indices=[1]),
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    "qwen3_next": _hybrid("qwen3_next", 12, 4, **_DELTA, **_EXPERTS),
    # Qwen/Qwen3.5-9B
    "qwen3_5": _hybrid("qwen3_5_text", 8, 4, **_DELTA),
    # ai21labs/Jamba-v0.1
    "jamba": _hybrid(
        "jamba", 4, 8, mamba_dt_rank=8, num_experts=4, mamba_d_state=16, mamba_d_conv=4
    ),
    # LiquidAI/LFM2-1.2B: 6 of 16 layers attend
    "lfm2": _hybrid("lfm2", 5, 3, layer_types=["conv", "conv", "full_attention"]),
    # Zyphra/Zamba2-1.2B
    "zamba2": _hybrid(
        "zamba2",
        6,
        6,
        mamba_d_state=32,
        n_mamba_heads=8,
        mamba_headdim=32,
        mamba_ngroups=1,
        layers_block_type=["mamba"] * 5 + ["hybrid"],
        num_mem_blocks=1,
        chunk_size=32,
        attention_head_dim=2 * D // HEADS,
        use_shared_attention_adapter=False,
    ),
    # nvidia/Nemotron-H-8B-Base-8K
    "nemotron_h": _hybrid(
        "nemotron_h",
        4,
        4,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        chunk_size=32,
        n_groups=1,
        layers_block_type=["mamba", "mlp", "attention", "mlp"],
    ),
    # ibm-granite/granite-4.0-h-small
    "granitemoehybrid": _hybrid(
        "granitemoehybrid",
        4,
        4,
        **_MAMBA,
        num_local_experts=8,
        num_experts_per_tok=4,
        shared_intermediate_size=D,
        layer_types=["mamba"] * 3 + ["attention"],
    ),
    # allenai/Olmo-Hybrid-7B
    "olmo_hybrid": _hybrid("olmo_hybrid", 8, 4, **_DELTA),
}
ENCODERS: Mapping[str, Model] = {
    "bert_base": _encoder("bert", 12),
    "roberta": _encoder("roberta", 12, max_position_embeddings=2 * TOKENS),
    "distilbert": _encoder("distilbert", 6, dim=D, hidden_dim=4 * D, n_heads=HEADS),
    "electra": _encoder("electra", 12, embedding_size=D),
    "esm2": _encoder("esm", 33, mask_token_id=1, token_dropout=False),
    "modernbert": _encoder("modernbert", 22, intermediate_size=int(1.5 * D)),
    "deberta_v3": _encoder("deberta-v2", 12, relative_attention=True, pos_att_type=["p2c"]),
}
AUDIO: Mapping[str, Model] = {
    "hubert": _audio("hubert", 12),
    "wav2vec2": _audio("wav2vec2", 12),
    "wavlm": _audio("wavlm", 12),
    "audio_spectrogram": Model(
        "audio",
        "transformers",
        12,
        of_transformers(
            "audio-spectrogram-transformer",
            1,
            lambda: {"input_values": torch.randn(1, 128, 128)},
            max_length=128,
            **SIZES,
        ),
    ),
}
