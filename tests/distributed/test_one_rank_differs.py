"""One rank has other settings, or no gradient: all ranks are told, and none waits or drifts."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from fop.distributed import group
from fop.linalg import treat_as_accelerator
from tests.common import same
from tests.distributed.launch import Check, Rank, run, start_context
from tests.distributed.models import batches, net
from tests.distributed.test_fsdp import shard, whole

# The values of both ranks.
SETTINGS: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.2),
    "momentum": (0.7, 0.9),
    "weight_decay": (0.0, 0.1),
    "nesterov": (True, False),
    "decoupled_weight_decay": (True, False),
    "damping": (0.001, 0.01),
    "damping_mode": ("factored", "exact"),
    "factor_decay": (0.9, 0.95),
    "update_every": (3, 4),
    "fisher": ("mc", "empirical"),
    "sharing": ("expand", "reduce"),
    "max_factor_size": (8, 64),
    "beta": ("adaptive", 0.5),
    "eta": ("adaptive", 0.5),
    "total": ("mean", "sum"),
    "kl_clip": (0.001, None),
    "loss_reduction": ("mean", "sum"),
    "halves": ("samples", "ranks"),
    "curvature": ("kronecker", "identity"),
    "fallback": ("sgd", "adamw"),
    "norms": ("fallback", "unitwise"),
    "strategy": ("owner", "all"),
    "skip": (["first"], ["first", "last"]),
    "param_groups": ([{"names": "last*", "lr": 0.1}], [{"names": "last*", "lr": 0.5}]),
}
# Where an option is named by its effect.
NAMED = {
    "param_groups": "lr of param_groups[0] is 0.1 on rank 0 and 0.5 on rank 1",
}


def test_every_option_is_among_the_compared() -> None:
    options = set(inspect.signature(fop.FOP).parameters)
    assert options - SETTINGS.keys() == {"model", "process_group"}


def refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def other_options_of_options_are_refused(rank: Rank) -> None:
    """Whatever a dict holds is compared; functions by their names."""
    both: list[tuple[str, Any, Any]] = [
        ("fallback", {"name": "sgd", "lr": 0.1}, {"name": "sgd", "lr": 0.3}),
        ("update_every", {"steps": 3, "stagger": True}, {"steps": 3, "stagger": False}),
        ("fisher", {"name": "mc"}, {"name": "mc", "likelihood": "gaussian"}),
    ]
    for option, *values in both:
        text = f"{option} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1"
        refused(lambda o=option, v=values[rank.index]: fop.FOP(net(), **{o: v}), text)
    pick = (min, max)[rank.index]
    text = "'model_output': the function min} on rank 0 and {'name': 'mc', 'model_output': the func"
    refused(lambda: fop.FOP(net(), fisher={"name": "mc", "model_output": pick}), text)


def other_settings_are_refused(rank: Rank) -> None:
    for option, values in SETTINGS.items():
        text = f"{option} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1"
        for module in (net(), DistributedDataParallel(net())):
            settings = {option: values[rank.index]}
            refused(lambda m=module, s=settings: fop.FOP(m, **s), NAMED.get(option, text))


def other_classes_functions_and_wrappers_are_refused(rank: Rank) -> None:
    kind = (fop.FOP, fop.KFAC)[rank.index]
    refused(lambda: kind(net()), "the optimizer is FOP on rank 0 and KFAC on rank 1")
    every = (lambda step: step, lambda step: min(step, 3))[rank.index]
    text = "values [1, 2, 3, 4] on rank 0 and a function with values [1, 2, 3, 3] on rank 1"
    refused(lambda: fop.FOP(net(), update_every=every), text)
    wrapped = DistributedDataParallel(net())
    module = (wrapped, wrapped.module)[rank.index]
    refused(lambda: fop.FOP(module), "wrapped in DistributedDataParallel on rank 0 and plain on")
    rows = (1, 3)[rank.index]
    refused(lambda: fop.FOP(net(), strategy=rows), "strategy is 1 on rank 0 and 3 on rank 1")
    frozen = net()
    frozen.last.requires_grad_(rank.index == 0)
    refused(lambda: fop.FOP(frozen), "(3, 54) torch.float64 trained on rank 0 and (3, 54) torch")


def equal_settings_are_accepted(rank: Rank) -> None:
    """Whatever the order of a set, and a function's identity."""
    names = ["first", "last", "grouped"][:: 1 if rank.index else -1]
    fop.FOP(net(), skip=dict.fromkeys(names), update_every=lambda step: 3)
    fop.FOP(net(), skip=set(names[:2]) | {"first", "last", "grouped"})


def plain(rank: Rank) -> nn.Module:
    return net()


def wrapped(rank: Rank) -> nn.Module:
    return DistributedDataParallel(net())


def sharded(rank: Rank) -> nn.Module:
    return shard(rank, net())


