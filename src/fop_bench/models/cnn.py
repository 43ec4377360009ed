"""A LeNet-like network for 28 x 28 grey images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def cnn(classes: int = 10) -> nn.Sequential:
    """Two 5 x 5 convolutions (32 and 64 channels), each max-pooled by 2, then 128 units."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, kernel_size=5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * 7 * 7, 128),
            relu3=nn.ReLU(),
            fc2=nn.Linear(128, classes),
        )
    )
