"""Which layers of a model are preconditioned, and why others are not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fop._torch import compiled_from
from fop.layers import (
    ROLES,
    LayerAdapter,
    ProjectionAdapter,
    Role,
    adapter_for,
    attention_parameters,
    has_own_forward,
)
from fop.settings import Skip
from fop.slices import ParameterSlice, check_shards

logger = logging.getLogger("fop")


@dataclass(frozen=True)
class Use:
    """A module that uses a weight, and whether its inputs and outputs enter the curvature."""

    module: nn.Module
    adapter: LayerAdapter
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

    def slices(self) -> tuple[ParameterSlice, ParameterSlice | None]:
        """The layer's rows of the weight and of the bias."""
        adapter, bias = self.uses[0].adapter, self.bias
        weight = ParameterSlice(self.weight, adapter.weight_rows)
        return weight, None if bias is None else ParameterSlice(bias, adapter.bias_rows)

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def find_layers(model: nn.Module, skip: Skip | Iterable[Skip], *, norms: bool) -> list[FoundLayer]:
    """The layers to precondition, in the order of `model.named_modules()`.

    Modules with parameters that are left out are logged, one message per reason.
    """
    search = _Search(model, skip, norms=norms)
    found = [layer for name, module in model.named_modules() for layer in search.of(name, module)]
    search.log()
    return found


class _UnsupportedError(Exception):
    """Why a layer uses the fallback optimizer."""


class _Search:
    """One walk through the modules of a model."""

    def __init__(self, model: nn.Module, skip: Skip | Iterable[Skip], *, norms: bool) -> None:
        self._norms = norms
        self._owners, self._sequence_first = _owners(model), _sequence_first(model)
        self._attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        self._inside_attention = {child for a in self._attentions for child in a.children()}
        rules = _skip_rules(model, skip)
        skipped = {m for name, m in model.named_modules() if any(_skips(r, name, m) for r in rules)}
        entire = [attention for attention in self._attentions if attention in skipped]
        self._skipped = skipped | {child for attention in entire for child in attention.children()}
        self._taken: set[nn.Parameter | None] = set()
        self._left_out: dict[tuple[int, str], list[str]] = {}

    def of(self, name: str, module: nn.Module) -> list[FoundLayer]:
        """The layers of one module whose weights are not those of layers before."""
        if isinstance(module, nn.MultiheadAttention):
            layers = list(self._projections(name, module))
        elif module in self._inside_attention:
            return []
        else:
            layers = list(self._layer(name, module))
        new = [layer for layer in layers if layer.weight not in self._taken]
        self._taken |= {layer.weight for layer in new}
        return new

    def log(self) -> None:
        for (level, reason), names in self._left_out.items():
            logger.log(level, "uses the fallback optimizer (%s): %s", reason, ", ".join(names))

    def _leave_out(self, name: str, reason: object, level: int = logging.INFO) -> None:
        self._left_out.setdefault((level, str(reason)), []).append(repr(name))

    # ---- modules with an adapter

    def _layer(self, name: str, module: nn.Module) -> Iterator[FoundLayer]:
        adapter = adapter_for(module, norms=self._norms)
        if adapter is None:
            self._without_adapter(name, module)
            return
        weight = module._parameters.get("weight")
        if module in self._skipped or weight in self._taken:
            return
        try:
            weight = _checked(weight)
            if reason := adapter.unsupported_reason(module):
                raise _UnsupportedError(reason)
            uses = self._uses(weight)
        except _UnsupportedError as reason:
            self._leave_out(name, reason)
        else:
            biases = [use.module._parameters.get("bias") for use in uses]
            yield FoundLayer(name, weight, self._common(biases), uses, name)

    def _without_adapter(self, name: str, module: nn.Module) -> None:
        sizes = [p.dim() for p in module._parameters.values() if p is not None]
        if sizes:
            # Seen by default where a user would expect curvature: matrices of torch's layers.
            torchs_own = type(module).__module__.startswith("torch.nn.modules.")
            surprising = torchs_own and max(sizes) > 1 and module not in self._skipped
            level = logging.WARNING if surprising else logging.INFO
            self._leave_out(name, f"no curvature for {type(module).__name__}", level)

    def _uses(self, weight: nn.Parameter) -> tuple[Use, ...]:
        """How the modules that share a weight use it; raises where they can't be combined.

        Modules of one type are like further calls of one module. An embedding tied to an output
        layer has the roles of inputs and outputs exchanged: its gradient counts, and the curvature
        is that of the output layer.
        """
        modules = self._owners[weight]
        if not self._inside_attention.isdisjoint(modules):
            raise _UnsupportedError("it shares parameters with nn.MultiheadAttention")
        apart = _UnsupportedError("it shares parameters with a module that is not preconditioned")
        pairs: list[tuple[LayerAdapter, nn.Module]] = []
        for module in modules:
            adapter = adapter_for(module, norms=self._norms)
            if adapter is None or adapter.unsupported_reason(module) or module in self._skipped:
                raise apart
            pairs.append((adapter, module))
        pairs.sort(key=lambda pair: pair[0].one_hot)  # stable: layers with real inputs lead
        leading = type(pairs[0][0])
        if any(type(adapter) is not leading and not adapter.one_hot for adapter, _ in pairs):
            raise apart
        return tuple(
            Use(module, adapter, type(adapter) is leading, module in self._sequence_first)
            for adapter, module in pairs
        )

    def _common(self, biases: Sequence[nn.Parameter | None]) -> nn.Parameter | None:
        """The bias that all uses of a weight share and no other module has."""
        bias = biases[0]
        if bias is None or any(other is not bias for other in biases):
            return None
        return bias if len(self._owners[bias]) == len(biases) else None

    # ---- nn.MultiheadAttention

    def _projections(self, name: str, module: nn.MultiheadAttention) -> Iterator[FoundLayer]:
        """Those that can be preconditioned.

        A parameter may be shared with other attentions, if each uses it in the same place.
        """
        for role in ROLES:
            if _holder(module, role) in self._skipped:
                continue
            place = f"{name}.{role}" if name else role
            try:
                weight, users = self._users(module, role)
            except _UnsupportedError as reason:
                self._leave_out(place, reason)
                continue
            bias = self._common([attention_parameters(user, role)[1] for user in users])
            uses = tuple(Use(user, ProjectionAdapter(user, role)) for user in users)
            yield FoundLayer(place, weight, bias, uses, place if role == "out_proj" else name)

    def _users(
        self, module: nn.MultiheadAttention, role: Role
    ) -> tuple[nn.Parameter, list[nn.MultiheadAttention]]:
        """The weight of a projection, and the attentions that use it."""
        if has_own_forward(module):
            raise _UnsupportedError(f"{type(module).__name__} has a forward of its own")
        weight = _checked(attention_parameters(module, role)[0])
        users = [a for a in self._attentions if attention_parameters(a, role)[0] is weight]
        holders = [_holder(user, role) for user in users if not has_own_forward(user)]
        if holders != self._owners[weight] or not self._skipped.isdisjoint(holders):
            raise _UnsupportedError(
                "it shares parameters with a module of another kind, or one that is skipped"
            )
        return weight, users


