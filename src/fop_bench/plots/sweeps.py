"""Best metric against a setting (damping, update interval, ...), and the beta/eta ablation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fop_bench.plots.canvas import (
    method_legend,
    panels,
    percent_axis,
    plain,
    style,
    target_line,
    titled,
)
from fop_bench.records import Run
from fop_bench.style import look, order, value_text
from fop_bench.summary import Spread, settings, variant_order

TITLES = {
    "damping": "damping λ",
    "update_every": "curvature update interval (steps)",
    "kl_clip": "KL clip",
    "lr": "learning rate at the base batch",
}
# KFAC is the pair (1, 0); FOP adapts both unless told otherwise.
DEFAULT_PAIR: dict[str, dict[str, Any]] = {
    "kfac": {"eta": 1.0, "beta": 0.0},
    "kfac-2x": {"eta": 1.0, "beta": 0.0},
    "fop": {"eta": "adaptive", "beta": "adaptive"},
    "fop-sum": {"eta": "adaptive", "beta": "adaptive"},
}
Samples = dict[str, dict[Any, list[float]]]  # method -> setting -> best metric of each seed


def sweep(runs: Sequence[Run], parameter: str) -> Figure:
    """Best metric against ``parameter``: a panel for each batch size, a line for each method.

    Points are means over seeds, bars reach from the smallest to the largest, the target is dotted.
    """
    having = [run for run in runs if parameter in settings(run)]
    if not having:
        raise ValueError(f"parameter: no run has a setting {parameter!r} in its configuration")
    with style():
        batches = sorted({int(run.meta["batch_size"]) for run in having})
        figure, axes = panels(len(batches), share_x=True)
        values = sorted({settings(run)[parameter] for run in having}, key=_by_size)
        for axis, batch in zip(axes, batches, strict=True):
            samples: Samples = defaultdict(lambda: defaultdict(list))
            for run in having:
                if int(run.meta["batch_size"]) == batch:
                    samples[run.meta["method"]][settings(run)[parameter]].append(run.best())
            _draw_lines(axis, samples, values)
            axis.set_title(f"batch size {batch:,}")
            axis.set_xlabel(plain(TITLES.get(parameter, parameter)))
            handle = target_line(axis, float(having[0].meta["target"]))
        percent_axis(axes[0], having[0].meta["metric"])
        method_legend(figure, (run.meta["method"] for run in having), [handle])
        titled(figure, _title(having))
    return figure


def _draw_lines(axis: Axes, samples: Samples, values: list[Any]) -> None:
    """Numbers on a number line (logarithmic from a decade on), words evenly spaced."""
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    place = {v: float(v) if numeric else float(i) for i, v in enumerate(values)}
    if numeric and values[0] > 0 and values[-1] / values[0] >= 10:
        axis.set_xscale("log")
    if not numeric:
        axis.set_xticks(list(place.values()), [plain(value_text(v)) for v in values])
    for method in sorted(samples, key=order):
        shown = look(method)
        points = [
            (place[v], Spread(tuple(samples[method][v]))) for v in values if v in samples[method]
        ]
        points = [(x, s) for x, s in points if math.isfinite(s.mean)]
        axis.errorbar(
            [x for x, _ in points],
            [s.mean for _, s in points],
            yerr=_bars([s for _, s in points]),
            color=shown.colour,
            linestyle=shown.line,
            marker=shown.marker,
            capsize=3,
            elinewidth=1.2,
        )


def ablation(runs: Sequence[Run]) -> Figure:
    """Best metric for each pair of beta and eta, a panel for each batch size: one dot a pair.

    KFAC, which is beta 0 and eta 1, stands first where it was run. Dots and not
    bars, since the interesting differences are small and a bar has to start at zero.
    """
    lines: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[tuple[str, str], Any] = {}
    for run in runs:
        chosen, method = settings(run), run.meta["method"]
        if method not in DEFAULT_PAIR:
            continue
        eta, beta = (chosen.get(k, DEFAULT_PAIR[method][k]) for k in ("eta", "beta"))
        name = plain(f"η {value_text(eta)}, β {value_text(beta)}")
        ranks[method, name] = (order(method), variant_order((("eta", eta), ("beta", beta))))
        lines[method, name][int(run.meta["batch_size"])].append(run.best())
    if not lines:
        raise ValueError(
            "runs: expected runs of fop or kfac, which have a beta and an eta; found none"
        )
    keys = sorted(lines, key=lambda key: ranks[key], reverse=True)
    batches = sorted({batch for by_batch in lines.values() for batch in by_batch})
    with style():
        figure, axes = panels(len(batches), size=(4.4, 0.42 * len(keys) + 0.9))
        for axis, batch in zip(axes, batches, strict=True):
            for place, (method, name) in enumerate(keys):
                values = Spread(tuple(lines[method, name].get(batch, ())))
                if values.n and math.isfinite(values.mean):
                    axis.errorbar(
                        values.mean,
                        place,
                        xerr=_bars([values]),
                        color=look(method).colour,
                        marker=look(method).marker,
                        capsize=3,
                    )
            axis.set_title(f"batch size {batch:,}")
            percent_axis(axis, runs[0].meta["metric"], horizontal=True)
            handle = target_line(axis, float(runs[0].meta["target"]), vertical=True)
        axes[0].set_yticks(range(len(keys)), [f"{look(m).label}: {name}" for m, name in keys])
        axes[0].set_ylim(-0.6, len(keys) - 0.4)
        method_legend(figure, (), [handle])
        titled(figure, _title(runs))
    return figure


def _bars(spreads: list[Spread]) -> list[list[float]]:
    """Distances from the mean down to the smallest and up to the largest value."""
    return [[s.mean - min(s.values) for s in spreads], [max(s.values) - s.mean for s in spreads]]


def _by_size(value: Any) -> list[tuple[bool, float, str]]:
    return variant_order((("", value),))


def _title(runs: Sequence[Run]) -> str:
    return ", ".join(sorted({str(run.meta["workload"]) for run in runs}))
