"""Models that read a picture: convolutional networks and vision transformers."""

# the checkers' environment does not have timm and torchvision
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bench.zoo.model import SIDE, SIZES, Inputs, Model, of_transformers


def _pixels() -> Inputs:
    return {"pixel_values": torch.randn(1, 3, SIDE, SIDE)}


def _picture(name: str, repeats: int, **options: Any) -> Model:
    sizes = SIZES | {"image_size": SIDE, "patch_size": 8} | options
    build = of_transformers(name, 1, _pixels, **sizes)
    return Model("vision", "transformers", repeats, build)


def _of_timm(name: str, **options: Any) -> Model:
    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import timm

        return timm.create_model(name, **options), {"x": torch.randn(2, 3, SIDE, SIDE)}

    return Model("vision", "timm", 0, build)


def _of_torchvision(name: str) -> Model:
    def build(parts: int) -> tuple[nn.Module, Inputs]:
        import torchvision

        return torchvision.models.get_model(name), {"x": torch.randn(2, 3, SIDE, SIDE)}

    return Model("CNN", "torchvision", 0, build)


def _cnn(name: str) -> Model:
    return _of_timm(name)._replace(group="CNN")


CNNS: Mapping[str, Model] = {
    "resnet50": _of_torchvision("resnet50"),
    "efficientnet_b0": _cnn("efficientnet_b0"),
    "convnext_tiny": _cnn("convnext_tiny"),
    "mobilenetv3_large": _cnn("mobilenetv3_large_100"),
    "regnety_008": _cnn("regnety_008"),
    "densenet121": _of_torchvision("densenet121"),
}
VISION: Mapping[str, Model] = {
    "vit_tiny": _of_timm("vit_tiny_patch16_224", img_size=SIDE),
    # with LayerScale
    "deit3_small": _of_timm("deit3_small_patch16_224", img_size=SIDE),
    "swin_tiny": _of_timm("swin_tiny_patch4_window7_224", img_size=SIDE, window_size=4),
    "mixer_s16": _of_timm("mixer_s16_224", img_size=SIDE),
    "vit_base": _picture("vit", 12),
    "dinov2": _picture("dinov2", 12),
    "beit": _picture("beit", 12),
    "siglip": _picture("siglip_vision_model", 12),
}
