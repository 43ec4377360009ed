"""nn.MultiheadAttention: four linear layers, for queries, keys, values and the output.

Each is a layer of its own, so the curvature and the step are those of four nn.Linear modules,
whether torch keeps the weights of the first three packed in one parameter, rows of `in_proj_weight`
[3 E, E], or, with other sizes of keys and values, apart. Their biases are packed in any case. So
a layer's weight and bias may be rows of a larger parameter.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fop.layers.linear import LinearAdapter

Role = Literal["query", "key", "value", "out_proj"]
IN_ROLES: tuple[Role, ...] = ("query", "key", "value")
ROLES: tuple[Role, ...] = (*IN_ROLES, "out_proj")


class ProjectionAdapter(LinearAdapter):
    """One projection. Dimension 0 of what it is given counts examples, whatever batch_first is."""

    def __init__(self, module: nn.Module, role: Role) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        super().__init__(module)
        self.role = role
        if role != "out_proj":
            index, width = IN_ROLES.index(role), module.embed_dim
            self.bias_rows = slice(index * width, (index + 1) * width)
            if module._qkv_same_embed_dim:
                self.weight_rows, self.state_prefix = self.bias_rows, f"{role}."


def has_own_forward(module: nn.MultiheadAttention) -> bool:
    """Whether a call runs other code than torch's, by a subclass or on this module alone."""
    return type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module)


def attention_parameters(
    module: nn.MultiheadAttention, role: Role
) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """The parameters that hold a projection's weight and bias; no weight if it is computed."""
    if role == "out_proj":
        own = module.out_proj._parameters
        return own.get("weight"), own.get("bias")
    name = "in_proj_weight" if module._qkv_same_embed_dim else f"{role[0]}_proj_weight"
    return module._parameters.get(name), module._parameters.get("in_proj_bias")
