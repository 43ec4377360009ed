"""The state of an optimizer: read, and brought together from several ranks.

All of a state is checked and copied before anything of an optimizer changes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fop.capture import factor_dtype
from fop.distributed import Ranks
from fop.entries import Entry
from fop.layer import Layer
from fop.settings import GROUP_CHECKS, check_group

# Written into every parameter group, which is what trainers that rebuild a state_dict keep. Raised
# when states of older versions can no longer be read as they are; those without a number are of 1.
STATE_FORMAT = 2

# What the update rules keep.
RULE_ENTRIES: Mapping[str, Entry] = {
    "momentum_buffer": Entry(lambda parameter: [parameter]),
    "update_average": Entry(lambda parameter: [parameter]),
    "exp_avg": Entry(lambda parameter: [parameter]),
    "exp_avg_sq": Entry(lambda parameter: [parameter], low=0.0),
    "step": Entry(lambda parameter: [()], low=0.0, dtype=torch.float32),
}
# Those shaped like the parameter.
RULE_KEYS = frozenset(RULE_ENTRIES) - {"step"}
# AdamW's, which are of no use apart.
TOGETHER = frozenset({"exp_avg", "exp_avg_sq", "step"})
# Of the fallback optimizer. A state that was saved under another one keeps to its own no longer.
FALLBACK_OPTIONS = ("rule", "fallback_lr", "betas", "eps")

Groups = Sequence[Mapping[str, Any]]
State = MutableMapping[Tensor, dict[str, Any]]


# ---- reading


def read_state(
    state_dict: Mapping[str, Any], groups: Groups, layers: Iterable[Layer]
) -> tuple[State, list[dict[str, Any]]]:
    """State and groups for an optimizer with these groups and layers, sharing nothing.

    Raises, naming what differs, unless the state belongs to an optimizer like this. Entries that
    nobody declares, as those of another `damping_mode`, are left out.
    """
    _check_form(state_dict)
    saved_groups: Groups = state_dict["param_groups"]
    _check_groups(saved_groups, groups)
    saved = _by_number(state_dict["state"], saved_groups)
    of_weight: dict[Tensor, list[Layer]] = {}
    for layer in layers:
        of_weight.setdefault(layer.weight, []).append(layer)
    state: State = defaultdict(dict)
    names = _in_order(groups, "param_names")
    for name, (number, parameter) in zip(names, _numbered(saved_groups, groups), strict=True):
        if number in saved:
            its_layers = of_weight.get(parameter, ())
            state[parameter] = _read_parameter(name, saved[number], parameter, its_layers)
    return state, [_new_group(*pair) for pair in zip(saved_groups, groups, strict=True)]


def _in_order(groups: Groups, key: str) -> list[Any]:
    return [one for group in groups for one in group[key]]


def _numbered(saved_groups: Groups, groups: Groups) -> Iterable[tuple[Any, Tensor]]:
    """The parameters with their numbers in a state_dict."""
    return zip(_in_order(saved_groups, "params"), _in_order(groups, "params"), strict=True)


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Of this version of fop, and of no other optimizer."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"this is no state_dict of an optimizer, because it has no {missing[0]!r}: it has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}"
        )
    saved_groups = state_dict["param_groups"]
    fits = isinstance(saved_groups, (list, tuple)) and all(
        isinstance(saved, Mapping) and isinstance(saved.get("params"), (list, tuple))
        for saved in saved_groups
    )
    if not fits or not isinstance(state_dict["state"], Mapping):
        raise TypeError(
            "this is no state_dict of an optimizer: 'state' should be a dict, and 'param_groups' a "
            "list of dicts with 'params'"
        )
    for saved in saved_groups:
        if "rule" not in saved or "steps" not in saved:
            raise ValueError(
                "this is the state of an optimizer that is not fop's: its parameter groups have no "
                "'rule' and 'steps'. Start with a new optimizer and load the model's weights alone"
            )
        found = saved.get("state_format", 1)
        if found != STATE_FORMAT:
            raise ValueError(
                f"the state has format {found!r}, but this version of fop reads format "
                f"{STATE_FORMAT}: load it with the version of fop that saved it, or a later one, "
                "or start with a new optimizer and load the model's weights alone"
            )


def _check_groups(saved_groups: Groups, groups: Groups) -> None:
    sizes = [[len(group["params"]) for group in side] for side in (saved_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state has parameter groups of {sizes[0]} parameters, but this optimizer has "
            f"groups of {sizes[1]}: it is the state of another model, or of an optimizer with "
            "other param_groups, skip or norms. Build the optimizer as it was built for the state"
        )
    numbers = _in_order(saved_groups, "params")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"the state names a parameter twice: its params are {numbers}")
    _check_names(saved_groups, groups)
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        missing = sorted((group.keys() & GROUP_CHECKS.keys()) - saved.keys())
        if missing:
            raise ValueError(
                f"param_groups[{index}] of the state has no {missing[0]!r}: it was changed after "
                "it was saved, or saved by another version of fop"
            )
        try:
            check_group(saved)
        except (TypeError, ValueError) as error:
            raise type(error)(f"in param_groups[{index}] of the state, {error}") from None


def _check_names(saved_groups: Groups, groups: Groups) -> None:
    names = _in_order(groups, "param_names")
    for saved, group in zip(saved_groups, groups, strict=True):
        own_names = group["param_names"]
        saved_names = saved.get("param_names", own_names)
        if not isinstance(saved_names, (list, tuple)) or len(saved_names) != len(own_names):
            raise ValueError(
                f"param_names in the state should be {len(own_names)} names, got {saved_names!r}"
            )
        if (saved["rule"] == "curvature") != (group["rule"] == "curvature"):
            raise ValueError(
                f"parameter {own_names[0]!r} follows the rule {group['rule']!r}, but "
                f"{saved['rule']!r} in the state: build the optimizer with the skip and norms that "
                "the state was saved with"
            )
        for saved_name, name in zip(saved_names, own_names, strict=True):
            if saved_name != name and saved_name in names:
                raise ValueError(
                    f"parameter {names.index(name)} is {name!r}, but {saved_name!r} in the state: "
                    "build the optimizer with the param_groups, skip and norms that the state was "
                    "saved with"
                )


def _by_number(saved: Mapping[Any, Any], saved_groups: Groups) -> dict[Any, Any]:
    """The entries of each parameter. torch.distributed.checkpoint makes text of the numbers."""
    numbers = _in_order(saved_groups, "params")
    unknown = saved.keys() - {key for number in numbers for key in (number, str(number))}
    if unknown:
        raise ValueError(
            f"the state has entries under {', '.join(sorted(map(repr, unknown)))}, which stands "
            "for no parameter of its param_groups"
        )
    found = {number: saved.get(number, saved.get(str(number))) for number in numbers}
    return {number: entries for number, entries in found.items() if entries is not None}


def _read_parameter(
    name: str, entries: Mapping[str, Any], parameter: Tensor, layers: Iterable[Layer]
) -> dict[str, Any]:
    """What the update rules keep of a parameter, and the curvature of the layers it belongs to."""
    if not isinstance(entries, Mapping):
        raise TypeError(f"the state of parameter {name!r} should be a dict, got {entries!r}")
    missing = sorted(TOGETHER - entries.keys())
    if missing and len(missing) < len(TOGETHER):
        raise ValueError(
            f"parameter {name!r} has no {missing[0]} in the state, but other entries of AdamW"
        )
    dtype, device = parameter.dtype, parameter.device
    sizes = [tuple(parameter.shape)]
    found: dict[str, Any] = {
        key: entry.read(f"the {key} of parameter {name!r}", entries[key], sizes, dtype, device)
        for key, entry in RULE_ENTRIES.items()
        if key in entries
    }
    for layer in layers:
        of_layer = layer.sizes, factor_dtype(dtype), device
        for full, (key, entry) in zip(layer.keys, layer.curvature.entries.items(), strict=True):
            if full in entries:
                what = f"the {key} of layer {layer.name!r}"
                found[full] = entry.read(what, entries[full], *of_layer)
    return found


def _new_group(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the state; parameters, their names and another fallback stay the group's."""
    # Only SGD may go without a learning rate of its own.
    own_rate = [options["fallback_lr"] is not None for options in (saved, group)]
    same_fallback = saved["rule"] == group["rule"] and own_rate[0] == own_rate[1]
    kept = ("params", "param_names", *(() if same_fallback else FALLBACK_OPTIONS))
    options = copy.deepcopy({k: v for k, v in saved.items() if k not in kept})
    return options | {k: group[k] for k in kept} | {"state_format": STATE_FORMAT}


