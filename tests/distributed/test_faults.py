"""State is never partly saved, resumes on other numbers of ranks, and ranks fail together."""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from tests.common import distance, same, snapshot
from tests.distributed.launch import Check, Rank, run
from tests.distributed.models import alone, assert_same, batches, net, together


def one_step(module: nn.Module, optimizer: Any, rank: Rank, step: int) -> None:
    optimizer.zero_grad()
    x, y = batches([4] * rank.ranks, seed=step)[rank.index]
    cross_entropy(module(x), y).backward()
    optimizer.step()


LAYERS = ("first", "grouped", "last")  # of the model; its norm uses the fallback


def weight_of(model: nn.Module, layer: str) -> nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def raises(kind: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def factors_fall_with_the_number_of_ranks(rank: Rank) -> None:
    """Each layer's curvature is on one rank, and all of it is somewhere."""
    keys = ("input_factor", "output_factor", "input_inverse", "output_inverse")
    model, optimizer = together(rank, fop.FOP, [4] * rank.ranks)
    mine = [name for name in LAYERS if keys[0] in optimizer.state[weight_of(model, name)]]
    everyone: list[Any] = [None] * rank.ranks
    dist.all_gather_object(everyone, mine)
    assert sorted(chain(*everyone)) == ["first", "grouped", "last"]
    if rank.ranks > 1:
        assert max(map(len, everyone)) < 3
    model, optimizer = together(rank, fop.FOP, [4] * rank.ranks, strategy="all")
    assert all(keys[0] in optimizer.state[weight_of(model, name)] for name in LAYERS)


def a_partial_state_is_refused(rank: Rank) -> None:
    model = DistributedDataParallel(net())
    optimizer = fop.FOP(model)
    optimizer.load_state_dict(optimizer.state_dict())  # nothing to lose yet
    one_step(model, optimizer, rank, 0)
    if rank.ranks == 1:
        optimizer.state_dict()
        return
    raises(RuntimeError, "consolidate_state_dict()", optimizer.state_dict)
    optimizer.consolidate_state_dict(to=1)
    if rank.index == 1:
        assert "input_factor" in optimizer.state_dict()["state"][0]
    else:
        raises(RuntimeError, "consolidate_state_dict()", optimizer.state_dict)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"]
    weights = [weight_of(model.module, name) for name in LAYERS]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(order):
        assert ("input_inverse" in state[number]) == any(parameter is w for w in weights)
    one_step(model, optimizer, rank, 1)
    raises(RuntimeError, "consolidate_state_dict()", optimizer.state_dict)
    raises(ValueError, "to must be a rank", lambda: optimizer.consolidate_state_dict(to=9))


def resume_is_exact(rank: Rank) -> None:
    """Bit for bit; in a plain module, because DDP itself adds in another order at its start."""
    model = net()
    optimizer = fop.FOP(model, update_every=3)
    for step in range(3):
        one_step(model, optimizer, rank, step)
    optimizer.consolidate_state_dict()
    saved = (
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.load(_roundtrip(rank, optimizer.state_dict()), weights_only=True),
    )
    for step in range(3, 6):
        one_step(model, optimizer, rank, step)
    other = net(seed=1)
    other.load_state_dict(saved[0])
    again = fop.FOP(other, update_every=3)
    again.load_state_dict(saved[1])
    for step in range(3, 6):
        one_step(other, again, rank, step)
    assert same(snapshot(other), snapshot(model))


def _roundtrip(rank: Rank, value: Any) -> Path:
    path = rank.directory / f"state-{rank.index}.pt"
    torch.save(value, path)
    return path


def torch_distributed_checkpoint(rank: Rank) -> None:
    """A consolidated state goes through dcp.save and dcp.load."""
    model = DistributedDataParallel(net())
    optimizer = fop.FOP(model)
    for step in range(2):
        one_step(model, optimizer, rank, step)
    optimizer.consolidate_state_dict()
    place = str(rank.directory / f"dcp-{rank.ranks}")
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=place)
    one_step(model, optimizer, rank, 2)
    expected = snapshot(model)
    other = DistributedDataParallel(net(seed=3))
    again = fop.FOP(other)
    again.consolidate_state_dict()
    # dcp.load fills tensors in place, so it needs a state of the same form: that of any step.
    one_step(other, again, rank, 7)
    again.consolidate_state_dict()
    target = {"model": other.module.state_dict(), "optimizer": again.state_dict()}
    dcp.load(target, checkpoint_id=place)
    other.module.load_state_dict(target["model"])
    again.load_state_dict(target["optimizer"])
    assert again.steps == 2
    one_step(other, again, rank, 2)
    assert distance(snapshot(other), expected) < 1e-10


