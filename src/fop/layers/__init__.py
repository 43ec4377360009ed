"""Layer types the optimizer preconditions.

A new one is a `Layer` subclass and one line in `LAYER_TYPES`.
"""

from __future__ import annotations

from torch import nn

from fop.layers.base import Layer
from fop.layers.conv import ConvLayer, ConvTransposeLayer
from fop.layers.embedding import EmbeddingLayer
from fop.layers.linear import LinearLayer

LAYER_TYPES: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
    nn.ConvTranspose1d: ConvTransposeLayer,
    nn.ConvTranspose2d: ConvTransposeLayer,
    nn.ConvTranspose3d: ConvTransposeLayer,
    nn.Embedding: EmbeddingLayer,
}


def layer_for(module: nn.Module) -> Layer | None:
    """The adapter of a module, or None where its type is not supported.

    A subclass counts only if it computes the same thing as its base, that is, inherits its forward.
    """
    for module_type, layer_type in LAYER_TYPES.items():
        if isinstance(module, module_type) and type(module).forward is module_type.forward:
            return layer_type(module)
    return None


__all__ = ["LAYER_TYPES", "Layer", "layer_for"]
