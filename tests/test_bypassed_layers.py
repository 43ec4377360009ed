"""Weights that are used without their modules have no curvature: they use the fallback, and are
named together, once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fop
from tests.common import distance, points, train


class Direct(nn.Module):
    """As beit, eva and swin v2 do: two weights are handed to functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.key = nn.Linear(5, 6), nn.Linear(6, 6)
        self.value, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = torch.tanh(F.linear(x, self.key.weight, self.key.bias))
        return self.head(torch.tanh(F.linear(x, self.value.weight)))


BYPASSED = ("key.weight", "key.bias", "value.weight")
RULES: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.7),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3, weight_decay=0),
}


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize("fallback", RULES)
def test_they_use_the_fallback_and_the_other_layers_keep_their_curvature(
    kind: Any, fallback: str
) -> None:
    """As if they had been skipped, and as torch's optimizer trains them."""
    ours, skipped = Direct().double(), Direct().double()
    optimizer = kind(ours, fallback=fallback)
    theirs = copy.deepcopy(ours)
    rule = RULES[fallback]([theirs.get_parameter(name) for name in BYPASSED])
    data = [points(seed=seed) for seed in range(6)]

    def step(x: Tensor, y: Tensor) -> None:
        others = {n: p for n, p in ours.state_dict().items() if n not in BYPASSED}
        theirs.load_state_dict(others, strict=False)
        train(ours, optimizer, [(x, y)])
        theirs.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        rule.step()

    with pytest.warns(RuntimeWarning, match=r"no call of their modules was seen.* 'key', 'value'"):
        step(*data[0])
    for batch in data[1:]:  # warnings are errors: it is said once
        step(*batch)
    mine = [ours.get_parameter(name) for name in BYPASSED]
    assert distance(mine, [theirs.get_parameter(name) for name in BYPASSED]) < 1e-12
    assert set(fop.diagnostics(optimizer)) == {"embed", "head"}
    train(skipped, kind(skipped, fallback=fallback, skip=["key", "value"]), data)
    assert distance(ours.parameters(), skipped.parameters()) < 1e-12


def test_a_resumed_run_finds_them_again_and_goes_on_bit_for_bit() -> None:
    data = [points(seed=seed) for seed in range(8)]
    one, two = Direct(), Direct()
    data = [(x.float(), y) for x, y in data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        first, second = fop.FOP(one), fop.FOP(two)
        train(one, first, data[:5])
        two.load_state_dict(one.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(one, first, data[5:])
        train(two, second, data[5:])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
