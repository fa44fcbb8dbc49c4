"""Networks of the zoo that give something for each pixel, by hand: segments, boxes, images.

What they bring for a compiler: dilations, upsampling, skips across scales, shuffled pixels,
transposed convolutions, instance norms, reflected borders.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from edgeweave.bench.zoo_networks import Branches, Residual, conv_block

__all__ = [
    "DeepGenerator",
    "DeepLab",
    "FeaturePyramid",
    "Hourglass",
    "autoencoder",
    "edsr",
    "espcn",
    "generator",
    "yolo",
]

_CLASSES = 20


def espcn(width: int) -> nn.Module:
    """Three times as many pixels from shuffled channels (Shi et al., 2016)."""
    return nn.Sequential(
        nn.Conv2d(3, width, 5, padding=2), nn.Tanh(),
        nn.Conv2d(width, width // 2, 3, padding=1), nn.Tanh(),
        nn.Conv2d(width // 2, 27, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip


class _Scaled(nn.Module):
    """Residuals times a small number keep deep networks stable."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + 0.1 * self.inner(x)
        return out


def edsr(width: int) -> nn.Module:
    """Residual blocks without norms, then twice as many pixels (Lim et al., 2017)."""
    body = nn.Sequential(*(_Scaled(width) for _ in range(6)), nn.Conv2d(width, width, 3, padding=1))
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Residual(body),
        nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2),
        nn.Conv2d(width, 3, 3, padding=1),
    )  # fmt: skip


class _Pooled(nn.Module):
    """The mean of the image, at every pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.inner(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


class DeepLab(nn.Module):
    """Pyramid of dilated convolutions (Chen et al., 2017).

    Args:
        width: Channels of each branch.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        w = width
        self.body = nn.Sequential(
            conv_block(3, w, 3, 2), conv_block(w, w, 3, 2), conv_block(w, 2 * w, 3, 2),
            conv_block(2 * w, 2 * w, 3, dilation=2),
        )  # fmt: skip
        self.pyramid = Branches(
            conv_block(2 * w, w, 1),
            *(conv_block(2 * w, w, 3, dilation=d) for d in (3, 6, 9)),
            _Pooled(2 * w, w),
        )
        self.head = nn.Sequential(conv_block(5 * w, w, 1), nn.Conv2d(w, _CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each class at each pixel of images `[B, 3, H, W]`."""
        scores = self.head(self.pyramid(self.body(x)))
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)


class FeaturePyramid(nn.Module):
    """Coarse features are added to fine ones (Lin et al., 2017).

    Args:
        width: Channels of the first level, and of all results.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(conv_block(a, b, 3, 2), conv_block(b, b)) for a, b in pairwise(sizes)
        )
        self.across = nn.ModuleList(nn.Conv2d(size, width, 1) for size in sizes[1:])
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in sizes[1:])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Features of four scales of images `[B, 3, H, W]`, fine to coarse."""
        found = []
        for layer in self.down:
            x = layer(x)
            found.append(x)
        sides = [layer(level) for layer, level in zip(self.across, found, strict=True)]
        for fine in range(len(sides) - 2, -1, -1):
            sides[fine] = sides[fine] + F.interpolate(sides[fine + 1], scale_factor=2.0)
        return [layer(level) for layer, level in zip(self.smooth, sides, strict=True)]


class Hourglass(nn.Module):
    """Down to few pixels and up again, with residuals across (Newell et al., 2016).

    Args:
        width: Channels of all levels.
        depth: Halvings.
    """

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.stem = conv_block(3, width, 7, 2)
        self.down = nn.ModuleList(self._bottleneck(width) for _ in range(depth))
        self.across = nn.ModuleList(self._bottleneck(width) for _ in range(depth))
        self.up = nn.ModuleList(self._bottleneck(width) for _ in range(depth))
        self.head = nn.Conv2d(width, 17, 1)

    @staticmethod
    def _bottleneck(width: int) -> nn.Module:
        half = width // 2
        return Residual(
            nn.Sequential(
                nn.BatchNorm2d(width), nn.ReLU(), conv_block(width, half, 1),
                conv_block(half, half), nn.Conv2d(half, width, 1),
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Heat maps of 17 joints for images `[B, 3, H, W]`."""
        x = self.stem(x)
        kept = []
        for down, across in zip(self.down, self.across, strict=True):
            kept.append(across(x))
            x = down(F.max_pool2d(x, 2))
        for up in self.up:
            x = kept.pop() + F.interpolate(up(x), scale_factor=2.0, mode="nearest")
        return self.head(x)  # type: ignore[no-any-return]


