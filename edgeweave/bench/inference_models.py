"""The models of `edgeweave bench inference`: real architectures with random weights.

Where `transformers` has the architecture, its configuration is used with the published sizes;
nothing is downloaded. Weights are random. Convolutions are initialised for unit gain and batch
norms get running statistics measured on random images, so that activations keep the size they have
in a trained model: with the library's own initialisation some of these networks compute with
denormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZOO", "ZooModel", "build"]

Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]

_QUICK_IMAGE = 64
_QUICK_TOKENS = 32
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class ZooModel:
    """One architecture.

    Attributes:
        name: Name in tables.
        family: `"conv"`, `"transformer"` or `"mlp"`; the targets differ.
        make: Builds the model with random weights, in training mode. Its argument is whether
            the small variant is wanted.
        inputs: Makes inputs from a batch size and whether the small variant is wanted.
    """

    name: str
    family: str
    make: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool], Inputs]


def build(entry: ZooModel, batch: int, quick: bool) -> tuple[nn.Module, Inputs]:
    """Builds a model and its inputs, the same ones at every call.

    Args:
        entry: The architecture.
        batch: Size of the batch.
        quick: The small variant: few layers, small images, short sequences.

    Returns:
        The model in eval mode without gradients, and `(args, kwargs)` for it.

    Example:
        >>> from edgeweave.bench.inference_models import ZOO, build
        >>> model, (args, kwargs) = build(ZOO["MLP"], batch=2, quick=True)
        >>> model(*args, **kwargs).shape
        torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20)
        model = entry.make(quick).eval().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, _NORMS):
                module.reset_parameters()
        args, kwargs = entry.inputs(batch, quick)
        _settle_batch_norms(model, args, kwargs)
    return model, (args, kwargs)


def _settle_batch_norms(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any]
) -> None:
    """Gives batch norms the statistics of random input, or activations vanish with depth."""
    norms = [module for module in model.modules() if isinstance(module, _NORMS)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model(*(torch.cat([arg, arg.flip(-1)]) for arg in args), **kwargs)
    for norm in norms:
        norm.eval()
        norm.momentum = 0.1


def _image(batch: int, quick: bool) -> Inputs:
    side = _QUICK_IMAGE if quick else 224
    return (torch.randn(batch, 3, side, side),), {}


def _tokens(batch: int, quick: bool) -> Inputs:
    length = _QUICK_TOKENS if quick else 128
    ids = torch.randint(0, 1000, (batch, length))
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _resnet50(quick: bool) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    small: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 64, 128]}
    return ResNetForImageClassification(ResNetConfig(num_labels=1000, **(small if quick else {})))


def _mobilenet_v2(quick: bool) -> Any:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    multiplier = 0.35 if quick else 1.0
    return MobileNetV2ForImageClassification(
        MobileNetV2Config(num_labels=1000, depth_multiplier=multiplier)
    )


def _efficientnet(quick: bool) -> Any:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    # B0; the library's default is B7.
    sizes: dict[str, Any] = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    if quick:
        sizes = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
    return EfficientNetForImageClassification(EfficientNetConfig(num_labels=1000, **sizes))


def _convnext_tiny(quick: bool) -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64]}
    # The scales start at 1e-6, which makes every block the identity; training makes them larger.
    config = ConvNextConfig(num_labels=1000, layer_scale_init_value=0.1, **(small if quick else {}))
    return ConvNextForImageClassification(config)


def _vit_base(quick: bool) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"image_size": _QUICK_IMAGE, **_few_layers()}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **(small if quick else {})))


def _swin_tiny(quick: bool) -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    small: dict[str, Any] = {
        "image_size": _QUICK_IMAGE,
        "window_size": 4,
        "embed_dim": 24,
        "depths": [1, 2],
        "num_heads": [2, 4],
    }
    return SwinForImageClassification(SwinConfig(num_labels=1000, **(small if quick else {})))


def _bert_base(quick: bool) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**(_few_layers() if quick else {})))


def _distilbert(quick: bool) -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    small: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    return DistilBertModel(DistilBertConfig(**(small if quick else {})))


def _gpt2(quick: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
    # Prefill: the logits of a prompt, without the cache that generation would need.
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **(small if quick else {})))


def _few_layers() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }


class _DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Segmentation network with transposed convolutions (Ronneberger et al., 2015).

    Args:
        width: Channels of the first level; they double at each of four halvings.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = [width << level for level in range(5)]
        self.down = nn.ModuleList(
            _DoubleConv(a, b) for a, b in zip([3, *channels[:-1]], channels, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(channels[:0:-1], channels[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(_DoubleConv(a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Segments images.

        Args:
            x: Images, `[B, 3, H, W]`, sides divisible by 16.

        Returns:
            Scores of two classes, `[B, 2, H, W]`.
        """
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class DLRM(nn.Module):
    """Recommendation model: two MLPs around pairwise products (Naumov et al., 2019).

    Args:
        width: Size of each embedding.
        rows: Rows of each of the 26 embedding tables.
    """

    def __init__(self, width: int = 64, rows: int = 10_000) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(26))
        self.bottom = _mlp([13, 512, 256, width], last=nn.ReLU())
        self.top = _mlp([width + 27 * 26 // 2, 512, 512, 256, 1], last=nn.Sigmoid())
        self.register_buffer("pairs", torch.triu_indices(27, 27, offset=1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Predicts clicks.

        Args:
            dense: Numbers, `[B, 13]`.
            sparse: Categories, `[B, 26]`, integers.

        Returns:
            Probabilities, `[B, 1]`.
        """
        x = self.bottom(dense)
        rows = [x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack(rows, dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        return self.top(torch.cat([x, crossed], dim=1))  # type: ignore[no-any-return]


def _mlp(sizes: list[int], last: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    layers[-1:] = [last] if last is not None else []
    return nn.Sequential(*layers)


def _dlrm(quick: bool) -> nn.Module:
    return DLRM(16, 100) if quick else DLRM()


def _dlrm_inputs(batch: int, quick: bool) -> Inputs:
    # A request scores a slate of candidates: 128 rows for each unit of batch.
    rows = batch * (4 if quick else 128)
    sparse = torch.randint(0, 100 if quick else 10_000, (rows, 26))
    return (torch.randn(rows, 13), sparse), {}


def _vector(batch: int, quick: bool) -> Inputs:
    return (torch.randn(batch, 64 if quick else 1024),), {}


_ENTRIES = (
    ZooModel("ResNet-50", "conv", _resnet50, _image),
    ZooModel("MobileNetV2", "conv", _mobilenet_v2, _image),
    ZooModel("EfficientNet-B0", "conv", _efficientnet, _image),
    ZooModel("ConvNeXt-T", "conv", _convnext_tiny, _image),
    ZooModel("U-Net", "conv", lambda quick: UNet(8 if quick else 32), _image),
    ZooModel("ViT-B", "transformer", _vit_base, _image),
    ZooModel("Swin-T", "transformer", _swin_tiny, _image),
    ZooModel("BERT-base", "transformer", _bert_base, _tokens),
    ZooModel("DistilBERT", "transformer", _distilbert, _tokens),
    ZooModel("GPT-2", "transformer", _gpt2, _tokens),
    ZooModel(
        "MLP",
        "mlp",
        lambda quick: _mlp([64, 64, 10] if quick else [1024, 2048, 2048, 1024, 10]),
        _vector,
    ),
    ZooModel("DLRM", "mlp", _dlrm, _dlrm_inputs),
)

ZOO: Mapping[str, ZooModel] = {entry.name: entry for entry in _ENTRIES}
