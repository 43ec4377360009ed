"""Tuned settings as a file: what `tune` writes and `compare` reads, with the budget that was spent
on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from fop_bench.config import ConfigError, read_file
from fop_bench.files import write_text
from fop_bench.methods import get_method
from fop_bench.records import now, versions
from fop_bench.schema import Count, MisfitError, Name, Settings, fit

SCHEMA = 1


@dataclass(frozen=True)
class Setting:
    """The best options (for the base batch) of a method at a batch size, and how they scored."""

    workload: Name
    method: Name
    batch_size: Count
    options: Mapping[str, Any]
    score: Mapping[str, Any]


class _Score(TypedDict, total=False):
    score: dict[str, Any]


class _Setting(_Score):
    workload: Name
    method: Name
    batch_size: Count
    options: Settings


class _Budget(TypedDict, total=False):
    trials: Count
    seeds: list[int]


class _Extras(TypedDict, total=False):
    budget: _Budget
    setting: list[_Setting]


class _File(_Extras):
    schema: Literal[1]


@dataclass(frozen=True)
class Tuned:
    """All settings of a file; `budget` says what each method was given: trials, seeds, epochs,
    split.
    """

    path: Path
    budget: Mapping[str, Any]
    settings: tuple[Setting, ...]

    def options(self, workload: str, method: str, batch_size: int) -> dict[str, Any]:
        """Of the batch size itself, else of the nearest smaller one (the rest is the linear rule),
        else the smallest.

        Empty for a method that was not tuned; a method that follows another takes the other's.
        """
        name = get_method(method).follows or method
        found = {
            s.batch_size: s.options
            for s in self.settings
            if (s.workload, s.method) == (workload, name)
        }
        if not found:
            return {}
        smaller = [size for size in found if size <= batch_size]
        return dict(found[max(smaller) if smaller else min(found)])


def read_tuned(path: Path) -> Tuned:
    table = read_file(path)
    if table.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path}: expected schema = {SCHEMA}, found {table.get('schema')!r}: "
            "is it from `fop-bench tune`?"
        )
    try:
        content: _File = fit(table, _File)
    except MisfitError as error:
        raise ConfigError(f"{path}: {error}: tune again, or correct that value") from error
    settings = []
    for number, entry in enumerate(content.get("setting", []), 1):
        setting = Setting(**{"score": {}, **entry})  # type: ignore[arg-type]
        own = {k: v for k, v in setting.options.items() if not k.startswith("schedule.")}
        get_method(setting.method).check(own, f"{path}: [[setting]] number {number}")
        settings.append(setting)
    return Tuned(path, content.get("budget", {}), tuple(settings))


def write_tuned(path: Path, budget: Mapping[str, Any], settings: tuple[Setting, ...]) -> None:
    """As TOML; a value prints as in JSON, which for text, numbers and lists is the same."""
    lines = ["# Written by `fop-bench tune`; options are for the base batch."]
    lines += _lines({"schema": SCHEMA, "created": now()})
    lines += ["", "[budget]", *_lines(budget), "", "[versions]", *_lines(versions())]
    for setting in settings:
        place = {
            "workload": setting.workload,
            "method": setting.method,
            "batch_size": setting.batch_size,
        }
        lines += ["", "[[setting]]", *_lines(place), "[setting.options]", *_lines(setting.options)]
        lines += ["[setting.score]", *_lines(setting.score)]
    write_text(path, "\n".join(lines) + "\n")


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {json.dumps(value, allow_nan=False)}" for key, value in table.items()]


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)
