"""R ranks take the step of one process on the same batch with the same halves, to round-off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from fop.linalg import STORAGE
from tests import FIXED, LIBRARY, oracles
from tests.common import distance, snapshot
from tests.distributed.launch import Check, Rank, run
from tests.distributed.models import (
    alone,
    assert_same,
    batches,
    in_parts,
    net,
    together,
)

KINDS = (fop.FOP, fop.KFAC)
# The library's own defaults, where tests have others.
SIZED: dict[str, Any] = {name: LIBRARY[fop.FOP][name] for name in FIXED}
DDP = (True, False)


def strategies(rank: Rank) -> list[object]:
    proper = [k for k in range(2, rank.ranks) if rank.ranks % k == 0]
    return ["owner", "all", *proper]


def sizes(rank: Rank) -> list[int]:
    return [4] * rank.ranks


def uneven(rank: Rank) -> list[int]:
    return [3, 4, 2, 5][: rank.ranks]


def every_strategy(rank: Rank) -> None:
    for kind in KINDS:
        expected, _ = alone(rank, kind, sizes(rank))
        for strategy in strategies(rank):
            for wrapped in DDP:
                found, _ = together(rank, kind, sizes(rank), wrapped=wrapped, strategy=strategy)
                assert_same(found, expected)


def packed_factors(rank: Rank) -> None:
    """As wide layers have them; the one process has dense ones."""
    for kind in KINDS:
        expected, _ = alone(rank, kind, sizes(rank))
        for overhead in (0, STORAGE.solve_overhead):  # by Cholesky factors, and by inverses
            with STORAGE.changed(packed_from=1, block=4, solve_overhead=overhead):
                for strategy in strategies(rank):
                    found, _ = together(rank, kind, sizes(rank), strategy=strategy)
                    assert_same(found, expected)


def every_rank_has_the_same_parameters(rank: Rank) -> None:
    for wrapped in DDP:
        found, _ = together(rank, fop.FOP, uneven(rank), wrapped=wrapped)
        flat = torch.cat([p.detach().reshape(-1) for p in found.parameters()])
        first = flat.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(flat, first)


def uneven_batches(rank: Rank) -> None:
    """Every example then carries its weight in the mean over ranks, as in ragged micro-batches."""
    for kind in KINDS:
        for wrapped in DDP:
            expected, _ = alone(rank, kind, uneven(rank))
            found, _ = together(rank, kind, uneven(rank), wrapped=wrapped)
            assert_same(found, expected)


def accumulation(rank: Rank) -> None:
    """Micro-batches under no_sync, with a synchronisation in each, and in a plain module."""
    # On one rank the halves of two micro-batches are not those of the whole batch.
    for kind in KINDS if rank.ranks > 1 else (fop.KFAC,):
        expected, _ = alone(rank, kind, sizes(rank))
        for wrapped, synchronise in ((True, False), (True, True), (False, False)):
            found, _ = together(
                rank, kind, sizes(rank), wrapped=wrapped, parts=2, synchronise=synchronise
            )
            assert_same(found, expected)


def clipping(rank: Rank) -> None:
    """The averaged gradient is clipped before step(); a fixed beta shows the difference's scale."""
    for settings in ({}, {"beta": 0.4, "eta": 1.0, "kl_clip": None}):
        expected, _ = alone(rank, fop.FOP, uneven(rank), clip=0.05, **settings)
        found, _ = together(rank, fop.FOP, uneven(rank), clip=0.05, **settings)
        assert_same(found, expected)


def settings(rank: Rank) -> None:
    for chosen in (
        {"damping_mode": "exact", "total": "sum"},
        {"sharing": "reduce", "weight_decay": 0.01, "nesterov": True},
        {"fisher": "exact", "fallback": "adamw"},
        {"norms": "unitwise", "beta": 0.3},
        {"max_factor_size": 20, "update_every": 3},
        {"curvature": "identity"},
        {"update_every": {"steps": 3, "stagger": True}},
    ):
        expected, _ = alone(rank, fop.FOP, uneven(rank), **chosen)
        for wrapped in DDP:
            found, _ = together(rank, fop.FOP, uneven(rank), wrapped=wrapped, **chosen)
            assert_same(found, expected)


class Attentive(nn.Module):
    """Packed attention (four layers in two parameters and a bias that three share) on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1).unflatten(1, (4, 8))
        return self.last(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


def attention(rank: Rank) -> None:
    """Layers that are rows of one parameter may have different owners."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Attentive().double()

    for kind in KINDS:
        expected, _ = alone(rank, kind, uneven(rank), make=make)
        for wrapped in DDP:
            for strategy in ("owner", "all"):
                options = {"make": make, "wrapped": wrapped, "strategy": strategy}
                found, _ = together(rank, kind, uneven(rank), **options)
                assert_same(found, expected)


