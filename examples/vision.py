"""Compressed saved activations of a CNN in a custom training loop: python examples/vision.py [STEPS]

`with ec.compressed("lossless+fp8"):` goes around the forward pass of any model. The same networks train on any layout:
`echelon train --set model=examples/vision.py:vgg --set batch=16 --set compress=lossless`.
"""

import sys

import torch

import echelon as ec
from echelon.data.synthetic_images import synthetic_images
from echelon.models.vision import cnn

SIDE, CLASSES = 32, 10


def vgg():
    """VGG-16 with an eighth of its channels. Without arguments `vision.vgg16()` is of its published size."""
    return cnn.vgg16(CLASSES, SIDE, width_multiplier=1 / 8, dropout=0.1)


def alexnet():
    return cnn.alexnet(CLASSES, 64, width_multiplier=1 / 8, dropout=0.1)


def resnet():
    return cnn.resnet50(CLASSES, width_multiplier=1 / 8)


def batch(rows, step):
    pixels, labels = synthetic_images(torch.arange(step * rows, (step + 1) * rows), side=SIDE, classes=CLASSES)
    return {"images": pixels, "labels": labels}


def train(compress, steps):
    """The losses, and how many bytes forward left for backward."""
    torch.manual_seed(0)
    model = vgg()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(steps):
        with ec.compressed(compress) as saving:
            total, count = model(**batch(16, step))
            loss = total / count
        kept = saving.bytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept


if __name__ == "__main__":
    for compress in ("none", "lossless", "lossless+fp8"):
        losses, kept = train(compress, int(sys.argv[1]) if len(sys.argv) > 1 else 40)
        print(f"{compress:14} {kept / 2**20:5.2f} MiB kept, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
