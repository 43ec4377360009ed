"""Which layers are preconditioned, and how parameters are sorted into groups."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fop._torch import compiled_from
from fop.layers import (
    ROLES,
    Layer,
    ProjectionLayer,
    Role,
    attention_parameters,
    has_own_forward,
    layer_for,
)
from fop.settings import GROUP_OPTIONS, Settings, Skip
from fop.shards import check_shards

logger = logging.getLogger("fop")


@dataclass(frozen=True)
class Use:
    """A module that uses a weight, and whether its inputs and outputs enter the curvature."""

    module: nn.Module
    layer: Layer
    curvature: bool = True
    sequence_first: bool = False  # in a call with three dimensions the second counts examples


@dataclass(frozen=True)
class FoundLayer:
    """A weight to precondition, its bias, and the modules that use it: several if it is tied.

    The parameters may hold more than this layer's part, as the packed ones of attention do.
    """

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    uses: tuple[Use, ...]
    module_name: str  # what `skip` takes; attention has several layers in one module

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def find_layers(model: nn.Module, skip: Skip | Iterable[Skip], *, norms: bool) -> list[FoundLayer]:
    """The layers to precondition, in the order of `model.named_modules()`."""
    rules = _skip_rules(model, skip)
    skipped = {m for name, m in model.named_modules() if any(_skips(r, name, m) for r in rules)}
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    inside_attention = {child for attention in attentions for child in attention.children()}
    skipped |= {
        child for attention in attentions if attention in skipped for child in attention.children()
    }
    owners, sequence_first = _owners(model), _sequence_first(model)
    found: list[FoundLayer] = []
    taken: set[nn.Parameter | None] = set()
    left_out = _LeftOut()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            layers = _attention_layers(name, module, skipped, owners, attentions, left_out)
            found += [layer for layer in layers if layer.weight not in taken]
            taken |= {layer.weight for layer in layers}
            continue
        if module in inside_attention:
            continue
        layer, weight = layer_for(module, norms=norms), module._parameters.get("weight")
        if layer is None and any(p is not None for p in module._parameters.values()):
            # Seen by default where a user would expect curvature: matrices of torch's layers.
            torchs_own = type(module).__module__.startswith("torch.nn.modules.")
            matrix = any(p is not None and p.dim() > 1 for p in module._parameters.values())
            surprising = torchs_own and matrix and module not in skipped
            kind = type(module).__name__
            left_out.add(name, f"no curvature for {kind}", surprising=surprising)
        if layer is None or module in skipped or weight in taken:
            continue
        sharing = owners.get(weight, []) if weight is not None else []
        uses = _uses(sharing, sequence_first, norms=norms)
        if weight is None:
            reason: str | None = "its weight is computed by a parametrization"
        elif weight.numel() == 0:
            reason = "its weight is empty"
        else:
            reason = layer.refusal(module)
            if reason is None and not inside_attention.isdisjoint(sharing):
                reason = "it shares parameters with nn.MultiheadAttention"
            if reason is None and (uses is None or not skipped.isdisjoint(sharing)):
                reason = "it shares parameters with a module that is not preconditioned"
        if reason is not None or weight is None or uses is None:
            left_out.add(name, str(reason))
            continue
        taken.add(weight)
        found.append(FoundLayer(name, weight, _common_bias(uses, owners), uses, name))
    left_out.log()
    return found


class _LeftOut:
    """Modules without curvature, for one message per reason."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], list[str]] = {}

    def add(self, name: str, reason: str, *, surprising: bool = False) -> None:
        level = logging.WARNING if surprising else logging.INFO
        self._names.setdefault((level, reason), []).append(repr(name))

    def log(self) -> None:
        for (level, reason), names in self._names.items():
            logger.log(level, "uses the fallback optimizer (%s): %s", reason, ", ".join(names))


