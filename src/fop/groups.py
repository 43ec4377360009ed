"""How the parameters of a model are sorted into the groups of torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from fop.settings import GROUP_OPTIONS, Settings


def build_groups(
    model: nn.Module, preconditioned: set[nn.Parameter], settings: Settings
) -> list[dict[str, Any]]:
    """Parameter groups for torch.optim.Optimizer: the user's, the rest, each split by rule.

    All of them hold the options of the fallback, since a layer may come to need it later. Its
    learning rate keeps its ratio to `lr` in a group with an lr of its own.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    requested = list(settings.param_groups or [])
    for index, group in enumerate(requested):
        for parameter in _members(group, index, names):
            if parameter in owner:
                raise ValueError(
                    f"parameter {names[parameter]!r} is in param_groups[{owner[parameter]}] and in "
                    f"param_groups[{index}]: a parameter may be in one group only"
                )
            owner[parameter] = index
    built: list[dict[str, Any]] = []
    for index in [*range(len(requested)), None]:
        asked = {} if index is None else requested[index]
        own = {k: v for k, v in asked.items() if k in GROUP_OPTIONS}
        options = {**settings.fallback_of_groups, **own}
        if "fallback_lr" not in asked and options["fallback_lr"] is not None:
            options["fallback_lr"] *= _ratio(asked.get("lr", settings.lr), settings.lr)
        members = [(name, p) for p, name in names.items() if owner.get(p) == index]
        for rule, wanted in ({"rule": "curvature"}, True), ({}, False):
            params = [pair for pair in members if (pair[1] in preconditioned) is wanted]
            if params:
                built.append({"params": params, **options, **rule})
    return built


def _ratio(own_lr: Any, lr: Any) -> float:
    """Of a group's lr to that of all; what is no lr raises later, with the other options."""
    sensible = isinstance(own_lr, (int, float, Tensor)) and lr > 0
    return float(own_lr / lr) if sensible else 1.0


def _members(
    group: Mapping[str, Any], index: int, names: Mapping[nn.Parameter, str]
) -> list[nn.Parameter]:
    place = f"param_groups[{index}]"
    if not isinstance(group, Mapping):
        raise TypeError(
            f"{place} must be a dict with 'names' or 'params', got {type(group).__name__}"
        )
    unknown = set(group) - GROUP_OPTIONS - {"names", "params"}
    if unknown or ("names" in group) == ("params" in group):
        raise ValueError(
            f"{place} must have either 'names' (glob patterns of parameter or layer names) or "
            f"'params' (tensors), and of options only {', '.join(sorted(GROUP_OPTIONS))}; got "
            f"{', '.join(map(repr, group))}"
        )
    if "params" in group:
        params = group["params"]
        # torch.optim takes (name, parameter) pairs too.
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        given = [item[1] if isinstance(item, tuple) else item for item in given]
        for item in given:
            if item not in names:
                is_tensor = isinstance(item, Tensor)
                found = tuple(item.shape) if is_tensor else f"<{type(item).__name__}>"
                raise ValueError(
                    f"{place} holds a tensor of shape {found} that is no parameter of the model"
                )
        return given
    patterns = [group["names"]] if isinstance(group["names"], str) else list(group["names"])
    members: dict[nn.Parameter, None] = {}  # ordered, and compares by identity
    for pattern in patterns:
        matched = [p for p, name in names.items() if _matches(pattern, name)]
        if not matched:
            raise ValueError(
                f"{place}: no parameter or layer matches {pattern!r}; names look like "
                f"{next(iter(names.values()))!r}"
            )
        members.update(dict.fromkeys(matched))
    return list(members)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