def a_nan_on_one_rank_makes_all_skip(rank: Rank) -> None:
    """On a step with curvature work and on a steady one, wrapped and plain."""
    for wrapped in (True, False):
        for bad_step in (1, 4):
            model = net()
            module = DistributedDataParallel(model) if wrapped else model
            optimizer = fop.FOP(module)
            for step in range(6):
                optimizer.zero_grad()
                before = snapshot(model)
                x, y = batches([4] * rank.ranks, seed=step)[rank.index]
                if step == bad_step and rank.index == rank.ranks - 1:
                    x = x * math.nan
                cross_entropy(module(x), y).backward()
                optimizer.step()
                assert same(snapshot(model), before) == (step == bad_step)
                assert all(bool(p.isfinite().all()) for p in model.parameters())
            for own in optimizer.state.values():
                assert all(
                    bool(v.isfinite().all()) for v in own.values() if isinstance(v, torch.Tensor)
                )


def a_nan_only_in_the_curvature_makes_all_skip(rank: Rank) -> None:
    """Found on one rank before the step: no owner may take it into its averages."""
    model = DistributedDataParallel(net())
    optimizer = fop.FOP(model)
    before = snapshot(model)
    x, y = batches([4] * rank.ranks)[rank.index]
    cross_entropy(model(x), y).backward()
    if rank.index == 0:
        optimizer._engine.layers[0].recorder.sample().statistics.inputs.values.fill_(math.nan)
    optimizer.step()
    assert same(snapshot(model), before)
    assert not any("input_factor" in own for own in optimizer.state.values())
    assert optimizer.param_groups[0]["refresh_overdue"]


def a_rank_without_examples_takes_part(rank: Rank) -> None:
    """Its loss is zero over no examples; the batch is that of the other ranks."""
    if rank.ranks < 3:
        return
    model, expected = net(), net()
    module = DistributedDataParallel(model)
    optimizer = fop.FOP(module)
    reference = fop.FOP(expected, halves="microbatches", process_group=rank.alone)
    for step in range(5):
        data = batches([4] * rank.ranks, seed=step)
        optimizer.zero_grad()
        x, y = data[rank.index]
        if rank.index == 2:
            (module(x[:0]).sum() * 0).backward()
        else:
            cross_entropy(module(x), y).backward()
        optimizer.step()
        reference.zero_grad()
        for x, y in data[:2]:
            (cross_entropy(expected(x), y) / rank.ranks).backward()
        reference.step()
    assert_same(model, expected)


def an_error_on_one_rank_reaches_all(rank: Rank) -> None:
    """On a step that refreshes curvature and on a plain one; it names who must be asked."""
    if rank.ranks == 1:
        return
    for bad_step in (0, 4):
        model = net()
        optimizer = fop.FOP(model)
        for step in range(bad_step):
            one_step(model, optimizer, rank, step)
        optimizer.zero_grad()
        x, y = batches([4] * rank.ranks)[rank.index]
        cross_entropy(model(x), y).backward()
        if rank.index == 1:
            model.first.weight.grad = None
            optimizer._engine.layers[0].recorder.seen.replaced = True
            raises(RuntimeError, "layer 'first' was replaced", optimizer.step)
        else:
            raises(RuntimeError, "1 of", optimizer.step)


def different_models_are_refused_on_all_ranks(rank: Rank) -> None:
    if rank.ranks == 1:
        return
    model = nn.Linear(3, 2 if rank.index == 0 else 4)
    shapes = "parameter 'weight' is (2, 3) torch.float32 trained on rank 0 and (4, 3)"
    raises(ValueError, shapes, lambda: fop.FOP(model))
    raises(ValueError, "must divide", lambda: fop.FOP(net(), strategy=rank.ranks + 1))


def plain_models_start_from_the_first_rank(rank: Rank) -> None:
    model = net(seed=rank.index)
    fop.FOP(model)
    assert same(snapshot(model), snapshot(net(seed=0)))


def diagnostics_are_those_of_one_process(rank: Rank) -> None:
    counts = [3, 4, 2, 5][: rank.ranks]
    _, reference = alone(rank, fop.FOP, counts, steps=3)
    expected, scale = fop.diagnostics(reference), fop.noise_scale(reference)
    for wrapped in (True, False):
        _, optimizer = together(rank, fop.FOP, counts, steps=3, wrapped=wrapped)
        assert math.isclose(fop.noise_scale(optimizer), scale, rel_tol=1e-8)
        found = fop.diagnostics(optimizer)
        names: list[Any] = [None] * rank.ranks
        dist.all_gather_object(names, list(found))
        assert sorted(chain(*names)) == sorted(expected)
        for name, entry in found.items():
            for key, value in entry.items():
                assert math.isclose(value, expected[name][key], rel_tol=1e-6, abs_tol=1e-12), key


