"""Convolutional networks for images [B, 3, side, side] and labels [B]: AlexNet, VGG-16 and ResNet-50.

Published shapes with a head for any number of classes and any side; `width_multiplier` scales all channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from echelon.models.layers import loss_sum

VGG_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""channels of the convolutions of each stage; a 2 x 2 max-pool follows each stage"""
RESNET_50 = ((64, 3), (128, 4), (256, 6), (512, 3))
"""inner channels and blocks of each stage"""
EXPANSION = 4
HIDDEN = 4096


class ImageClassifier(nn.Module):
    """A CNN: convolutional features, then a classification head."""

    def __init__(self, features: nn.Sequential, head: nn.Sequential) -> None:
        super().__init__()
        self.features, self.head = features, head
        for module in list(self.modules()):
            # The last layer keeps torch's small initial values: every class is equally likely.
            if isinstance(module, nn.Conv2d | nn.Linear) and module is not head[-1]:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss_sum(self.logits(images), labels)

    def logits(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(images))
        return out


def alexnet(
    classes: int = 1000, side: int = 224, width_multiplier: float = 1.0, dropout: float = 0.5
) -> ImageClassifier:
    c64, c192, c384, c256 = (_scale_channels(channels, width_multiplier) for channels in (64, 192, 384, 256))
    layers: list[nn.Module] = [nn.Conv2d(3, c64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(c64, c192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(c192, c384, 3, padding=1), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(c384, c256, 3, padding=1), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(c256, c256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)]
    return _with_head(layers, c256, side, classes, _scale_channels(HIDDEN, width_multiplier), dropout)


def vgg16(classes: int = 1000, side: int = 224, width_multiplier: float = 1.0, dropout: float = 0.5) -> ImageClassifier:
    layers: list[nn.Module] = []
    channels = 3
    for stage in VGG_16:
        for width in stage:
            out = _scale_channels(width, width_multiplier)
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return _with_head(layers, channels, side, classes, _scale_channels(HIDDEN, width_multiplier), dropout)


def resnet50(classes: int = 1000, width_multiplier: float = 1.0) -> ImageClassifier:
    channels = _scale_channels(64, width_multiplier)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(channels)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    for number, (width, blocks) in enumerate(RESNET_50):
        inner = _scale_channels(width, width_multiplier)
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, 2 if number and not block else 1))
            channels = EXPANSION * inner
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return ImageClassifier(nn.Sequential(*layers), head)


class Bottleneck(nn.Module):
    """ResNet's bottleneck: three convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and channels == out
        projection = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        out: Tensor = self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))
        return out


def _scale_channels(channels: int, share: float) -> int:
    return max(1, int(channels * share))


def _with_head(
    layers: list[nn.Module], channels: int, side: int, classes: int, hidden: int, dropout: float
) -> ImageClassifier:
    features = channels * _side_after(layers, side) ** 2
    head = nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    )
    return ImageClassifier(nn.Sequential(*layers), head)


def _side_after(layers: list[nn.Module], side: int) -> int:
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, stride, padding = (_last_dim(x) for x in (layer.kernel_size, layer.stride, layer.padding))
            side = (side + 2 * padding - kernel) // stride + 1
    if side < 1:
        raise ValueError("the images are too small for the network; use a larger side")
    return side


def _last_dim(size: Any) -> int:
    return int(size[-1] if isinstance(size, tuple) else size)
