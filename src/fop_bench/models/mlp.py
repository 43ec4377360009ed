"""A multi-layer perceptron on flattened images."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of the given widths, input to output, with ReLU between them."""
    if len(widths) < 2:
        raise ValueError(f"widths must name at least input and output, got {widths}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        if number > 1:
            layers[f"relu{number - 1}"] = nn.ReLU()
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
    return nn.Sequential(layers)
