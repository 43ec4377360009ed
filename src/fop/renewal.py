"""How a batch's raw sums become factors, are taken into moving averages, and those into metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fop.block import Block, State
from fop.capture import Statistics
from fop.curvature import Curvature
from fop.curvature.base import RefreshJob
from fop.linalg import all_finite, on_host
from fop.scaling import factor_scales, square_scale

Fresh = list[tuple[Block, Statistics]]


def make_factors(
    sums: Statistics, sharing: str, reduction: str, ranks: int, scale: Tensor | None
) -> None:
    """Make raw sums Kronecker factors, in place; `scale` undoes that of mixed precision."""
    of_inputs, of_outputs = factor_scales(
        examples=sums.examples, rows=sums.rows, sharing=sharing, reduction=reduction, ranks=ranks
    )
    moment_of_inputs, moment_of_outputs = sums.moments
    moment_of_inputs.mul_(of_inputs)
    if scale is not None:
        outputs = moment_of_outputs.values
        quadratic = [outputs] if sums.squares is None else [outputs, sums.squares]
        torch._foreach_mul_(quadratic, scale.to(outputs) ** 2)  # first: it only shrinks
    moment_of_outputs.mul_(of_outputs)
    if sums.squares is not None:
        sums.squares.mul_(square_scale(examples=sums.examples, reduction=reduction, ranks=ranks))


def renew(
    fresh: Fresh,
    decay: float,
    uses: int,
    options: Mapping[Tensor, Mapping[str, Any]],
    state: State,
) -> list[Block]:
    """Factors into moving averages, and those into metrics; the layers where that failed.

    `uses` is on how many steps a metric will serve. The list of factors is emptied.
    """
    failed: list[Block] = []
    for some in _rounds(fresh):
        jobs: dict[Curvature, list[tuple[Block, RefreshJob]]] = {}
        for block, sums in some:
            state[block.weight]  # exists from now on
            own = block.state_in(state)
            block.curvature.absorb(own, *sums.moments, decay)
            if sums.squares is not None:
                block.curvature.absorb_squares(own, sums.squares, decay)
            job = RefreshJob(own, block.shape, options[block.weight]["damping"], uses)
            jobs.setdefault(block.curvature, []).append((block, job))
        unsuccessful = []
        for curvature, pairs in jobs.items():
            done = curvature.refresh([job for _, job in pairs])
            unsuccessful += [b for (b, _), fine in zip(pairs, done, strict=True) if not fine]
        _restart(unsuccessful, dict(some), state)
        failed += unsuccessful
    return failed


def _rounds(fresh: Fresh) -> Iterator[Fresh]:
    """What to renew together: all, for one host read, unless that costs nothing.

    One at a time, sums go and a decomposition replaces its predecessor before the next needs
    memory.
    """
    one_by_one = all(on_host(block.weight) for block, _ in fresh)
    while fresh:
        count = 1 if one_by_one else len(fresh)
        some, fresh[:count] = fresh[:count], []
        yield some


def _restart(failed: list[Block], fresh: Mapping[Block, Statistics], state: State) -> None:
    """Start moving averages anew that hold something not finite, which would never fade."""
    for block in failed:
        inputs, outputs = fresh[block].moments
        batch = {"input_factor": inputs.values, "output_factor": outputs.values}
        own = block.state_in(state)
        if not bool(all_finite([own[key] for key in batch])):
            own.update({key: values.clone() for key, values in batch.items()})
