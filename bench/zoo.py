"""Models beyond language models: hybrids, diffusion, images, encoders and audio, by group.

Each model is built with a number of its repeated parts, which is 1 or 2 where it is measured, and
is told with the number that its checkpoint has; a convolutional network is built whole. Widths are
those of the checkpoint divided by up to 32. Ratios of widths, heads and experts stay.
"""

# the checkers' environment does not have diffusers, timm and torchvision
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

D, HEADS, TOKENS, VOCAB = 128, 4, 64, 128
# the sides of pictures, in pixels, and of latents
SIDE, LATENT = 64, 16
# by name: inputs of a model, and options of its configuration
Inputs = dict[str, Any]
Options = dict[str, Any]


class Model(NamedTuple):
    """A model that is measured."""

    group: str
    # the package that it needs besides torch
    package: str
    # repeated parts of its checkpoint; 0: it is built whole
    repeats: int
    # a number of repeated parts -> the model and its inputs by name
    build: Callable[[int], tuple[nn.Module, Inputs]]


def _tokens() -> Tensor:
    return torch.randint(3, VOCAB, (1, TOKENS))


def _of_transformers(
    name: str, per_part: int, inputs: Callable[[], Inputs], **options: Any
) -> Callable[[int], tuple[nn.Module, Inputs]]:
    """Return what builds a model of transformers, with so many layers in a repeated part.

    An option that is a list is of the layers of a part.
    """

    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import transformers

        layers = per_part * parts
        sizes = {"num_hidden_layers": layers, "vocab_size": VOCAB, "pad_token_id": 0}
        repeated = {
            key: value * parts if isinstance(value, list) else value
            for key, value in options.items()
        }
        config = transformers.AutoConfig.for_model(name, **sizes | repeated)
        for dropout in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
            if hasattr(config, dropout):
                # a CPU has no fused attention with dropout
                setattr(config, dropout, 0.0)
        return transformers.AutoModel.from_config(config), inputs()

    return build


def _ids() -> Inputs:
    return {"input_ids": _tokens(), "use_cache": False}


def _text() -> Inputs:
    return {"input_ids": _tokens()}


def _wave() -> Inputs:
    return {"input_values": torch.randn(1, 8000)}


def _pixels() -> Inputs:
    return {"pixel_values": torch.randn(1, 3, SIDE, SIDE)}


_SIZES: Options = {"hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": 1}
_SIZES |= {"head_dim": D // HEADS, "use_cache": False}
_MAMBA: Options = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
}
_DELTA: Options = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_DELTA |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_EXPERTS: Options = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": D // 4}


def _hybrid(name: str, repeats: int, per_part: int = 1, wide: float = 3.5, **options: Any) -> Model:
    sizes = {"intermediate_size": int(wide * D), **_SIZES, **options}
    return Model("hybrid", "transformers", repeats, _of_transformers(name, per_part, _ids, **sizes))


def _encoder(name: str, repeats: int, **options: Any) -> Model:
    sizes = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": HEADS, **options}
    return Model("encoder", "transformers", repeats, _of_transformers(name, 1, _text, **sizes))


