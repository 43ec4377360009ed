"""Which layers are preconditioned, and how parameters are sorted into groups."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fop.layers import Layer, layer_for

logger = logging.getLogger("fop")

# What a parameter group may set for itself.
GROUP_OPTIONS = frozenset({"lr", "momentum", "weight_decay", "nesterov", "damping"})

Skip = str | type[nn.Module] | nn.Module


@dataclass(frozen=True)
class Use:
    """A module that uses a weight, and whether its inputs and outputs enter the curvature."""

    module: nn.Module
    layer: Layer
    curvature: bool = True


@dataclass(frozen=True)
class FoundLayer:
    """A weight to precondition, its bias, and the modules that use it: several if it is tied."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    uses: tuple[Use, ...]

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def find_layers(model: nn.Module, skip: Skip | Iterable[Skip], *, norms: bool) -> list[FoundLayer]:
    """The layers to precondition, in the order of `model.named_modules()`."""
    rules = _skip_rules(model, skip)
    skipped = {m for name, m in model.named_modules() if any(_skips(r, name, m) for r in rules)}
    inside_attention = _children_of_attention(model)
    owners = _owners(model)
    found: dict[nn.Parameter | None, FoundLayer] = {}
    for name, module in model.named_modules():
        layer, weight = layer_for(module, norms=norms), module._parameters.get("weight")
        if layer is None and any(p is not None for p in module._parameters.values()):
            kind = type(module).__name__
            logger.info("%r is trained by the fallback rule: no curvature for %s", name, kind)
        if layer is None or module in skipped or weight in found:
            continue
        sharing = owners.get(weight, []) if weight is not None else []
        uses = _uses(sharing, norms=norms)
        if weight is None:
            reason: str | None = "its weight is computed by a parametrization"
        elif module in inside_attention:
            reason = "nn.MultiheadAttention uses it without calling it"
        else:
            reason = layer.refusal(module)
            if reason is None and (uses is None or not skipped.isdisjoint(sharing)):
                reason = "it shares parameters with a module that is not preconditioned"
        if reason is not None or weight is None or uses is None:
            logger.info("layer %r is trained by the fallback rule: %s", name, reason)
            continue
        found[weight] = FoundLayer(name, weight, _common_bias(uses, owners), uses)
    return list(found.values())


def _uses(modules: list[nn.Module], *, norms: bool) -> tuple[Use, ...] | None:
    """How the modules that share a weight use it; None where they can't be combined.

    Modules of one type are like further calls of one module. An embedding tied to an output layer
    has the roles of inputs and outputs exchanged: its gradient counts, and the curvature is that of
    the output layer.
    """
    pairs: list[tuple[Layer, nn.Module]] = []
    for module in modules:
        layer = layer_for(module, norms=norms)
        if layer is None or layer.refusal(module) is not None:
            return None
        pairs.append((layer, module))
    pairs.sort(key=lambda pair: pair[0].indexed)  # stable: layers with real inputs lead
    leading = type(pairs[0][0]) if pairs else None
    if any(type(layer) is not leading and not layer.indexed for layer, _ in pairs):
        return None
    return tuple(Use(module, layer, curvature=type(layer) is leading) for layer, module in pairs)


def _common_bias(
    uses: Sequence[Use], owners: Mapping[nn.Parameter, list[nn.Module]]
) -> nn.Parameter | None:
    """The bias that all modules of a weight share and no other has; others follow the fallback."""
    biases = {use.module._parameters.get("bias") for use in uses}
    bias = biases.pop() if len(biases) == 1 else None
    return bias if bias is not None and len(owners[bias]) == len(uses) else None


def check_model(model: object) -> nn.Module:
    """The module itself, without a compiled wrapper; raises where there is nothing to optimize."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, "
            "not its parameters, because the optimizer watches the layers; group parameters with "
            "param_groups=[...]"
        )
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} of a lazy module has no shape yet: run one forward pass "
                "before building the optimizer"
            )
    if next(inner.parameters(), None) is None:
        raise ValueError(
            f"model {type(inner).__name__} has no parameters: there is nothing to optimize"
        )
    return inner


def build_groups(
    model: nn.Module,
    preconditioned: set[nn.Parameter],
    param_groups: Sequence[Mapping[str, Any]] | None,
    fallback: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Parameter groups for torch.optim.Optimizer: the user's, the rest, each split by rule.

    Preconditioned parameters and those of the fallback never share a group, so that the fallback
    can have a learning rate of its own and schedulers see both.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    requested = list(param_groups or [])
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
        options = (
            {}
            if index is None
            else {k: v for k, v in requested[index].items() if k in GROUP_OPTIONS}
        )
        members = [(names[p], p) for p in names if owner.get(p) == index]
        ours = [pair for pair in members if pair[1] in preconditioned]
        others = [pair for pair in members if pair[1] not in preconditioned]
        if ours:
            built.append({"params": ours, "rule": "curvature", **options})
        if others:
            built.append({"params": others, **fallback, **options})
    return built


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
        given: list[nn.Parameter] = (
            [params] if isinstance(params, nn.Parameter) else [_untupled(p) for p in params]
        )
        for parameter in given:
            if parameter not in names:
                raise ValueError(
                    f"{place} holds a tensor of shape {_shape(parameter)} that is no parameter of "
                    "the model"
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


def _untupled(item: Any) -> Any:
    """A parameter, also out of the (name, parameter) pairs that torch.optim takes."""
    return item[1] if isinstance(item, tuple) else item


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"<{type(value).__name__}>"


def _skip_rules(model: nn.Module, skip: Skip | Iterable[Skip]) -> list[Skip]:
    alone = isinstance(skip, (str, type, nn.Module))
    rules: list[Any] = [skip] if alone else list(skip)  # type: ignore[arg-type]
    for rule in rules:
        if not isinstance(rule, (str, nn.Module)) and not (
            isinstance(rule, type) and issubclass(rule, nn.Module)
        ):
            raise TypeError(
                f"skip takes layer name patterns, module types and modules, got {rule!r}"
            )
        if not isinstance(rule, type) and not any(
            _skips(rule, n, m) for n, m in model.named_modules()
        ):
            what = repr(rule) if isinstance(rule, str) else f"the given {type(rule).__name__}"
            raise ValueError(
                f"skip: no layer of the model matches {what}; model.named_modules() has the names"
            )
    return rules


def _skips(rule: Skip, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    return isinstance(module, rule) if isinstance(rule, type) else module is rule


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that hold each parameter."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
    return owners


def _children_of_attention(model: nn.Module) -> set[nn.Module]:
    return {
        child
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
