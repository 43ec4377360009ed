"""Models sharded by FSDP2 take the step of one process on the same batch with the same halves.

The parameters have 3, 4, 5, 6 and 24 rows: on 2 and 3 ranks some shards are uneven, or empty.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

import fop
from tests import FIXED as FIXED_STEPS
from tests import LIBRARY
from tests.common import CLASSES
from tests.distributed.launch import Check, Rank, run
from tests.distributed.models import alone, batches, in_parts, net
from tests.distributed.test_equality import Attentive

KINDS = (fop.FOP, fop.KFAC)
TOLERANCE = 1e-9
FIXED = {"beta": 0.4, "eta": 1.0, "kl_clip": None}  # shows the difference's scale

# The library's own defaults, where tests have others.
SIZED: dict[str, Any] = {name: LIBRARY[fop.FOP][name] for name in FIXED_STEPS}


def uneven(rank: Rank) -> list[int]:
    return [3, 4, 2][: rank.ranks]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, CLASSES))
    return nn.Sequential(*layers).double()


def attentive() -> nn.Module:
    torch.manual_seed(0)
    return Attentive().double()


MODELS: tuple[Callable[[], nn.Module], ...] = (mlp, net, attentive)


def shard(rank: Rank, model: nn.Module, **options: Any) -> nn.Module:
    """Two of the blocks, and the rest by the root, as users do."""
    mesh = init_device_mesh("cpu", (rank.ranks,))
    blocks = [m for m in model.children() if next(m.parameters(), None) is not None]
    for block in blocks[:2]:
        if not isinstance(block, nn.MultiheadAttention):  # FSDP2 warns of its output, a view
            fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(
    rank: Rank,
    model: nn.Module,
    optimizer: Any,
    *,
    counts: Sequence[int] | None = None,
    steps: range = range(4),
    parts: int = 1,
    synchronise: bool = True,
    clip: float | None = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        local = in_parts(batches(counts or uneven(rank), seed=step)[rank.index], parts)
        for number, (x, y) in enumerate(local):
            model.set_requires_gradient_sync(synchronise or number == len(local) - 1)
            (cross_entropy(model(x), y) / len(local)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = whole(model), whole(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE), name


def sharded(
    rank: Rank, kind: Callable[..., Any], make: Callable[[], nn.Module], **settings: Any
) -> tuple[nn.Module, Any]:
    model = shard(rank, make())
    return model, kind(model, **settings)


def every_model(rank: Rank) -> None:
    for make in MODELS:
        for kind in KINDS:
            expected, _ = alone(rank, kind, uneven(rank), make=make)
            model, optimizer = sharded(rank, kind, make)
            train(rank, model, optimizer)
            assert_same(model, expected)


def parameters_and_momentum_stay_sharded(rank: Rank) -> None:
    model, optimizer = sharded(rank, fop.FOP, net, weight_decay=0.01)
    train(rank, model, optimizer, steps=range(2))
    rows = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        own = optimizer.state[parameter]
        buffer = own["momentum_buffer" if "momentum_buffer" in own else "exp_avg"]
        assert buffer.shape == parameter.to_local().shape
        rows += buffer.shape[0]
    total = torch.tensor(rows)
    torch.distributed.all_reduce(total)
    assert int(total) == sum(parameter.shape[0] for parameter in model.parameters())


def every_strategy(rank: Rank) -> None:
    expected, _ = alone(rank, fop.FOP, uneven(rank))
    for strategy in ("owner", "all"):
        model, optimizer = sharded(rank, fop.FOP, net, strategy=strategy)
        train(rank, model, optimizer)
        assert_same(model, expected)


def settings(rank: Rank) -> None:
    for chosen in (
        {"weight_decay": 0.01, "nesterov": True, "damping_mode": "exact"},
        {"weight_decay": 0.01, "decoupled_weight_decay": True, "fallback": "adamw"},
        {"norms": "unitwise", "beta": 0.3},
        {"max_factor_size": 20, "update_every": 3},
        {"curvature": "identity"},
        {"fisher": "exact"},
        {"skip": ["grouped"], "momentum": 0.0},
    ):
        expected, _ = alone(rank, fop.FOP, uneven(rank), **chosen)
        model, optimizer = sharded(rank, fop.FOP, net, **chosen)
        train(rank, model, optimizer)
        assert_same(model, expected)


def clipping(rank: Rank) -> None:
    """The averaged gradient is clipped, and with it the difference, also by ranks without rows."""
    for chosen in ({}, FIXED):
        expected, _ = alone(rank, fop.FOP, uneven(rank), clip=0.05, **chosen)
        model, optimizer = sharded(rank, fop.FOP, net, **chosen)
        train(rank, model, optimizer, clip=0.05)
        assert_same(model, expected)


def accumulation(rank: Rank) -> None:
    """Micro-batches, each reduced by itself or all together."""
    counts = [4] * rank.ranks
    # On one rank the halves of two micro-batches are not those of the whole batch.
    for kind in KINDS if rank.ranks > 1 else (fop.KFAC,):
        expected, _ = alone(rank, kind, counts, clip=0.1)
        for synchronise in (True, False):
            model, optimizer = sharded(rank, kind, net)
            loop = {"parts": 2, "synchronise": synchronise, "clip": 0.1}
            train(rank, model, optimizer, counts=counts, **loop)
            assert_same(model, expected)


def gradients_for_other_purposes_leave_no_trace(rank: Rank) -> None:
    expected, _ = alone(rank, fop.FOP, uneven(rank), steps=2)
    model, optimizer = sharded(rank, fop.FOP, net)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batches(uneven(rank), seed=step)[rank.index]
        image = x.clone().requires_grad_()
        torch.autograd.grad(model(image).sum(), image)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same(model, expected)


def diagnostics_are_those_of_one_process(rank: Rank) -> None:
    _, reference = alone(rank, fop.FOP, uneven(rank), steps=3, clip=0.05)
    model, optimizer = sharded(rank, fop.FOP, net)
    train(rank, model, optimizer, steps=range(3), clip=0.05)
    scale = fop.noise_scale(reference)
    assert math.isclose(fop.noise_scale(optimizer), scale, rel_tol=1e-7)


def a_rank_without_rows_takes_part(rank: Rank) -> None:
    """Of a layer with one output only the first rank has something to change."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 1)).double()

    model, plain = shard(rank, make()), make()
    optimizer = fop.KFAC(model, update_every=2)
    reference = fop.KFAC(plain, update_every=2, process_group=rank.alone)
    for step in range(4):
        data = batches(uneven(rank), seed=step)
        optimizer.zero_grad()
        model(data[rank.index][0]).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        for x, _ in data:
            (plain(x).square().mean() / rank.ranks).backward()
        reference.step()
    assert_same(model, plain)


