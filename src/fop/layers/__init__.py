"""The layers that the optimizer preconditions, each through an adapter to one canonical form.

nn.MultiheadAttention is four layers in one module; `fop/capture/attention.py` records it.
"""

from __future__ import annotations

from fop.layers.attention import (
    IN_ROLES,
    ROLES,
    ProjectionAdapter,
    Role,
    attention_parameters,
    has_own_forward,
)
from fop.layers.base import Gram, LayerAdapter
from fop.layers.folded import folded
from fop.layers.norm import NormAdapter
from fop.layers.registry import ADAPTERS, adapter_for, register_layer, supported_type

__all__ = [
    "ADAPTERS",
    "IN_ROLES",
    "ROLES",
    "Gram",
    "LayerAdapter",
    "NormAdapter",
    "ProjectionAdapter",
    "Role",
    "adapter_for",
    "attention_parameters",
    "folded",
    "has_own_forward",
    "register_layer",
    "supported_type",
]
