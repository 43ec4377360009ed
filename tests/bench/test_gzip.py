"""Of a packed file no more is read than its format can hold, however much it would unpack to."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from fop_bench.data import cifar
from fop_bench.data.cifar import load_cifar
from fop_bench.data.errors import DataError
from fop_bench.data.idx import read_idx
from fop_bench.data.text import read_text

MEGA = 1 << 20
ZEROS = 200 * MEGA  # packs to 200 kB


def idx_header(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)


def pack(path: Path, head: bytes, zeros: int = ZEROS) -> Path:
    with gzip.open(path, "wb") as stream:
        stream.write(head)
        for _ in range(zeros // MEGA):
            stream.write(bytes(MEGA))
    assert path.stat().st_size < 400_000
    return path


def peak_of(work: Callable[[], object], message: str) -> int:
    """Bytes that were taken at most while `work` was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_idx_file_is_read_as_far_as_its_header_says(tmp_path: Path) -> None:
    path = pack(tmp_path / "images.gz", idx_header(10, 28, 28))
    assert peak_of(lambda: read_idx(path, 3), "too long: it holds more than 7,856 bytes") < MEGA
    lying = pack(tmp_path / "lying.gz", idx_header(200_000, 32, 32))
    assert peak_of(lambda: read_idx(lying, 3), "its header announces 204,800,016 bytes") < MEGA
    other = pack(tmp_path / "other.gz", b"")
    assert peak_of(lambda: read_idx(other, 3), "not an IDX file") < MEGA


def test_a_text_is_read_as_far_as_texts_go(tmp_path: Path) -> None:
    path = pack(tmp_path / "input.txt.gz", b"")
    assert peak_of(lambda: read_text(path), "too long") < 40 * MEGA


@pytest.fixture
def layout() -> cifar.CifarFormat:
    return cifar.CifarFormat({"train.bin": 40, "test.bin": 10}, 1, 10)


def test_cifar_files_are_read_as_far_as_they_go(tmp_path: Path, layout: cifar.CifarFormat) -> None:
    paths = [pack(tmp_path / f"{name}.gz", b"") for name in layout.files]
    assert peak_of(lambda: load_cifar(paths, layout), "more than 122,920 bytes") < MEGA


def test_a_member_of_an_archive_is_read_as_far_as_it_goes(
    tmp_path: Path, layout: cifar.CifarFormat
) -> None:
    path = tmp_path / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("folder/train.bin")
        member.size = 50 * MEGA
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    assert peak_of(lambda: load_cifar([path], layout), r"train\.bin: too long") < 4 * MEGA


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_what_else_is_in_an_archive_is_bounded(
    tmp_path: Path, layout: cifar.CifarFormat, kind: bytes
) -> None:
    """A header of an archive can announce any length of its own, and is read as a whole."""
    header = tarfile.TarInfo("other")
    header.size, header.type = ZEROS, kind
    path = pack(tmp_path / "cifar.tar.gz", header.tobuf(tarfile.GNU_FORMAT))
    assert peak_of(lambda: load_cifar([path], layout), "too long") < 8 * MEGA