def a_rank_without_gradients_makes_all_skip(rank: Rank) -> None:
    """Zeroed after the backward pass on one rank, on a curvature step and on a plain one.

    The ranks then go on together as those that never had this step's batch.
    """
    cases = [(fop.FOP, "owner", step) for step in (0, 1, 4)]
    cases += [(fop.KFAC, "owner", 4), (fop.FOP, "all", 4)]
    for make in (plain, wrapped, sharded):
        for kind, strategy, bad_step in cases:
            model = make(rank)
            optimizer = kind(model, strategy=strategy, momentum=0.9)
            for step in range(7):
                before = whole(model)
                optimizer.zero_grad()
                backward(rank, model, step)
                bad = step == bad_step
                if bad and rank.index == 1:
                    optimizer.zero_grad()
                    with pytest.warns(RuntimeWarning, match="rank 1 called step.. without a"):
                        optimizer.step()
                else:
                    optimizer.step()
                after = whole(model)
                assert same(after.values(), before.values()) == bad, (make, kind, step)
            assert optimizer.steps == 7
            everyone: list[Any] = [None] * rank.ranks
            dist.all_gather_object(everyone, [float(v.sum()) for v in after.values()])
            assert everyone[0] == everyone[1]


def backward(rank: Rank, model: nn.Module, step: int) -> None:
    x, y = batches([4] * rank.ranks, seed=step)[rank.index]
    cross_entropy(model(x), y).backward()


def a_rank_that_runs_no_backward_makes_all_skip(rank: Rank) -> None:
    """Where the others can run theirs: a plain module, and DDP without synchronisation."""
    for make in (plain, wrapped):
        for bad_step in (0, 4):
            model = make(rank)
            optimizer = fop.FOP(model, momentum=0.9)
            for step in range(6):
                before = whole(model)
                optimizer.zero_grad()
                bad = step == bad_step
                if make is wrapped:
                    model.require_backward_grad_sync = not bad
                if bad and rank.index == 1:
                    with pytest.warns(RuntimeWarning, match="rank 1 called step.. without a"):
                        optimizer.step()
                else:
                    backward(rank, model, step)
                    optimizer.step()
                assert same(whole(model).values(), before.values()) == bad


def a_step_without_any_gradient_does_nothing(rank: Rank) -> None:
    """As on one process, and without a word; the steps after it are what they were."""
    for make in (plain, wrapped, sharded):
        results = []
        for idle in (False, True):
            model = make(rank)
            optimizer = fop.FOP(model, momentum=0.9, update_every=1)
            for step in range(4):
                optimizer.zero_grad()
                if idle:
                    before = whole(model)
                    optimizer.step()
                    assert same(whole(model).values(), before.values())
                backward(rank, model, step)
                optimizer.step()
            results.append(whole(model))
        assert same(results[0].values(), results[1].values())


def the_masked_way_skips_too(rank: Rank) -> None:
    """That of accelerators, where plain steps read nothing on the host."""
    with treat_as_accelerator():
        a_rank_without_gradients_makes_all_skip(rank)
        a_rank_that_runs_no_backward_makes_all_skip(rank)


CHECKS: tuple[Check, ...] = (
    other_settings_are_refused,
    other_options_of_options_are_refused,
    other_classes_functions_and_wrappers_are_refused,
    equal_settings_are_accepted,
    a_rank_without_gradients_makes_all_skip,
    a_rank_that_runs_no_backward_makes_all_skip,
    a_step_without_any_gradient_does_nothing,
    the_masked_way_skips_too,
)


@pytest.mark.slow
def test_all_ranks_hear_of_one_that_differs() -> None:
    failures = run(2, CHECKS)
    assert not failures, "\n".join(f"{check}: {text}" for check, text in failures.items())


def start_alone(index: int, port: int, directory: Path, how: str) -> None:
    """What a rank does that the other one does not; both write down their errors."""
    torch.set_num_threads(1)
    group.PATIENCE = timedelta(seconds=2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    early = fop.FOP(net()) if how == "build early" else None
    dist.init_process_group("gloo", store=store, rank=index, world_size=2)
    rank = Rank(index, 2, None, directory)
    model = wrapped(rank) if how == "backward" else net()
    optimizer = early or fop.FOP(model)
    try:
        if how == "backward":
            if index == 0:
                backward(rank, model, 0)
            optimizer.step()
        elif how == "save":
            backward(rank, model, 0)
            optimizer.step()
            if index == 0:
                optimizer.consolidate_state_dict(to=0)
            optimizer.step()
        else:
            backward(rank, early._model, 0)
            early.step()
    except RuntimeError as error:
        (directory / str(index)).write_text(str(error))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        # The second rank ends, and the first one, which waits in DDP's own backward, at once too.
        ("backward", "", "rank 1 of 2 called step() without a gradient, and the others have not"),
        ("save", "rank 0 of 2 is to save the optimizer's state, but others have not come", ""),
        ("build early", "built before the process group of 2 ranks", "built before the process"),
    ],
)
def test_what_one_rank_does_alone_is_named_long_before_the_time_out(
    tmp_path: Path, how: str, first: str, second: str
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_context()
    ranks = [
        context.Process(target=start_alone, args=(index, store.port, tmp_path, how))
        for index in range(2)
    ]
    start = time.monotonic()
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert time.monotonic() - start < 120  # the time-out is half an hour
    for index, text in enumerate((first, second)):
        assert text in (tmp_path / str(index)).read_text()
