"""Recipes: which methods, batch sizes and seeds on which workload, with which settings. One file a
paper row.

A file is TOML or YAML. It may extend another one and then says only what differs::

    extends = "cifar10-resnet18"     # the whole table
    source = "Table 1, batch size 8192"
    batch_sizes = [8192]

    [schedule]                       # of every method
    name = "plateau"
    [method]                         # options of every method that takes them
    weight_decay = 5e-4
    [for.kfac.method]                # of one method; [for.kfac] takes epochs and schedule too
    lr = 0.1
    [for.b2048]                      # the same for one batch size
    epochs = 50
    [grid.kfac]                      # replaces what tuning tries for that option
    damping = [1e-3, 1e-4]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from fop_bench.config import (
    Amp,
    ConfigError,
    RunConfig,
    check_names,
    merged,
    read_file,
    schedule_from,
)
from fop_bench.errors import unknown
from fop_bench.methods import METHODS, Method, get_method, with_control
from fop_bench.schedules import IntervalRule, LrRule
from fop_bench.schema import Count, Limit, MisfitError, Name, Setting, Settings, Whole, fit
from fop_bench.tuned import Tuned, read_tuned
from fop_bench.workloads import WORKLOADS, Workload

RECIPES = Path(__file__).parent / "recipes"

BATCH_CASE = re.compile(r"b\d+")

Counts = Annotated[list[Count], Limit("a list of whole numbers >= 1, not empty", bool)]
Seeds = Annotated[list[Whole], Limit("a list of whole numbers >= 0, not empty", bool)]
Names = Annotated[list[Name], Limit("a list of names, not empty", bool)]
Values = Annotated[list[Setting], Limit("a list of values, not empty", bool)]


class _Scalars(TypedDict, total=False):
    epochs: Count
    base_batch: Count
    lr_rule: LrRule
    interval_rule: IntervalRule
    subset: Count | None
    accumulate: Count
    amp: Amp
    compile: bool
    evaluate_every: Count | None


class _Run(_Scalars, total=False):
    schedule: Settings
    method: Settings


class _Tune(TypedDict, total=False):
    trials: Count
    seeds: Seeds
    epochs: Count


class _Whole(_Run, total=False):
    title: str
    source: str
    extends: Name
    workload: Name | Names
    methods: Name | Names
    batch_sizes: Counts
    seeds: Seeds
    tuned: Name
    grid: dict[str, dict[str, Values]]
    tune: _Tune


_For = TypedDict("_For", {"for": dict[str, _Run]}, total=False)  # no name in Python


class _Table(_Whole, _For, total=False):
    """All that a file may say."""


@dataclass(frozen=True)
class Recipe:
    """A checked recipe; `table` is the content of its files with the command line on top."""

    name: str
    table: Mapping[str, Any]
    tuned: Tuned | None = None
    command_line: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return str(self.table.get("title", self.name))

    @property
    def source(self) -> str:
        return str(self.table.get("source", ""))

    @property
    def workloads(self) -> tuple[str, ...]:
        return _strings(self.table["workload"])

    @property
    def methods(self) -> tuple[str, ...]:
        return _strings(self.table.get("methods", tuple(METHODS)))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.table.get("seeds", WORKLOADS[self.workloads[0]].seeds))

    def batch_sizes(self, workload: Workload) -> tuple[int, ...]:
        return tuple(self.table.get("batch_sizes", workload.batch_sizes))

    def grid(self, method: Method) -> dict[str, tuple[Any, ...]]:
        """Tuning's values for each option: the method's own, with the recipe's in their place."""
        table = self.table.get("grid", {}).get(method.name, {})
        return {
            **method.grid,
            **{name: tuple(map(_tupled, values)) for name, values in table.items()},
        }

    def run(
        self,
        workload: Workload,
        method: str,
        batch_size: int,
        seed: int,
        *,
        options: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> RunConfig:
        """One run, resolved. What comes later wins: the method's defaults, the workload, the
        recipe, what it says for this batch size and for this method, tuned settings, the command
        line, and `options` and `overrides`, which tuning and sweeps vary.
        """
        chosen = get_method(method)
        special = self.table.get("for", {})
        own = special.get(method, {}).get("method", {})
        chosen.check(own, f"{self.name}: [for.{method}.method]")
        table = merged(self.table, special.get(f"b{batch_size}", {}))
        table = merged(table, {**special.get(method, {}), "method": {}})
        given = self.command_line
        tuned, tuned_schedule = split_schedule(
            self.tuned.options(workload.name, method, batch_size) if self.tuned else {}
        )
        varied, varied_schedule = split_schedule(options or {})
        resolved = {
            **chosen.defaults,
            **chosen.taking(workload.optimizer_overrides),
            **chosen.taking(table.get("method", {})),
            **own,
            **tuned,
            **chosen.taking(given.get("method", {})),
            **varied,
        }
        chosen.check(resolved, self.name)
        schedule = {
            **table.get("schedule", {}),
            **tuned_schedule,
            **given.get("schedule", {}),
            **varied_schedule,
        }
        settings = {k: v for k, v in merged(table, given).items() if k in _Scalars.__annotations__}
        return RunConfig(
            workload=workload.name,
            method=method,
            batch_size=batch_size,
            seed=seed,
            options=resolved,
            schedule=schedule_from(schedule, self.name),
            **{
                "epochs": workload.epochs,
                "base_batch": workload.base_batch,
                **settings,
                **overrides,
            },
        )

    def plan(
        self,
        methods: Sequence[str] = (),
        batch_sizes: Sequence[int] = (),
        seeds: Sequence[int] = (),
        **overrides: Any,
    ) -> list[RunConfig]:
        """All runs, seed by seed, so that a comparison broken off early has every method at least
        once.
        """
        names = with_control(tuple(methods) or self.methods)
        return [
            self.run(WORKLOADS[workload], method, batch_size, seed, **overrides)
            for seed in (tuple(seeds) or self.seeds)
            for workload in self.workloads
            for batch_size in (tuple(batch_sizes) or self.batch_sizes(WORKLOADS[workload]))
            for method in names
        ]


def available() -> list[str]:
    """The names of the recipes that come with fop-bench."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(
    name: str, overrides: Mapping[str, Any] | None = None, tuned: Path | None = None
) -> Recipe:
    """A recipe by its name, by the path of a file, or a workload's own defaults by the workload's
    name.
    """
    path = Path(name)
    if path.suffix in (".toml", ".yaml", ".yml"):
        table, label = _read(path, ()), path.stem
    elif name in available():
        table, label = _read(RECIPES / f"{name}.toml", ()), name
    elif name in WORKLOADS:
        table, label = {"workload": name}, name
    else:
        raise ConfigError(
            f"{unknown(name, (*available(), *WORKLOADS))} is no recipe "
            f"({', '.join(available())}), no workload "
            f"({', '.join(sorted(WORKLOADS))}) and no .toml or .yaml file: see `fop-bench list`"
        )
    command_line = overrides or {}
    own = table.get("method", {})
    table = merged(table, command_line)
    _fit(label, table)
    # Whose options those on the command line are depends on the command: see cli.options.
    _check(label, {**table, "method": own})
    source = tuned or table.get("tuned")
    return Recipe(label, table, read_tuned(Path(source)) if source else None, command_line)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's table on top of those that it extends; paths inside it are relative to it."""
    if path in seen:
        chain = " -> ".join(item.name for item in (*seen, path))
        raise ConfigError(f"{path}: recipes extend each other in a circle: {chain}")
    table = read_file(path)
    _fit(str(path), table)
    if "tuned" in table:
        table["tuned"] = str(path.parent / table["tuned"])
    parent = table.pop("extends", None)
    if parent is None:
        return table
    parent_path = path.parent / parent if Path(parent).suffix else RECIPES / f"{parent}.toml"
    return merged(_read(parent_path, (*seen, path)), table)


def _fit(name: str, table: Mapping[str, Any]) -> None:
    try:
        fit(table, _Table)
    except MisfitError as error:
        raise ConfigError(f"{name}: {error}: correct that value") from error


def _check(name: str, table: Mapping[str, Any]) -> None:
    """Every value is of its type and every name in the table is known."""
    check_names(table, _Table.__annotations__, name)
    _fit(name, table)
    if "workload" not in table:
        raise ConfigError(
            f"{name}: no workload: add workload = NAME, one of {', '.join(sorted(WORKLOADS))}"
        )
    for workload in _strings(table["workload"]):
        if workload not in WORKLOADS:
            raise ConfigError(
                f"{name}: unknown workload {unknown(workload, WORKLOADS)}: "
                f"one of {', '.join(sorted(WORKLOADS))}"
            )
    check_names(_strings(table.get("methods", ())), METHODS, f"{name}: methods")
    for case, own in table.get("for", {}).items():
        if not BATCH_CASE.fullmatch(case):
            check_names([case], METHODS, f"{name}: [for]")
        check_names(own, _Run.__annotations__, f"{name}: [for.{case}]")
    check_names(table.get("grid", {}), METHODS, f"{name}: [grid]")
    for method, axes in table.get("grid", {}).items():
        for option, values in split_schedule(axes)[0].items():
            for value in values:
                METHODS[method].check({option: value}, f"{name}: [grid.{method}]")
    check_names(table.get("tune", {}), _Tune.__annotations__, f"{name}: [tune]")
    everything = frozenset[str]().union(*(method.accepts for method in METHODS.values()))
    check_names(table.get("method", {}), everything, f"{name}: [method]")
    schedule_from(table.get("schedule", {}), name)


def split_schedule(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the optimizer, and those named "schedule.X", which tuning may vary as well."""
    prefix = "schedule."
    own = {name: value for name, value in options.items() if not name.startswith(prefix)}
    rest = {name.removeprefix(prefix): options[name] for name in options if name not in own}
    return own, rest


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
