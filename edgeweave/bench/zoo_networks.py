"""Classifiers of the zoo written by hand, after the papers that their docstrings name.

Each keeps what its architecture brings for a compiler (concatenations, shuffled channels, gates,
branches, dilations, upsampling) and is shorter than the published network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = [
    "Branches",
    "DenseNet",
    "MlpMixer",
    "Residual",
    "ShuffleNet",
    "alexnet",
    "conv_block",
    "inception",
    "repvgg",
    "se_resnext",
    "squeezenet",
    "vgg",
]

_CLASSES = 100


def conv_block(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    dilation: int = 1,
    act: nn.Module | None = None,
) -> nn.Sequential:
    """Convolution that keeps the size but for its stride, batch norm, activation."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU() if act is None else act)


def _head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))


class Residual(nn.Module):
    """`x + inner(x)`, with a projection of x where the sizes differ."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        out: Tensor = self.shortcut(x) + self.inner(x)
        return out


class Branches(nn.Module):
    """Several modules on one input, their results concatenated (or added) over channels."""

    def __init__(self, *branches: nn.Module, add: bool = False) -> None:
        super().__init__()
        self.branches, self.add = nn.ModuleList(branches), add

    def forward(self, x: Tensor) -> Tensor:
        """The branches' results as one tensor."""
        parts = [branch(x) for branch in self.branches]
        if not self.add:
            return torch.cat(parts, dim=1)
        return torch.stack(parts).sum(dim=0)


def alexnet(width: int) -> nn.Module:
    """Large strides, dropout, three linear layers (Krizhevsky et al., 2012)."""
    sizes = (width, 3 * width, 6 * width, 4 * width)
    return nn.Sequential(
        nn.Conv2d(3, sizes[0], 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(sizes[0], sizes[1], 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(sizes[1], sizes[2], 3, padding=1), nn.ReLU(),
        nn.Conv2d(sizes[2], sizes[3], 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Dropout(),
        nn.Linear(9 * sizes[3], 16 * width), nn.ReLU(), nn.Dropout(),
        nn.Linear(16 * width, 16 * width), nn.ReLU(), nn.Linear(16 * width, _CLASSES),
    )  # fmt: skip


def vgg(width: int) -> nn.Module:
    """Nothing but 3x3 convolutions and pooling (Simonyan and Zisserman, 2014)."""
    layers: list[nn.Module] = []
    before = 3
    for factor, repeats in ((1, 1), (2, 1), (4, 2), (8, 2), (8, 2)):
        for _ in range(repeats):
            layers += [nn.Conv2d(before, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
            before = factor * width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, _head(before))


def _fire(inputs: int, squeezed: int) -> nn.Module:
    act = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(inputs, squeezed, 1), act,
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, 4 * squeezed, 1), act),
            nn.Sequential(nn.Conv2d(squeezed, 4 * squeezed, 3, padding=1), act),
        ),
    )  # fmt: skip


