"""The optimizer leaves the model as it found it, and long runs do not grow."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import cnn, images, mlp, points, train


def leftovers(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        found += [*module._backward_hooks.values()]
        found += [key for key in vars(module) if "fop" in key]
    for parameter in model.parameters():
        found += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        found += (parameter._backward_hooks or {}).values()
    return found


@pytest.mark.parametrize("settings", [{}, {"fisher": "mc"}], ids=str)
def test_nothing_is_left_on_the_model_after_del(settings: dict[str, Any]) -> None:
    model = cnn()
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = fop.FOP(model, **settings)
    train(model, optimizer, [images(seed=seed) for seed in range(3)])
    assert leftovers(model)
    dead = [weakref.ref(optimizer), weakref.ref(optimizer._engine.layers[0].recorder)]
    loss = cross_entropy(model(images()[0]), images()[1])  # a graph that outlives the optimizer
    del optimizer
    gc.collect()
    assert [reference() for reference in dead] == [None, None]
    assert leftovers(model) == []
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    loss.backward()
    fop.KFAC(model)


def test_hooks_of_an_optimizer_that_was_taken_over_from_go_at_once() -> None:
    model = mlp()
    first, second = fop.FOP(model), fop.FOP(model)
    del second
    gc.collect()
    assert leftovers(model) == []
    del first


def live_tensor_bytes() -> int:
    gc.collect()
    # exact types: isinstance would wake lazy proxies and find the parameters of lazy modules
    found = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    return sum(item.untyped_storage().nbytes() for item in found)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("settings", [{"update_every": 3}, {"fisher": "mc", "update_every": 7}])
def test_hundreds_of_steps_do_not_grow(settings: dict[str, Any]) -> None:
    """Neither tensors nor Python objects; also with evaluations and dropped batches in between."""
    model = mlp(dtype=torch.float32)
    optimizer = fop.FOP(model, **settings)
    data = [points(4, seed, torch.float32) for seed in range(5)]

    def some(steps: int) -> None:
        for step in range(steps):
            train(model, optimizer, [data[step % 5]])
            if step % 10 == 0:
                model(data[0][0])
                cross_entropy(model(data[1][0]), data[1][1]).backward()
                optimizer.zero_grad()

    some(100)
    memory, objects = live_tensor_bytes(), len(gc.get_objects())
    resident = resident_bytes() if Path("/proc/self/statm").exists() else None
    some(600)
    assert live_tensor_bytes() == memory
    assert len(gc.get_objects()) - objects < 100
    if resident is not None:  # what C++ holds shows only here
        assert resident_bytes() - resident < 8 * 2**20


def test_zeroed_gradients_take_all_that_was_recorded_with_them() -> None:
    """The next forward pass must not find the last step's half-gradient differences in memory."""
    model = mlp()
    optimizer = fop.FOP(model, update_every=1)
    train(model, optimizer, [points()])
    samples = [layer.recorder.sample() for layer in optimizer._engine.layers]
    kept = [weakref.ref(part) for sample in samples for part in sample.difference or ()]
    del samples
    assert kept
    optimizer.zero_grad()
    assert not any(reference() is not None for reference in kept)
