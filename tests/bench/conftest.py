"""Tiny data sets in the official layouts, and a machine on which no other data is found."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fop_bench.data import catalog, cifar, sources
from fop_bench.data.text import ALPHABET


@pytest.fixture(autouse=True)
def _isolated_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of this machine, and no network: what a test needs it writes."""
    monkeypatch.delenv("FOP_DATA", raising=False)
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path / "cache" / "fop")
    for name, source in catalog.SOURCES.items():
        offline = replace(source, downloads=(), system_folders=())
        monkeypatch.setitem(catalog.SOURCES, name, offline)


def random_bytes(*shape: int, below: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, dtype=torch.uint8)


def balanced_labels(count: int, classes: int) -> Tensor:
    return (torch.arange(count) % classes).to(torch.uint8)


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.flatten().tolist())


def idx_bytes(tensor: Tensor) -> bytes:
    header = bytes((0, 0, 8, tensor.dim())) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return header + raw(tensor)


def cifar_records(count: int, classes: int, label_bytes: int, seed: int = 0) -> bytes:
    fine = balanced_labels(count, classes)[:, None]
    labels = fine if label_bytes == 1 else torch.cat((fine // 5, fine), 1)
    return raw(torch.cat((labels, random_bytes(count, cifar.PIXELS, seed=seed)), 1))


def write_tar_gz(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def fashion_dir(tmp_path: Path) -> Path:
    """120 + 40 images of 28 x 28; training files gzipped, test files plain."""
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count, compress in (("train", 120, True), ("t10k", 40, False)):
        for kind, tensor in (
            ("images-idx3", random_bytes(count, 28, 28)),
            ("labels-idx1", balanced_labels(count, 10)),
        ):
            content = idx_bytes(tensor)
            if compress:
                (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{prefix}-{kind}-ubyte").write_bytes(content)
    return folder.parent


@pytest.fixture
def cifar10_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's six files with 40 records each instead of 10,000."""
    small = replace(cifar.CIFAR10, files=dict.fromkeys(cifar.CIFAR10.files, 40))
    monkeypatch.setattr(cifar, "CIFAR10", small)
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(small.files):
        (folder / name).write_bytes(cifar_records(40, 10, 1, seed=number))
    return folder.parent


@pytest.fixture
def cifar100_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """cifar-100-binary.tar.gz with 400 + 100 records instead of 50,000 + 10,000."""
    small = replace(cifar.CIFAR100, files={"train.bin": 400, "test.bin": 100})
    monkeypatch.setattr(cifar, "CIFAR100", small)
    folder = tmp_path / "data"
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: cifar_records(count, 100, 2) for name, count in small.files.items()}
    write_tar_gz(folder / "cifar-100-binary.tar.gz", "cifar-100-binary", files)
    return folder


@pytest.fixture
def shakespeare_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "tinyshakespeare"
    folder.mkdir(parents=True, exist_ok=True)
    letters = random_bytes(6000, below=len(ALPHABET)).tolist()
    (folder / "input.txt").write_text("".join(ALPHABET[i] for i in letters), encoding="utf-8")
    return folder.parent


@pytest.fixture
def write_image_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function writing imagenet/{train,val}/<class>/*.JPEG for the given classes."""

    def write(classes: list[str], train: int = 3, val: int = 1, name: str = "imagenet") -> Path:
        image = pytest.importorskip("PIL.Image")
        root = tmp_path / "data" / name
        for split, count in (("train", train), ("val", val)):
            for label, wnid in enumerate(classes):
                folder = root / split / wnid
                folder.mkdir(parents=True)
                for number in range(count):
                    size = (40 + number, 30)
                    pixels = random_bytes(30, size[0], 3, seed=label * 10 + number)
                    image.frombytes("RGB", size, raw(pixels)).save(
                        folder / f"{wnid}_{number}.JPEG", format="JPEG"
                    )
        return root.parent

    return write