def ekfac(rank: Rank) -> None:
    """Every rank must have the basis that squares are measured in.

    The model has fewer features than examples: in a null space the basis would be arbitrary.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        pool = nn.AdaptiveAvgPool2d(1)
        layers = (nn.Conv2d(2, 4, 2), nn.Tanh(), pool, nn.Flatten(), nn.Linear(4, 3))
        return nn.Sequential(*layers).double()

    settings = {"curvature": "ekfac", "update_every": 2, "make": make}
    counts = [12 + size for size in uneven(rank)]
    expected, _ = alone(rank, fop.FOP, counts, **settings)
    for wrapped in DDP:
        found, _ = together(rank, fop.FOP, counts, wrapped=wrapped, strategy="all", **settings)
        assert_same(found, expected)
    if rank.ranks > 1:
        with pytest.raises(ValueError, match='use strategy="all"'):
            fop.FOP(net(), curvature="ekfac")


class Positions(nn.Module):
    """A position embedding, looked up once for the whole batch: it has no examples to show."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.last = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1).unflatten(1, (8, 4))
        return self.last((rows + self.positions(torch.arange(8).unsqueeze(0))).tanh().mean(1))


def a_layer_that_is_disabled(rank: Rank) -> None:
    """It follows its plain gradient, on all ranks alike."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Positions().double()

    expected, _ = alone(rank, fop.FOP, sizes(rank), make=make)
    for wrapped in DDP:
        found, optimizer = together(rank, fop.FOP, sizes(rank), make=make, wrapped=wrapped)
        assert "positions" not in fop.diagnostics(optimizer)
        assert_same(found, expected)


def a_layer_that_one_rank_disables(rank: Rank) -> None:
    """All ranks agree on it, and it follows the average of their plain gradients."""

    def changed(model: nn.Module, index: int) -> nn.Module:
        last: Any = model.last
        forward = last.forward
        if index == rank.ranks - 1:
            last.forward = lambda x: 2 * forward(x)
        return model

    expected: list[torch.Tensor] = []
    for index, (x, y) in enumerate(batches(sizes(rank))):
        plain = changed(net(), index)
        cross_entropy(plain(x), y).backward()
        grads = [p.grad / rank.ranks for p in plain.last.parameters()]
        expected = [a + b for a, b in zip(expected, grads, strict=True)] if expected else grads
    for wrapped in DDP:
        model = net()
        module = DistributedDataParallel(model) if wrapped else model
        optimizer = fop.FOP(module, lr=0.1, momentum=0.0, kl_clip=None, fallback="sgd")
        changed(model, rank.index)
        before = [p.detach().clone() for p in model.last.parameters()]
        x, y = batches(sizes(rank))[rank.index]
        cross_entropy(module(x), y).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "some layers use the fallback optimizer")
            optimizer.step()
        steps = [(old - p) / 0.1 for old, p in zip(before, model.last.parameters(), strict=True)]
        assert distance(steps, expected) < 1e-10
        for step in range(1, 12):  # on one of these curvature is refreshed
            optimizer.zero_grad()
            x, y = batches(sizes(rank), seed=step)[rank.index]
            cross_entropy(module(x), y).backward()
            optimizer.step()
        assert "last" not in fop.diagnostics(optimizer)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        largest = mine.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        assert torch.equal(mine, largest)


def more_ranks_than_layers(rank: Rank) -> None:
    def one_layer() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double()

    expected, _ = alone(rank, fop.FOP, sizes(rank), make=one_layer)
    for wrapped in DDP:
        found, _ = together(rank, fop.FOP, sizes(rank), make=one_layer, wrapped=wrapped)
        assert_same(found, expected)


def other_halves(rank: Rank) -> None:
    """halves="samples" on every rank is the split of each micro-batch on one process."""
    expected, _ = alone(rank, fop.FOP, sizes(rank), halves="samples")
    for wrapped in DDP:
        found, _ = together(rank, fop.FOP, sizes(rank), halves="samples", wrapped=wrapped)
        assert_same(found, expected)


def the_dense_reference(rank: Rank) -> None:
    """Against float64 matrices that share no code with the library."""
    if rank.ranks == 1:
        return
    counts = uneven(rank)
    model = net()
    # Parameters in no layer follow SGD there, too.
    reference = oracles.ReferenceOptimizer(model, oracles.Reference(halves="microbatches"))
    wrapped = DistributedDataParallel(model)
    optimizer = fop.FOP(wrapped)
    for step in range(3):
        data = batches(counts, seed=step)
        optimizer.zero_grad()
        x, y = data[rank.index]
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        reference.step(data, oracles.cross_entropy, weights=[1 / rank.ranks] * rank.ranks)
    assert distance(snapshot(model), snapshot(reference.model)) < 1e-9


def sum_losses(rank: Rank) -> None:
    """Of a local sum, curvature is that of the examples; the gradient is the mean over ranks."""
    model, expected = net(), net()
    wrapped = DistributedDataParallel(model)
    optimizer = fop.FOP(wrapped, loss_reduction="sum")
    halves = "microbatches" if rank.ranks > 1 else "samples"
    reference = fop.FOP(expected, loss_reduction="sum", halves=halves, process_group=rank.alone)
    for step in range(4):
        data = batches(uneven(rank), seed=step)
        optimizer.zero_grad()
        x, y = data[rank.index]
        cross_entropy(wrapped(x), y, reduction="sum").backward()
        optimizer.step()
        reference.zero_grad()
        for x, y in data:
            cross_entropy(expected(x), y, reduction="sum").backward()
        for parameter in expected.parameters():
            parameter.grad.div_(rank.ranks)
        reference.step()
    assert_same(model, expected)


def an_optimizer_built_before_the_wrapper(rank: Rank) -> None:
    """As trainers have it: they wrap the model later, accumulate without synchronising and clip."""
    if rank.ranks == 1:  # halves of micro-batches are not those of a batch
        return
    sizes = [4] * rank.ranks
    options = {"kl_clip": 1e-2, "momentum": 0.7, "weight_decay": 1e-2}
    for kind in (fop.FOP, fop.KFAC):
        expected, _ = alone(rank, kind, sizes, clip=0.1, **options)
        model = net()
        optimizer = kind(model, **options)
        module = DistributedDataParallel(model)
        for step in range(4):
            optimizer.zero_grad()
            parts = in_parts(batches(sizes, seed=step)[rank.index], 2)
            for number, (x, y) in enumerate(parts):
                module.require_backward_grad_sync = number == 1
                (cross_entropy(module(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        assert_same(model, expected)


def a_layer_that_some_ranks_do_not_use(rank: Rank) -> None:
    """Odd ranks skip the second layer: to it, their examples do not exist."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            x = self.a(x).tanh()
            return self.c(self.b(x).tanh() if use else x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Gated().double()

    def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(100 * step + index)
        return torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))

    expected = make()
    halves = "microbatches" if rank.ranks > 1 else "samples"
    reference = fop.FOP(expected, halves=halves, process_group=rank.alone, kl_clip=1e-2)
    for step in range(4):
        reference.zero_grad()
        for index in range(rank.ranks):
            x, y = batch(step, index)
            (cross_entropy(expected(x, index % 2 == 0), y) / rank.ranks).backward()
        if rank.ranks > 1:
            # Alternate passes of layer b are not those of the others.
            recorded = reference._engine.layers[1].recorder.sample().statistics
            recorded.difference = None
            recorded.first, recorded.second = 4 * ((rank.ranks + 1) // 2), 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "layer 'b' saw .* examples in the two halves")
            reference.step()
    for wrapped in DDP:
        model = make()
        module = DistributedDataParallel(model, find_unused_parameters=True) if wrapped else model
        optimizer = fop.FOP(module, kl_clip=1e-2)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step, rank.index)
            cross_entropy(module(x, rank.index % 2 == 0), y).backward()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "layer 'b' saw .* examples in the two halves")
                optimizer.step()
        assert_same(model, expected)


