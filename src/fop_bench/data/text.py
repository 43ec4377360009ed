"""Characters of a text as windows of tokens; the target is the same window one character on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fop_bench.data.errors import DataError
from fop_bench.data.idx import REPLACE, read_bytes
from fop_bench.data.seeding import epoch_order, stream
from fop_bench.data.selection import Selection
from fop_bench.data.splits import (
    WHOLE,
    Batches,
    EvaluationSplit,
    NoValidationError,
    Share,
    check_batch_size,
)

# The characters of tiny Shakespeare; fixed, so that a model can be built without the data.
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LARGEST = 1 << 24  # bytes; tiny Shakespeare has 1.1 million
EVALUATION_BATCH = 128
TEST_FRACTION = 0.1


def read_text(path: Path, alphabet: str = ALPHABET) -> Tensor:
    """The text as token numbers [characters]."""
    try:
        text = read_bytes(path, LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8 text ({error})", REPLACE) from error
    numbers = {character: number for number, character in enumerate(alphabet)}
    unknown = next((i for i, character in enumerate(text) if character not in numbers), None)
    if unknown is not None:
        problem = f"character {text[unknown]!r} at position {unknown} is not in the vocabulary"
        raise DataError(path, problem, REPLACE)
    return torch.tensor([numbers[character] for character in text], dtype=torch.long)


@dataclass(frozen=True)
class TextBatches:
    """Windows of `length` tokens starting at the given positions."""

    tokens: Tensor
    starts: Tensor
    length: int
    batch_size: int
    share: Share = WHOLE

    def __len__(self) -> int:
        return -(-len(self.starts) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        reach = torch.arange(self.length + 1)
        for starts in torch.split(self.starts, self.batch_size):
            windows = self.tokens[(self.share.of(starts)[:, None] + reach).to(self.tokens.device)]
            yield windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class TextSplits:
    """Consecutive parts of one text. An example is a window; an epoch sees every window once."""

    training: Tensor
    test: Tensor
    validation: Tensor | None
    length: int
    subset: int | None = None  # at most this many windows of each part

    @property
    def train_size(self) -> int:
        return self._windows(self.training)

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        return next(iter(TextBatches(self.training, torch.arange(2), self.length, 2)))

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> Batches:
        """Windows are cut again each epoch, at a random offset, as augmentation."""
        offset = int(torch.randint(self.length, (), generator=stream("offset", seed, epoch)))
        starts = offset + self.length * epoch_order(self.train_size, seed, epoch)
        capped = check_batch_size(batch_size, self.train_size)
        return TextBatches(self.training, starts, self.length, capped, share)

    def evaluation(self, split: EvaluationSplit) -> Batches:
        tokens = self.test if split == "test" else self.validation
        if tokens is None:
            raise NoValidationError
        starts = self.length * torch.arange(self._windows(tokens))
        return TextBatches(tokens, starts, self.length, EVALUATION_BATCH)

    def _windows(self, tokens: Tensor) -> int:
        """Windows with their last target that fit at any offset below `length`."""
        count = len(tokens) // self.length - 1
        return count if self.subset is None else min(count, self.subset)


def split_text(path: Path, selection: Selection, length: int, device: torch.device) -> TextSplits:
    """The last tenth of the text is the test part; the validation part lies before it."""
    tokens = read_text(path)
    if len(tokens) * TEST_FRACTION < 3 * length:
        problem = f"{len(tokens):,} characters are too few for windows of {length}"
        raise DataError(path, problem, REPLACE)
    tokens = tokens.to(device)
    test_start = round((1 - TEST_FRACTION) * len(tokens))
    held_start = round((1 - selection.held_out) * test_start)
    validation = tokens[held_start:test_start] if selection.held_out else None
    return TextSplits(
        tokens[:held_start], tokens[test_start:], validation, length, selection.subset
    )