def _audio(name: str, repeats: int) -> Model:
    sizes = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": HEADS}
    # a convolution each
    sizes |= {"conv_dim": (2 * D // 3,) * 7, "layerdrop": 0.0, "mask_time_prob": 0.0}
    return Model("audio", "transformers", repeats, _of_transformers(name, 1, _wave, **sizes))


def _picture(name: str, repeats: int, **options: Any) -> Model:
    sizes = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": HEADS}
    sizes |= {"image_size": SIDE, "patch_size": 8, **options}
    build = _of_transformers(name, 1, _pixels, **sizes)
    return Model("vision", "transformers", repeats, build)


def _of_diffusers(
    name: str, inputs: Callable[[], Inputs], depth: str, **options: Any
) -> Callable[[int], tuple[nn.Module, Inputs]]:
    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import diffusers

        sizes = dict.fromkeys(depth.split(), parts)
        return getattr(diffusers, name)(**sizes, **options), inputs()

    return build


def _diffusion(
    name: str,
    repeats: int,
    inputs: Callable[[], Inputs],
    depth: str = "num_layers",
    **options: Any,
) -> Model:
    heads = {"attention_head_dim": D // HEADS, "num_attention_heads": HEADS}
    build = _of_diffusers(name, inputs, depth, **heads | options)
    return Model("diffusion", "diffusers", repeats, build)


def _latent(channels: int = 4) -> Tensor:
    return torch.randn(2, channels, LATENT, LATENT)


def _times() -> Tensor:
    return torch.tensor([5.0, 500.0])


def _context() -> Tensor:
    return torch.randn(2, 16, D)


def _packed() -> Inputs:
    """Return the inputs of models that get latents as a sequence of patches, and their text."""
    return {
        "hidden_states": torch.randn(2, TOKENS, 16),
        "encoder_hidden_states": _context(),
        "timestep": torch.rand(2),
    }


def _flux(axes: int) -> Inputs:
    places = {"img_ids": torch.zeros(TOKENS, axes), "txt_ids": torch.zeros(16, axes)}
    pooled = {"pooled_projections": torch.randn(2, D)} if axes == 3 else {}
    return _packed() | places | pooled | {"guidance": torch.ones(2)}


def _video(channels: int, **more: Any) -> Inputs:
    return {
        "hidden_states": torch.randn(1, channels, 2, LATENT, LATENT),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": _context()[:1],
        **more,
    }


def _unet(name: str, inputs: Callable[[], Inputs], **options: Any) -> Model:
    return Model("UNet, VAE", "diffusers", 0, _of_diffusers(name, inputs, "", **options))


def _of_timm(name: str, side: int, **options: Any) -> Model:
    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import timm

        return timm.create_model(name, **options), {"x": torch.randn(2, 3, side, side)}

    return Model("vision", "timm", 0, build)


def _of_torchvision(name: str) -> Model:
    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import torchvision

        return torchvision.models.get_model(name), {"x": torch.randn(2, 3, SIDE, SIDE)}

    return Model("CNN", "torchvision", 0, build)


def _cnn(name: str) -> Model:
    return _of_timm(name, SIDE)._replace(group="CNN")


_BLOCKS: Options = {"block_out_channels": (32, 64), "norm_num_groups": 8}
_CROSS: Options = {"cross_attention_dim": D, "attention_head_dim": 2}

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
DIFFUSION: Mapping[str, Model] = {
    # facebook/DiT-XL-2-256
    "dit": _diffusion(
        "DiTTransformer2DModel",
        28,
        lambda: {
            "hidden_states": _latent(),
            "timestep": torch.tensor([5, 500]),
            "class_labels": torch.tensor([1, 2]),
        },
        sample_size=LATENT,
        in_channels=4,
        out_channels=8,
    ),
    # PixArt-alpha/PixArt-Sigma-XL-2-1024-MS
    "pixart": _diffusion(
        "PixArtTransformer2DModel",
        28,
        lambda: {
            "hidden_states": _latent(),
            "encoder_hidden_states": _context(),
            "timestep": torch.tensor([5, 500]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        sample_size=LATENT,
        cross_attention_dim=D,
        caption_channels=D,
        use_additional_conditions=False,
    ),
    # stabilityai/stable-diffusion-3-medium
    "sd3": _diffusion(
        "SD3Transformer2DModel",
        24,
        lambda: {
            "hidden_states": _latent(16),
            "encoder_hidden_states": _context(),
            "pooled_projections": torch.randn(2, D),
            "timestep": _times(),
        },
        sample_size=LATENT,
        joint_attention_dim=D,
        caption_projection_dim=D,
        pooled_projection_dim=D,
        pos_embed_max_size=LATENT,
    ),
    # black-forest-labs/FLUX.1-dev: 19 double, 38 single blocks
    "flux": _diffusion(
        "FluxTransformer2DModel",
        28,
        lambda: _flux(3),
        "num_layers num_single_layers",
        in_channels=16,
        joint_attention_dim=D,
        pooled_projection_dim=D,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    ),
    # black-forest-labs/FLUX.2-dev: 8 double, 48 single blocks
    "flux2": _diffusion(
        "Flux2Transformer2DModel",
        28,
        lambda: _flux(4),
        "num_layers num_single_layers",
        in_channels=16,
        joint_attention_dim=D,
        axes_dims_rope=(8, 8, 8, 8),
    ),
    # Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    "wan": _diffusion(
        "WanTransformer3DModel",
        30,
        lambda: _video(16),
        text_dim=D,
        freq_dim=D,
        ffn_dim=int(5.8 * D),
    ),
    # Lightricks/LTX-Video
    "ltx": _diffusion(
        "LTXVideoTransformer3DModel",
        28,
        lambda: (
            _packed()
            | {
                "encoder_attention_mask": torch.ones(2, 16),
                "num_frames": 1,
                "height": 8,
                "width": 8,
            }
        ),
        in_channels=16,
        out_channels=16,
        cross_attention_dim=D,
        caption_channels=D,
    ),
    # Qwen/Qwen-Image
    "qwen_image": _diffusion(
        "QwenImageTransformer2DModel",
        60,
        lambda: (
            _packed()
            | {
                "encoder_hidden_states_mask": torch.ones(2, 16, dtype=torch.bool),
                "img_shapes": [(1, 8, 8)] * 2,
            }
        ),
        in_channels=16,
        out_channels=4,
        joint_attention_dim=D,
        axes_dims_rope=(8, 12, 12),
    ),
    # hunyuanvideo-community/HunyuanVideo: 20 double, 40 single blocks
    "hunyuan_video": _diffusion(
        "HunyuanVideoTransformer3DModel",
        30,
        lambda: _video(
            16,
            encoder_attention_mask=torch.ones(1, 16),
            pooled_projections=torch.randn(1, D),
            guidance=torch.ones(1),
        ),
        "num_layers num_single_layers",
        num_refiner_layers=1,
        text_embed_dim=D,
        pooled_projection_dim=D,
        rope_axes_dim=(8, 12, 12),
    ),
    # THUDM/CogVideoX-5b
    "cogvideox": _diffusion(
        "CogVideoXTransformer3DModel",
        42,
        lambda: {
            "hidden_states": torch.randn(1, 2, 16, LATENT, LATENT),
            "encoder_hidden_states": _context()[:1],
            "timestep": torch.tensor([500]),
        },
        text_embed_dim=D,
        max_text_seq_length=16,
        sample_width=LATENT,
        sample_height=LATENT,
        sample_frames=5,
    ),
    # Efficient-Large-Model/Sana_1600M_1024px_diffusers
    "sana": _diffusion(
        "SanaTransformer2DModel",
        20,
        lambda: {
            "hidden_states": _latent(32),
            "encoder_hidden_states": _context(),
            "timestep": torch.tensor([5, 500]),
        },
        in_channels=32,
        out_channels=32,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=D // HEADS,
        cross_attention_dim=D,
        caption_channels=D,
        sample_size=LATENT,
    ),
}
UNETS: Mapping[str, Model] = {
    # google/ddpm-cifar10-32
    "ddpm": _unet(
        "UNet2DModel",
        lambda: {"sample": _latent(3), "timestep": 5},
        sample_size=LATENT,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    ),
    # stable-diffusion-v1-5/stable-diffusion-v1-5
    "sd15": _unet(
        "UNet2DConditionModel",
        lambda: {"sample": _latent(), "timestep": 5, "encoder_hidden_states": _context()},
        sample_size=LATENT,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **_BLOCKS,
        **_CROSS,
    ),
    # stabilityai/stable-diffusion-xl-base-1.0
    "sdxl": _unet(
        "UNet2DConditionModel",
        lambda: {
            "sample": _latent(),
            "timestep": 5,
            "encoder_hidden_states": _context(),
            "added_cond_kwargs": {"text_embeds": torch.randn(2, 32), "time_ids": torch.ones(2, 6)},
        },
        sample_size=LATENT,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 4),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        use_linear_projection=True,
        **_BLOCKS,
        **_CROSS,
    ),
    # stabilityai/sd-vae-ft-mse
    "autoencoder_kl": _unet(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(1, 3, 32, 32)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=2,
        **_BLOCKS,
    ),
    # Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    "autoencoder_wan": _unet(
        "AutoencoderKLWan",
        lambda: {"sample": torch.randn(1, 3, 1, 32, 32)},
        base_dim=32,
        dim_mult=[1, 2],
        num_res_blocks=2,
        temperal_downsample=[False],
    ),
}
CNNS: Mapping[str, Model] = {
    "resnet50": _of_torchvision("resnet50"),
    "efficientnet_b0": _cnn("efficientnet_b0"),
    "convnext_tiny": _cnn("convnext_tiny"),
    "mobilenetv3_large": _cnn("mobilenetv3_large_100"),
    "regnety_008": _cnn("regnety_008"),
    "densenet121": _of_torchvision("densenet121"),
}
VISION: Mapping[str, Model] = {
    "vit_tiny": _of_timm("vit_tiny_patch16_224", SIDE, img_size=SIDE),
    # with LayerScale
    "deit3_small": _of_timm("deit3_small_patch16_224", SIDE, img_size=SIDE),
    "swin_tiny": _of_timm("swin_tiny_patch4_window7_224", SIDE, img_size=SIDE, window_size=4),
    "mixer_s16": _of_timm("mixer_s16_224", SIDE, img_size=SIDE),
    "vit_base": _picture("vit", 12),
    "dinov2": _picture("dinov2", 12),
    "beit": _picture("beit", 12),
    "siglip": _picture("siglip_vision_model", 12),
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
        _of_transformers(
            "audio-spectrogram-transformer",
            1,
            lambda: {"input_values": torch.randn(1, 128, 128)},
            hidden_size=D,
            intermediate_size=4 * D,
            num_attention_heads=HEADS,
            max_length=128,
        ),
    ),
}
ZOO: Mapping[str, Model] = {
    **HYBRID,
    **DIFFUSION,
    **UNETS,
    **CNNS,
    **VISION,
    **ENCODERS,
    **AUDIO,
}
