"""From the times of a cell's steps to the figures of the table. Pure: no clock, no torch.

A cell is what `measure.py` printed: steps [number, refreshes, seconds], SGD's seconds as the
reference, peak and state bytes, multiply-adds. Every time is a ratio to SGD's in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

INTERVAL = 10
FIRST_OF_WHOLE_INTERVALS = 5  # fop also refreshes on steps 1, 2 and 4

Cell = Mapping[str, Any]
Step = tuple[int, bool, float]


@dataclass(frozen=True)
class Figures:
    """One method on one workload. None where it was not, or could not be, measured."""

    every_step: float | None = None  # curvature refreshed on every step
    interval: float | None = None  # mean over an interval of ten steps
    plain: float | None = None  # a step that refreshes nothing
    worst: float | None = None  # worst step of an interval, against its mean
    peak_bytes: int | None = None
    state_bytes: int | None = None
    error: str | None = None


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float | None:
    """Median against median; None without times."""
    return median(seconds) / median(reference) if seconds else None


def of_kind(cell: Cell, *, refreshes: bool) -> list[float]:
    return [seconds for _, refreshing, seconds in cell["steps"] if refreshing == refreshes]


def whole_interval(steps: Sequence[Step], interval: int = INTERVAL) -> list[float] | None:
    """The median time of each place in an interval; None unless every place was seen."""
    places: dict[int, list[float]] = {}
    for number, _, seconds in steps:
        if number >= FIRST_OF_WHOLE_INTERVALS:
            places.setdefault(number % interval, []).append(seconds)
    if len(places) < interval:
        return None
    return [median(times) for times in places.values()]


def figures(cells: Mapping[int, Cell]) -> Figures:
    """Of the cells of one method on one workload, by their interval."""
    for cell in cells.values():
        if "error" in cell:
            return Figures(error=cell["error"])
    peak = max((cell["peak_bytes"] for cell in cells.values()), default=None)
    state = max((cell["state_bytes"] for cell in cells.values()), default=None)
    every = cells.get(1)
    every_step = None
    if every is not None:
        every_step = ratio([seconds for *_, seconds in every["steps"]], every["reference"])
    spread = cells.get(INTERVAL)
    if spread is None:
        return Figures(every_step=every_step, peak_bytes=peak, state_bytes=state)
    refresh = ratio(of_kind(spread, refreshes=True), spread["reference"])
    if every_step is None and not spread.get("staggered"):
        every_step = refresh  # the same work, on every step
    interval, worst = _over_interval(spread, refresh if refresh is not None else every_step)
    plain = None
    if not spread.get("staggered"):
        plain = ratio(of_kind(spread, refreshes=False), spread["reference"])
    return Figures(every_step, interval, plain, worst, peak, state)


def _over_interval(cell: Cell, refresh: float | None) -> tuple[float | None, float | None]:
    """Mean over the interval, and its worst step against that."""
    places = whole_interval(cell["steps"])
    if places is not None:
        mean = fmean(places)
        return mean / median(cell["reference"]), max(places) / mean
    plain = ratio(of_kind(cell, refreshes=False), cell["reference"])
    if plain is None or refresh is None or cell.get("staggered"):
        return None, None
    composed = (refresh + (INTERVAL - 1) * plain) / INTERVAL
    return composed, max(refresh, plain) / composed


def counted(cell: Cell) -> dict[str, float] | None:
    """Multiply-adds of the kinds of step, as far as they were counted."""
    found = cell.get("multiply_adds") or {}
    if not {"refresh", "plain"} <= found.keys():
        return None
    refresh, plain = found["refresh"], found["plain"]
    mean = (refresh + (INTERVAL - 1) * plain) / INTERVAL
    return {"every_step": refresh, "interval": mean, "plain": plain}
