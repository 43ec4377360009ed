"""Epochs or time to the target against the batch size: the large-batch question in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from fop_bench import published
from fop_bench.plots.canvas import (
    INK,
    batch_axis,
    method_legend,
    panels,
    plain_log_ticks,
    style,
    titled,
)
from fop_bench.style import look, order
from fop_bench.summary import Row, Spread

Quantity = Literal["epochs", "seconds"]
Lines = dict[str, list[tuple[int, Spread]]]  # method -> (batch size, what each seed took)


def target_by_batch(
    rows: Sequence[Row], quantity: Quantity = "epochs", *, with_published: bool = True
) -> Figure:
    """Mean and every seed against batch size; a method that misses is marked above "not reached".

    ``rows`` are of one workload, as ``summarise`` gives them; published figures are drawn beside
    ours in a panel of their own, since they come from other machines.
    """
    names = sorted({row.workload for row in rows})
    if len(names) != 1:
        raise ValueError(f"rows: expected rows of one workload, found {names or 'none'}")
    ours: Lines = {}
    for row in rows:
        if not row.variant:
            spread = row.epochs if quantity == "epochs" else row.seconds
            ours.setdefault(row.method, []).append((row.batch_size, spread))
    theirs = _published(names[0], quantity) if with_published else {}
    groups = [("this record", ours)] + ([("published", theirs)] if theirs else [])
    with style():
        # Epochs compare across machines and share an axis; seconds do not.
        together = quantity == "epochs"
        figure, axes = panels(len(groups), size=(5.4, 4.0), share_y=together)
        for axis, (title, lines) in zip(axes, groups, strict=True):
            _draw(axis, lines, [group for _, group in groups] if together else [lines])
            if len(groups) > 1:
                axis.set_title(title)
        axes[0].set_ylabel("epochs to target" if quantity == "epochs" else "time to target (s)")
        method_legend(figure, [method for _, group in groups for method in group])
        titled(figure, names[0])
    return figure


def _published(workload: str, quantity: Quantity) -> Lines:
    figures = published.for_workload(workload)
    lines: Lines = {}
    for result in figures.results if figures else ():
        value = result.epochs if quantity == "epochs" else result.seconds
        if value is not None:
            lines.setdefault(result.method, []).append((result.batch_size, Spread((value,))))
    return lines


def _draw(axis: Axes, lines: Lines, on_axis: Sequence[Lines]) -> None:
    """Reached points on a logarithmic axis, misses in a strip above all points that share it."""
    spreads = [s for group in on_axis for points in group.values() for _, s in points]
    finite = [v for s in spreads for v in s.values if math.isfinite(v) and v > 0]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    ratio = max(high / low, 2.0)
    strip = high * ratio**0.22
    axis.set_yscale("log")
    axis.set_ylim(low / ratio**0.08, strip * ratio**0.2)
    plain_log_ticks(axis)
    axis.yaxis.set_major_locator(_ticks(low, high))
    missed = [m for m, points in lines.items() if any(math.isinf(s.mean) for _, s in points)]
    sizes = {size for points in lines.values() for size, _ in points}
    batch_axis(axis, sizes)
    if missed:
        axis.axhspan(strip / ratio**0.1, strip * ratio**0.2, color="#f3f3f3", zorder=0)
        axis.text(
            0.01, 0.985, "not reached by every seed", transform=axis.transAxes,
            color=INK, fontsize=10.5, va="top", style="italic",
        )  # fmt: skip
    for method in sorted(lines, key=order):
        points = sorted(lines[method], key=lambda point: point[0])
        shown = look(method)
        reached = [(size, s.mean) for size, s in points if math.isfinite(s.mean)]
        axis.plot(
            [size for size, _ in reached], [mean for _, mean in reached],
            color=shown.colour, linestyle=shown.line, marker=shown.marker, zorder=3,
        )  # fmt: skip
        seeds = [(size, v) for size, s in points for v in s.values if math.isfinite(v) and s.n > 1]
        axis.plot(
            [size for size, _ in seeds], [v for _, v in seeds],
            color=shown.colour, linestyle="none", marker="o", markersize=3, alpha=0.55,
        )  # fmt: skip
        place = missed.index(method) if method in missed else 0
        aside = 2.0 ** (min(0.13, 0.5 / max(len(missed), 1)) * (place - (len(missed) - 1) / 2))
        misses = [size * aside for size, s in points if math.isinf(s.mean)]
        axis.plot(
            misses, [strip] * len(misses), color=shown.colour, linestyle="none",
            marker=shown.marker, markerfacecolor="white", markeredgewidth=1.8, zorder=3,
        )  # fmt: skip


def _ticks(low: float, high: float) -> FixedLocator:
    """About five round values (1, 2, 5 times a power of ten) between the ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    values = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    inside = [v for v in values if low / 1.3 <= v <= high * 1.3]
    step = max(1, math.ceil(len(inside) / 7))
    return FixedLocator(inside[::step])