def _attention_layers(
    name: str,
    module: nn.MultiheadAttention,
    skipped: set[nn.Module],
    owners: Mapping[nn.Parameter, list[nn.Module]],
    attentions: Sequence[nn.MultiheadAttention],
    left_out: _LeftOut,
) -> list[FoundLayer]:
    """The projections of one attention that can be preconditioned.

    A parameter may be shared with other attentions, if each uses it in the same place.
    """
    found = []
    for role in ROLES:
        holder: nn.Module = module.out_proj if role == "out_proj" else module
        if holder in skipped:
            continue
        weight, bias = attention_parameters(module, role)
        users = [other for other in attentions if attention_parameters(other, role)[0] is weight]
        reason = None
        if has_own_forward(module):
            reason = f"{type(module).__name__} has a forward of its own"
        elif weight is None:
            reason = "its weight is computed by a parametrization"
        elif weight.numel() == 0:
            reason = "its weight is empty"
        elif not _only_these(owners[weight], users, role, skipped):
            reason = "it shares parameters with a module of another kind, or one that is skipped"
        place = f"{name}.{role}" if name else role
        if reason is not None or weight is None:
            left_out.add(place, str(reason))
            continue
        alike = all(attention_parameters(user, role)[1] is bias for user in users)
        if bias is None or not alike or len(owners[bias]) != len(users):
            bias = None  # a bias that others share differently follows the fallback
        uses = tuple(Use(user, ProjectionLayer(user, role)) for user in users)
        skippable = name if role != "out_proj" else place
        found.append(FoundLayer(place, weight, bias, uses, skippable))
    return found


def _only_these(
    holders: Sequence[nn.Module],
    users: Sequence[nn.MultiheadAttention],
    role: Role,
    skipped: set[nn.Module],
) -> bool:
    """Whether a weight is held by these attentions alone, and all of them are preconditioned."""
    expected: list[nn.Module] = [u.out_proj if role == "out_proj" else u for u in users]
    return (
        not any(has_own_forward(user) for user in users)
        and skipped.isdisjoint(expected)
        and len(holders) == len(expected)
        and all(holder in expected for holder in holders)
    )


def _uses(
    modules: list[nn.Module], sequence_first: set[nn.Module], *, norms: bool
) -> tuple[Use, ...] | None:
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
    return tuple(
        Use(module, layer, type(layer) is leading, module in sequence_first)
        for layer, module in pairs
    )


def _common_bias(
    uses: Sequence[Use], owners: Mapping[nn.Parameter, list[nn.Module]]
) -> nn.Parameter | None:
    """The bias that all modules of a weight share and no other has; others follow the fallback."""
    biases = {use.module._parameters.get("bias") for use in uses}
    bias = biases.pop() if len(biases) == 1 else None
    return bias if bias is not None and len(owners[bias]) == len(uses) else None


def describe_modules(model: nn.Module, parameter_names: Iterable[str]) -> str:
    """The modules that hold these parameters, by type: "LSTM rnn; LayerNorm norms.0 and 3 more"."""
    by_type: dict[str, dict[str, None]] = {}
    for parameter_name in parameter_names:
        name = parameter_name.rpartition(".")[0]
        kind = type(model.get_submodule(name)).__name__
        by_type.setdefault(kind, {})[name] = None
    described = []
    for kind, found in by_type.items():
        names = [name for name in found if name]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        described.append(f"{kind} {', '.join(names[:2])}{more}".rstrip())
    return "; ".join(described)


def check_model(model: object) -> nn.Module:
    """The module itself, without wrappers; raises where there is nothing to optimize."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, "
            "not its parameters, because the optimizer watches the layers; group parameters with "
            "param_groups=[...]"
        )
    inner, _ = unwrapped(model)
    check_shards(inner)
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


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module inside torch.compile and DistributedDataParallel, and the latter if there is."""
    wrapper = None
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper = model
            inner: Any = model.module
        else:
            inner = compiled_from(model)
        if not isinstance(inner, nn.Module):
            return model, wrapper
        model = inner


def build_groups(
    model: nn.Module,
    preconditioned: set[nn.Parameter],
    settings: Settings,
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
        members = [(names[p], p) for p in names if owner.get(p) == index]
        ours = [pair for pair in members if pair[1] in preconditioned]
        others = [pair for pair in members if pair[1] not in preconditioned]
        if ours:
            built.append({"params": ours, **options, "rule": "curvature"})
        if others:
            built.append({"params": others, **options})
    return built


def _ratio(own_lr: Any, lr: Any) -> float:
    """Of a group's lr to that of all; what is no lr is refused later, with the other options."""
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


def _sequence_first(model: nn.Module) -> set[nn.Module]:
    """The layers that torch's transformers call with [positions, examples, features]."""
    layers: set[nn.Module] = set()
    stacks: list[nn.TransformerEncoder | nn.TransformerDecoder] = []
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            if not module.self_attn.batch_first:
                layers.add(module)
        elif isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
            stacks.append(module)
    norms = {
        stack.norm
        for stack in stacks
        if stack.norm is not None and layers.issuperset(stack.layers) and len(stack.layers) > 0
    }
    return norms | {child for layer in layers for child in layer.children()}
