"""A workload owns data, model, loss, metric and target, and they fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fop_bench.data import SOURCES
from fop_bench.workloads import WORKLOADS, Workload

PAPER = {
    "cifar10-resnet18": (0.91, 100, 1024, (2048, 4096, 8192, 16_384, 32_768, 50_000), 5),
    "imagenet100-t2tvit": (0.806, 100, 512, (512, 1024, 2048, 4096), 3),
    "imagenet1k-resnet50": (0.759, 80, 1024, (1024, 2048, 4096, 8192), 3),
    "cifar10-lt-100": (0.7195, 200, 128, (128,), 5),
    "cifar10-lt-50": (0.7645, 200, 128, (128,), 5),
    "cifar100-lt-100": (0.3773, 200, 128, (128,), 5),
    "cifar100-lt-50": (0.4378, 200, 128, (128,), 5),
}
LAPTOP = {
    "digits-mlp",
    "fashion-mlp",
    "fashion-cnn",
    "cifar10-resnet8",
    "cifar10-resnet20",
    "cifar10-lt-resnet32",
    "shakespeare-gpt",
}


class Given:
    """Batches written down in a test."""

    def __init__(self, *batches: tuple[Tensor, Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


@pytest.fixture
def data_dir(
    fashion_dir: Path, cifar10_dir: Path, cifar100_dir: Path, shakespeare_dir: Path
) -> Path:
    """Every data set but ImageNet, tiny."""
    assert fashion_dir == cifar10_dir == cifar100_dir == shakespeare_dir
    return fashion_dir


def test_registry_holds_the_papers_and_the_laptop_workloads() -> None:
    assert {n for n, w in WORKLOADS.items() if w.scale == "paper"} == set(PAPER)
    assert {n for n, w in WORKLOADS.items() if w.scale == "laptop"} == LAPTOP
    assert all(name == workload.name for name, workload in WORKLOADS.items())
    assert all(workload.data in SOURCES for workload in WORKLOADS.values())


@pytest.mark.parametrize("name", PAPER)
def test_paper_workloads_have_the_settings_of_appendix_c(name: str) -> None:
    w = WORKLOADS[name]
    found = (w.target, w.epochs, w.base_batch, w.batch_sizes, len(w.seeds))
    assert found == PAPER[name]
    assert w.metric == "accuracy"
    assert w.train_images is None


def test_the_transformers_fall_back_on_adamw() -> None:
    for name, workload in WORKLOADS.items():
        expected = {"fallback": "adamw"} if name.endswith(("t2tvit", "gpt")) else {}
        assert workload.optimizer_overrides == expected


SMALL = [name for name, workload in WORKLOADS.items() if not workload.data.startswith("imagenet")]


@pytest.mark.parametrize("name", SMALL)
def test_data_model_loss_and_metric_fit_together(name: str, data_dir: Path) -> None:
    workload = WORKLOADS[name]
    splits = workload.splits(data_dir, validation=True, subset=20)
    model = workload.model(0)
    inputs, target = next(iter(splits.train(8, epoch=0, seed=0)))
    assert splits.example[0].shape[1:] == inputs.shape[1:]
    loss = workload.loss(model(inputs), target)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None for p in model.parameters())
    metrics = workload.evaluate(model, splits.evaluation("validation"))
    assert workload.metric in metrics
    assert set(metrics) == set(workload.evaluate(model, splits.evaluation("test")))
    assert all(isinstance(value, float) for value in metrics.values())
    assert ("error_tail" in metrics) == ("-lt-" in name)


@pytest.mark.parametrize(
    "name", ["imagenet100-t2tvit", pytest.param("imagenet1k-resnet50", marks=pytest.mark.slow)]
)
def test_imagenet_workloads_run_on_image_files(
    name: str, write_image_folder: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = WORKLOADS[name]
    classes = {"imagenet100-t2tvit": 100, "imagenet1k-resnet50": 1000}[name]
    names = [f"n{number:08}" for number in range(classes)]
    assert callable(write_image_folder)
    folder = write_image_folder(names, train=1, name=workload.data)
    splits = workload.splits(folder, subset=3, workers=0)
    inputs, target = next(iter(splits.train(2, epoch=0, seed=0)))
    assert inputs.shape == (2, 3, 224, 224)
    model = workload.model(0)
    workload.loss(model(inputs), target).backward()
    assert set(workload.evaluate(model, splits.evaluation("test"))) == {"loss", "accuracy"}


def test_long_tail_trains_on_an_unbalanced_and_validates_on_a_balanced_set(data_dir: Path) -> None:
    splits = WORKLOADS["cifar10-lt-100"].splits(data_dir, validation=True)
    trained = torch.cat([y for _, y in splits.train(1000, 0, 0)]).bincount(minlength=10).tolist()
    assert trained == sorted(trained, reverse=True)
    assert trained[0] == 18  # 20 a class, a tenth held out
    held = torch.cat([y for _, y in splits.evaluation("validation")])
    assert held.bincount().tolist() == [2] * 10


def test_subset_overrides_a_workloads_own_number(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WORKLOADS["fashion-mlp"]
    assert workload.train_images == 20_000
    assert workload.splits(data_dir).train_size == 120
    assert workload.splits(data_dir, subset=50).train_size == 50
    assert Workload(**{**vars(workload), "train_images": 30}).splits(data_dir).train_size == 30


def test_loss_is_the_mean_over_all_predictions() -> None:
    workload = WORKLOADS["shakespeare-gpt"]
    output, target = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    each = torch.stack([F.cross_entropy(o, t) for o, t in zip(output, target, strict=True)])
    torch.testing.assert_close(workload.loss(output, target), each.mean())


def test_evaluation_weighs_every_example_alike() -> None:
    workload = WORKLOADS["digits-mlp"]
    logits, labels = torch.randn(11, 10), torch.randint(10, (11,))
    whole = workload.evaluate(nn.Identity(), Given((logits, labels)))
    parts = workload.evaluate(
        nn.Identity(), Given((logits[:7], labels[:7]), (logits[7:], labels[7:]))
    )
    assert whole["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert whole["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert parts == pytest.approx(whole, rel=1e-5)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    workload = WORKLOADS["shakespeare-gpt"]
    logits, target = torch.randn(2, 4, 9), torch.randint(9, (2, 4))
    metrics = workload.evaluate(nn.Identity(), Given((logits, target)))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-5)
    assert not workload.higher_is_better
    broken = workload.evaluate(nn.Identity(), Given((logits * 1e4, target)))
    assert broken["perplexity"] == math.inf


def test_long_tail_errors_are_those_of_the_classes_in_each_group() -> None:
    workload = WORKLOADS["cifar10-lt-100"]
    labels = torch.arange(10).repeat(4)
    answers = labels.clone()
    answers[0] = 9  # one of 12 in the head, classes 0 to 2
    answers[[3, 14, 25, 36]] = 0  # four of 16 in the middle, classes 3 to 6
    answers[labels >= 7] = 0  # all of the tail
    metrics = workload.evaluate(nn.Identity(), Given((F.one_hot(answers, 10).float(), labels)))
    assert metrics["error_head"] == pytest.approx(1 / 12)
    assert metrics["error_middle"] == pytest.approx(4 / 16)
    assert metrics["error_tail"] == 1
    assert metrics["error"] == pytest.approx(17 / 40) == 1 - metrics["accuracy"]


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_changes_neither_mode_nor_statistics(training: bool, data_dir: Path) -> None:
    workload = WORKLOADS["cifar10-resnet8"]
    splits = workload.splits(data_dir, subset=8)
    model = workload.model(0).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workload.evaluate(model, splits.evaluation("test"))
    assert model.training is training
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_digits_can_be_learnt_to_the_target() -> None:
    workload = WORKLOADS["digits-mlp"]
    splits = workload.splits(None)
    assert splits.train_size == workload.batch_sizes[-1]
    model = workload.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(6):
        for inputs, target in splits.train(64, epoch, seed=0):
            optimizer.zero_grad()
            workload.loss(model(inputs), target).backward()
            optimizer.step()
    assert workload.evaluate(model, splits.evaluation("test"))["accuracy"] >= workload.target
