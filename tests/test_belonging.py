"""What was captured belongs to its gradient: goes with it, comes back with it, never mixes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train

# beta is fixed, so that an update is linear in (a, d), and without d it is KFAC's.
SETTINGS: dict[str, Any] = {"beta": 0.4, "eta": 1.0, "kl_clip": None, "momentum": 0.0}
OURS = {key: SETTINGS[key] for key in ("kl_clip", "momentum")}
ON_EVERY_STEP = pytest.mark.parametrize("every", [1, 100], ids=["refresh due", "not due"])


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    x, y = points(seed=seed)
    (cross_entropy(model(x), y) * scale).backward()


def after(
    act: Callable[[nn.Sequential, Any], None], every: int, build: Any = fop.FOP
) -> tuple[nn.Sequential, Any]:
    """A model whose fifth step is `act` and step()."""
    model = mlp()
    optimizer = build(model, update_every=every, **(SETTINGS if build is fop.FOP else OURS))
    train(model, optimizer, [points(seed=seed) for seed in range(4)])
    model.zero_grad()
    act(model, optimizer)
    optimizer.step()
    return model, optimizer


def two_passes(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    backward(model, 11, 0.5)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def put_back(model: nn.Module, kept: list[Tensor]) -> None:
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad


def set_aside(model: nn.Sequential, optimizer: Any) -> None:
    two_passes(model, optimizer)
    kept = gradients(model)
    model.zero_grad()
    backward(model, 12, 1e3)
    put_back(model, kept)


def set_aside_by_the_optimizer(model: nn.Sequential, optimizer: Any) -> None:
    two_passes(model, optimizer)
    kept = gradients(model)
    optimizer.zero_grad()
    backward(model, 12, 1e3)
    optimizer.zero_grad()
    put_back(model, kept)


def set_aside_between_passes(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    kept = gradients(model)
    model.zero_grad()
    backward(model, 12, 1e3)
    put_back(model, kept)
    backward(model, 11, 0.5)


def a_pass_that_is_zeroed_in_place(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 12, 1e3)
    for grad in gradients(model):
        grad.zero_()
    two_passes(model, optimizer)


def from_zeros_of_the_user(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 12, 1e3)
    put_back(model, [torch.zeros_like(p) for p in model.parameters()])
    two_passes(model, optimizer)


def an_input_gradient_between(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    x, y = points(seed=12)
    torch.autograd.grad(cross_entropy(model(x.requires_grad_()), y), x)
    backward(model, 11, 0.5)


@ON_EVERY_STEP
@pytest.mark.parametrize(
    "act",
    [
        set_aside,
        set_aside_by_the_optimizer,
        set_aside_between_passes,
        a_pass_that_is_zeroed_in_place,
        from_zeros_of_the_user,
        an_input_gradient_between,
    ],
)
def test_a_gradient_that_comes_back_brings_what_was_captured(act: Any, every: int) -> None:
    """The step is that of the undisturbed loop, bit for bit."""
    assert same(snapshot(after(act, every)[0]), snapshot(after(two_passes, every)[0]))


def test_an_input_gradient_after_clipping_changes_nothing() -> None:
    """What became of p.grad counts once, whatever passes are begun meanwhile."""

    def act(model: nn.Sequential, optimizer: Any) -> None:
        two_passes(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def disturbed(model: nn.Sequential, optimizer: Any) -> None:
        act(model, optimizer)
        x, y = points(seed=12)
        torch.autograd.grad(cross_entropy(model(x.requires_grad_()), y), x)

    assert same(snapshot(after(disturbed, 100)[0]), snapshot(after(act, 100)[0]))


def test_passes_with_create_graph_are_passes_as_any_other() -> None:
    """Torch makes p.grad a new tensor then, with the old one in it."""

    def act(model: nn.Sequential, optimizer: Any) -> None:
        for seed in (10, 11):
            x, y = points(seed=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about a cycle
                (cross_entropy(model(x), y) * 0.5).backward(create_graph=True)

    model, optimizer = after(act, 100)
    assert distance(snapshot(model), snapshot(after(two_passes, 100)[0])) < 1e-14
    optimizer.zero_grad()


# ---- gradients that are not known


def copies_put_back(model: nn.Sequential, optimizer: Any) -> None:
    two_passes(model, optimizer)
    kept = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    backward(model, 12, 1e3)
    put_back(model, kept)


def copies_put_back_between_passes(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    kept = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    backward(model, 12, 1e3)
    put_back(model, kept)
    backward(model, 11, 0.5)


def as_before(optimizer: Any) -> dict[str, Tensor]:
    own = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return {key: torch.as_tensor(value).clone() for key, value in own.items()}


@ON_EVERY_STEP
@pytest.mark.parametrize("act", [copies_put_back, copies_put_back_between_passes])
def test_a_copy_put_back_makes_a_kfac_step_and_is_said_once(act: Any, every: int) -> None:
    """With the curvature at hand: that of other passes does not mix in."""
    before: dict[str, Tensor] = {}

    def acted(model: nn.Sequential, optimizer: Any) -> None:
        before.update(as_before(optimizer))
        act(model, optimizer)

    with pytest.warns(RuntimeWarning, match="layer '0' is not the one that its backward") as seen:
        model, optimizer = after(acted, every)
    assert len(seen) == 1
    for key, value in before.items():
        assert torch.equal(torch.as_tensor(optimizer.state[model[0].weight][key]), value), key
    assert distance(snapshot(model), kfac_step(two_passes, every)) < 1e-12


def kfac_step(act: Any, every: int) -> list[Tensor]:
    """What `act` comes to by KFAC, with the curvature of the four steps before."""
    model = mlp()
    optimizer = fop.FOP(model, update_every=every, **SETTINGS)
    train(model, optimizer, [points(seed=seed) for seed in range(4)])
    state = optimizer.state_dict()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    reference = fop.KFAC(twin, update_every=100, **OURS)
    reference.load_state_dict(state)
    act(twin, reference)
    reference.step()
    return snapshot(twin)


def test_a_gradient_replaced_after_its_pass_makes_a_kfac_step_with_its_statistics() -> None:
    """As by p.grad = p.grad * mask: the curvature is that of an undisturbed step."""

    def replaced(model: nn.Sequential, optimizer: Any) -> None:
        two_passes(model, optimizer)
        put_back(model, [grad * 0.5 for grad in gradients(model)])

    with pytest.warns(RuntimeWarning, match="replaced by another tensor"):
        model, optimizer = after(replaced, 1)
    _, other = after(two_passes, 1)
    for own, expected in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in own.keys() & {"input_factor", "output_factor"}:
            assert torch.equal(own[key], expected[key])
    twin = mlp()
    before = fop.FOP(twin, update_every=1, **SETTINGS)
    train(twin, before, [points(seed=seed) for seed in range(4)])
    start = [p.detach().clone() for p in twin.parameters()]
    before.zero_grad()
    two_passes(twin, before)
    for index in (0, 2):
        own = optimizer.state[model[index].weight]
        grads = [p.grad * 0.5 for p in twin[index].parameters()]
        a = torch.cat([grads[0], grads[1].unsqueeze(1)], dim=1)
        u = own["output_inverse"][0] @ a @ own["input_inverse"][0]
        wanted = [start[index] - 0.1 * u[:, :-1], start[index + 1] - 0.1 * u[:, -1]]
        assert distance(model[index].parameters(), wanted) < 1e-12


class FailingError(Exception):
    pass


def fail_half_way(model: nn.Sequential) -> None:
    """After the last layer's gradient has been reached, and before the first one's."""
    x, y = points(seed=12)
    hidden = model[0](x)

    def fail(grad: Tensor) -> None:
        raise FailingError

    hidden.register_hook(fail)
    with pytest.raises(FailingError):
        (cross_entropy(model[2](model[1](hidden)), y) * 1e3).backward()


def undone_in_place(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    kept = [grad.clone() for grad in gradients(model)]
    fail_half_way(model)
    for grad, value in zip(gradients(model), kept, strict=True):
        grad.copy_(value)
    backward(model, 11, 0.5)


def undone_by_copies(model: nn.Sequential, optimizer: Any) -> None:
    backward(model, 10, 0.5)
    kept = [grad.clone() for grad in gradients(model)]
    fail_half_way(model)
    put_back(model, kept)
    backward(model, 11, 0.5)


def undone_at_the_end(model: nn.Sequential, optimizer: Any) -> None:
    two_passes(model, optimizer)
    kept = [grad.clone() for grad in gradients(model)]
    fail_half_way(model)
    for grad, value in zip(gradients(model), kept, strict=True):
        grad.copy_(value)


@ON_EVERY_STEP
@pytest.mark.parametrize("act", [undone_in_place, undone_by_copies, undone_at_the_end])
def test_a_failed_microbatch_that_is_undone_does_not_mix(act: Any, every: int) -> None:
    """KFAC's step where the failed pass had arrived; elsewhere that of the undisturbed loop."""
    named = "0" if act is undone_by_copies else "2"
    with pytest.warns(RuntimeWarning, match=f"layer '{named}' .* a pass failed before its end"):
        found = snapshot(after(act, every)[0])
    kfac, undisturbed = kfac_step(two_passes, every), snapshot(after(two_passes, every)[0])
    assert distance(found[2:], kfac[2:]) < 1e-12
    if act is not undone_by_copies:
        assert distance(found[:2], undisturbed[:2]) < 1e-12
    elif every != 1:
        assert distance(found[:2], kfac[:2]) < 1e-12


