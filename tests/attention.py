"""Multi-head attention by hand, out of four nn.Linear modules: the reference for nn's own."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """The same function of the same weights as an nn.MultiheadAttention, and called like it."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, self.batch_first = source.num_heads, source.batch_first
        self.zeros = source.add_zero_attn
        width, bias = source.embed_dim, source.in_proj_bias is not None
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(source.kdim, width, bias=bias)
        self.value = nn.Linear(source.vdim, width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.bias_k, self.bias_v = copy.deepcopy(source.bias_k), copy.deepcopy(source.bias_v)
        self.to(source.out_proj.weight.dtype)
        with torch.no_grad():
            for name, tensor in unpacked(source).items():
                self.get_parameter(name).copy_(tensor)
        for name, parameter in unpacked(source, keep=True).items():
            self.get_parameter(name).requires_grad_(parameter.requires_grad)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        n, width = len(query), query.shape[-1]
        q, k, v = self.query(query), self.key(key), self.value(value)
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(n, 1, width)], 1)
            v = torch.cat([v, self.bias_v.expand(n, 1, width)], 1)
            added += 1
        if self.zeros:
            k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
            added += 1
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [n, heads, L, S]
        for mask, shape in ((attn_mask, (1, 1)), (key_padding_mask, (n, 1, 1))):
            if mask is not None:
                allowed = mask if mask.is_floating_point() else _minus_infinity(mask, scores)
                padded = nn.functional.pad(allowed, (0, added))
                scores = scores + padded.reshape(*shape, *padded.shape[-(4 - len(shape)) :])
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        output = self.out_proj(mixed)
        return (output if self.batch_first else output.transpose(0, 1)), None


def _minus_infinity(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def unpacked(module: nn.MultiheadAttention, *, keep: bool = False) -> dict[str, Tensor]:
    """The tensors of an nn.MultiheadAttention by the names they have in `PlainAttention`.

    With `keep`, the parameters that hold them, whole.
    """
    roles = ("query", "key", "value")

    def thirds(packed: Tensor) -> list[Tensor]:
        return [packed] * 3 if keep else list(packed.detach().chunk(3))

    weights: list[Tensor] = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if module.in_proj_weight is not None:
        weights = thirds(module.in_proj_weight)
    found = {f"{role}.weight": tensor for role, tensor in zip(roles, weights, strict=True)}
    found["out_proj.weight"] = module.out_proj.weight
    if module.in_proj_bias is not None:
        biases = thirds(module.in_proj_bias)
        found |= {f"{role}.bias": tensor for role, tensor in zip(roles, biases, strict=True)}
        found["out_proj.bias"] = module.out_proj.bias
    if module.bias_k is not None and module.bias_v is not None:
        found |= {"bias_k": module.bias_k, "bias_v": module.bias_v}
    return found


def with_plain_attention(model: nn.Module) -> nn.Module:
    """A copy of the model with every nn.MultiheadAttention written out."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(parent), attribute, PlainAttention(module))
    return twin


def aligned(model: nn.Module, plain: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """All parameters of a model, and those of its written-out twin, in the same order."""
    left: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.MultiheadAttention):
            left |= {prefix + key: tensor for key, tensor in unpacked(module).items()}
        elif not name.endswith("out_proj"):
            own = module.named_parameters(prefix=name, recurse=False)
            left |= dict(own)
    right = dict(plain.named_parameters())
    assert set(left) == set(right)
    return [left[key].detach() for key in right], [p.detach() for p in right.values()]