def yolo(width: int) -> nn.Module:
    """Leaky convolutions and pooling down to a grid of boxes (Redmon and Farhadi, 2018)."""
    layers: list[nn.Module] = []
    before = 3
    for factor in (1, 2, 4, 8, 16):
        layers.append(conv_block(before, factor * width, act=nn.LeakyReLU(0.1)))
        layers.append(nn.MaxPool2d(2))
        before = factor * width
    layers.append(conv_block(before, 16 * width, act=nn.LeakyReLU(0.1)))
    return nn.Sequential(*layers, nn.Conv2d(16 * width, 3 * (5 + _CLASSES), 1))


def generator(width: int) -> nn.Module:
    """Images from images: instance norms, reflected borders, up again (Zhu et al., 2017)."""
    w = width

    def block(channels: int) -> nn.Module:
        return Residual(
            nn.Sequential(
                nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3),
                nn.InstanceNorm2d(channels), nn.ReLU(),
                nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3),
                nn.InstanceNorm2d(channels),
            )
        )  # fmt: skip

    return nn.Sequential(
        nn.ReflectionPad2d(3), nn.Conv2d(3, w, 7), nn.InstanceNorm2d(w), nn.ReLU(),
        nn.Conv2d(w, 2 * w, 3, 2, 1), nn.InstanceNorm2d(2 * w), nn.ReLU(),
        nn.Conv2d(2 * w, 4 * w, 3, 2, 1), nn.InstanceNorm2d(4 * w), nn.ReLU(),
        block(4 * w), block(4 * w), block(4 * w),
        nn.ConvTranspose2d(4 * w, 2 * w, 3, 2, 1, 1), nn.InstanceNorm2d(2 * w), nn.ReLU(),
        nn.ConvTranspose2d(2 * w, w, 3, 2, 1, 1), nn.InstanceNorm2d(w), nn.ReLU(),
        nn.ReflectionPad2d(3), nn.Conv2d(w, 3, 7), nn.Tanh(),
    )  # fmt: skip


class DeepGenerator(nn.Module):
    """Images of 64 pixels from noise (Radford et al., 2015).

    Args:
        width: Channels of the last level.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before, stride, padding = 100, 1, 0
        for factor in (8, 4, 2, 1):
            after = factor * width
            layers.append(nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False))
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before, stride, padding = after, 2, 1
        self.body = nn.Sequential(*layers, nn.ConvTranspose2d(before, 3, 4, 2, 1), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        """Images `[B, 3, 64, 64]` from noise `[B, 100]`."""
        return self.body(noise[:, :, None, None])  # type: ignore[no-any-return]


def autoencoder(width: int) -> nn.Module:
    """A few numbers per patch and back, with group norms and SiLU (as in Rombach et al., 2022)."""
    w = width

    def stage(channels: int, layer: nn.Module) -> list[nn.Module]:
        return [layer, nn.GroupNorm(4, channels), nn.SiLU()]

    def block(channels: int) -> nn.Module:
        return Residual(
            nn.Sequential(
                nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)
            )
        )

    return nn.Sequential(
        *stage(w, nn.Conv2d(3, w, 3, 2, 1)), block(w),
        *stage(2 * w, nn.Conv2d(w, 2 * w, 3, 2, 1)), block(2 * w),
        nn.Conv2d(2 * w, 4, 1), nn.Conv2d(4, 2 * w, 1), block(2 * w),
        nn.Upsample(scale_factor=2.0), *stage(w, nn.Conv2d(2 * w, w, 3, padding=1)),
        nn.Upsample(scale_factor=2.0), nn.Conv2d(w, 3, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip
