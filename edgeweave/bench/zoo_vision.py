"""Vision models of the zoo: those of `transformers` from small configurations, and by hand.

ResNet-50, MobileNetV2, EfficientNet-B0, ConvNeXt-T, U-Net, ViT-B and Swin-T come from
`edgeweave.bench.inference_models`; these are the others. Values that are a pair are for small and
for full inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from edgeweave.bench import zoo_networks as networks
from edgeweave.bench import zoo_pixels as pixels
from edgeweave.bench.inference_models import Inputs, ZooModel
from edgeweave.bench.zoo_hf import Sizes, make_transformer

__all__ = ["VISION"]

_VIT: Sizes = {
    "image_size": (64, 224),
    "hidden_size": (64, 256),
    "num_hidden_layers": (2, 6),
    "num_attention_heads": (4, 8),
    "intermediate_size": (128, 1024),
    "num_labels": 100,
}

_MODELS: dict[str, tuple[str, Sizes]] = {
    "RegNet": (
        "RegNetForImageClassification",
        {
            "embedding_size": 32,
            "hidden_sizes": ([16, 32], [64, 128, 256, 512]),
            "depths": ([1, 1], [1, 2, 4, 1]),
            "groups_width": 16,
            "num_labels": 100,
        },
    ),
    "MobileNetV1": (
        "MobileNetV1ForImageClassification",
        {"depth_multiplier": (0.25, 1.0), "image_size": (64, 224), "num_labels": 100},
    ),
    "MobileViT": (
        "MobileViTForImageClassification",
        {
            "image_size": (64, 256),
            "hidden_sizes": ([16, 24, 32], [96, 120, 144]),
            "neck_hidden_sizes": ([8, 8, 16, 16, 24, 24, 32], [16, 32, 64, 96, 128, 160, 640]),
            "num_labels": 100,
        },
    ),
    "MobileViTV2": (
        "MobileViTV2ForImageClassification",
        {"image_size": (64, 256), "width_multiplier": (0.25, 0.75), "num_labels": 100},
    ),
    "DeiT": ("DeiTForImageClassificationWithTeacher", _VIT),
    "BEiT": (
        "BeitForImageClassification",
        {**_VIT, "use_relative_position_bias": True, "layer_scale_init_value": 0.1},
    ),
    "DINOv2": ("Dinov2ForImageClassification", {**_VIT, "image_size": (56, 224), "mlp_ratio": 2}),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        {
            "depths": ([1, 1, 1, 1], [2, 2, 2, 2]),
            "hidden_sizes": ([16, 16, 32, 32], [32, 64, 160, 256]),
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": (32, 256),
            "num_labels": 20,
        },
    ),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        {
            "depths": ([1, 1, 1, 1], [2, 2, 4, 2]),
            "hidden_sizes": ([8, 16, 16, 32], [64, 128, 320, 512]),
            "layer_scale_init_value": 0.1,
            "num_labels": 100,
        },
    ),
    "PVT": (
        "PvtForImageClassification",
        {
            "image_size": (64, 224),
            "depths": ([1, 1, 1, 1], [2, 2, 2, 2]),
            "hidden_sizes": ([16, 16, 32, 32], [64, 128, 320, 512]),
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 100,
        },
    ),
    "PVTv2": (
        "PvtV2ForImageClassification",
        {
            "image_size": (64, 224),
            "depths": ([1, 1, 1, 1], [2, 2, 2, 2]),
            "hidden_sizes": ([16, 16, 32, 32], [32, 64, 160, 256]),
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 100,
        },
    ),
    "CvT": (
        "CvtForImageClassification",
        {
            "embed_dim": ([16, 32, 64], [64, 192, 384]),
            "num_heads": [1, 2, 4],
            "depth": ([1, 2, 3], [1, 2, 4]),
            "num_labels": 100,
        },
    ),
    "Swinv2": (
        "Swinv2ForImageClassification",
        {
            "image_size": (64, 256),
            "window_size": (4, 8),
            "embed_dim": (24, 96),
            "depths": ([1, 1], [2, 2, 2]),
            "num_heads": ([2, 4], [3, 6, 12]),
            "num_labels": 100,
        },
    ),
    "Swin2SR": (
        "Swin2SRForImageSuperResolution",
        {
            "image_size": (32, 64),
            "embed_dim": (24, 60),
            "depths": ([1, 1], [2, 2]),
            "num_heads": [2, 2],
            "window_size": 8,
        },
    ),
    "LeViT": (
        "LevitForImageClassification",
        {
            "image_size": (64, 224),
            "hidden_sizes": ([16, 32, 48], [128, 256, 384]),
            "num_attention_heads": ([2, 2, 2], [4, 6, 8]),
            "depths": ([1, 1, 1], [2, 3, 4]),
            "key_dim": ([8, 8, 8], [16, 16, 16]),
            "num_labels": 100,
        },
    ),
    "FocalNet": (
        "FocalNetForImageClassification",
        {
            "image_size": (64, 224),
            "embed_dim": (16, 96),
            "depths": ([1, 1], [2, 2, 2, 2]),
            "hidden_sizes": ([16, 32], [96, 192, 384, 768]),
            "focal_levels": ([2, 2], [2, 2, 2, 2]),
            "focal_windows": ([3, 3], [3, 3, 3, 3]),
            "num_labels": 100,
        },
    ),
    "ConvNeXtV2": (
        "ConvNextV2ForImageClassification",
        {
            "depths": ([1, 1, 1, 1], [2, 2, 6, 2]),
            "hidden_sizes": ([16, 32, 64, 64], [40, 80, 160, 320]),
            "num_labels": 100,
        },
    ),
    "BiT": (
        "BitForImageClassification",
        {
            "depths": ([1, 1], [2, 2, 2, 2]),
            "hidden_sizes": ([32, 64], [128, 256, 512, 1024]),
            "embedding_size": (32, 64),
            "num_groups": 8,
            "num_labels": 100,
        },
    ),
    "Hiera": (
        "HieraForImageClassification",
        {
            "image_size": ([64, 64], [224, 224]),
            "embed_dim": (16, 64),
            "depths": ([1, 1, 1, 1], [1, 2, 4, 2]),
            "num_heads": [1, 2, 4, 8],
            "num_labels": 100,
        },
    ),
    "SwiftFormer": (
        "SwiftFormerForImageClassification",
        {
            "depths": ([1, 1, 1, 1], [2, 2, 4, 2]),
            "embed_dims": ([16, 32, 32, 64], [48, 56, 112, 220]),
            "num_labels": 100,
        },
    ),
    "HGNetV2": (
        "HGNetV2ForImageClassification",
        {"num_labels": 100},
    ),
    "YOLOS": (
        "YolosForObjectDetection",
        {**_VIT, "image_size": ([64, 64], [224, 224]), "num_detection_tokens": (10, 50)},
    ),
    "DPT": (
        "DPTForDepthEstimation",
        {
            **_VIT,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": ([8, 16, 32, 32], [48, 96, 192, 256]),
            "fusion_hidden_size": (16, 64),
        },
    ),
    "ViTDet": (
        "VitDetModel",
        {
            **_VIT,
            "window_size": 4,
            "window_block_indices": [0],
            "use_relative_position_embeddings": True,
        },
    ),
    "AIMv2": ("Aimv2VisionModel", _VIT),
    "Data2Vec": (
        "Data2VecVisionForImageClassification",
        {**_VIT, "use_shared_relative_position_bias": True, "layer_scale_init_value": 0.1},
    ),
    "TextNet": (
        "TextNetForImageClassification",
        {"num_labels": 100},
    ),
}  # fmt: skip

# By hand, from the number of channels.
_BY_HAND: dict[str, tuple[Callable[[int], nn.Module], tuple[int, int], tuple[int, int]]] = {
    # Name: the model from its width, small and full width, small and full side of the image.
    "AlexNet": (networks.alexnet, (8, 64), (64, 224)),
    "VGG-11": (networks.vgg, (8, 64), (64, 224)),
    "SqueezeNet": (networks.squeezenet, (4, 16), (64, 224)),
    "DenseNet": (networks.DenseNet, (8, 32), (64, 224)),
    "ShuffleNetV2": (networks.ShuffleNet, (16, 116), (64, 224)),
    "GoogLeNet": (networks.inception, (8, 64), (64, 224)),
    "SE-ResNeXt": (networks.se_resnext, (16, 64), (64, 224)),
    "RepVGG": (networks.repvgg, (8, 48), (64, 224)),
    "MLP-Mixer": (networks.MlpMixer, (32, 256), (64, 224)),
    "ESPCN": (pixels.espcn, (8, 64), (32, 128)),
    "EDSR": (pixels.edsr, (8, 64), (32, 96)),
    "DeepLabV3 head": (pixels.DeepLab, (8, 64), (64, 224)),
    "FPN": (pixels.FeaturePyramid, (8, 64), (64, 224)),
    "Hourglass": (pixels.Hourglass, (8, 64), (64, 192)),
    "YOLO-tiny": (pixels.yolo, (4, 16), (64, 416)),
    "CycleGAN generator": (pixels.generator, (8, 32), (32, 128)),
    "DCGAN generator": (pixels.DeepGenerator, (8, 64), (0, 0)),
    "Convolutional autoencoder": (pixels.autoencoder, (8, 32), (64, 128)),
}


def _image(sides: tuple[int, int], batch: int, quick: bool) -> Inputs:
    side = sides[0 if quick else 1]
    return (torch.randn(batch, 3, side, side),), {}


def _noise(batch: int, quick: bool) -> Inputs:
    return (torch.randn(batch, 100),), {}


def _wide(make: Callable[[int], nn.Module], widths: tuple[int, int], quick: bool) -> nn.Module:
    return make(widths[0 if quick else 1])


def _side(sizes: Sizes) -> tuple[int, int]:
    side: Any = sizes.get("image_size", (64, 224))
    if isinstance(side[0], list):
        return side[0][0], side[1][0]
    return side[0], side[1]


def _entries() -> dict[str, ZooModel]:
    found: dict[str, ZooModel] = {}
    for name, (cls, sizes) in _MODELS.items():
        make: Callable[[bool], nn.Module] = functools.partial(make_transformer, cls, sizes)
        found[name] = ZooModel(name, "vision", make, functools.partial(_image, _side(sizes)))
    for name, (by_width, widths, sides) in _BY_HAND.items():
        inputs = functools.partial(_image, sides) if sides[0] else _noise
        make = functools.partial(_wide, by_width, widths)
        found[name] = ZooModel(name, "vision", make, inputs)
    return found


VISION: Mapping[str, ZooModel] = _entries()
"""The entries by name."""
