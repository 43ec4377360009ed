"""What all plots share: type sizes, panels, the legend beside the data, and saving.

Figures are built without pyplot, so that drawing touches no global state of the caller's.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from fop_bench.files import atomic_open
from fop_bench.style import look, order
from fop_bench.tables import is_fraction

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 13,
    "legend.fontsize": 12,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
    "legend.frameon": False,
}
INK = "#333333"
PANEL = (3.7, 3.2)  # inches
COLUMNS = 3


def style() -> Any:
    """The context in which every figure is drawn."""
    return matplotlib.rc_context(cast(Any, STYLE))


def panels(
    count: int,
    *,
    share_x: bool = False,
    share_y: bool = True,
    size: tuple[float, float] = PANEL,
    columns: int = COLUMNS,
) -> tuple[Figure, list[Axes]]:
    """A figure of small multiples, sharing their vertical axis unless told otherwise."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    width = max(columns * size[0], 6.0) + 0.6
    figure = Figure(figsize=(width, rows * size[1] + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=share_y, sharex=share_x, squeeze=False)
    axes = list(grid.flat)
    for empty in axes[count:]:
        empty.set_visible(False)
    for axis in axes[:count]:
        axis.tick_params(labelbottom=True)
    return figure, axes[:count]


def method_legend(figure: Figure, methods: Iterable[str], extra: Sequence[Line2D] = ()) -> None:
    """One legend for all panels, below them, where it can cover nothing."""
    handles = [method_handle(method) for method in sorted(set(methods), key=order)]
    handles.extend(extra)
    if handles:
        width = figure.get_size_inches()[0]
        columns = max(1, min(len(handles), int(width // 1.75)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def method_handle(method: str) -> Line2D:
    shown = look(method)
    return Line2D(
        [],
        [],
        color=shown.colour,
        linestyle=shown.line,
        marker=shown.marker,
        label=plain(shown.label),
    )


def target_line(axis: Axes, value: float, *, vertical: bool = False) -> Line2D:
    """The dotted line of the target; returns a handle for the legend."""
    draw = axis.axvline if vertical else axis.axhline
    draw(value, color=INK, linestyle=":", linewidth=1.6, zorder=1)
    return Line2D([], [], color=INK, linestyle=":", linewidth=1.6, label="target")


def batch_axis(axis: Axes, sizes: Iterable[int]) -> None:
    """A logarithmic axis with exactly the batch sizes that were run as ticks."""
    ticks = sorted(set(sizes))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_xlabel("batch size")
    if len(ticks) == 1:
        axis.set_xlim(ticks[0] / 2, ticks[0] * 2)


def plain_log_ticks(axis: Axes) -> None:
    """Readable labels (1, 10, 100) on a logarithmic vertical axis."""
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def percent_axis(axis: Axes, metric: str, *, horizontal: bool = False) -> None:
    """Percentages for accuracies and errors, plain numbers for anything else."""
    scaled = is_fraction(metric)
    label = plain(f"test {metric} (%)" if scaled else f"test {metric}")
    one = axis.xaxis if horizontal else axis.yaxis
    if scaled:
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    (axis.set_xlabel if horizontal else axis.set_ylabel)(label)


def titled(figure: Figure, title: str) -> None:
    figure.suptitle(plain(title), fontsize=14, fontweight="bold")


def plain(text: str) -> str:
    """Text from a record, in which matplotlib must not look for mathematics."""
    return text.replace("$", r"\$")


def png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure as PNG; the same records give the same bytes."""
    stream = io.BytesIO()
    with style():
        figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()


def save(figure: Figure, path: Path, dpi: int = 200) -> Path:
    """Write the figure (PNG, PDF or SVG by its suffix); the file appears complete or not at all."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "pdf", "svg"):
        raise ValueError(f"path: expected a name ending in .png, .pdf or .svg, found {path.name!r}")
    stream = io.BytesIO()
    with style():
        figure.savefig(stream, format=kind, dpi=dpi)
    with atomic_open(path, "wb") as out:
        out.write(stream.getvalue())
    return path