# ---- several ranks, of which each keeps a part


def consolidate(
    state: State, groups: Groups, layers: Sequence[Layer], ranks: Ranks, to: int | None
) -> dict[Tensor, dict[str, Any]] | None:
    """What the ranks keep in parts, full on rank `to` or, if it is None, on all; None elsewhere."""
    mine = {
        index: {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in state.get(layer.weight, {}).items()
            if key in layer.keys
        }
        for index, layer in enumerate(layers)
        if ranks.owns(layer)
    }
    of_ranks = ranks.gather_objects(mine, to, once=True)
    found = _join_rows(state, groups, ranks, to) if ranks.partial_rows else {}
    for part in of_ranks or ():
        for index, curvature in (part or {}).items():
            found.setdefault(layers[index].weight, {}).update(curvature)
    return None if of_ranks is None else found


def _join_rows(
    state: State, groups: Groups, ranks: Ranks, to: int | None
) -> dict[Tensor, dict[str, Any]]:
    """What the update rules keep, from the rows of all ranks."""
    parameters = _in_order(groups, "params")
    mine = [{k: v.cpu() for k, v in state.get(p, {}).items() if k in RULE_KEYS} for p in parameters]
    of_ranks = ranks.gather_objects(mine, to)
    if of_ranks is None:
        return {}
    return {
        parameter: {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        for parameter, *parts in zip(parameters, *of_ranks, strict=True)
    }


def add_consolidated(
    state_dict: Mapping[str, Any], groups: Groups, consolidated: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Put what `consolidate` found into a rank's own state_dict."""
    entries = state_dict["state"]
    for number, parameter in _numbered(state_dict["param_groups"], groups):
        if consolidated.get(parameter):
            entries[number] = {**entries.get(number, {}), **consolidated[parameter]}