# One start of the processes for all of them.
def sized_steps(rank: Rank) -> None:
    """As they are by default: all ranks find the coefficients of one process."""
    for own in (sizes(rank), uneven(rank)):
        expected, optimizer = alone(rank, fop.FOP, own, **SIZED)
        assert optimizer.last_step.rule == "model", optimizer.last_step
        for strategy in strategies(rank):
            for wrapped in DDP:
                found, other = together(
                    rank, fop.FOP, own, wrapped=wrapped, strategy=strategy, **SIZED
                )
                assert other.last_step.rule == "model", other.last_step
                assert_same(found, expected, 1e-6)


CHECKS: tuple[Check, ...] = (
    sized_steps,
    packed_factors,
    every_strategy,
    every_rank_has_the_same_parameters,
    uneven_batches,
    accumulation,
    clipping,
    settings,
    attention,
    ekfac,
    a_layer_that_is_disabled,
    a_layer_that_one_rank_disables,
    more_ranks_than_layers,
    other_halves,
    the_dense_reference,
    sum_losses,
    an_optimizer_built_before_the_wrapper,
    a_layer_that_some_ranks_do_not_use,
)


# What depends on how many ranks there are: an odd number has unequal halves, and four can share
# curvature out by twos.
ODD: tuple[Check, ...] = (
    every_rank_has_the_same_parameters,
    uneven_batches,
    accumulation,
    the_dense_reference,
    a_layer_that_some_ranks_do_not_use,
)
BY_TWOS: tuple[Check, ...] = (every_strategy, uneven_batches, sized_steps)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "checks"), [(1, CHECKS), (2, CHECKS), (3, ODD), (4, BY_TWOS)])
def test_ranks_equal_one_process(ranks: int, checks: tuple[Check, ...]) -> None:
    failures = run(ranks, checks)
    assert not failures, "\n".join(f"{check}: {text}" for check, text in failures.items())
