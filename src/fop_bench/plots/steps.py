"""Two figures: the cost of a step by method and workload, and how it grows."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from fop_bench.plots.canvas import method_legend, panels, plain_log_ticks, save, style
from fop_bench.steps import tables
from fop_bench.steps.methods import OURS
from fop_bench.steps.workloads import SWEEPS, TABLE
from fop_bench.style import look

KINDS = (
    ("every_step", "curvature every step", 1.0),
    ("interval", "every 10 steps", 0.6),
    ("plain", "step without curvature work", 0.3),
)


def plot_costs(record: tables.Record, path: Path) -> Path:
    """Bars of the three kinds of step, a panel a workload, methods downwards."""
    names = tables.workloads(record)
    with style():
        figure, axes = panels(len(names), share_y=False, size=(4.4, 3.6))
        for axis, workload in zip(axes, names, strict=True):
            _bars(axis, record, workload)
        handles = [
            axes[0].barh([0], [0], color="#444444", alpha=alpha, label=label)
            for _, label, alpha in KINDS
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(KINDS))
        figure.suptitle("CPU time of a step, as a multiple of SGD's", fontweight="bold")
        return save(figure, path, dpi=110)


def _bars(axis: Axes, record: tables.Record, workload: str) -> None:
    rows = [m for m in tables.methods(record) if tables.of(record, workload, m).plain is not None]
    for place, method in enumerate(reversed(rows)):
        found = tables.of(record, workload, method)
        for offset, (kind, _, alpha) in enumerate(KINDS):
            value = getattr(found, kind)
            if value is not None:
                axis.barh(
                    place + 0.27 * (1 - offset), value, 0.27, color=look(method).colour, alpha=alpha
                )
    labels = [look(method).label for method in reversed(rows)]
    axis.set_yticks(range(len(rows)), labels)
    axis.axvline(1, color="#333333", linestyle=":")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xticks([1, 2, 5, 10, 20, 50])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(0.8, None)
    axis.grid(axis="y", visible=False)
    axis.set_title(TABLE[workload].label, fontsize="medium")


def plot_growth(record: tables.Record, path: Path) -> Path:
    """Cost of a step against batch size and width, for fop's own."""
    measured = {key.split("/")[0] for key in record["cells"]}
    sweeps = {
        title: found
        for title, sweep in SWEEPS.items()
        if (found := {size: w for size, w in sweep.items() if w.name in measured})
    }
    with style():
        figure, axes = panels(len(sweeps), share_y=False)
        for axis, (title, sweep) in zip(axes, sweeps.items(), strict=True):
            for method in OURS:
                for kind, line in (("every_step", "-"), ("interval", "--"), ("plain", ":")):
                    points = {
                        size: getattr(tables.of(record, workload.name, method), kind)
                        for size, workload in sweep.items()
                    }
                    points = {size: value for size, value in points.items() if value is not None}
                    shown = look(method)
                    axis.plot(
                        list(points), list(points.values()), line,
                        color=shown.colour, marker=shown.marker,
                    )  # fmt: skip
            name, _, label = title.rpartition(": ")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(list(sweep))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            plain_log_ticks(axis)
            axis.set_xlabel(label)
            axis.set_title(name)
        axes[0].set_ylabel("multiple of SGD's step")
        method_legend(figure, OURS)
        figure.suptitle("Solid: curvature every step; dashed: every 10; dotted: none", fontsize=12)
        return save(figure, path, dpi=110)
