"""What must be equal on all ranks, or their messages don't fit and their models drift apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fop.settings import Settings

if TYPE_CHECKING:
    from fop.distributed.comm import Comm

COMPARED_INTERVALS = 4  # a function can't be compared, its first values can
SHOWN_DIFFERENCES, SHOWN_CHARACTERS = 3, 100

Description = Mapping[str, str]  # values by option, all as text


def describe(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    model: nn.Module,
    layers: Iterable[str],
) -> dict[str, str]:
    """All that shapes an optimizer's steps; what a user sets directly comes first."""
    found = {"the optimizer": type(optimizer).__name__}
    found |= {option: _text(value) for option, value in optimizer.defaults.items()}
    found |= {field.name: _text(getattr(settings, field.name)) for field in fields(settings)}
    if callable(settings.schedule["steps"]):
        values = [settings.interval(step) for step in range(1, 1 + COMPARED_INTERVALS)]
        stagger = ", staggered" if settings.schedule["stagger"] else ""
        found["update_every"] = f"a function with values {values}{stagger}"
    found["skip"] = _skip_text(model, settings.skip)
    for index, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option not in ("params", "param_names"):
                found[f"{option} of param_groups[{index}]"] = _text(value)
        for name in group["param_names"]:
            found[f"the group of parameter {name!r}"] = f"param_groups[{index}]"
    found |= {f"layer {name!r}": "preconditioned" for name in layers}
    for name, p in model.named_parameters():
        shape, trained = tuple(p.shape), "trained" if p.requires_grad else "frozen"
        found[f"parameter {name!r}"] = f"{shape} {p.dtype} {trained}"
    return found


def _text(value: object) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"  # its address differs in each process
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(entry)}' for key, entry in value.items())}}}"
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return f"a {type(value).__qualname__}" if " at 0x" in text else text


def _skip_text(model: nn.Module, skip: Any) -> str:
    names = {module: name for name, module in model.named_modules()}
    rules = [skip] if isinstance(skip, (str, type, nn.Module)) else list(skip)
    texts = []
    for rule in rules:
        if isinstance(rule, type):
            texts.append(f"{rule.__module__}.{rule.__qualname__}")
        else:
            texts.append(repr(rule) if isinstance(rule, str) else f"the module {names[rule]!r}")
    return f"[{', '.join(sorted(texts))}]"  # sets come in another order in each process


def check_agreement(comm: Comm, mine: Description) -> None:
    """Raise on all ranks, with the options and their values, unless all describe the same.

    Ranks exchange a digest; full descriptions travel only if these differ.
    """
    text = "\n".join(f"{option}: {value}" for option, value in mine.items())
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(comm.gather(digest, "settings"))) > 1:
        raise ValueError(
            f"rank {comm.index}: the ranks must train the same model with the same settings, but "
            f"{_differences(comm.gather(dict(mine), 'settings'))}: build the same model and pass "
            "the same arguments on every rank"
        )


def _differences(descriptions: Sequence[Description]) -> str:
    """One sentence about each option that differs; of those that differ alike, the first."""
    options = dict.fromkeys(option for description in descriptions for option in description)
    told: dict[tuple[str, ...], str] = {}
    for option in options:
        values = tuple(description.get(option, "missing") for description in descriptions)
        if len(set(values)) > 1:
            told.setdefault(values, option)
    shown = [_difference(option, values) for values, option in told.items()]
    more = len(shown) - SHOWN_DIFFERENCES
    return "; ".join(shown[:SHOWN_DIFFERENCES]) + (f"; and {more} more differ" if more > 0 else "")


def _difference(option: str, values: Sequence[str]) -> str:
    by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(str(rank))
    parts = [
        f"{_shortened(value)} on rank{'s' if len(ranks) > 1 else ''} {_shortened(', '.join(ranks))}"
        for value, ranks in by_value.items()
    ]
    return f"{option} is {' and '.join(parts)}"


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
