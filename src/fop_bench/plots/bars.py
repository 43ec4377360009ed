"""Peak memory as bars grouped by batch size, and the published figures in a panel beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fop_bench import published
from fop_bench.memory import GIGA, Measurement
from fop_bench.plots.canvas import panels, plain, style, titled
from fop_bench.style import look, order

Bars = dict[tuple[int, str], float]  # (batch size, method) -> amount in the panel's unit


def memory_bars(measurements: Sequence[Measurement], *, with_published: bool = True) -> Figure:
    """Peak memory of each method at each batch size, for the measurements of one workload."""
    names = sorted({m.workload for m in measurements})
    if len(names) != 1:
        raise ValueError(f"measurements: expected those of one workload, found {names or 'none'}")
    largest = max((m.peak_bytes for m in measurements if math.isfinite(m.peak_bytes)), default=1.0)
    size, unit = (GIGA, "GB") if largest >= GIGA else (1e6, "MB")
    ours = {(m.batch_size, m.method): m.peak_bytes / size for m in measurements}
    what = "peak GPU memory" if measurements[0].device == "cuda" else "growth of resident memory"
    groups: list[tuple[str, str, Bars]] = [("this record", f"{what} ({unit})", ours)]
    figures = published.for_workload(names[0]) if with_published else None
    if figures and figures.memory:
        theirs = {(m.batch_size, m.method): m.gigabytes for m in figures.memory}
        groups.append(("published", "largest memory of a GPU (GB)", theirs))
    with style():
        figure, axes = panels(len(groups), size=(6.0, 3.9), share_y=False)
        for axis, (title, label, bars) in zip(axes, groups, strict=True):
            _draw(axis, bars)
            axis.set_ylabel(label)
            if len(groups) > 1:
                axis.set_title(title)
        methods = sorted({m for _, _, bars in groups for _, m in bars}, key=order)
        figure.legend(
            handles=[_patch(method) for method in methods],
            loc="outside lower center",
            ncols=min(len(methods), 6),
        )
        titled(figure, names[0])
    return figure


def _patch(method: str) -> Patch:
    shown = look(method)
    return Patch(
        facecolor=shown.colour,
        edgecolor="white",
        hatch="///" if shown.dashed else None,
        label=plain(shown.label),
    )


def _draw(axis: Axes, bars: Bars) -> None:
    batches = sorted({batch for batch, _ in bars})
    methods = sorted({method for _, method in bars}, key=order)
    width = 0.84 / len(methods)
    top = max((v for v in bars.values() if math.isfinite(v)), default=1.0)
    for place, method in enumerate(methods):
        shown = look(method)
        offset = (place - (len(methods) - 1) / 2) * width
        for group, batch in enumerate(batches):
            amount = bars.get((batch, method))
            if amount is None:
                continue
            if math.isinf(amount):
                axis.text(
                    group + offset, 0.02 * top, "out of memory",
                    rotation=90, ha="center", va="bottom", fontsize=9, color=shown.colour,
                )  # fmt: skip
                continue
            axis.bar(
                group + offset,
                amount,
                width * 0.92,
                color=shown.colour,
                edgecolor="white",
                hatch="///" if shown.dashed else None,
            )
            if len(batches) * len(methods) <= 24:
                axis.text(
                    group + offset, amount + 0.01 * top, f"{amount:.3g}",
                    ha="center", va="bottom", fontsize=8.5, rotation=90,
                )  # fmt: skip
    axis.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axis.set_xlabel("batch size")
    axis.set_ylim(0, 1.18 * top)
    axis.grid(visible=False, axis="x")
