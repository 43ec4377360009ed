"""Steps with something non-finite are counted, and named if it goes on."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from fop.linalg import treat_as_accelerator
from tests.common import mlp, points, same, snapshot, train


def bad_steps(count: int, model: nn.Module, optimizer: Any, name: str | None = None) -> None:
    """With a NaN in all gradients, or in that of one parameter."""
    for _ in range(count):
        x, y = points()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for known, parameter in model.named_parameters():
            if known == name or name is None:
                parameter.grad.view(-1)[0] = math.nan
        optimizer.step()


@pytest.mark.parametrize("path", [nullcontext, treat_as_accelerator], ids=["on a host", "masked"])
def test_skipped_steps_are_counted(path: Callable[[], AbstractContextManager[None]]) -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    assert optimizer.skipped_steps == 0
    with path():
        for _ in range(3):
            bad_steps(1, model, optimizer)
            train(model, optimizer, [points()])
    assert (optimizer.skipped_steps, optimizer.steps) == (3, 6)
    twin = mlp()
    other = fop.FOP(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.skipped_steps == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "all gradients are non-finite, as after a non-finite loss"),
        ("2.weight", "the gradients of '2.weight' are non-finite"),
    ],
)
def test_five_in_a_row_are_said_once_and_named(name: str | None, said: str) -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    for _ in range(2):  # and again, if it starts again
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bad_steps(4, model, optimizer, name)
        with pytest.warns(RuntimeWarning, match=f"the last 5 steps were skipped .*{said}") as found:
            bad_steps(9, model, optimizer, name)
        assert len(found) == 1
        train(model, optimizer, [points()])


def test_parameters_that_are_non_finite_are_named() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    with torch.no_grad():
        model[0].bias[0] = math.inf
    with pytest.warns(RuntimeWarning, match=r"parameters are non-finite already \('0.bias'\)"):
        bad_steps(5, model, optimizer)


@pytest.mark.parametrize("loss", [math.inf, math.nan, torch.tensor(math.inf)])
def test_a_non_finite_loss_of_a_closure_skips_the_step(loss: Any) -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    x, y = points()

    def closure() -> Any:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        return loss

    before = snapshot(model)
    optimizer.step(closure)
    assert same(snapshot(model), before)
    assert optimizer.skipped_steps == 1
