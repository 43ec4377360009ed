"""Copies of an optimizer stay with their ranks, or say why they can't."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from tests.common import same, snapshot
from tests.distributed.launch import Check, Rank, run
from tests.distributed.models import alone, assert_same, batches, net

# With halves="samples" each rank has two halves of its own, with "ranks" the even and odd ones.
SETTINGS: list[dict[str, Any]] = [{}, {"strategy": "all", "damping_mode": "exact"}]


def steps(rank: Rank, module: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        x, y = batches([4] * rank.ranks, seed=step)[rank.index]
        cross_entropy(module(x), y).backward()
        optimizer.step()


def copied(pair: Any, how: str) -> Any:
    return copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))


def copies_train_on_alike_with_and_without_ddp(rank: Rank) -> None:
    for wrapped in (True, False):
        for how in ("deepcopy", "pickle"):
            for settings in SETTINGS:
                model = net()
                module = DistributedDataParallel(model) if wrapped else model
                optimizer = fop.FOP(module, **settings)
                steps(rank, module, optimizer, 0, 3)
                twin, twin_optimizer = copied((module, optimizer), how)
                steps(rank, module, optimizer, 3, 6)
                steps(rank, twin, twin_optimizer, 3, 6)
                inner = twin.module if wrapped else twin
                assert same(snapshot(inner), snapshot(model)), (wrapped, how, settings)


def a_group_of_its_own_is_kept_by_copies_and_refused_by_pickle(rank: Rank) -> None:
    """Each rank on its own, so that sharing the step with the others would show."""
    model = net(seed=rank.index)
    optimizer = fop.FOP(model, process_group=rank.alone, halves="samples")
    steps(rank, model, optimizer, 0, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    steps(rank, model, optimizer, 3, 6)
    steps(rank, twin, twin_optimizer, 3, 6)
    assert same(snapshot(twin), snapshot(model))
    with pytest.raises(RuntimeError, match=r"process_group of its own can't be pickled"):
        pickle.dumps(optimizer)
    module = DistributedDataParallel(net(), process_group=dist.new_group())
    wrapped = fop.FOP(module)
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default"):
        pickle.dumps(wrapped)


def a_part_of_the_state_does_not_go_elsewhere(rank: Rank) -> None:
    model = net()
    optimizer = fop.FOP(model)
    steps(rank, model, optimizer, 0, 2)
    everyone: list[Any] = [None] * rank.ranks
    dist.all_gather_object(everyone, pickle.dumps((model, optimizer)))
    if rank.ranks > 1:
        text = f"was pickled on rank {(rank.index + 1) % rank.ranks} of {rank.ranks}"
        with pytest.raises(RuntimeError, match=re.escape(text)):
            pickle.loads(everyone[(rank.index + 1) % rank.ranks])


def gradients_that_are_views_of_buckets_count_as_any_other(rank: Rank) -> None:
    """DDP puts its own views in the place of p.grad, with and without gradients set to None."""
    sizes = [4] * rank.ranks
    expected, _ = alone(rank, fop.FOP, sizes)
    for to_none in (True, False):
        for by_model in (True, False):
            model = net()
            module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = fop.FOP(module)
            for step in range(4):
                (module if by_model else optimizer).zero_grad(set_to_none=to_none)
                x, y = batches(sizes, seed=step)[rank.index]
                for part in (slice(0, 2), slice(2, 4)):
                    module.require_backward_grad_sync = part.stop == 4
                    (cross_entropy(module(x[part]), y[part]) / 2).backward()
                optimizer.step()
            assert_same(model, expected)


CHECKS: list[Check] = [
    copies_train_on_alike_with_and_without_ddp,
    a_group_of_its_own_is_kept_by_copies_and_refused_by_pickle,
    a_part_of_the_state_does_not_go_elsewhere,
    gradients_that_are_views_of_buckets_count_as_any_other,
]


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run(2, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_copies_on_ranks(check: Check, failures: dict[str, str]) -> None:
    assert check.__name__ not in failures, failures[check.__name__]


def test_a_copy_without_ranks_saves_and_loads() -> None:
    model = net()
    optimizer = fop.FOP(model)
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    twin, twin_optimizer = torch.load(buffer, weights_only=False)
    assert twin_optimizer.param_groups[0]["params"][0] is twin.first.weight
