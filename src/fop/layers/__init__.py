"""Layer types the optimizer preconditions.

A new one is a `Layer` subclass and one line in `LAYER_TYPES`, or `NORM_TYPES` for a normalisation.
nn.MultiheadAttention is four layers in one module, and has its own way in (`fop/attention.py`).
"""

from __future__ import annotations

from torch import nn

from fop.layers.attention import IN_ROLES, ROLES, ProjectionLayer, Role, attention_parameters
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

    A subclass counts only if it computes the same thing as its base, that is, inherits its forward.
    """
    types: dict[type[nn.Module], type[Layer]] = {**LAYER_TYPES, **(NORM_TYPES if norms else {})}
    if norms and type(module) in NORM_TYPES and module._parameters.get("weight") is None:
        return None  # a normalisation without parameters
    for module_type, layer_type in types.items():
        if isinstance(module, module_type) and type(module).forward is module_type.forward:
            return layer_type(module)
    return None


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
    "layer_for",
]
