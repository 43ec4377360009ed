"""Folders of image files, one folder a class: train/<class>/*.JPEG and val/<class>/*.JPEG.

Decoded and cropped by Pillow in DataLoader workers, sent to the device as bytes, normalised there.
Every random crop depends on (seed, epoch, image) alone, so the number of workers changes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fop_bench.data.errors import DataError
from fop_bench.data.seeding import epoch_order, stream
from fop_bench.data.splits import (
    WHOLE,
    Batches,
    EvaluationSplit,
    Normalisation,
    NoValidationError,
    Share,
    check_batch_size,
)

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
CHUNK = 256  # images a worker loads at a time; a training batch may be many chunks
EVALUATION_BATCH = 256
IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
LAYOUT = "Expected one folder a class: train/<class>/*.JPEG and val/<class>/*.JPEG"


@dataclass(frozen=True)
class ImageFiles:
    """Paths of image files with their labels [n]."""

    paths: tuple[str, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Tensor) -> ImageFiles:
        return ImageFiles(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])


def find_images(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """All images of the classes in `folder`, sorted; a class's label is its place in `classes`."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            raise DataError(folder / name, "the folder of this class is missing", LAYOUT)
        with os.scandir(folder / name) as entries:
            found = sorted(e.path for e in entries if e.name.lower().endswith(EXTENSIONS))
        if not found:
            raise DataError(folder / name, "holds no images", LAYOUT)
        paths += found
        labels += [label] * len(found)
    return ImageFiles(tuple(paths), torch.tensor(labels))


def find_classes(folder: Path, expected: int, wanted: Sequence[str] | None = None) -> list[str]:
    """The class folders in order; of a larger set only the `wanted` ones."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        fix = f"{LAYOUT}; ImageNet's validation archive is flat, so sort its files by class first"
        raise DataError(folder, "holds no class folders", fix)
    if wanted is not None and len(names) > expected:
        return sorted(wanted)
    if len(names) != expected:
        raise DataError(folder, f"holds {len(names)} class folders, expected {expected}", LAYOUT)
    return names


def read_image(path: str) -> Image:
    """Decode a file completely, as RGB."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's words for broken files
        raise DataError(path, f"cannot be decoded ({error})", "Replace the file") from error


def random_resized_crop(image: Image, size: int, randomness: torch.Generator) -> Image:
    """A random 8 to 100 % of the area, aspect ratio 3:4 to 4:3, resized; mirrored half the time."""
    from PIL import Image

    box = _crop_box(image.width, image.height, randomness)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if torch.rand((), generator=randomness) < 0.5:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _crop_box(width: int, height: int, randomness: torch.Generator) -> tuple[int, int, int, int]:
    for _ in range(10):
        area, ratio, across, down = torch.rand(4, generator=randomness).tolist()
        area = width * height * (0.08 + 0.92 * area)
        ratio = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    # An image too long for such a crop: its middle, with the nearest allowed ratio.
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_crop(image: Image, size: int) -> Image:
    """Shorter side to size * 256 / 224, then the middle."""
    from PIL import Image

    scale = size * 256 / 224 / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def to_bytes(image: Image) -> Tensor:
    """[3, height, width] of bytes."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class CroppedImages(Dataset[tuple[Tensor, Tensor]]):
    """Decoded, cropped images; with `shuffle` = (seed, epoch) the crops are random."""

    files: ImageFiles
    size: int
    shuffle: tuple[int, int] | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = read_image(self.files.paths[index])
        if self.shuffle is None:
            image = centre_crop(image, self.size)
        else:
            image = random_resized_crop(image, self.size, stream("crop", *self.shuffle, index))
        return to_bytes(image), self.files.labels[index]


@dataclass(frozen=True)
class FolderBatches:
    """Batches of image files, loaded by worker processes ahead of their use."""

    images: CroppedImages
    order: Tensor
    batch_size: int
    workers: int
    device: torch.device
    share: Share = WHOLE

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = [self.share.of(batch) for batch in torch.split(self.order, self.batch_size)]
        # A share of no images has one empty chunk, which is nothing to load.
        chunks = [c.tolist() for batch in batches for c in torch.split(batch, CHUNK) if len(c)]
        loader = iter(
            DataLoader(
                self.images,
                batch_sampler=chunks,
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                generator=stream("workers"),  # else the loader draws from the global generator
            )
        )
        for batch in batches:
            if not len(batch):
                empty = torch.empty(0, 3, self.images.size, self.images.size, device=self.device)
                yield empty, torch.empty(0, dtype=torch.long, device=self.device)
                continue
            parts = [next(loader) for _ in torch.split(batch, CHUNK)]
            pixels, labels = (
                torch.cat([part.to(self.device, non_blocking=True) for part in column])
                for column in zip(*parts, strict=True)
            )
            yield IMAGENET(pixels), labels


@dataclass(frozen=True)
class FolderSplits:
    """Training, validation and test images in files."""

    training: ImageFiles
    test: ImageFiles
    validation: ImageFiles | None
    size: int
    workers: int
    device: torch.device

    @property
    def train_size(self) -> int:
        return len(self.training)

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        images = CroppedImages(self.training, self.size)
        return next(iter(FolderBatches(images, torch.arange(2), 2, 0, self.device)))

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> Batches:
        images = CroppedImages(self.training, self.size, shuffle=(seed, epoch))
        order = epoch_order(self.train_size, seed, epoch)
        capped = check_batch_size(batch_size, self.train_size)
        return FolderBatches(images, order, capped, self.workers, self.device, share)

    def evaluation(self, split: EvaluationSplit) -> Batches:
        files = self.test if split == "test" else self.validation
        if files is None:
            raise NoValidationError
        images, order = CroppedImages(files, self.size), torch.arange(len(files))
        return FolderBatches(images, order, EVALUATION_BATCH, self.workers, self.device)
