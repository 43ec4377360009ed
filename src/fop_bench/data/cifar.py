"""CIFAR-10 and CIFAR-100 in their official binary layout, as a folder or the .tar.gz as downloaded.

A record is the label byte(s) followed by 3,072 pixel bytes: the red, green and blue planes of a
32 x 32 image. CIFAR-100 has a coarse and then a fine label; the fine one is used.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from fop_bench.data.errors import DataError
from fop_bench.data.idx import REPLACE, Bounded, opened, read_bytes
from fop_bench.data.splits import Images

PIXELS = 3 * 32 * 32
BESIDES = 1 << 20  # bytes of an archive besides its images: names, padding, a page of text


@dataclass(frozen=True)
class CifarFormat:
    """File names with their numbers of records; the last file is the test set."""

    files: dict[str, int]
    label_bytes: int
    classes: int

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self.files[name] * (self.label_bytes + PIXELS)


CIFAR10 = CifarFormat(
    files={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)} | {"test_batch.bin": 10_000},
    label_bytes=1,
    classes=10,
)
CIFAR100 = CifarFormat(files={"train.bin": 50_000, "test.bin": 10_000}, label_bytes=2, classes=100)


def load_cifar(paths: Sequence[Path], layout: CifarFormat) -> tuple[Images, Images]:
    """(training images, test images) from the binary files, or from one archive that holds them."""
    if len(paths) == 1 and paths[0].name.endswith(".tar.gz"):
        archive = paths[0]
        contents = _read_archive(archive, layout)
        named = [(archive / name, contents[name]) for name in layout.files]
    else:
        sizes = map(layout.size, layout.files)
        named = [(path, read_bytes(path, size)) for path, size in zip(paths, sizes, strict=True)]
    parts = [
        _parse(path, raw, records, layout)
        for (path, raw), records in zip(named, layout.files.values(), strict=True)
    ]
    training = Images(
        torch.cat([part.pixels for part in parts[:-1]]),
        torch.cat([part.labels for part in parts[:-1]]),
    )
    return training, parts[-1]


def _parse(path: Path, raw: bytes, records: int, layout: CifarFormat) -> Images:
    record = layout.label_bytes + PIXELS
    if len(raw) < records * record:
        problem = f"truncated: {len(raw):,} bytes, expected {records:,} records of {record:,} bytes"
        raise DataError(path, problem, REPLACE)
    table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(records, record)
    labels = table[:, layout.label_bytes - 1].long()
    if int(labels.max()) >= layout.classes:
        first = int((labels >= layout.classes).nonzero()[0])
        problem = f"corrupt: record {first} has label {int(labels[first])}, expected less than "
        raise DataError(path, f"{problem}{layout.classes}", REPLACE)
    pixels = table[:, layout.label_bytes :].reshape(records, 3, 32, 32)
    return Images(pixels, labels)


def _read_archive(archive: Path, layout: CifarFormat) -> dict[str, bytes]:
    """The named members' contents; nothing is unpacked onto the disk."""
    contents: dict[str, bytes] = {}
    limit = BESIDES + sum(map(layout.size, layout.files))
    try:
        with opened(archive, limit) as stream:
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar:
                for member in tar:
                    name = Path(member.name).name
                    wanted = member.isfile() and name in layout.files
                    file = tar.extractfile(member) if wanted else None
                    if file is not None:
                        contents[name] = Bounded(archive / name, file, layout.size(name)).read()
            while stream.read(1 << 20):  # to the end: only there gzip checks its checksum
                pass
    except tarfile.TarError as error:
        raise DataError(archive, f"truncated or corrupt archive ({error})", REPLACE) from error
    for name in layout.files:
        if name not in contents:
            raise DataError(archive / name, "not in the archive", REPLACE)
    return contents
