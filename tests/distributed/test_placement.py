"""Placement is near the best possible for real models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fop
from fop.costs import Work
from fop.costs import owner_cost as cost
from fop.distributed.buckets import Item, Quantity, ReduceQueue, into_buckets
from fop.distributed.placement import assign_owners as place
from fop_bench.models.resnet import imagenet_resnet50
from fop_bench.models.t2t_vit import t2t_vit_14


def works(model: nn.Module) -> list[Work]:
    found = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            weight, groups = module.weight, getattr(module, "groups", 1)
            columns = weight[0].numel() + (module.bias is not None)
            found.append(Work(weight.shape[0] // groups, columns, groups))
    return found


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("make", [imagenet_resnet50, t2t_vit_14])
@pytest.mark.parametrize("interval", [1, 10, 1000])
def test_no_rank_has_much_more_than_the_best_placement_could_give_it(
    make: object, ranks: int, interval: int
) -> None:
    with torch.device("meta"):
        model = make()
    costs = [cost(work, interval) for work in works(model)]
    assert len(costs) > 50
    loads = [0.0] * ranks
    for owner, load in zip(place(costs, ranks), costs, strict=True):
        loads[owner] += load
    # No assignment can beat the mean load, or the costliest layer.
    assert max(loads) <= 1.1 * max(sum(costs) / ranks, *costs)


def test_more_ranks_than_layers_leave_some_without_work() -> None:
    assert sorted(place([1.0, 2.0, 3.0], 5)) == [0, 1, 2]
    assert place([], 3) == []
    assert place([1.0, 1.0], 1) == [0, 0]


def test_buckets_hold_one_owner_up_to_the_limit_in_the_order_of_completion() -> None:
    def item(key: int, owner: int, numel: int) -> Item:
        return Item(key, owner, ((numel,),), torch.float32, torch.device("cpu"))

    items = [item(0, 0, 4), item(1, 1, 4), item(2, 0, 4), item(3, 0, 4), item(4, 1, 9)]
    buckets = into_buckets(items, limit=32)
    assert [[p.key for p in bucket.items] for bucket in buckets] == [[0, 2], [1], [3], [4]]
    flat = buckets[0].empty()
    views = buckets[0].views(flat)
    views[0][0].fill_(1.0)
    views[2][0].fill_(2.0)
    assert flat.tolist() == [1.0] * 4 + [2.0] * 4


class RecordingComm:
    """Notes what is sent, in order."""

    def __init__(self) -> None:
        self.sent: list[float] = []

    def reduce_in_row(self, tensor: torch.Tensor, owner: int, what: str) -> None:
        self.sent += tensor.tolist()


def test_messages_leave_when_complete_but_always_in_the_same_order() -> None:
    """Autograd may complete layers in another order on every rank."""

    def item(key: str, owner: int) -> Item:
        return Item(key, owner, ((1,),), torch.float32, torch.device("cpu"))

    def pack(key: str, places: list[torch.Tensor]) -> None:
        places[0].fill_("abc".index(key))

    comm = RecordingComm()
    quantity = Quantity("differences", [item(k, n) for n, k in enumerate("cba")], pack)
    queue = ReduceQueue(comm, list("abc"), [quantity])
    queue.complete("b")
    assert comm.sent == []
    queue.complete("c")
    assert comm.sent == [2, 1]
    queue.close()
    assert comm.sent == [2, 1, 0]
    assert not queue.outdated
    queue.complete("a")  # by a further pass
    assert queue.outdated


def test_one_process_is_all_its_ranks() -> None:
    optimizer = fop.FOP(nn.Linear(2, 2))
    assert not optimizer._ranks.partial_curvature
    assert optimizer._ranks.size == 1
