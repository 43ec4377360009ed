"""An equal-budget search: every method gets the same number of trials, seeds and epochs on the
validation split.

A trial is one point of the method's grid, run with every seed. The best trial is the one with the
fewest missed targets, then the fewest epochs to the target, then the best metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fop_bench.compare import DataCache, run_all
from fop_bench.config import ConfigError, RunConfig
from fop_bench.loop import Runtime
from fop_bench.methods import get_method
from fop_bench.progress import Display
from fop_bench.recipes import Recipe
from fop_bench.records import Run
from fop_bench.schema import Count, Limit, MisfitError, Whole, check_fields
from fop_bench.tuned import Setting
from fop_bench.workloads import WORKLOADS

RULE = "fewest missed targets, then fewest epochs to the target, then best metric; seed means"


@dataclass(frozen=True)
class Budget:
    """What each method is given; `epochs` None takes the recipe's."""

    trials: Count
    seeds: Annotated[tuple[Whole, ...], Limit("whole numbers >= 0, one at least", bool)]
    epochs: Count | None = None

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except MisfitError as error:
            raise ConfigError(f"tuning: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        spent = {
            "trials": self.trials,
            "seeds": list(self.seeds),
            "split": "validation",
            "chosen_by": RULE,
        }
        return spent if self.epochs is None else {**spent, "epochs": self.epochs}


@dataclass(frozen=True)
class Search:
    """All trials of one method at one batch size."""

    workload: str
    method: str
    batch_size: int
    trials: tuple[dict[str, Any], ...]
    jobs: tuple[tuple[Path, RunConfig], ...]  # trial by trial, seed by seed


def plan_search(
    recipe: Recipe, methods: Sequence[str], batch_sizes: Sequence[int], budget: Budget, root: Path
) -> list[Search]:
    """The searches of all methods; one that follows another's setting has none of its own."""
    untuned = replace(recipe, tuned=None)
    names = dict.fromkeys(get_method(name).follows or name for name in (methods or recipe.methods))
    return [
        _search(untuned, workload, name, batch_size, budget, root)
        for workload in recipe.workloads
        for batch_size in (batch_sizes or recipe.batch_sizes(WORKLOADS[workload]))
        for name in names
    ]


def _search(
    recipe: Recipe, workload: str, name: str, batch_size: int, budget: Budget, root: Path
) -> Search:
    method = get_method(name)
    grid = method.settings(recipe.grid(method))
    if budget.trials > len(grid):
        raise ConfigError(
            f"--trials {budget.trials} is more than the {len(grid)} settings of {name!r}: an equal "
            f"budget needs --trials {len(grid)} or less, or more values under [grid.{name}]"
        )
    trials = tuple(grid[: budget.trials])
    overrides: dict[str, Any] = {"split": "validation"}
    if budget.epochs is not None:
        overrides["epochs"] = budget.epochs
    jobs = tuple(
        (
            root / workload / name / f"b{batch_size}" / f"trial{number:02d}" / f"s{seed}",
            recipe.run(WORKLOADS[workload], name, batch_size, seed, options=options, **overrides),
        )
        for number, options in enumerate(trials, 1)
        for seed in budget.seeds
    )
    return Search(workload, name, batch_size, trials, jobs)


def carry_out(
    searches: Sequence[Search], budget: Budget, runtime: Runtime, display: Display
) -> list[Setting]:
    """Runs every search; the best setting of each."""
    cache = DataCache(runtime)
    settings = []
    for search in searches:
        runs = run_all(search.jobs, runtime, display, cache=cache)
        count = len(budget.seeds)
        seeds_of = [runs[start : start + count] for start in range(0, len(runs), count)]
        best = min(range(len(seeds_of)), key=lambda trial: rank(seeds_of[trial]))
        settings.append(
            Setting(
                search.workload,
                search.method,
                search.batch_size,
                search.trials[best],
                score(seeds_of[best]),
            )
        )
    return settings


def rank(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Smaller is better; see `RULE`."""
    reached = [epochs for run in runs if math.isfinite(epochs := run.to_target("epoch"))]
    best = _mean([run.best() for run in runs])
    worse = -best if runs[0].meta["higher_is_better"] else best
    return len(runs) - len(reached), _mean(reached) if reached else math.inf, worse


def score(runs: Sequence[Run]) -> dict[str, Any]:
    """What is written beside the setting: misses are counted, and never averaged away."""
    misses, epochs, _ = rank(runs)
    result: dict[str, Any] = {"seeds": len(runs), "missed": int(misses)}
    if math.isfinite(epochs):
        result["epochs_to_target_where_reached"] = epochs
    best = _mean([run.best() for run in runs])
    if math.isfinite(best):
        result[f"best_{runs[0].metric_key}"] = best
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
