"""Every data set by name: where it comes from (SOURCES) and how it is loaded (load_*)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fop_bench.data import cifar, digits, imagenet100
from fop_bench.data.cifar import CifarFormat
from fop_bench.data.download import Download
from fop_bench.data.idx import load_images
from fop_bench.data.imagefolder import FolderSplits, find_classes, find_images
from fop_bench.data.selection import Selection
from fop_bench.data.sources import DataStatus, Layout, Source, obtain, status
from fop_bench.data.splits import Images, ImageSplits, Normalisation, Request
from fop_bench.data.text import TextSplits, split_text
from fop_bench.data.verify import verify_images

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_KARPATHY = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
_BY_HAND = "By hand: {}, in the folder given as --data-dir or $FOP_DATA."
_FASHION_MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
_IMAGE_FOLDERS = ("train", "val")


def _cifar_source(name: str, layout: CifarFormat, folder: str, archive: str, md5: str) -> Source:
    files = tuple(layout.files)
    return Source(
        name,
        layouts=(Layout(folder, files), Layout(".", files), Layout(".", (archive,))),
        manual=_BY_HAND.format(f"{_TORONTO}/{archive} or the folder {folder} that it holds"),
        downloads=(Download(f"{_TORONTO}/{archive}", archive, md5),),
    )


_SOURCES = (
    Source("digits", layouts=(), manual="Part of the package."),
    Source(
        "fashion-mnist",
        layouts=(Layout("fashion-mnist", tuple(_FASHION_MD5)), Layout(".", tuple(_FASHION_MD5))),
        manual=_BY_HAND.format(f"the four .gz files of {_ZALANDO}")
        + " On Debian and Ubuntu: apt install dataset-fashion-mnist.",
        downloads=tuple(
            Download(f"{_ZALANDO}/{name}.gz", f"fashion-mnist/{name}.gz", md5)
            for name, md5 in _FASHION_MD5.items()
        ),
        system_folders=(Path("/usr/share/datasets"),),
    ),
    _cifar_source(
        "cifar10",
        cifar.CIFAR10,
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    _cifar_source(
        "cifar100",
        cifar.CIFAR100,
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    Source(
        "tinyshakespeare",
        layouts=(Layout("tinyshakespeare", ("input.txt",)), Layout(".", ("tinyshakespeare.txt",))),
        manual=_BY_HAND.format(f"{_KARPATHY}/input.txt as tinyshakespeare/input.txt"),
        downloads=(
            Download(
                f"{_KARPATHY}/input.txt",
                "tinyshakespeare/input.txt",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                "sha256",
            ),
        ),
    ),
    Source(
        "imagenet",
        layouts=tuple(Layout(f, _IMAGE_FOLDERS) for f in ("imagenet", "ILSVRC2012", ".")),
        manual="Register at https://image-net.org, unpack ILSVRC2012 as "
        "imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG, and pass the folder that "
        "holds imagenet as --data-dir.",
    ),
    Source(
        "imagenet100",
        layouts=tuple(
            Layout(f, _IMAGE_FOLDERS) for f in ("imagenet100", "imagenet", "ILSVRC2012", ".")
        ),
        manual="Any copy of ImageNet-1K (its 100 classes are picked), or "
        "imagenet100/train/<class> and imagenet100/val/<class> with 100 classes, in the folder "
        "given as --data-dir.",
    ),
)
SOURCES = {source.name: source for source in _SOURCES}

_FASHION = Normalisation(mean=(0.2860,), std=(0.3530,))
_DIGITS = Normalisation(mean=(0.3053,), std=(0.3761,), white=digits.WHITE)
_CIFAR = {
    "cifar10": Normalisation(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": Normalisation(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
}
CROP_PADDING = 4


def data_status(name: str, data_dir: Path | None) -> DataStatus:
    """Whether the data set is on this machine, where, and how to get it."""
    if name not in SOURCES:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(SOURCES)}")
    if name == "digits":
        return DataStatus(True, "part of the package", SOURCES[name].how_to_get)
    return status(SOURCES[name], data_dir)


def load_digits(request: Request, held_out: float) -> ImageSplits:
    return _in_memory(request, digits.load_digits(), _select(request, held_out), _DIGITS)


def load_fashion(request: Request, held_out: float) -> ImageSplits:
    files = obtain(SOURCES["fashion-mnist"], request.data_dir)
    data = load_images(files[0], files[1], 10), load_images(files[2], files[3], 10)
    return _in_memory(request, data, _select(request, held_out), _FASHION)


def load_cifar(
    request: Request, held_out: float, name: str, imbalance: float | None = None
) -> ImageSplits:
    """CIFAR with random crops and flips; long-tailed if an imbalance is given."""
    layout = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}[name]
    data = cifar.load_cifar(obtain(SOURCES[name], request.data_dir), layout)
    selection = replace(_select(request, held_out), imbalance=imbalance)
    return _in_memory(request, data, selection, _CIFAR[name], CROP_PADDING)


def load_shakespeare(request: Request, held_out: float, length: int) -> TextSplits:
    (path,) = obtain(SOURCES["tinyshakespeare"], request.data_dir)
    return split_text(path, _select(request, held_out), length, request.device)


def load_imagenet(request: Request, held_out: float, name: str) -> FolderSplits:
    train_folder, test_folder = obtain(SOURCES[name], request.data_dir)
    expected, wanted = {"imagenet": (1000, None), "imagenet100": (100, imagenet100.CLASSES)}[name]
    classes = find_classes(train_folder, expected, wanted)
    find_classes(test_folder, expected, wanted)  # a flat validation folder deserves its own words
    training, test = find_images(train_folder, classes), find_images(test_folder, classes)
    verify_images(training.paths + test.paths)
    splits = _select(request, held_out).apply(training, test)
    workers = _processors() if request.workers is None else request.workers
    return FolderSplits(*splits, size=224, workers=workers, device=request.device)


def _select(request: Request, held_out: float) -> Selection:
    return Selection(held_out=held_out if request.validation else 0.0, subset=request.subset)


def _in_memory(
    request: Request,
    data: tuple[Images, Images],
    selection: Selection,
    normalise: Normalisation,
    padding: int = 0,
) -> ImageSplits:
    training, test, validation = selection.apply(*data)
    device = request.device
    return ImageSplits(
        training.to(device),
        test.to(device),
        None if validation is None else validation.to(device),
        normalise,
        padding,
    )


def _processors() -> int:
    """Processors this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
