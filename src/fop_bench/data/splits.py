"""What a run needs from its data: batches of any epoch in a fixed order, on the device.

Three kinds of data share this shape: images that fit into memory (here), folders of image files
(imagefolder.py) and text (text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from fop_bench.data.augment import crop_and_flip, random_crops
from fop_bench.data.seeding import epoch_order, stream

EvaluationSplit = Literal["validation", "test"]
EVALUATION_BATCH = 1000  # batch size does not change a metric; this one fits every small model


class Batches(Protocol):
    """One pass over some data; tensors are already on the device."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Share:
    """One of `count` contiguous parts of every batch; the first parts are an example larger."""

    index: int = 0
    count: int = 1

    def of(self, batch: Tensor) -> Tensor:
        """This part of a batch, along its first axis; empty where there are too few examples."""
        return batch.tensor_split(self.count)[self.index]


WHOLE = Share()


class Splits(Protocol):
    """Training, validation and test data of one workload."""

    @property
    def train_size(self) -> int: ...

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """A tiny batch (two examples), to see shapes and dtypes."""
        ...

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> Batches:
        """The epoch's batches, shuffled by (seed, epoch); the last, smaller one is kept.

        Of each batch only the `share` is given, with the examples that the whole batch has there.
        """
        ...

    def evaluation(self, split: EvaluationSplit) -> Batches:
        """The split in file order, without augmentation."""
        ...


@dataclass(frozen=True)
class Request:
    """What a run asks of a data set; see Workload.splits."""

    data_dir: Path | None
    device: torch.device
    validation: bool
    subset: int | None
    workers: int | None = None


class NoValidationError(ValueError):
    """Validation data was asked for, but the splits train on everything."""

    def __init__(self) -> None:
        super().__init__(
            'evaluation("validation") needs held-out data: build the splits with validation=True'
        )


def check_batch_size(batch_size: int, size: int) -> int:
    """The batch size capped at the number of examples."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return min(batch_size, size)


@dataclass(frozen=True)
class Images:
    """Images as bytes [n, channels, height, width] with their labels [n] (int64)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> Images:
        return Images(self.pixels[indices], self.labels[indices])

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Normalisation:
    """Maps bytes to floats: (byte / white - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: float = 255.0

    def __call__(self, pixels: Tensor) -> Tensor:
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return (pixels.float() / self.white - mean) / std


@dataclass(frozen=True)
class ImageBatches:
    """Batches of in-memory images; `prepare(pixels, number of the batch, its size)` makes them
    floats.
    """

    images: Images
    order: Tensor
    batch_size: int
    prepare: Callable[[Tensor, int, int], Tensor]
    share: Share = WHOLE

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, indices in enumerate(torch.split(self.order, self.batch_size)):
            mine = self.share.of(indices)
            batch = self.images.select(mine.to(self.images.labels.device))
            yield self.prepare(batch.pixels, number, len(indices)), batch.labels


@dataclass(frozen=True)
class ImageSplits:
    """Images held on the device as bytes; normalised, cropped and flipped a batch at a time."""

    training: Images
    test: Images
    validation: Images | None
    normalise: Normalisation
    padding: int = 0  # of the random crop; 0 means no augmentation

    @property
    def train_size(self) -> int:
        return len(self.training)

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        return self.normalise(self.training.pixels[:2]), self.training.labels[:2]

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> Batches:
        def prepare(pixels: Tensor, number: int, size: int) -> Tensor:
            if self.padding:
                draws = random_crops(size, self.padding, stream("augment", seed, epoch, number))
                pixels = crop_and_flip(pixels, self.padding, *map(share.of, draws))
            return self.normalise(pixels)

        order = epoch_order(self.train_size, seed, epoch)
        capped = check_batch_size(batch_size, self.train_size)
        return ImageBatches(self.training, order, capped, prepare, share)

    def evaluation(self, split: EvaluationSplit) -> Batches:
        images = self.test if split == "test" else self.validation
        if images is None:
            raise NoValidationError

        def prepare(pixels: Tensor, _number: int, _size: int) -> Tensor:
            return self.normalise(pixels)

        return ImageBatches(images, torch.arange(len(images)), EVALUATION_BATCH, prepare)
