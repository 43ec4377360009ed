"""One setting varied, everything else as tuned: learning rate, momentum, damping, the beta/eta
ablation, the curvature interval, batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fop_bench.config import ConfigError, RunConfig
from fop_bench.errors import unknown
from fop_bench.methods import get_method, with_control
from fop_bench.recipes import Recipe
from fop_bench.records import run_path
from fop_bench.workloads import WORKLOADS


@dataclass(frozen=True)
class Sweep:
    """The points are option tables; a method that does not take an option of a point sits that
    point out.
    """

    name: str
    summary: str
    methods: tuple[str, ...]
    points: tuple[Mapping[str, Any], ...]


def _values(option: str, *values: Any) -> tuple[dict[str, Any], ...]:
    return tuple({option: value} for value in values)


BETAS = (-0.1, -0.01, 0.0, 0.01, 0.1, "adaptive")
SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep(
            "damping",
            "best metric against damping (Figures of C.4.1)",
            ("kfac", "kfac-2x", "fop"),
            _values("damping", 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        ),
        Sweep(
            "lr",
            "best metric against the learning rate at the base batch",
            ("sgd", "adamw", "kfac", "kfac-2x", "fop"),
            _values("lr", 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0),
        ),
        Sweep(
            "momentum",
            "best metric against momentum",
            ("sgd", "kfac", "kfac-2x", "fop"),
            _values("momentum", 0.0, 0.5, 0.7, 0.8, 0.9, 0.95),
        ),
        Sweep(
            "ablation",
            "FOP with beta and eta fixed or adaptive, beside KFAC (Figure of D.1)",
            ("kfac", "kfac-2x", "fop"),
            ({}, *({"beta": beta, "eta": eta} for eta in (1.0, "adaptive") for beta in BETAS)),
        ),
        Sweep(
            "update_every",
            "best metric against the curvature interval",
            ("kfac", "kfac-2x", "fop"),
            _values("update_every", 1, 5, 10, 50, 100, 200),
        ),
        Sweep(
            "batch_size",
            "epochs to target against batch size",
            ("sgd", "adamw", "kfac", "kfac-2x", "fop"),
            ({},),
        ),
    )
}


OF_ONE_OPTION = tuple(name for name, sweep in SWEEPS.items() if name in sweep.points[0])


def get_sweep(name: str) -> Sweep:
    if name not in SWEEPS:
        raise ConfigError(
            f"unknown sweep {unknown(name, SWEEPS)}: choose one of {', '.join(SWEEPS)}"
        )
    return SWEEPS[name]


def sweep_jobs(
    sweep: Sweep,
    recipe: Recipe,
    root: Path,
    *,
    methods: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    seeds: Sequence[int] = (),
    values: Sequence[Any] = (),
    **overrides: Any,
) -> list[tuple[Path, RunConfig]]:
    """All runs, each point in a directory of its own; `values` replace the sweep's own."""
    points = sweep.points
    if values:
        if sweep.name not in sweep.points[0]:
            raise ConfigError(
                f"--values: the sweep {sweep.name!r} takes none; {', '.join(OF_ONE_OPTION)} do"
            )
        points = _values(sweep.name, *values)
    if sweep.name == "update_every":
        overrides["interval_rule"] = (
            "none"  # the interval is what is measured, so no rule may change it
        )
    names = with_control(tuple(methods) or sweep.methods)
    return [
        (
            run_path(root / point_name(point), workload, name, batch_size, seed),
            recipe.run(WORKLOADS[workload], name, batch_size, seed, options=point, **overrides),
        )
        for seed in (tuple(seeds) or recipe.seeds)
        for workload in recipe.workloads
        for batch_size in (tuple(batch_sizes) or recipe.batch_sizes(WORKLOADS[workload]))
        for point in points
        for name in names
        if _takes_part(name, point, sweep)
    ]


def _takes_part(name: str, point: Mapping[str, Any], sweep: Sweep) -> bool:
    """In the ablation KFAC is one bar, with the empty point; FOP has all the others."""
    method = get_method(name)
    if sweep.name == "ablation":
        return bool(point) == ("beta" in method.accepts)
    return set(point) <= method.accepts


def point_name(point: Mapping[str, Any]) -> str:
    """A directory name, such as ``beta=0.1,eta=adaptive``."""
    return ",".join(f"{name}={value}" for name, value in point.items()) or "as-tuned"