def a_rank_without_examples_takes_part(rank: Rank) -> None:
    if rank.ranks < 3:
        return
    model, expected = shard(rank, net()), net()
    optimizer = fop.FOP(model)
    reference = fop.FOP(expected, halves="microbatches", process_group=rank.alone)
    for step in range(4):
        data = batches(uneven(rank), seed=step)
        optimizer.zero_grad()
        x, y = data[rank.index]
        if rank.index == 2:
            (model(x[:0]).sum() * 0).backward()
        else:
            cross_entropy(model(x), y).backward()
        optimizer.step()
        reference.zero_grad()
        for x, y in data[:2]:
            (cross_entropy(expected(x), y) / rank.ranks).backward()
        reference.step()
    assert_same(model, expected)


def a_nan_on_one_rank_skips_the_step_on_all(rank: Rank) -> None:
    model, optimizer = sharded(rank, fop.FOP, net)
    train(rank, model, optimizer, steps=range(2))
    before = whole(model)
    optimizer.zero_grad()
    x, y = batches(uneven(rank))[rank.index]
    (cross_entropy(model(x), y) * (math.nan if rank.index == 0 else 1.0)).backward()
    optimizer.step()
    for name, value in whole(model).items():
        assert torch.equal(value, before[name]), name


def checkpoints(rank: Rank) -> None:
    """A whole state: sharded models and one process load each other's."""
    halves = "microbatches" if rank.ranks > 1 else "samples"
    for chosen in ({"fallback": "adamw"}, {"strategy": "all"}):
        _, reference = alone(rank, fop.FOP, uneven(rank), steps=3, **chosen)
        model, optimizer = sharded(rank, fop.FOP, net, **chosen)
        train(rank, model, optimizer, steps=range(3))
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict()
        state = copy.deepcopy(optimizer.state_dict())  # as if saved: some tensors go on changing
        for number, entries in reference.state_dict()["state"].items():
            assert entries.keys() == state["state"][number].keys()
            for key, value in entries.items():
                found, value = map(torch.as_tensor, (state["state"][number][key], value))
                assert torch.allclose(found, value, rtol=1e-7, atol=1e-9), key
        values = whole(model)
        train(rank, model, optimizer, steps=range(3, 5))
        for source in (state, reference.state_dict()):
            again = net()
            again.load_state_dict(values)
            resumed = fop.FOP(shard(rank, again), **chosen)
            resumed.load_state_dict(copy.deepcopy(source))
            train(rank, again, resumed, steps=range(3, 5))
            assert_same(again, model)
        single = net()
        single.load_state_dict(values)
        reference = fop.FOP(single, process_group=rank.alone, halves=halves, **chosen)
        reference.load_state_dict(state)
        for step in range(3, 5):
            reference.zero_grad()
            for x, y in batches(uneven(rank), seed=step):
                (cross_entropy(single(x), y) / rank.ranks).backward()
            reference.step()
        assert_same(model, single)


