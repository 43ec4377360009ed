"""IDX files (MNIST's layout), plain or gzipped.

Header: two zero bytes, 0x08 for bytes, the number of dimensions, then each size as a big-endian
32-bit number; the bytes follow.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from fop_bench.data.errors import DataError
from fop_bench.data.splits import Images

REPLACE = "Replace the file with an intact copy, or delete it to have it downloaded again"


def read_bytes(path: Path) -> bytes:
    """The contents, unpacked if the name ends in .gz."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise DataError(path, "the gzip file is truncated", REPLACE) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(path, f"not an intact gzip file ({error})", REPLACE) from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})", "Make the file readable") from error


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The file's byte tensor, which must have that many dimensions."""
    raw = read_bytes(path)
    header = 4 + 4 * dimensions
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) < header:
        raise DataError(
            path,
            f"not an IDX file of bytes with {dimensions} dimension(s): it starts with "
            f"{raw[:4].hex(' ') or 'nothing'}, expected 00 00 08 0{dimensions}",
            REPLACE,
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected = header + math.prod(shape)
    if len(raw) != expected:
        kind = "truncated" if len(raw) < expected else "too long"
        problem = f"{kind}: {len(raw):,} bytes, expected {expected:,} for shape {shape}"
        raise DataError(path, problem, REPLACE)
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).reshape(shape)


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
