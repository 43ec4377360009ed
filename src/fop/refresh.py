"""How curvature is refreshed: when it is due, and how a batch becomes averages and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from fop.capture import Statistics, gradient_ratios
from fop.context import Context
from fop.curvature import Curvature
from fop.curvature.base import LAST_SIZE, CurvatureState, RefreshJob
from fop.distributed import Batch, Counts
from fop.layer import Layer
from fop.linalg import all_finite, on_host
from fop.rules import Feedback
from fop.scaling import to_means

Fresh = list[tuple[Layer, Statistics]]


def refresh(
    context: Context,
    layers: Sequence[Layer],
    counts: Mapping[Layer, Counts],
    batch: Batch,
) -> tuple[list[Layer], bool]:
    """Refresh these layers' curvature, each on its owner.

    Returns those where that failed; and whether moments are non-finite: then none is refreshed.
    """
    ranks, messages = context.ranks, context.messages
    empty = [layer for layer in layers if 0 in (counts[layer].first, counts[layer].second)]
    if empty and context.settings.projects:
        messages.no_halves(empty, counts[empty[0]].first, counts[empty[0]].second)
    fresh: Fresh = []
    bounds: list[Tensor] = []
    for layer in layers:
        if ranks.owns(layer):
            moments = batch.moments(layer, counts[layer])
            _to_means(context, layer, moments)
            bounds += moments.bounds()
            fresh.append((layer, moments))
        layer.drop_moments()
    # Sums that are finite on each rank may not be so together, or once they are scaled.
    overflow = bool(bounds) and not bool(all_finite(bounds))
    # All are refreshed together, for one host read, unless that costs nothing. Then one at a time:
    # its sums go and a decomposition replaces its predecessor before the next needs memory.
    at_once = 1 if all(map(on_host, bounds)) else len(fresh)
    bounds.clear()  # views of the sums
    if ranks.any_rank([overflow])[0]:
        return [], True
    shares = {x: share for x in layers if (share := x.recorder.take_unaccounted()) is not None}
    if shares:
        messages.unaccounted(shares)
    failed: list[Layer] = []
    while fresh:
        some, fresh[:at_once] = fresh[:at_once], []
        failed += _update_and_refresh(context, some)
    if failed:
        messages.not_inverted(failed)
    return failed, False


def _to_means(context: Context, layer: Layer, moments: Statistics) -> None:
    # Extra passes run under no loss scale, unless they have taken it over from the loss.
    settings, plan, scale = context.settings, layer.recorder.plan, None
    if (plan.empirical or plan.scaled_by_loss) and context.loss_scale is not None:
        if context.loss_scale.measured and layer.recorder.gradients.touched():
            context.messages.unknown_scale()
        scale = context.loss_scale.of_captured(gradient_ratios([layer.recorder.gradients])[0])
    to_means(
        moments,
        sharing=settings.sharing,
        reduction=settings.loss_reduction,
        extra_passes=not plan.empirical,
        scaled_by_loss=plan.scaled_by_loss,
        ranks=context.ranks.size,
        loss_scale=scale,
    )


def _update_and_refresh(context: Context, fresh: Fresh) -> list[Layer]:
    """Batches into moving averages, and those into metrics; the layers where that failed."""
    settings, state = context.settings, context.state
    uses = settings.interval(context.number)  # steps that a metric will serve on
    jobs: dict[Curvature, list[tuple[Layer, RefreshJob]]] = {}
    for layer, moments in fresh:
        state[layer.weight]  # exists from now on: state is a defaultdict, as torch's
        own = layer.state_in(state)
        layer.curvature.update(own, moments, settings.factor_decay)
        damping = _damping(context, layer, own)
        job = RefreshJob(own, layer.sample.shape, damping, uses)
        jobs.setdefault(layer.curvature, []).append((layer, job))
    failed: list[Layer] = []
    for curvature, pairs in jobs.items():
        done = curvature.refresh([job for _, job in pairs])
        failed += [layer for (layer, _), fine in zip(pairs, done, strict=True) if not fine]
    for layer in failed:
        _restart(layer, dict(fresh)[layer], layer.state_in(state))
    return failed


def _damping(context: Context, layer: Layer, own: CurvatureState) -> float:
    last, index = context.last.get(layer, (None, 0))
    feedback = Feedback(
        layer.name,
        context.number,
        context.options[layer.weight]["damping"],
        own.get("damping"),
        lambda: layer.curvature.mean_eigenvalue(own, layer.sample.shape),
        lambda: None if last is None else last.of_layer(index),
    )
    return float(context.settings.damping_rule(feedback))


def _restart(layer: Layer, moments: Statistics, own: CurvatureState) -> None:
    """Start moving averages again that hold something non-finite, which would never fade."""
    entries = layer.curvature.entries
    averages = [key for key in entries if key + LAST_SIZE in entries and key in own]
    if not bool(all_finite([own[key] for key in averages])):
        for key in averages:
            del own[key]
        layer.curvature.update(own, moments, 0.0)


@lru_cache(maxsize=32)
def phases(costs: tuple[float, ...], interval: int) -> tuple[int, ...]:
    """For each layer, by how many steps its refreshes come after the start of an interval.

    Work is spread evenly: costliest first, each to the step with the least work so far; of equal
    ones, the first. A pure function of costs and interval: a resumed run finds the same.
    """
    work: dict[int, float] = dict.fromkeys(range(min(interval, len(costs))), 0.0)
    chosen = [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: (-costs[layer], layer)):
        chosen[layer] = min(work, key=lambda phase: (work[phase], phase))
        work[chosen[layer]] += costs[layer]
    return tuple(phase * interval // max(len(work), 1) for phase in chosen)