def _holder(module: nn.MultiheadAttention, role: Role) -> nn.Module:
    """The module that the weight of a projection belongs to."""
    return module.out_proj if role == "out_proj" else module


def _checked(weight: nn.Parameter | None) -> nn.Parameter:
    if weight is None:
        raise _UnsupportedError("its weight is computed by a parametrization")
    if weight.numel() == 0:
        raise _UnsupportedError("its weight is empty")
    return weight


def _skip_rules(model: nn.Module, skip: Skip | Iterable[Skip]) -> list[Skip]:
    alone = isinstance(skip, (str, type, nn.Module))
    rules: list[Any] = [skip] if alone else list(skip)  # type: ignore[arg-type]
    for rule in rules:
        if isinstance(rule, type) and issubclass(rule, nn.Module):
            continue
        if not isinstance(rule, (str, nn.Module)):
            what = "layer name patterns, module types and modules"
            raise TypeError(f"skip takes {what}, got {rule!r}")
        if not any(_skips(rule, name, module) for name, module in model.named_modules()):
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
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layers: set[nn.Module] = {
        m for m in model.modules() if isinstance(m, kinds) and not m.self_attn.batch_first
    }
    found = {child for layer in layers for child in layer.children()}
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
            stack = set(module.layers)
            if module.norm is not None and stack and stack <= layers:
                found.add(module.norm)
    return found


def describe_modules(model: nn.Module, parameter_names: Iterable[str]) -> str:
    """The modules that hold these parameters, by type: "LSTM rnn; LayerNorm norms.0 and 3 more"."""
    by_type: dict[str, list[str]] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name in parameter_names):
        names = by_type.setdefault(type(model.get_submodule(name)).__name__, [])
        names += [name] if name else []
    described = []
    for kind, names in by_type.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        described.append(f"{kind} {', '.join(names[:2])}{more}".rstrip())
    return "; ".join(described)


def check_model(model: object) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module without wrappers, and its DDP; raises where there is nothing to optimize."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself, "
            "not its parameters, because the optimizer has hooks on the layers; group parameters "
            "with param_groups=[...]"
        )
    inner, wrapper = _unwrapped(model)
    check_shards(inner)
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} of a lazy module has no shape yet: run one forward pass "
                "before building the optimizer"
            )
    if next(inner.parameters(), None) is None:
        what = f"model {type(inner).__name__} has no parameters"
        raise ValueError(f"{what}: there is nothing to optimize")
    return inner, wrapper


def _unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module inside torch.compile and DistributedDataParallel, and the latter if there is."""
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    inner = compiled_from(model) if wrapper is None else wrapper.module
    if inner is None:
        return model, None
    model, within = _unwrapped(inner)
    return model, wrapper or within
