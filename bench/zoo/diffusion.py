"""Diffusion transformers, UNets and VAEs of diffusers."""

# the checkers' environment does not have diffusers
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.zoo.model import HEADS, LATENT, TOKENS, Build, D, Inputs, Model, Options


def _of_diffusers(name: str, inputs: Callable[[], Inputs], depth: str, **options: Any) -> Build:
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


_BLOCKS: Options = {"block_out_channels": (32, 64), "norm_num_groups": 8}
_CROSS: Options = {"cross_attention_dim": D, "attention_head_dim": 2}

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
