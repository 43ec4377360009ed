"""How a state is read: all of it is checked and copied before anything of an optimizer changes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fop.capture import factor_dtype
from fop.entries import AnyEntry, Entry, Shape
from fop.settings import GROUP_CHECKS, check_group

# Written into every parameter group, which is what trainers that rebuild a state_dict keep. Raised
# when states of older versions can no longer be read as they are; those without a number are of 1.
STATE_FORMAT = 2

# What the update rules keep.
RULE_ENTRIES: Mapping[str, Entry] = {
    "momentum_buffer": Entry(lambda parameter: [parameter]),
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


@dataclass(frozen=True)
class LayerEntries:
    """A preconditioned layer, as far as its state must fit it."""

    name: str
    weight: Tensor
    prefix: str  # of its keys, where several layers share a weight
    entries: Mapping[str, AnyEntry]
    sizes: Sequence[Shape]  # (groups, rows, columns), with a trained bias and with a frozen one


Groups = list[dict[str, Any]]
State = defaultdict[Tensor, dict[str, Any]]


def read_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layers: Iterable[LayerEntries],
) -> tuple[State, Groups]:
    """State and groups for an optimizer with these groups and layers, sharing nothing.

    Raises, naming what differs, unless the state belongs to an optimizer like this. Entries that
    nobody declares, as those of another `damping_mode`, are left out.
    """
    saved_groups = _checked_groups(state_dict, groups)
    of_weight: dict[Tensor, list[LayerEntries]] = {}
    for layer in layers:
        of_weight.setdefault(layer.weight, []).append(layer)
    saved = _by_number(state_dict["state"], saved_groups)
    state: State = defaultdict(dict)
    for saved_group, group in zip(saved_groups, groups, strict=True):
        members = zip(saved_group["params"], group["params"], group["param_names"], strict=True)
        for number, parameter, name in members:
            if number in saved:
                layers_of_it = of_weight.get(parameter, ())
                state[parameter] = _read_parameter(name, saved[number], parameter, layers_of_it)
    return state, _new_groups(saved_groups, groups)


def _by_number(
    saved: Mapping[Any, Any], saved_groups: Sequence[Mapping[str, Any]]
) -> dict[Any, Any]:
    """The entries of each parameter. torch.distributed.checkpoint makes text of the numbers."""
    numbers = [number for group in saved_groups for number in group["params"]]
    unknown = saved.keys() - {key for number in numbers for key in (number, str(number))}
    if unknown:
        raise ValueError(
            f"the state has entries under {', '.join(sorted(map(repr, unknown)))}, which stands "
            "for no parameter of its param_groups"
        )
    found = {number: saved.get(number, saved.get(str(number))) for number in numbers}
    return {number: entries for number, entries in found.items() if entries is not None}


def _checked_groups(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The groups of a state that are like these."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"this is no state_dict of an optimizer, because it has no {missing[0]!r}: it has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}"
        )
    saved_groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
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
        _check_format(saved)
    sizes = [[len(group["params"]) for group in side] for side in (saved_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state has parameter groups of {sizes[0]} parameters, but this optimizer has "
            f"groups of {sizes[1]}: it is the state of another model, or of an optimizer with "
            "other param_groups, skip or norms. Build the optimizer as it was built for the state"
        )
    numbers = [number for saved in saved_groups for number in saved["params"]]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"the state names a parameter twice: its params are {numbers}")
    _check_names(saved_groups, groups)
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        _check_options(saved, index, group)
    return saved_groups


def _check_format(saved: Mapping[str, Any]) -> None:
    if "rule" not in saved or "steps" not in saved:
        raise ValueError(
            "this is the state of an optimizer that is not fop's: its parameter groups have no "
            "'rule' and 'steps'. Start with a new optimizer and load the model's weights alone"
        )
    found = saved.get("state_format", 1)
    if found != STATE_FORMAT:
        raise ValueError(
            f"the state has format {found!r}, but this version of fop reads format {STATE_FORMAT}: "
            "load it with the version of fop that saved it, or a later one, or start with a new "
            "optimizer and load the model's weights alone"
        )


def _check_names(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    names = [name for group in groups for name in group["param_names"]]
    position = 0
    for saved, group in zip(saved_groups, groups, strict=True):
        saved_names = saved.get("param_names", group["param_names"])
        if not isinstance(saved_names, (list, tuple)) or len(saved_names) != len(group["params"]):
            raise ValueError(
                f"param_names in the state should be {len(group['params'])} names, got "
                f"{saved_names!r}"
            )
        if (saved["rule"] == "curvature") != (group["rule"] == "curvature"):
            raise ValueError(
                f"parameter {group['param_names'][0]!r} follows the rule {group['rule']!r}, but "
                f"{saved['rule']!r} in the state: build the optimizer with the skip and norms that "
                "the state was saved with"
            )
        for saved_name, name in zip(saved_names, group["param_names"], strict=True):
            if saved_name != name and saved_name in names:
                raise ValueError(
                    f"parameter {position} is {name!r}, but {saved_name!r} in the state: "
                    "build the optimizer with the param_groups, skip and norms that the state was "
                    "saved with"
                )
            position += 1


def _check_options(saved: Mapping[str, Any], index: int, group: Mapping[str, Any]) -> None:
    """By the constructor's own checks."""
    missing = sorted((group.keys() & GROUP_CHECKS.keys()) - saved.keys())
    if missing:
        raise ValueError(
            f"param_groups[{index}] of the state has no {missing[0]!r}: it was changed after it "
            "was saved, or saved by another version of fop"
        )
    try:
        check_group(saved)
    except (TypeError, ValueError) as error:
        raise type(error)(f"in param_groups[{index}] of the state, {error}") from None


def _read_parameter(
    name: str, entries: Mapping[str, Any], parameter: Tensor, layers: Iterable[LayerEntries]
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
        what = f"of layer {layer.name!r}"
        for key, entry in layer.entries.items():
            full = layer.prefix + key
            if full in entries:
                kept = (layer.sizes, factor_dtype(dtype), device)
                found[full] = entry.read(f"the {key} {what}", entries[full], *kept)
    return found


def _new_groups(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Groups:
    """The options of the state; parameters and their names stay this optimizer's."""
    return [
        {
            **copy.deepcopy({k: v for k, v in saved.items() if k != "params"}),
            **({} if _same_fallback(saved, group) else {k: group[k] for k in FALLBACK_OPTIONS}),
            "params": group["params"],
            "param_names": group["param_names"],
            "state_format": STATE_FORMAT,
        }
        for saved, group in zip(saved_groups, groups, strict=True)
    ]


def _same_fallback(saved: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Only SGD may go without a learning rate of its own."""
    own_rate = [options["fallback_lr"] is not None for options in (saved, group)]
    return saved["rule"] == group["rule"] and own_rate[0] == own_rate[1]