def mixed_precision_policies(rank: Rank) -> None:
    """Calls in bfloat16, shards in float32: close to the same in float32 throughout."""
    distances = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = shard(rank, net().float(), mp_policy=policy)
        # Little damping would show how far curvature of a few examples carries round-off.
        optimizer = fop.FOP(model, lr=0.1, damping=0.3, kl_clip=None)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batches(uneven(rank), seed=step)[rank.index]
            cross_entropy(model(x.float()).float(), y).backward()
            optimizer.step()
        distances.append(whole(model))
    start, exact, rounded = whole(net().float()), *distances
    for name, value in exact.items():
        assert (rounded[name] - value).norm() < 0.2 * (value - start[name]).norm(), name


def other_layouts_are_refused_by_name(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.ranks,))
    columns = fully_shard(
        nn.Linear(6, 6), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)
    )
    with pytest.raises(NotImplementedError, match=r"parameter 'weight' is a DTensor with plac"):
        fop.FOP(columns)
    square = init_device_mesh("cpu", (1, rank.ranks), mesh_dim_names=("copies", "shards"))
    hybrid = fully_shard(nn.Linear(6, 6), mesh=square)
    with pytest.raises(NotImplementedError, match="HSDP"):
        fop.FOP(hybrid)
    parallel = nn.Linear(6, 6)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="'bias' is not sharded, but others"):
        fop.FOP(parallel)
    if rank.ranks > 1:
        with pytest.raises(ValueError, match="leave out process_group"):
            fop.FOP(shard(rank, net()), process_group=rank.alone)


def what_is_not_supported_is_refused_in_the_loop(rank: Rank) -> None:
    model, optimizer = sharded(rank, fop.FOP, net)
    x, y = batches(uneven(rank))[rank.index]
    cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place between two backward passes"):
        cross_entropy(model(x), y).backward()
    model, optimizer = sharded(rank, fop.FOP, net)
    cross_entropy(model(x), y).backward()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(NotImplementedError, match="GradScaler is not supported"):
        optimizer.step()
    capture = sharded(rank, fop.FOP, net)[1]._engine.layers[0].recorder
    elsewhere = nn.Parameter(torch.empty(capture.weight.shape, device="meta"))
    with pytest.raises(NotImplementedError, match="CPUOffloadPolicy is not supported"):
        capture.records(elsewhere)


def bytes_sent(rank: Rank) -> None:
    """Averages, differences and updates are one volume each, as in a plain module."""
    model, optimizer = sharded(rank, fop.FOP, net)
    train(rank, model, optimizer, steps=range(1))
    layers = ("first", "grouped", "last")
    count = sum(p.numel() for n, p in model.named_parameters() if n.startswith(layers))
    volume = 8 * count * (rank.ranks - 1) / rank.ranks
    for kind in ("averages", "differences", "updates"):
        assert math.isclose(optimizer._ranks.comm.sent[kind], volume, abs_tol=8)


def sized_steps(rank: Rank) -> None:
    """As they are by default: forward passes are run again with displaced shards."""
    for make in MODELS:
        expected, _ = alone(rank, fop.FOP, uneven(rank), make=make, **SIZED)
        model, optimizer = sharded(rank, fop.FOP, make, **SIZED)
        train(rank, model, optimizer)
        assert optimizer.last_step.rule == "model", optimizer.last_step
        found = whole(model)
        for name, parameter in expected.named_parameters():
            assert torch.allclose(found[name], parameter, rtol=1e-6, atol=1e-8), name


CHECKS: tuple[Check, ...] = (
    sized_steps,
    every_model,
    parameters_and_momentum_stay_sharded,
    every_strategy,
    settings,
    clipping,
    accumulation,
    gradients_for_other_purposes_leave_no_trace,
    diagnostics_are_those_of_one_process,
    a_rank_without_rows_takes_part,
    a_rank_without_examples_takes_part,
    a_nan_on_one_rank_skips_the_step_on_all,
    checkpoints,
    mixed_precision_policies,
    other_layouts_are_refused_by_name,
    bytes_sent,
    what_is_not_supported_is_refused_in_the_loop,
)


# On two ranks everything; else what depends on their number.
SOME: tuple[Check, ...] = (every_model, a_rank_without_rows_takes_part, checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "checks"), [(1, SOME), (2, CHECKS), (3, SOME)])
def test_sharded_models_equal_one_process(ranks: int, checks: tuple[Check, ...]) -> None:
    failures = run(ranks, checks)
    assert not failures, "\n".join(f"{check}: {text}" for check, text in failures.items())
