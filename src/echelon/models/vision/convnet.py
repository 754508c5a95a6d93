"""A small convolutional network with batch normalisation, for images [B, 3, side, side] and labels [B]."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.models.layers import loss_sum
from echelon.models.model_config import KERNEL_WEIGHTS, ModelConfig
from echelon.models.pipeline_model import PipelineLayer, PipelineModel, block_layers
from echelon.rng import ONES, ZEROS, Init, normal_init


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, ReLU and 2 x 2 average pooling."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(self.norm(self.conv(x))), 2)


class ConvNet(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ConvBlock(i, o) for i, o in config.convolutions)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.convolutions[-1][1], config.vocab)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss_sum(self.logits(images), labels)

    def logits(self, images: Tensor) -> Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self._classify(x)

    def _classify(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out

    def pipeline_model(self) -> PipelineModel:
        blocks = block_layers(self.blocks, lambda block, x, _shared, images, labels: block(images if x is None else x))
        return PipelineModel(layers=(*blocks, PipelineLayer("head", ("drop", "head"), self._head_layer)))

    def _head_layer(self, x: Tensor, _shared: None, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss_sum(self._classify(x), labels)

    def initial(self, name: str) -> Init:
        """Initial distribution of a parameter."""
        if name.endswith("bias"):
            return ZEROS
        if ".norm." in name:
            return ONES
        if name == "head.weight":
            return normal_init(0.02)
        block = int(name.split(".")[1])
        return normal_init(math.sqrt(2 / (KERNEL_WEIGHTS * self.config.convolutions[block][0])))
