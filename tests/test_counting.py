"""Examples are counted right wherever a layer has them, or it is said."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop import optimizer as fronts
from tests import oracles
from tests.common import CLASSES, distance, mlp, points, snapshot, train
from tests.miniatures import (
    MINIATURES,
    AttentionWindows,
    FlatHead,
    Frames,
    LongSequenceFirst,
    Miniature,
    Positions,
    SequenceFirst,
    Transposed,
    Windows,
)

EXAMPLES = 6  # SquareRelativeBias, Windows and others have as many positions
COMMON = {"lr": 0.1, "momentum": 0.9, "fallback": {"name": "sgd", "lr": 0.1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce": {"sharing": "reduce"},
    "ekfac": {"curvature": "ekfac"},
    "mc": {"fisher": "mc"},
    "exact": {"fisher": "exact"},
    "norms": {"norms": "unitwise"},
    "no curvature": {"curvature": "identity", "kl_clip": None},
}

by_name = pytest.mark.parametrize("kind", MINIATURES, ids=lambda kind: kind.__name__)


def run(
    model: Miniature,
    build: Any = fop.FOP,
    sizes: Sequence[Sequence[int]] = ((EXAMPLES,),) * 3,
    **settings: Any,
) -> fronts.SecondOrderOptimizer:
    """One step for each list of micro-batches, update_every=2 so that some are plain."""
    if model.twin:
        settings["skip"] = model.tables
    optimizer: fronts.SecondOrderOptimizer = build(model, update_every=2, **{**COMMON, **settings})
    for step, parts in enumerate(sizes):
        optimizer.zero_grad()
        torch.manual_seed(step)
        for part, size in enumerate(parts):
            x, y = model.data(size, seed=10 * step + part)
            (model.loss(model(x), y) * size / sum(parts)).backward()
        optimizer.step()
    return optimizer


def assert_equal(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    found = distance(snapshot(one), snapshot(other))
    assert found < tolerance, f"relative distance {found}"


@by_name
@pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_steps_are_those_of_a_model_with_the_examples_in_front(
    kind: type[Miniature], build: Any, settings: dict[str, Any]
) -> None:
    if kind is Frames and "norms" in settings:
        pytest.skip("the twin's calls for each frame are no calls for each example")
    if kind is AttentionWindows and "sharing" in settings:
        pytest.skip("gradients of keys add up to zero over positions: their factor is round-off")
    model, twin = kind(), kind(twin=True)
    optimizer, expected = (run(m, build, **settings) for m in (model, twin))
    assert_equal(model, twin)
    if build is fop.FOP:
        assert fop.noise_scale(optimizer) == pytest.approx(fop.noise_scale(expected), rel=1e-9)


@by_name
def test_accumulated_micro_batches_are_counted_right(kind: type[Miniature]) -> None:
    model, twin = kind(), kind(twin=True)
    for one in (model, twin):
        run(one, sizes=((4, 3), (6, 4), (1, 6)))
    assert_equal(model, twin)


@by_name
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_counted_right(kind: type[Miniature], reentrant: bool) -> None:
    """They run a second time during the backward pass, outside of the model's forward."""
    model, twin = kind(checkpointing=reentrant), kind(twin=True)
    for one in (model, twin):
        run(one)
    assert_equal(model, twin)