def squeezenet(width: int) -> nn.Module:
    """Narrow layers before wide ones, in two branches (Iandola et al., 2016)."""
    w = width
    return nn.Sequential(
        nn.Conv2d(3, 6 * w, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        _fire(6 * w, w), _fire(8 * w, w), nn.MaxPool2d(3, 2, ceil_mode=True),
        _fire(8 * w, 2 * w), _fire(16 * w, 2 * w), nn.MaxPool2d(3, 2, ceil_mode=True),
        _fire(16 * w, 3 * w), _fire(24 * w, 4 * w),
        nn.Dropout(), nn.Conv2d(32 * w, _CLASSES, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class DenseNet(nn.Module):
    """Every layer reads all before it in its block (Huang et al., 2017).

    Args:
        width: Channels that each layer adds.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = 2 * width
        self.stem = nn.Sequential(conv_block(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.turns = nn.ModuleList(), nn.ModuleList()
        for _ in range(3):
            block = nn.ModuleList()
            for _ in range(4):
                block.append(
                    nn.Sequential(
                        nn.BatchNorm2d(channels), nn.ReLU(),
                        nn.Conv2d(channels, 4 * width, 1, bias=False),
                        nn.BatchNorm2d(4 * width), nn.ReLU(),
                        nn.Conv2d(4 * width, width, 3, padding=1, bias=False),
                    )
                )  # fmt: skip
                channels += width
            self.blocks.append(block)
            half = channels // 2
            self.turns.append(nn.Sequential(conv_block(channels, half, 1), nn.AvgPool2d(2)))
            channels = half
        self.head = _head(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images `[B, 3, H, W]`."""
        x = self.stem(x)
        for block, turn in zip(self.blocks, self.turns, strict=True):
            found = [x]
            for layer in block:  # type: ignore[attr-defined]
                found.append(layer(torch.cat(found, dim=1)))
            x = turn(torch.cat(found, dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class _Shuffled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.inner = nn.Sequential(
            conv_block(half, half, 1),
            conv_block(half, half, 3, groups=half, act=nn.Identity()),
            conv_block(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, self.inner(changed)), dim=1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(batch, channels, height, width)


class ShuffleNet(nn.Module):
    """Half of the channels pass by, then all are shuffled (Ma et al., 2018).

    Args:
        width: Channels of the first stage.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [conv_block(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
        before = 24
        for channels, repeats in ((width, 3), (2 * width, 3), (4 * width, 2)):
            stages.append(
                Branches(
                    nn.Sequential(
                        conv_block(before, before, 3, 2, groups=before, act=nn.Identity()),
                        conv_block(before, channels // 2, 1),
                    ),
                    nn.Sequential(
                        conv_block(before, channels // 2, 1),
                        conv_block(
                            channels // 2, channels // 2, 3, 2,
                            groups=channels // 2, act=nn.Identity(),
                        ),
                        conv_block(channels // 2, channels // 2, 1),
                    ),
                )
            )  # fmt: skip
            stages += [_Shuffled(channels) for _ in range(repeats)]
            before = channels
        self.body = nn.Sequential(*stages, _head(before))

    def forward(self, x: Tensor) -> Tensor:
        """Classify images `[B, 3, H, W]`."""
        return self.body(x)  # type: ignore[no-any-return]


def _inception(inputs: int, w: int) -> nn.Module:
    return Branches(
        conv_block(inputs, w, 1),
        nn.Sequential(conv_block(inputs, w, 1), conv_block(w, 2 * w, 3)),
        nn.Sequential(conv_block(inputs, w // 2, 1), conv_block(w // 2, w // 2, 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_block(inputs, w // 2, 1)),
    )


def inception(width: int) -> nn.Module:
    """Four branches of different reach in each block (Szegedy et al., 2014)."""
    w = width
    return nn.Sequential(
        conv_block(3, w, 7, 2), nn.MaxPool2d(3, 2, 1), conv_block(w, w, 1), conv_block(w, 3 * w, 3),
        nn.MaxPool2d(3, 2, 1), _inception(3 * w, w), _inception(4 * w, w),
        nn.MaxPool2d(3, 2, 1), _inception(4 * w, 2 * w), _inception(8 * w, 2 * w),
        _head(8 * w),
    )  # fmt: skip


class _Gate(nn.Module):
    """Channels weighed by what all pixels say (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels // 8, 1), nn.ReLU(),
            nn.Conv2d(channels // 8, channels, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.gate(x)
        return out


def se_resnext(width: int) -> nn.Module:
    """Grouped convolutions and gates in residual blocks (Xie et al., 2017; Hu et al., 2018)."""
    layers: list[nn.Module] = [conv_block(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    before = width
    for factor, stride in ((2, 1), (2, 1), (4, 2), (4, 1), (8, 2)):
        out = factor * width
        inner = nn.Sequential(
            conv_block(before, out // 2, 1),
            conv_block(out // 2, out // 2, 3, stride, groups=8),
            conv_block(out // 2, out, 1, act=nn.Identity()),
            _Gate(out),
        )
        same = before == out and stride == 1
        shortcut = None if same else conv_block(before, out, 1, stride, act=nn.Identity())
        layers += [Residual(inner, shortcut), nn.ReLU()]
        before = out
    return nn.Sequential(*layers, _head(before))


def repvgg(width: int) -> nn.Module:
    """A 3x3, a 1x1 and no convolution side by side, added (Ding et al., 2021)."""
    layers: list[nn.Module] = [conv_block(3, width, 3, 2)]
    before = width
    for factor, stride in ((1, 2), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2)):
        out = factor * width
        branches: list[nn.Module] = [
            conv_block(before, out, 3, stride, act=nn.Identity()),
            conv_block(before, out, 1, stride, act=nn.Identity()),
        ]
        if before == out and stride == 1:
            branches.append(nn.BatchNorm2d(out))
        layers += [Branches(*branches, add=True), nn.ReLU()]
        before = out
    return nn.Sequential(*layers, _head(before))


class _Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.over_tokens = _perceptron(tokens, 2 * tokens)
        self.over_channels = _perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.over_channels(self.norms[1](x))
        return out


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class MlpMixer(nn.Module):
    """Perceptrons over patches and over channels in turn (Tolstikhin et al., 2021).

    Args:
        width: Channels; below 64 for images of 64 pixels, else of 224, in patches of 16.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        tokens = (4 if width < 64 else 14) ** 2
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(_Mixer(tokens, width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images `[B, 3, H, W]`."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))  # type: ignore[no-any-return]
