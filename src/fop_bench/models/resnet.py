"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2016).

- `cifar_resnet(depth)`: the paper's own small networks for 32 x 32 images, 16 to 64 channels, with
  parameter-free shortcuts (option A).
- `resnet18_for_cifar`: ResNet-18 with a 3 x 3 stem and no pooling, as usual on CIFAR.
- `imagenet_resnet50`: ResNet-50; the 3 x 3 convolution of a bottleneck carries the stride.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class PaddedShortcut(nn.Module):
    """Option A: every second pixel, zeros for the new channels; no parameters."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        before = self.new_channels // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.new_channels - before))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Option B: a 1 x 1 convolution where the shape changes."""
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut; four times as wide at its end."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of blocks (each stage after the first halves the image), mean, classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        stages: list[tuple[int, int]],  # (width, number of blocks)
        stem: nn.Module,
        change: Callable[[int, int, int], nn.Module],  # shortcut where the shape changes
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        channels = stages[0][0]
        blocks: list[nn.Module] = []
        for stage, (width, count) in enumerate(stages):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                outputs = width * block.expansion
                same = stride == 1 and channels == outputs
                shortcut = nn.Identity() if same else change(channels, outputs, stride)
                blocks.append(block(channels, width, stride, shortcut))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _small_stem(width: int) -> nn.Module:
    return nn.Sequential(_conv(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def cifar_resnet(depth: int, classes: int = 10) -> ResNet:
    """ResNet-8, -20, -32, ...: depth 6 n + 2, three stages of n blocks."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6 n + 2 (8, 14, 20, 32, ...), got {depth}")
    count = (depth - 2) // 6

    def padded(inputs: int, outputs: int, _: int) -> nn.Module:
        return PaddedShortcut(outputs - inputs)

    stages = [(16, count), (32, count), (64, count)]
    return ResNet(BasicBlock, stages, _small_stem(16), padded, classes)


def resnet18_for_cifar(classes: int = 10) -> ResNet:
    """ResNet-18 for 32 x 32 images."""
    stages = [(64, 2), (128, 2), (256, 2), (512, 2)]
    return ResNet(BasicBlock, stages, _small_stem(64), _projection, classes)


def imagenet_resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50 for 224 x 224 images."""
    stem = nn.Sequential(
        _conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
    )
    stages = [(64, 3), (128, 4), (256, 6), (512, 3)]
    return ResNet(Bottleneck, stages, stem, _projection, classes)
