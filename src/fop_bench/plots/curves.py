"""The metric during training, against epochs or against time: a panel for each batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fop_bench.plots.canvas import (
    INK,
    method_legend,
    panels,
    percent_axis,
    plain,
    style,
    target_line,
    titled,
)
from fop_bench.records import Run
from fop_bench.style import look, order
from fop_bench.summary import by_variant, series
from fop_bench.tables import is_fraction, time_unit

XAxis = Literal["epochs", "time"]
NARROWEST = 0.03  # of a fraction: a panel shows at least 15 % below the target


def curves(runs: Sequence[Run], x: XAxis = "epochs") -> Figure:
    """Mean over seeds as a line, smallest to largest as a band, the target dotted.

    ``runs`` are of one workload. Where seeds recorded different numbers of evaluations the mean
    stops with the shortest, and the others go on as thin lines. Panels show the neighbourhood of
    the target, and name the methods that never come near it.
    """
    workload = _only_workload(runs)
    with style():
        batches = sorted({int(run.meta["batch_size"]) for run in runs})
        figure, axes = panels(len(batches))
        window = _window(runs)
        for axis, batch in zip(axes, batches, strict=True):
            handle = _panel(
                axis, [r for r in runs if int(r.meta["batch_size"]) == batch], x, window
            )
            axis.set_title(f"batch size {batch:,}")
        axes[0].set_ylim(*window)
        percent_axis(axes[0], runs[0].meta["metric"])
        method_legend(figure, (run.meta["method"] for run in runs), [handle])
        titled(figure, workload)
    return figure


def _panel(axis: Axes, runs: Sequence[Run], x: XAxis, window: tuple[float, float]) -> Line2D:
    """The curves of one batch size; returns the target's handle for the legend."""
    column, size, label = "epoch", 1.0, "epoch"
    if x == "time":
        size, unit = time_unit(max(_last(run, "train_time") for run in runs))
        column, label = "train_time", f"training time ({unit})"
    for (_, method, _), variants in by_variant(runs).items():
        for members in variants.values():
            _draw(axis, method, members, column, size)
    axis.set_xlabel(label)
    axis.set_xlim(0, 1.03 * max(_last(run, column) for run in runs) / size or 1.0)
    absent = {run.meta["method"] for run in runs} - {
        run.meta["method"]
        for run in runs
        if any(window[0] <= value <= window[1] for value in series(run, run.metric_key))
    }
    if absent:
        names = ", ".join(plain(look(method).label) for method in sorted(absent, key=order))
        axis.text(
            0.985, 0.03, f"never in view: {names}", transform=axis.transAxes,
            ha="right", va="bottom", fontsize=10, style="italic", color=INK, wrap=True,
        )  # fmt: skip
    return target_line(axis, float(runs[0].meta["target"]))


def _only_workload(runs: Sequence[Run]) -> str:
    names = sorted({run.meta["workload"] for run in runs})
    if len(names) != 1:
        raise ValueError(f"runs: expected runs of one workload, found {names or 'none'}")
    return str(names[0])


def _last(run: Run, column: str) -> float:
    return max((value for value in series(run, column) if math.isfinite(value)), default=0.0)


def _draw(axis: Axes, method: str, runs: Sequence[Run], column: str, size: float) -> None:
    shown = look(method)
    xs = [np.array(series(run, column)) / size for run in runs]
    ys = [np.array(series(run, run.metric_key)) for run in runs]
    shared = min(len(y) for y in ys)
    for seed_x, seed_y in zip(xs, ys, strict=True):
        if len(seed_y) > shared:
            axis.plot(seed_x, seed_y, color=shown.colour, linewidth=0.9, alpha=0.5)
    if shared == 0:
        return
    at = np.mean([seed_x[:shared] for seed_x in xs], axis=0)
    values = np.array([seed_y[:shared] for seed_y in ys])
    axis.fill_between(
        at, values.min(axis=0), values.max(axis=0), color=shown.colour, alpha=0.15, linewidth=0
    )
    axis.plot(
        at,
        values.mean(axis=0),
        color=shown.colour,
        linestyle=shown.line,
        marker=shown.marker,
        markevery=max(1, shared // 6),
        zorder=3,
    )


def _window(runs: Sequence[Run]) -> tuple[float, float]:
    """Vertical limits: from the best value to five times as far on the other side of the target."""
    target = float(runs[0].meta["target"])
    best = [run.best() for run in runs if math.isfinite(run.best())] or [target]
    higher = bool(runs[0].meta["higher_is_better"])
    top = max(*best, target) if higher else min(*best, target)
    gap = max(
        abs(top - target), NARROWEST if is_fraction(runs[0].meta["metric"]) else 0.03 * target
    )
    if higher:
        bottom, ceiling = target - 5 * gap, max(top, target) + 0.4 * gap
    else:
        bottom, ceiling = min(top, target) - 0.4 * gap, target + 5 * gap
    if is_fraction(runs[0].meta["metric"]):
        return max(bottom, 0.0), min(ceiling, 1.0)
    return bottom, ceiling
