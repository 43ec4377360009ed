"""TOML and YAML files, command-line overrides, and the resolved settings of one run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fop_bench.errors import BenchError, reason, unknown
from fop_bench.schedules import IntervalRule, LrRule, ScheduleConfig
from fop_bench.schema import Count, MisfitError, Name, Positive, Settings, Whole, check_fields, fit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Amp = Literal["off", "bf16", "fp16"]


class ConfigError(BenchError, ValueError):
    """A file or override that cannot be used; the message names the file and the key."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's numbers, and nothing else.

    `options` are the optimizer's, for the base batch; `subset` trains on that many examples alone;
    `evaluate_every` adds evaluations inside an epoch, every so many steps.
    """

    workload: Name
    method: Name
    batch_size: Count
    seed: Whole
    epochs: Count
    base_batch: Count
    options: dict[str, Any]
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_rule: LrRule = "linear"
    interval_rule: IntervalRule = "shrink"
    split: Literal["test", "validation"] = "test"
    subset: Count | None = None
    accumulate: Count = 1
    amp: Amp = "off"
    compile: bool = False
    evaluate_every: Count | None = None

    def __post_init__(self) -> None:
        try:
            check_fields(self)
            fit(self.options, Settings, "method")
            fit(self.options.get("lr"), Positive, "method.lr")
        except MisfitError as error:
            raise ConfigError(f"{self.workload}, {self.method}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; tuples become lists, so that a record read back compares equal."""
        plain: dict[str, Any] = listed(asdict(self))
        return plain


def listed(value: Any) -> Any:
    """`value` with every tuple as a list, as JSON would return it."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [listed(item) for item in value]
    return value


def schedule_from(table: Mapping[str, Any], where: str) -> ScheduleConfig:
    check_names(table, (item.name for item in fields(ScheduleConfig)), f"{where}: [schedule]")
    try:
        return ScheduleConfig(**table)
    except MisfitError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Every name is known, so that a misspelt one is not silently without effect."""
    known = sorted(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: unknown {unknown(name, known)}; known: {', '.join(known)}")


def read_file(path: Path) -> dict[str, Any]:
    """The table in a .toml, .yaml or .yml file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({reason(error)}): check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text ({error}): write it again") from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML ({error}): mend that line") from error
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path, text)
    raise ConfigError(f"{path}: expected a .toml, .yaml or .yml file")


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{path}: YAML needs the package PyYAML: pip install "fop[bench]", or write it as TOML'
        ) from error
    try:
        table = _numbers(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML ({error}): mend that line") from error
    try:
        named: dict[str, Any] = fit(table, dict[str, Any])
        return named
    except MisfitError as error:
        raise ConfigError(f"{path}: {error}") from error


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; here it is a number, as everywhere else."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """``["method.damping=1e-4"]`` as the table that a file with those lines would give."""
    table: dict[str, Any] = {}
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            raise ConfigError(
                f"--set {assignment!r}: expected KEY=VALUE, for example method.damping=1e-4"
            )
        branch = table
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"--set {assignment!r}: {key} was already given a value")
        branch[keys[-1]] = parse_value(text.strip())
    return table


def parse_value(text: str) -> Any:
    """A TOML value; bare words are strings, "none" is None (for example kl_clip=none)."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top: tables are merged, everything else is replaced."""
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in which two tables differ, each with both values."""
    found = []
    for key in sorted({*one, *other}):
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}: {left!r} / {right!r}")
    return found
