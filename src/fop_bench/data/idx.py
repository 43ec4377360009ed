"""IDX files (MNIST's layout), plain or gzipped.

Header: two zero bytes, 0x08 for bytes, the number of dimensions, then each size as a big-endian
32-bit number; the bytes follow.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fop_bench.data.errors import DataError
from fop_bench.data.splits import Images

LARGEST = 1 << 26  # bytes; the largest IDX file of any data set here has 47 million
REPLACE = "Replace the file with an intact copy, or delete it to have it downloaded again"


class Readable(Protocol):
    """A stream of bytes, as far as it is used here."""

    def read(self, size: int = -1, /) -> bytes: ...


class Bounded:
    """A stream that ends with a DataError once it held more than so many bytes.

    A small gzip file can unpack to a thousand times its size; what no file of its format holds is
    never read.
    """

    def __init__(self, path: Path, stream: Readable, limit: int) -> None:
        self._path, self._stream, self.limit = path, stream, limit
        self._seen = 0

    def read(self, size: int = -1, /) -> bytes:
        left = self.limit - self._seen + 1  # one byte more tells that there is more
        found = self._stream.read(left if size < 0 else min(size, left))
        self._seen += len(found)
        if self._seen > self.limit:
            raise DataError(
                self._path, f"too long: it holds more than {self.limit:,} bytes", REPLACE
            )
        return found


@contextmanager
def opened(path: Path, limit: int) -> Iterator[Bounded]:
    """The contents, unpacked if the name ends in .gz: no more of them than `limit` bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield Bounded(path, stream, limit)
    except EOFError as error:
        raise DataError(path, "the gzip file is truncated", REPLACE) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(path, f"not an intact gzip file ({error})", REPLACE) from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})", "Make the file readable") from error


def read_bytes(path: Path, limit: int) -> bytes:
    with opened(path, limit) as stream:
        return stream.read()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The file's byte tensor, which must have that many dimensions."""
    with opened(path, LARGEST) as stream:
        header = stream.read(4 + 4 * dimensions)
        if header[:4] != bytes((0, 0, 8, dimensions)) or len(header) < 4 + 4 * dimensions:
            raise DataError(
                path,
                f"not an IDX file of bytes with {dimensions} dimension(s): it starts with "
                f"{header[:4].hex(' ') or 'nothing'}, expected 00 00 08 0{dimensions}",
                REPLACE,
            )
        shape = struct.unpack(f">{dimensions}I", header[4:])
        expected = len(header) + math.prod(shape)
        if expected > LARGEST:
            problem = f"its header announces {expected:,} bytes, more than {LARGEST:,}"
            raise DataError(path, problem, REPLACE)
        stream.limit = expected
        content = bytearray(stream.read())
    if len(header) + len(content) < expected:
        found = len(header) + len(content)
        problem = f"truncated: {found:,} bytes, expected {expected:,} for shape {shape}"
        raise DataError(path, problem, REPLACE)
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)


def load_images(images: Path, labels: Path, classes: int) -> Images:
    """One split: images [n, h, w] become [n, 1, h, w]."""
    pixels = read_idx(images, 3)
    classification = read_idx(labels, 1).long()
    if len(pixels) != len(classification):
        problem = f"{len(classification):,} labels for {len(pixels):,} images in {images.name}"
        raise DataError(labels, problem, REPLACE)
    if len(pixels) == 0 or int(classification.max()) >= classes:
        found = int(classification.max()) if len(pixels) else "no images"
        problem = f"labels must be 0 to {classes - 1}, found {found}"
        raise DataError(labels, problem, REPLACE)
    return Images(pixels.unsqueeze(1), classification)
