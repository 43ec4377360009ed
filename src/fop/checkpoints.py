"""What a state must be like to be loaded; everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fop.symmetric import stored_shape

# Written into every parameter group, which is what trainers that rebuild a state_dict keep. Raised
# when states of older versions can no longer be read as they are; those without a number are of 1.
STATE_FORMAT = 2

# What the update rules keep, each shaped like its parameter.
RULE_KEYS = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"})


@dataclass(frozen=True)
class LayerMatrix:
    """A preconditioned layer, as far as its state must fit it."""

    name: str
    weight: Tensor
    prefix: str  # of its keys, where several layers share a weight
    groups: int
    rows: int
    columns: int


def check_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    matrices: Iterable[LayerMatrix],
) -> None:
    """Raise, naming what differs, unless the state belongs to an optimizer like this."""
    layers: dict[Tensor, list[LayerMatrix]] = {}
    for matrix in matrices:
        layers.setdefault(matrix.weight, []).append(matrix)
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"this is no state_dict of an optimizer, because it has no {missing[0]!r}: it has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}"
        )
    saved_groups = state_dict["param_groups"]
    for saved in saved_groups:
        _check_format(saved)
    sizes = [[len(group["params"]) for group in side] for side in (saved_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state has parameter groups of {sizes[0]} parameters, but this optimizer has "
            f"groups of {sizes[1]}: it is the state of another model, or of an optimizer with "
            "other param_groups, skip or norms. Build the optimizer as it was built for the state"
        )
    names = [name for group in groups for name in group["param_names"]]
    place = 0
    for saved, group in zip(saved_groups, groups, strict=True):
        saved_names = saved.get("param_names", group["param_names"])
        members = zip(saved["params"], group["params"], group["param_names"], strict=True)
        if (saved["rule"] == "curvature") != (group["rule"] == "curvature"):
            raise ValueError(
                f"parameter {group['param_names'][0]!r} follows the rule {group['rule']!r}, but "
                f"{saved['rule']!r} in the state: build the optimizer with the skip and norms that "
                "the state was saved with"
            )
        for index, (number, parameter, name) in enumerate(members):
            if saved_names[index] != name and saved_names[index] in names:
                raise ValueError(
                    f"parameter {place} is {name!r}, but {saved_names[index]!r} in the state: "
                    "build the optimizer with the param_groups, skip and norms that the state was "
                    "saved with"
                )
            place += 1
            entries = state_dict["state"].get(number, {})
            _check_rules(name, entries, parameter)
            for matrix in layers.get(parameter, ()):
                _check_factors(entries, matrix)


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


def _check_rules(name: str, entries: Mapping[str, Any], parameter: Tensor) -> None:
    for key in RULE_KEYS & entries.keys():
        if entries[key].shape != parameter.shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}, but its {key} in the "
                f"state has {tuple(entries[key].shape)}: it is the state of another model"
            )


def _check_factors(entries: Mapping[str, Any], matrix: LayerMatrix) -> None:
    groups = matrix.groups
    for key, size in (("output_factor", matrix.rows), ("input_factor", matrix.columns)):
        factor = entries.get(matrix.prefix + key)
        # A bias that is frozen, or no longer is, changes the size by one.
        if factor is not None and not _fits(factor, groups, size):
            shape = " x ".join(map(str, stored_shape(groups, size)))
            raise ValueError(
                f"the {key} of layer {matrix.name!r} should be {shape}, but has "
                f"shape {tuple(factor.shape)} in the state: it is the state of another model"
            )


def _fits(factor: Tensor, groups: int, size: int) -> bool:
    sizes = range(size - 1, size + 2)
    forms = {form for d in sizes for form in (stored_shape(groups, d), (groups, d))}
    return tuple(factor.shape) in forms
