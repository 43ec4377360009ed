"""The loss surface around a point with each method's step as an arrow (the paper's Figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from fop_bench.plots.canvas import plain, style, titled
from fop_bench.style import look, order

if TYPE_CHECKING:
    from fop_bench.landscape import Landscape, Step

Grid = np.ndarray[Any, np.dtype[np.float64]]
STAR = "#117733"
REACH = 0.62  # an arrow's share of the way from the centre to the edge, where it shows a direction


def landscape_contour(landscape: Landscape) -> Figure:
    """Contour lines of the loss from above, arrows from the centre, a star at the smallest loss."""
    with style():
        figure = Figure(figsize=(7.6, 6.9), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.add_subplot()
        losses = _shown(landscape)
        filled = axis.contourf(landscape.xs, landscape.ys, losses, 24, cmap="Greys", alpha=0.75)
        axis.contour(landscape.xs, landscape.ys, losses, 24, colors="#666666", linewidths=0.5)
        axis.plot(0, 0, "o", color="black", markersize=7, zorder=5)
        for step in _ordered(landscape):
            end = arrow_end(landscape, step)
            _arrow(axis, step, (0.0, 0.0), end)
            if step is best_step(landscape):
                _star(axis, *end)
        axis.grid(visible=False)
        axis.set_aspect("equal")
        axis.set_xlim(landscape.xs[0], landscape.xs[-1])
        axis.set_ylim(landscape.ys[0], landscape.ys[-1])
        axis.set_xlabel(plain(landscape.x_label))
        axis.set_ylabel(plain(landscape.y_label))
        bar = figure.colorbar(filled, ax=axis, shrink=0.85)
        bar.set_label("loss")
        titled(figure, f"{landscape.workload}, batch size {landscape.batch_size:,}")
        figure.legend(handles=_handles(landscape), loc="outside lower center", ncols=3)
        axis.set_title(_caption(landscape), fontsize=10.5)
    return figure


def landscape_3d(landscape: Landscape) -> Figure:
    """The same surface in three dimensions; arrows run on the surface."""
    with style():
        figure = Figure(figsize=(8.6, 7.4))
        FigureCanvasAgg(figure)
        axis: Any = figure.add_axes((0.0, 0.13, 0.97, 0.78), projection="3d", computed_zorder=False)
        losses = _shown(landscape)
        grid_x, grid_y = np.meshgrid(landscape.xs, landscape.ys)
        axis.plot_surface(
            grid_x, grid_y, losses, cmap="viridis", alpha=0.6, linewidth=0.25,
            edgecolor="#ffffff", rcount=60, ccount=60, zorder=1,
        )  # fmt: skip
        axis.set_xlabel(plain(landscape.x_label), labelpad=10)
        axis.set_ylabel(plain(landscape.y_label), labelpad=10)
        axis.set_zlabel("loss", labelpad=14)
        axis.view_init(elev=36, azim=-58)
        axis.set_box_aspect((1, 1, 0.75), zoom=1.05)
        for step in _ordered(landscape):
            path = _on_surface(landscape, losses, arrow_end(landscape, step))
            shown = look(step.method)
            axis.plot(*path, shown.line, color=shown.colour, linewidth=3, zorder=4)
            flat = _project(axis, path)
            _arrow(axis, step, flat[-4], flat[-1])
            if step is best_step(landscape):
                _star(axis, *flat[-1])
        centre = _on_surface(landscape, losses, (0.0, 0.0))[:, :1]
        axis.plot(*centre, "o", color="black", markersize=7, zorder=6)
        titled(figure, f"{landscape.workload}, batch size {landscape.batch_size:,}")
        figure.text(0.5, 0.925, _caption(landscape), ha="center", fontsize=10.5)
        figure.legend(handles=_handles(landscape), loc="lower center", ncols=3)
    return figure


def arrow_end(landscape: Landscape, step: Step) -> tuple[float, float]:
    """Where an arrow ends: at the step's end in a plane of steps, else as far as is easy to see.

    Almost nothing of a step lies in a random plane, so that its shadow there would be too short to
    see; all arrows get the same length and show the direction of the shadow alone.
    """
    length = math.hypot(step.x, step.y)
    if landscape.plane == "steps" or length == 0.0:
        return step.x, step.y
    scale = REACH * min(landscape.xs[-1], landscape.ys[-1]) / length
    return step.x * scale, step.y * scale


def best_step(landscape: Landscape) -> Step | None:
    """The step after which the loss is smallest."""
    finite = [step for step in landscape.steps if math.isfinite(step.loss)]
    return min(finite, key=lambda step: step.loss, default=None)


def _arrow(axis: Any, step: Step, start: Sequence[float], end: Sequence[float]) -> None:
    shown = look(step.method)
    axis.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.42,head_length=0.75",
            "color": shown.colour,
            "linestyle": shown.line,
            "linewidth": 3,
            "shrinkA": 0,
            "shrinkB": 0,
        },
        zorder=5,
    )


def _star(axis: Any, x: float, y: float) -> None:
    """On top of everything; in three dimensions at a place of the picture."""
    axis.annotate(
        "★", xy=(x, y), ha="center", va="center", fontsize=19, color=STAR, zorder=7,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip


def _shown(landscape: Landscape) -> Grid:
    """Losses with walls cut down, so that a divergence at the edge does not flatten the middle."""
    losses = np.array(landscape.losses, dtype=np.float64)
    finite = losses[np.isfinite(losses)]
    roof = float(np.quantile(finite, 0.98)) if finite.size else 1.0
    return np.clip(np.nan_to_num(losses, nan=roof, posinf=roof), None, roof)


def _on_surface(landscape: Landscape, losses: Grid, end: Sequence[float]) -> Grid:
    """Forty points on the surface from the centre to above ``end``: [x, y, loss] x points."""
    along = np.linspace(0.0, 1.0, 40)
    xs, ys = end[0] * along, end[1] * along
    heights = []
    for x, y in zip(xs, ys, strict=True):
        at_x = [float(np.interp(x, landscape.xs, row)) for row in losses]
        heights.append(float(np.interp(y, landscape.ys, at_x)))
    return np.stack([xs, ys, np.array(heights) + 0.015 * float(np.ptp(losses))])


def _project(axis: Any, path: Grid) -> list[tuple[float, float]]:
    """Places in space as places of the picture, for the view that the axis has now."""
    points = axis.get_proj() @ np.vstack([path, np.ones(path.shape[1])])
    return [(float(x / w), float(y / w)) for x, y, _, w in points.T]


def _ordered(landscape: Landscape) -> list[Step]:
    return sorted(landscape.steps, key=lambda step: order(step.method))


def _caption(landscape: Landscape) -> str:
    if landscape.plane == "steps":
        return "arrows: the steps themselves, seen in the plane of the first and the last"
    shares = sorted(100 * step.share for step in landscape.steps)
    low, high = f"{shares[0]:.1f}", f"{shares[-1]:.1f}"
    part = f"{low} %" if low == high else f"{low} to {high} %"
    return f"arrows: directions only; {part} of a step's length lies in this random plane"


def _handles(landscape: Landscape) -> list[Line2D]:
    start = Line2D([], [], color="black", marker="o", linestyle="none", markersize=7)
    start.set_label(f"start: loss {landscape.loss:.3f}")
    handles = [start]
    for step in _ordered(landscape):
        shown = look(step.method)
        line = Line2D([], [], color=shown.colour, linestyle=shown.line, linewidth=3)
        line.set_label(plain(f"{shown.label}: loss {step.loss:.3f}"))
        handles.append(line)
    star = Line2D([], [], color=STAR, marker="*", linestyle="none", markersize=14)
    star.set_label("smallest loss after a step")
    return [*handles, star]