def test_a_failed_first_pass_that_is_undone_is_no_reason_to_stop() -> None:
    """There is no curvature yet: the layers it has reached follow their plain gradients."""
    model = mlp()
    optimizer = fop.FOP(model, **SETTINGS)
    before = snapshot(model)
    undone_in_place(model, optimizer)
    with pytest.warns(RuntimeWarning, match="layer '2' is not the one"):
        optimizer.step()
    twin = mlp()
    two_passes(twin, None)
    wanted = [p - 0.1 * g for p, g in zip(before, gradients(twin), strict=True)]
    assert distance(snapshot(model)[2:], wanted[2:]) < 1e-12
    train(model, optimizer, [points(seed=1)])
    assert "input_inverse" in optimizer.state[model[2].weight]


def test_a_failed_microbatch_that_stays_counts_as_far_as_it_came() -> None:
    """Where it was accumulated, p.grad and what was captured hold it alike."""

    def act(model: nn.Sequential, optimizer: Any) -> None:
        backward(model, 10, 0.5)
        fail_half_way(model)
        backward(model, 11, 0.5)

    def last_layer(model: nn.Sequential, optimizer: Any) -> None:
        backward(model, 10, 0.5)
        x, y = points(seed=12)
        hidden = model[1](model[0](x)).detach()
        (cross_entropy(model[2](hidden), y) * 1e3).backward()
        backward(model, 11, 0.5)

    assert distance(snapshot(after(act, 100)[0]), snapshot(after(last_layer, 100)[0])) < 1e-12


def test_a_failed_pass_and_zero_grad_leave_no_trace() -> None:
    for zero in (nn.Module.zero_grad, lambda model: model.zero_grad(set_to_none=False)):

        def act(model: nn.Sequential, optimizer: Any, zero: Any = zero) -> None:
            backward(model, 10, 0.5)
            fail_half_way(model)
            zero(model)
            two_passes(model, optimizer)

        assert same(snapshot(after(act, 1)[0]), snapshot(after(two_passes, 1)[0]))


def test_a_gradient_of_ones_own_beside_the_loss_makes_a_kfac_step() -> None:
    """Nothing is known about its halves."""

    def act(model: nn.Sequential, optimizer: Any) -> None:
        put_back(model, [torch.ones_like(p) for p in model.parameters()])
        two_passes(model, optimizer)

    with pytest.warns(RuntimeWarning, match="holds something from before"):
        found = snapshot(after(act, 100)[0])
    assert distance(found, kfac_step(act, 100)) < 1e-12
