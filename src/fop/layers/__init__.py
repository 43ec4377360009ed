"""Layer types the optimizer preconditions.

A new one is a `Layer` subclass and one line in `LAYER_TYPES`, or `NORM_TYPES` for a normalisation.
nn.MultiheadAttention is four layers in one module, reached in its own way (capture/attention.py).
"""

from __future__ import annotations

from torch import nn

from fop.layers.attention import (
    IN_ROLES,
    ROLES,
    ProjectionLayer,
    Role,
    attention_parameters,
    has_own_forward,
)
from fop.layers.base import Layer
from fop.layers.conv import ConvLayer, ConvTransposeLayer
from fop.layers.embedding import EmbeddingLayer
from fop.layers.folded import folded
from fop.layers.linear import LinearLayer
from fop.layers.norm import BatchNormLayer, GroupNormLayer, LayerNormLayer, NormLayer

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

NORM_TYPES: dict[type[nn.Module], type[NormLayer]] = {
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: LayerNormLayer,
    nn.GroupNorm: GroupNormLayer,
    nn.BatchNorm1d: BatchNormLayer,
    nn.BatchNorm2d: BatchNormLayer,
    nn.BatchNorm3d: BatchNormLayer,
}


def layer_for(module: nn.Module, *, norms: bool = False) -> Layer | None:
    """The adapter of a module, or None where its type is not supported.

    A subclass counts only if it inherits its base's forward. What else may change what a module
    computes is found by its calls (`fop/capture/verify.py`).
    """
    known = supported_type(type(module))
    if known is None or type(module).forward is not known.forward:
        return None
    if known in LAYER_TYPES:
        return LAYER_TYPES[known](module)
    if not norms or module._parameters.get("weight") is None:  # the latter has no parameters
        return None
    return NORM_TYPES[known](module)


def supported_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The nearest base of a module's class, or itself, that there is an adapter for."""
    return next((base for base in kind.__mro__ if base in LAYER_TYPES or base in NORM_TYPES), None)


__all__ = [
    "IN_ROLES",
    "LAYER_TYPES",
    "NORM_TYPES",
    "ROLES",
    "Layer",
    "NormLayer",
    "ProjectionLayer",
    "Role",
    "attention_parameters",
    "folded",
    "has_own_forward",
    "layer_for",
    "supported_type",
]
