"""Strong scaling as in the paper: time, rank-time and efficiency against ranks, a row a source.

Measured curves are solid; those of the cost model are dashed and say "model"; published points,
which come from other machines and growing batches, stand in the panel of efficiencies alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from fop_bench import published
from fop_bench.plots.canvas import INK, method_legend, panels, plain, plain_log_ticks, style, titled
from fop_bench.scaling import (
    Point,
    Scaling,
    batch_efficiencies,
    efficiencies,
    measured_points,
    modelled_points,
)
from fop_bench.style import look, order

DECADE = 10  # from here on a logarithmic axis has enough ticks to be read
Curve = tuple[Point, float]  # with its height


def scaling_curves(record: Scaling) -> Figure:
    """A row of panels for what was measured and for each modelled hardware.

    Curves over ranks are those of the largest batch; where there are several batch sizes, a last
    panel has efficiency against them, on the most ranks.
    """
    sources = _sources(record)
    batches = max(len({p.batch_size for p in points}) for _, points, _ in sources)
    width = 4 if batches > 1 else 3
    with style():
        figure, axes = panels(width * len(sources), share_y=False, size=(3.9, 3.3), columns=width)
        for number, (title, points, modelled) in enumerate(sources):
            row = axes[width * number : width * (number + 1)]
            largest = max(point.batch_size for point in points)
            of_largest = [point for point in points if point.batch_size == largest]
            reached = efficiencies(of_largest)
            _over_ranks(row[0], [(p, 1e3 * p.seconds) for p in of_largest], modelled, ideal=True)
            _over_ranks(row[1], [(p, 1e3 * p.seconds * p.ranks) for p in of_largest], modelled)
            _over_ranks(row[2], [(p, 100 * reached[p]) for p in of_largest], modelled, log=False)
            row[0].set_ylabel("time a step (ms)")
            row[1].set_ylabel("ranks x time (ms)")
            row[2].set_ylabel("efficiency (%)")
            row[2].axhline(100, color=INK, linestyle=":", linewidth=1.2)
            row[2].set_ylim(0, max(115, 110 * max(reached.values())))
            row[1].set_title(plain(f"{title}, batch size {largest:,}"))
            if number == 0:
                _published(row[2], record.workload)
            if width == 4:
                _over_batches(row[3], points, modelled)
        kinds = [Line2D([], [], color=INK, linestyle=":", label="ideal")]
        if any(modelled for _, _, modelled in sources):
            kinds.append(Line2D([], [], color=INK, linestyle="--", label="model, not measured"))
        if published.epoch_times(record.workload):
            hollow = Line2D(
                [], [], color=INK, linestyle="none", marker="o", markerfacecolor="white",
                label="published",
            )  # fmt: skip
            kinds.append(hollow)
        methods = [point.method for _, points, _ in sources for point in points]
        method_legend(figure, methods, kinds)
        titled(figure, f"{record.workload}: strong scaling")
    return figure


def _sources(record: Scaling) -> list[tuple[str, list[Point], bool]]:
    """(title, points, whether it is a model) of each row."""
    sources = [("measured", measured_points(record), False)] if record.timings else []
    for hardware in record.hardware:
        points = modelled_points(record, hardware.name)
        if any(point.ranks > 2 for point in points):
            sources.append((f"model: {hardware.name}", points, True))
    if not sources:
        raise ValueError("record: expected timings or predictions, found neither")
    return sources


def _over_ranks(
    axis: Axes, curve: Sequence[Curve], modelled: bool, *, log: bool = True, ideal: bool = False
) -> None:
    counts = sorted({point.ranks for point, _ in curve})
    for method in sorted({point.method for point, _ in curve}, key=order):
        mine = sorted((p.ranks, y) for p, y in curve if p.method == method)
        _line(axis, method, mine, modelled)
        if ideal:
            ranks, top = mine[0]
            axis.plot(
                counts, [top * ranks / count for count in counts],
                color=look(method).colour, linestyle=":", linewidth=1.2, zorder=1,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts[:: 1 if len(counts) < 7 else 2])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axis.set_xlabel("ranks")
    heights = [height for _, height in curve]
    if log and max(heights) > DECADE * min(heights):
        axis.set_yscale("log")
        plain_log_ticks(axis)


def _line(axis: Axes, method: str, curve: list[tuple[int, float]], modelled: bool) -> None:
    shown = look(method)
    axis.plot(
        [x for x, _ in curve], [y for _, y in curve],
        color=shown.colour, marker=shown.marker,
        linestyle="--" if modelled else "-",
        markersize=5 if modelled else 7,
        label=f"{shown.label} (model)" if modelled else shown.label,
    )  # fmt: skip


def _over_batches(axis: Axes, points: Sequence[Point], modelled: bool) -> None:
    """Examples a second against those at the smallest batch, on the most ranks."""
    most = max(point.ranks for point in points)
    reached = batch_efficiencies([point for point in points if point.ranks == most])
    for method in sorted({point.method for point in reached}, key=order):
        curve = sorted((p.batch_size, 100 * e) for p, e in reached.items() if p.method == method)
        _line(axis, method, curve, modelled)
    axis.set_xscale("log", base=2)
    sizes = sorted({point.batch_size for point in reached})
    axis.set_xticks(sizes)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_xlabel("batch size")
    axis.set_ylabel("throughput (%)")
    axis.set_title(f"against batch {sizes[0]:,}, {most:,} ranks")


def _published(axis: Axes, workload: str) -> None:
    for entry in published.epoch_times(workload):
        shown = look(entry.method)
        axis.plot(
            [entry.gpus], [100 * entry.efficiency], color=shown.colour, linestyle="none",
            marker=shown.marker, markerfacecolor="white", markeredgewidth=1.8, zorder=3,
        )  # fmt: skip
