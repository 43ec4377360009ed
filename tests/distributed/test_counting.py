"""Ranks agree on which layers have single examples, whatever each of them has seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from tests.common import CLASSES
from tests.distributed.launch import Check, Rank, run
from tests.distributed.models import assert_same
from tests.miniatures import FlatHead, LongSequenceFirst, Miniature, RowOfPositions, Windows

SGD = {"name": "sgd", "lr": 0.1}
COMMON = {"lr": 0.1, "momentum": 0.9, "fallback": SGD, "update_every": 4}
STEPS = 6


def trained(
    rank: Rank, make: Callable[[], Miniature], sizes: Sequence[int], *, wrapped: bool | None
) -> tuple[Miniature, Any]:
    """On all ranks, or (`wrapped=None`) in one process with a micro-batch for each."""
    model = make()
    skip = model.tables if model.twin else ()
    if wrapped is None:
        optimizer = fop.FOP(
            model, process_group=rank.alone, halves="microbatches", skip=skip, **COMMON
        )
        module: nn.Module = model
    else:
        module = DistributedDataParallel(model) if wrapped else model
        optimizer = fop.FOP(module, skip=skip, **COMMON)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, size in enumerate(sizes):
            if wrapped is None or index == rank.index:
                x, y = model.data(size, seed=10 * step + index)
                weight = 1 / len(sizes) if wrapped is None else 1.0
                (model.loss(module(x), y) * weight).backward()
        optimizer.step()
    return model, optimizer


def miniatures_equal_their_twins(rank: Rank) -> None:
    for kind in (FlatHead, LongSequenceFirst, Windows, RowOfPositions):
        for sizes in ((6, 4), (6, 6)):

            def make(kind: type[Miniature] = kind, twin: bool = False) -> Miniature:
                return kind(twin=twin)

            expected, _ = trained(rank, lambda: make(twin=True), sizes, wrapped=None)
            for wrapped in (True, False):
                found, _ = trained(rank, make, sizes, wrapped=wrapped)
                assert_same(found, expected, 1e-9)


def a_rank_with_one_example(rank: Rank) -> None:
    """It can't tell that positions are looked up for the whole batch; the other rank can."""
    sizes = (1, 6)
    expected, _ = trained(rank, lambda: RowOfPositions(twin=True), sizes, wrapped=None)
    for wrapped in (True, False):
        found, optimizer = trained(rank, RowOfPositions, sizes, wrapped=wrapped)
        [places] = [b for b in optimizer._engine.layers if b.name == "places"]
        assert (places.recorder.mismatch is None) is (rank.index == 0)
        assert places.recorder.disabled
        assert_same(found, expected, 1e-9)


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)
        self.double()

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return self.last(torch.tanh(self.first(x))[:rows])


def a_call_that_fits_no_more_on_one_rank(rank: Rank) -> None:
    """On a plain step the layer is not projected on any rank; later all of them disable it."""
    for wrapped in (True, False):
        for build in (fop.FOP, fop.KFAC):
            model = Selecting()
            module = DistributedDataParallel(model) if wrapped else model
            options: dict[str, Any] = {**COMMON, "kl_clip": None}
            optimizer = build(module, **options)
            for step in range(1, 7):
                torch.manual_seed(10 * step + rank.index)
                x, y = torch.randn(4, 5).double(), torch.randint(CLASSES, (4,))
                rows = 3 if rank.index == 1 and step == 3 else 4
                optimizer.zero_grad()
                cross_entropy(module(x, rows), y[:rows]).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    optimizer.step()
                _, block = optimizer._engine.layers
                if step == 3 and build is fop.FOP and optimizer._ranks.owns(block):
                    assert fop.diagnostics(optimizer, "last")["last"]["beta"] == 0.0
                # With KFAC nothing is captured on a plain step, so nothing is amiss.
                assert block.recorder.disabled is (build is fop.FOP and step >= 4)
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            first = flat.clone()
            torch.distributed.broadcast(first, 0)
            assert torch.equal(flat, first)


CHECKS: list[Check] = [
    miniatures_equal_their_twins,
    a_rank_with_one_example,
    a_call_that_fits_no_more_on_one_rank,
]


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return run(2, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks_agree(outcome: dict[str, str], check: Check) -> None:
    assert check.__name__ not in outcome, outcome[check.__name__]