def messages_leave_in_the_pass_that_synchronises(rank: Rank) -> None:
    if rank.ranks == 1:
        return
    model = DistributedDataParallel(net())
    optimizer = fop.FOP(model)
    x, y = batches([4] * rank.ranks)[rank.index]
    with model.no_sync():
        cross_entropy(model(x), y).backward()
    assert optimizer._ranks._queue is None
    cross_entropy(model(x), y).backward()
    queue = optimizer._ranks._queue
    assert queue.closed
    assert all(queue.started[kind] for kind in ("curvature sums", "differences"))
    optimizer.step()
    assert not queue.outdated


def messages_are_what_was_promised(rank: Rank) -> None:
    """Bytes a rank sends on a steady step, in units of the parameters P in layers."""
    if rank.ranks == 1:
        return
    for wrapped, kind, strategy, expected in (
        (True, fop.FOP, "owner", 2),  # and 2 more by DDP itself
        (False, fop.FOP, "owner", 3),
        (True, fop.KFAC, "owner", 1),
        (False, fop.KFAC, "owner", 2),
        (True, fop.FOP, "all", 2),
        (True, fop.KFAC, "all", 0),
    ):
        _, optimizer = together(rank, kind, [4] * rank.ranks, wrapped=wrapped, strategy=strategy)
        comm = optimizer._ranks.comm
        before = dict(comm.sent)
        model = optimizer._model
        module = DistributedDataParallel(model) if wrapped else model
        x, y = batches([4] * rank.ranks)[rank.index]
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        in_layers = sum(p.numel() for n, p in model.named_parameters() if n.startswith(LAYERS))
        whole = 8 * in_layers * (rank.ranks - 1) / rank.ranks
        sent = {k: v - before.get(k, 0) for k, v in comm.sent.items()}
        large = sum(sent.get(k, 0) for k in ("averages", "differences", "updates"))
        assert math.isclose(large / whole, expected, rel_tol=0.01, abs_tol=1e-9), (sent, whole)
        small = sent["totals"] + sent["clip"]
        assert small < 8 * 2 * (8 * 3 + 8 + 10)
        assert sent.get("curvature sums", 0) == 0


# One start of the processes for all of them.
CHECKS: tuple[Check, ...] = (
    factors_fall_with_the_number_of_ranks,
    a_partial_state_is_refused,
    resume_is_exact,
    torch_distributed_checkpoint,
    a_nan_on_one_rank_makes_all_skip,
    a_nan_only_in_the_curvature_makes_all_skip,
    a_rank_without_examples_takes_part,
    an_error_on_one_rank_reaches_all,
    different_models_are_refused_on_all_ranks,
    plain_models_start_from_the_first_rank,
    diagnostics_are_those_of_one_process,
    messages_leave_in_the_pass_that_synchronises,
    messages_are_what_was_promised,
)


def halves_of(rank: Rank, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of both halves of twelve examples: the halves are always the same."""
    x, y = batches([12], seed=step)[0]
    mine = torch.cat(
        [torch.arange(rank.index, 6, rank.ranks), torch.arange(6 + rank.index, 12, rank.ranks)]
    )
    return x[mine], y[mine]


def three_steps_from_the_last_checkpoint(rank: Rank) -> None:
    for kind, options in ((fop.FOP, {"halves": "samples"}), (fop.KFAC, {})):
        model = net()
        module = DistributedDataParallel(model)
        optimizer = kind(module, **options)
        path = rank.directory / f"{kind.__name__}.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(optimizer.steps, optimizer.steps + 3):
            optimizer.zero_grad()
            x, y = halves_of(rank, step)
            cross_entropy(module(x), y).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        dist.barrier()
        if rank.index == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@pytest.mark.slow
def test_training_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 ranks, then 3, then 1 follow the path of an undisturbed single process."""
    for ranks in (2, 3, 1):
        assert run(ranks, [three_steps_from_the_last_checkpoint], directory=tmp_path) == {}
    for kind in (fop.FOP, fop.KFAC):
        expected = net()
        optimizer = kind(expected)
        for step in range(9):
            optimizer.zero_grad()
            x, y = batches([12], seed=step)[0]
            cross_entropy(expected(x), y).backward()
            optimizer.step()
        found = net()
        found.load_state_dict(torch.load(tmp_path / f"{kind.__name__}.pt")["model"])
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_act_together(ranks: int) -> None:
    failures = run(ranks, CHECKS)
    assert not failures, "\n".join(f"{check}: {text}" for check, text in failures.items())