@by_name
def test_half_batch_gradients_are_those_of_the_two_halves(kind: type[Miniature]) -> None:
    model, alone = kind(), kind()
    optimizer = fop.FOP(model, **COMMON)
    x, y = model.data(EXAMPLES, seed=0)
    model.loss(model(x), y).backward()
    halves = []
    for part in (slice(0, EXAMPLES // 2), slice(EXAMPLES // 2, None)):
        parameters = dict(alone.named_parameters())
        loss = alone.loss(alone(x[part]), y[part]) / 2
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        halves.append(dict(zip(parameters, gradients, strict=True)))
    checked = 0
    for block in optimizer._engine.layers:
        if block.name in model.tables or "attention" in block.name:
            continue
        sample = block.recorder.sample()
        assert list(sample.half_sizes) == [EXAMPLES // 2, EXAMPLES // 2]
        for key, found in zip(("weight", "bias"), sample.difference or (), strict=False):
            name = f"{block.name}.{key}"
            assert distance([found], [halves[0][name] - halves[1][name]]) < 1e-12
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize("kind", [SequenceFirst, Transposed, FlatHead, Windows, Frames])
@pytest.mark.parametrize("project", [True, False], ids=["FOP", "KFAC"])
@pytest.mark.parametrize("norms", ["fallback", "unitwise"])
def test_steps_are_those_of_the_dense_reference(
    kind: type[Miniature], project: bool, norms: str
) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "update_every": 2, "norms": norms}
    options["fallback"] = "sgd"
    model = kind()
    reference = oracles.ReferenceOptimizer(
        kind(twin=True), oracles.Reference(**options, project=project)
    )
    optimizer = (fop.FOP if project else fop.KFAC)(model, **options)

    def loss(output: Tensor, target: Tensor, reduction: str) -> Tensor:
        return cross_entropy(output.flatten(0, -2), target.flatten(), reduction=reduction)

    for step in range(2):
        x, y = model.data(4, seed=step)
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        optimizer.step()
        reference.step([(x, y)], loss)
    assert_equal(model, reference.model)


def test_several_forwards_before_one_backward_each_have_their_own_batch() -> None:
    """Also where parts of them run again, in the reverse order."""
    for checkpointing in (None, True, False):
        pair = [LongSequenceFirst(twin, checkpointing) for twin in (False, True)]
        for one in pair:
            optimizer = fop.FOP(one, **COMMON)
            batches = [one.data(size, seed=size) for size in (6, 4)]
            sum(one.loss(one(x), y) for x, y in batches).backward()
            optimizer.step()
        assert_equal(*pair)


class Wrapping(nn.Module):
    """Calls its model twice as large as it is called itself."""

    def __init__(self, model: Miniature) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> Tensor:
        return scale * self.model(batch["x"])


@pytest.mark.parametrize("kind", [FlatHead, LongSequenceFirst, Frames])
def test_inputs_may_be_in_a_dict_and_the_model_inside_another(kind: type[Miniature]) -> None:
    found = []
    for twin in (False, True):
        model = kind(twin=twin)
        wrapper = Wrapping(model)
        optimizer = fop.FOP(wrapper, **COMMON)
        x, y = model.data(EXAMPLES, seed=0)
        model.loss(wrapper({"x": x}, scale=0.5), y).backward()
        optimizer.step()
        found.append(wrapper)
    assert_equal(*found)


@pytest.mark.parametrize("kind", [FlatHead, LongSequenceFirst, Frames])
def test_parts_that_are_called_themselves_tell_their_batch(kind: type[Miniature]) -> None:
    """As a training step does, in which the model itself is never called."""
    found = []
    for twin in (False, True):
        model = kind(twin=twin)
        wrapper = Wrapping(model)
        optimizer = fop.FOP(wrapper, **COMMON)
        x, y = model.data(EXAMPLES, seed=0)
        model.loss(wrapper.model(x), y).backward()
        optimizer.step()
        found.append(wrapper)
    assert_equal(*found)


class Recursive(FlatHead):
    """Calls itself on another batch, and goes on with its own."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.run(self.words(x))
        if len(x) > 3:
            z = z + self(x[:3]).sum()
        return self.head(z if self.twin else z.view(-1, z.shape[-1]))


def test_a_model_that_calls_itself_has_a_batch_in_each_call() -> None:
    found = []
    for twin in (False, True):
        model = Recursive(twin=twin)
        run(model)
        found.append(model)
    assert_equal(*found)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_tell_nothing(duplicate: Any) -> None:
    model = FlatHead()
    optimizer = fop.FOP(model, **COMMON)
    other = duplicate(model)
    seen = []
    optimizer._engine.plan.examples.begin = lambda *args, **_: seen.append(args)  # type: ignore[method-assign]
    x, _ = model.data(EXAMPLES, seed=0)
    other(x)
    assert not seen
    model(x)
    assert len(seen) == 1
    del optimizer
    gc.collect()
    model(x)
    assert len(seen) == 1
    assert not model._forward_pre_hooks


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    model, expected = mlp(), mlp()
    optimizer = fop.FOP(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(7, 4, dtype=torch.float64))
    assert optimizer._engine.plan.examples.current is None
    train(model, optimizer, [points()])
    train(expected, fop.FOP(expected), [points()])
    assert_equal(model, expected, 1e-15)


def test_an_unbatched_call_of_the_model_is_one_example() -> None:
    """Its first dimension counts features, whatever the number."""
    models = [mlp(), mlp()]
    for model, batched in zip(models, (False, True), strict=True):
        optimizer = fop.KFAC(model)
        x, y = points(1)
        output = model(x) if batched else model(x[0]).unsqueeze(0)
        cross_entropy(output, y).backward()
        optimizer.step()
    assert_equal(*models, 1e-13)


def test_a_list_of_images_is_no_batch_of_their_channels() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, CLASSES)

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.head(self.body(torch.stack(images)).mean((2, 3)))

    for count in (2, 3, 6):
        models = []
        for hooked in (True, False):
            model = Detector().double()
            optimizer = fop.KFAC(model)
            if not hooked:  # dimension 0 of each layer's input
                optimizer._engine.plan.examples.begin = lambda *_, **__: None  # type: ignore[method-assign]
            torch.manual_seed(1)
            images = [torch.randn(3, 5, 5, dtype=torch.float64) for _ in range(count)]
            cross_entropy(model(images), torch.arange(count) % CLASSES).backward()
            optimizer.step()
            models.append(model)
        assert_equal(*models, 1e-14)


# --- what is said ---------------------------------------------------------------------------------


class Once(nn.Module):
    """swinv2, xcit: modules that are called once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)
        self.table, self.scale = nn.Linear(2, 4), nn.Linear(3, 4)
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        z = self.first(x) * self.scale(x.new_ones(3))
        return self.last(torch.tanh(z + self.table(x.new_ones(1, 2))))


@pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
def test_modules_called_once_for_the_whole_batch_are_named_together(build: Any) -> None:
    model = Once()
    optimizer = build(model, **COMMON)
    x, y = points(6)
    cross_entropy(model(x), y).backward()
    with pytest.warns(RuntimeWarning) as caught:
        optimizer.step()
    [message] = [str(warning.message) for warning in caught]
    assert "called with rows that don't belong to single examples" in message
    assert "'table' 1 and 6, 'scale' 1 and 6" in message
    assert "use at least two" not in message
    train(model, optimizer, [points(6, seed=seed) for seed in range(4)])  # and says so once
    assert set(fop.diagnostics(optimizer)) == {"first", "last"}


def test_where_the_inputs_disagree_the_layers_tell_which_are_called_once() -> None:
    model = Once()
    optimizer = fop.FOP(model, **COMMON)
    x, y = points(6)
    cross_entropy(model(x, torch.ones(4, 4)), y).backward()
    with pytest.warns(RuntimeWarning, match="'table' 1 and 6, 'scale' 1 and 6"):
        optimizer.step()
    assert set(fop.diagnostics(optimizer)) == {"first", "last"}


def test_where_the_inputs_disagree_layers_with_other_counts_are_named_with_both_numbers() -> None:
    class Masked(FlatHead):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    model = Masked()
    optimizer = fop.FOP(model, **COMMON)
    for step in range(3):
        x, y = model.data(EXAMPLES, seed=step)
        optimizer.zero_grad()
        model.loss(model(x, torch.ones(5, 5)), y).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if step == 0:
            [warning] = caught
            assert "than most: 'head' 30, where most saw 6" in str(warning.message)
        else:
            assert not caught


class Selecting(nn.Module):
    """The last layer sees some of the examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)
        self.double()

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return self.last(torch.tanh(self.first(x))[:rows])


def test_a_layer_with_a_call_that_fits_no_more_is_not_projected() -> None:
    """It is named on the spot, and disabled when counts are next read."""
    model = Selecting()
    optimizer = fop.FOP(model, **COMMON, update_every=4, kl_clip=None)
    for step in range(1, 6):
        x, y = points(6, seed=step)
        rows = 5 if step == 3 else 6  # on a plain step
        optimizer.zero_grad()
        cross_entropy(model(x, rows), y[:rows]).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        named = ["'last' 5 and 6" in str(warning.message) for warning in caught]
        assert named == ([True] if step == 3 else [])
        if step <= 3:
            assert (fop.diagnostics(optimizer, "last")["last"]["beta"] == 0) is (step == 3)
        assert optimizer._engine.layers[1].recorder.disabled is (step >= 4)


def test_position_embeddings_are_named_at_info_and_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Two(Positions):
        def build(self) -> None:
            super().build()
            self.sides = nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            words = self.words(x) + self.sides(torch.arange(5)) + self.places(torch.arange(5))
            return self.head(self.run(words).mean(1))

    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(Two(), **COMMON)
        caplog.clear()
        model = optimizer._model
        assert isinstance(model, Two)
        for seed in range(3):
            x, y = model.data(EXAMPLES, seed=seed)
            optimizer.zero_grad()
            model.loss(model(x), y).backward()
            optimizer.step()
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "(looked up once for the whole batch" in record.getMessage()
    assert record.getMessage().endswith("'places' 5 and 6, 'sides' 5 and 6")


def test_layers_left_to_the_fallback_share_one_message_per_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parametrized = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    with caplog.at_level("WARNING", logger="fop"):
        fop.FOP(nn.Sequential(nn.LSTM(4, 4), nn.LSTM(4, 4), parametrized, nn.Linear(4, 4)))
    [message] = caplog.messages
    assert message == "uses the fallback optimizer (no curvature for LSTM): '0', '1'"


@pytest.mark.parametrize("scheduled", [False, True])
def test_warnings_point_at_the_line_that_calls_step(scheduled: bool) -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    if scheduled:  # which wraps step() once more
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    x, y = points(1)
    cross_entropy(model(x), y).backward()
    with pytest.warns(RuntimeWarning, match="saw 1 and 0 examples") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_warnings_of_steps_with_a_closure_and_of_failed_inversions_point_there_too() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    x, y = points(1)

    def closure() -> Any:
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match="saw 1 and 0 examples") as caught:
        optimizer.step(closure)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="could not be inverted") as caught:
        optimizer._engine.messages.not_inverted(optimizer._engine.layers)
    assert caught[0].filename == __file__
