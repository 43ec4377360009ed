"""Data sets are read from their official layouts, checked, and served in a reproducible order."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal

import pytest
import torch

from fop_bench.data import DataError, catalog, cifar, data_status, imagefolder, imagenet100, verify
from fop_bench.data.augment import crop_and_flip, random_crops
from fop_bench.data.catalog import (
    SOURCES,
    load_cifar,
    load_fashion,
    load_imagenet,
    load_shakespeare,
)
from fop_bench.data.digits import load_digits
from fop_bench.data.download import Download, fetch
from fop_bench.data.idx import read_idx
from fop_bench.data.longtail import class_groups, long_tail, long_tail_counts
from fop_bench.data.seeding import stream
from fop_bench.data.selection import hold_out
from fop_bench.data.sources import obtain
from fop_bench.data.splits import Request
from fop_bench.data.text import ALPHABET, read_text
from tests.bench.conftest import cifar_records, idx_bytes, random_bytes, write_tar_gz


def request(
    data_dir: Path | None, validation: bool = False, subset: int | None = None, workers: int = 0
) -> Request:
    return Request(data_dir, torch.device("cpu"), validation, subset, workers)


class TestIdx:
    def test_reads_plain_and_gzipped_files_alike(self, tmp_path: Path) -> None:
        tensor = random_bytes(5, 3, 2)
        (tmp_path / "plain").write_bytes(idx_bytes(tensor))
        (tmp_path / "packed.gz").write_bytes(gzip.compress(idx_bytes(tensor)))
        assert read_idx(tmp_path / "plain", 3).equal(tensor)
        assert read_idx(tmp_path / "packed.gz", 3).equal(tensor)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda content: content[:-1], "truncated: 45 bytes, expected 46"),
            (lambda content: content + b"x", "too long: it holds more than 46 bytes"),
            (lambda content: content[:9], "not an IDX file"),
            (lambda content: b"\x1f" + content[1:], "not an IDX file"),
            (lambda content: b"", "it starts with nothing"),
        ],
    )
    def test_damage_names_the_file_and_the_fix(
        self, tmp_path: Path, damage: Callable[[bytes], bytes], words: str
    ) -> None:
        path = tmp_path / "images"
        path.write_bytes(damage(idx_bytes(random_bytes(5, 3, 2))))
        with pytest.raises(DataError, match=words) as error:
            read_idx(path, 3)
        assert error.value.path == path
        assert "Replace the file" in str(error.value)

    @pytest.mark.parametrize("kept", [5, 30])
    def test_truncated_gzip_is_named(self, tmp_path: Path, kept: int) -> None:
        path = tmp_path / "images.gz"
        path.write_bytes(gzip.compress(idx_bytes(random_bytes(5, 3, 2)))[:kept])
        with pytest.raises(DataError, match=r"images\.gz: the gzip file is truncated"):
            read_idx(path, 3)

    def test_corrupt_gzip_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "images.gz"
        content = bytearray(gzip.compress(idx_bytes(random_bytes(5, 3, 2))))
        content[-6] ^= 1  # in the checksum
        path.write_bytes(content)
        with pytest.raises(DataError, match="not an intact gzip file"):
            read_idx(path, 3)

    def test_labels_must_match_images(self, fashion_dir: Path) -> None:
        path = fashion_dir / "fashion-mnist" / "t10k-labels-idx1-ubyte"
        path.write_bytes(idx_bytes(random_bytes(39, below=10)))
        with pytest.raises(DataError, match="39 labels for 40 images") as error:
            load_fashion(request(fashion_dir), 0.1)
        assert error.value.path == path

    def test_labels_must_be_classes(self, fashion_dir: Path) -> None:
        path = fashion_dir / "fashion-mnist" / "t10k-labels-idx1-ubyte"
        path.write_bytes(idx_bytes(torch.full((40,), 10, dtype=torch.uint8)))
        with pytest.raises(DataError, match="labels must be 0 to 9, found 10"):
            load_fashion(request(fashion_dir), 0.1)


class TestCifar:
    def test_pixels_and_labels_are_where_the_format_puts_them(self, cifar10_dir: Path) -> None:
        files = obtain(SOURCES["cifar10"], cifar10_dir)
        training, test = cifar.load_cifar(files, cifar.CIFAR10)
        assert training.pixels.shape == (200, 3, 32, 32)
        assert len(test) == 40
        record = files[1].read_bytes()[7 * 3073 : 8 * 3073]  # the eighth image of data_batch_2
        assert training.labels[47] == record[0]
        colours = [record[1 + c * 1024 + 2 * 32 + 5] for c in range(3)]  # red, green, blue
        assert training.pixels[47, :, 2, 5].tolist() == colours

    def test_cifar100_uses_the_fine_label_and_reads_the_archive(self, cifar100_dir: Path) -> None:
        splits = load_cifar(request(cifar100_dir), 0.1, "cifar100")
        assert splits.train_size == 400
        assert torch.bincount(splits.training.labels).tolist() == [4] * 100

    def test_folder_and_archive_give_the_same_images(self, cifar10_dir: Path) -> None:
        folder = cifar10_dir / "cifar-10-batches-bin"
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        archive = cifar10_dir / "cifar-10-binary.tar.gz"
        write_tar_gz(archive, folder.name, contents)
        unpacked, _ = cifar.load_cifar(obtain(SOURCES["cifar10"], cifar10_dir), cifar.CIFAR10)
        packed, _ = cifar.load_cifar([archive], cifar.CIFAR10)
        assert packed.pixels.equal(unpacked.pixels)
        assert packed.labels.equal(unpacked.labels)

    @pytest.mark.parametrize("cut", [1, 3073])
    def test_a_truncated_file_is_named(self, cifar10_dir: Path, cut: int) -> None:
        path = cifar10_dir / "cifar-10-batches-bin" / "data_batch_3.bin"
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(DataError, match=r"truncated: .* expected 40 records of 3,073") as error:
            load_cifar(request(cifar10_dir), 0.1, "cifar10")
        assert error.value.path == path

    def test_a_corrupt_label_is_named(self, cifar10_dir: Path) -> None:
        path = cifar10_dir / "cifar-10-batches-bin" / "test_batch.bin"
        content = bytearray(path.read_bytes())
        content[3073 * 6] = 77
        path.write_bytes(content)
        with pytest.raises(DataError, match="corrupt: record 6 has label 77") as error:
            load_cifar(request(cifar10_dir), 0.1, "cifar10")
        assert error.value.path == path

    def test_a_missing_file_is_named(self, cifar10_dir: Path) -> None:
        path = cifar10_dir / "cifar-10-batches-bin" / "data_batch_4.bin"
        path.unlink()
        with pytest.raises(DataError, match="5 of the 6 parts of cifar10") as error:
            load_cifar(request(cifar10_dir), 0.1, "cifar10")
        assert error.value.path == path
        status = data_status("cifar10", cifar10_dir)
        assert not status.found
        assert "data_batch_4.bin is missing" in status.where

    def test_a_truncated_archive_is_named(self, cifar100_dir: Path) -> None:
        path = cifar100_dir / "cifar-100-binary.tar.gz"
        path.write_bytes(path.read_bytes()[:-2000])
        with pytest.raises(DataError, match="the gzip file is truncated") as error:
            load_cifar(request(cifar100_dir), 0.1, "cifar100")
        assert error.value.path == path

    def test_an_archive_with_a_broken_checksum_is_refused(self, cifar100_dir: Path) -> None:
        path = cifar100_dir / "cifar-100-binary.tar.gz"
        content = bytearray(path.read_bytes())
        content[-6] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="not an intact gzip file"):
            load_cifar(request(cifar100_dir), 0.1, "cifar100")

    def test_an_archive_without_a_file_is_named(self, cifar100_dir: Path) -> None:
        path = cifar100_dir / "cifar-100-binary.tar.gz"
        write_tar_gz(path, "cifar-100-binary", {"train.bin": cifar_records(400, 100, 2)})
        with pytest.raises(DataError, match=r"test\.bin: not in the archive"):
            load_cifar(request(cifar100_dir), 0.1, "cifar100")


class TestDigits:
    def test_embedded_digits_are_the_known_ones(self) -> None:
        datasets = pytest.importorskip("sklearn.datasets")
        training, test = load_digits()
        ours = torch.cat((training.pixels, test.pixels)).flatten(1)
        labels = torch.cat((training.labels, test.labels))
        known = datasets.load_digits()

        def rows(pixels: torch.Tensor, labels: torch.Tensor) -> list[list[int]]:
            return sorted(torch.cat((pixels.long(), labels[:, None]), 1).tolist())

        expected = rows(torch.from_numpy(known.data).long(), torch.from_numpy(known.target).long())
        assert rows(ours, labels) == expected
        assert (len(training), len(test)) == (1438, 359)


class TestText:
    def test_windows_predict_the_next_character(self, shakespeare_dir: Path) -> None:
        splits = load_shakespeare(request(shakespeare_dir), 0.1, 16)
        text = (shakespeare_dir / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
        for inputs, target in splits.train(7, epoch=3, seed=1):
            for window, following in zip(inputs.tolist(), target.tolist(), strict=True):
                assert window[1:] == following[:-1]
                assert "".join(ALPHABET[i] for i in [*window, following[-1]]) in text[:5400]

    def test_an_epoch_sees_each_window_once(self, shakespeare_dir: Path) -> None:
        splits = load_shakespeare(request(shakespeare_dir), 0.1, 16)
        batches = list(splits.train(50, epoch=0, seed=0))
        assert sum(len(inputs) for inputs, _ in batches) == splits.train_size == 5400 // 16 - 1
        assert len({tuple(row) for inputs, _ in batches for row in inputs.tolist()}) == 336

    def test_parts_do_not_overlap(self, shakespeare_dir: Path) -> None:
        splits = load_shakespeare(request(shakespeare_dir, validation=True), 0.1, 16)
        assert splits.validation is not None
        parts = (splits.training, splits.validation, splits.test)
        whole = read_text(shakespeare_dir / "tinyshakespeare" / "input.txt")
        assert torch.cat(parts).equal(whole)
        assert [len(part) for part in parts] == [4860, 540, 600]

    def test_an_unknown_character_is_named(self, shakespeare_dir: Path) -> None:
        path = shakespeare_dir / "tinyshakespeare" / "input.txt"
        path.write_text("To be, or not to be: ü", encoding="utf-8")
        with pytest.raises(DataError, match="'ü' at position 21 is not in the vocabulary"):
            load_shakespeare(request(shakespeare_dir), 0.1, 16)

    def test_a_truncated_text_is_refused(self, shakespeare_dir: Path) -> None:
        path = shakespeare_dir / "tinyshakespeare" / "input.txt"
        path.write_text("Before we proceed any further", encoding="utf-8")
        with pytest.raises(DataError, match="29 characters are too few for windows of 16"):
            load_shakespeare(request(shakespeare_dir), 0.1, 16)


class TestImageFolder:
    @pytest.fixture
    def folder(
        self, write_image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> Path:
        """ImageNet with 100 classes instead of 1000; the names of ImageNet-100."""
        monkeypatch.setattr(imagefolder, "CHUNK", 64)
        return write_image_folder(list(imagenet100.CLASSES), name="imagenet100")

    def test_classes_are_numbered_in_order(self, folder: Path) -> None:
        splits = load_imagenet(request(folder), 0.34, "imagenet100")
        assert splits.train_size == 300
        assert torch.bincount(splits.training.labels).tolist() == [3] * 100
        labels = {Path(p).parent.name: int(y) for p, y in zip(*_columns(splits.test), strict=True)}
        assert list(labels) == sorted(imagenet100.CLASSES)
        assert list(labels.values()) == list(range(100))

    @pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
    def test_worker_processes_and_chunks_change_nothing(self, folder: Path) -> None:
        alone = load_imagenet(request(folder, subset=150), 0.34, "imagenet100")
        helped = replace(alone, workers=2, size=32)
        alone = replace(alone, size=32)
        expected = list(alone.train(100, epoch=2, seed=5))
        for batch, other in zip(expected, helped.train(100, epoch=2, seed=5), strict=True):
            assert batch[0].equal(other[0])
            assert batch[1].equal(other[1])
        assert [len(labels) for _, labels in expected] == [100, 50]

    def test_epochs_crop_differently_and_evaluation_does_not(self, folder: Path) -> None:
        splits = replace(load_imagenet(request(folder, subset=4), 0, "imagenet100"), size=24)
        first, again, later = (
            next(iter(splits.train(4, epoch=epoch, seed=0))) for epoch in (0, 0, 1)
        )
        assert first[0].shape == (4, 3, 24, 24)
        assert first[0].equal(again[0])
        assert (
            not first[0].sum((1, 2, 3)).sort().values.equal(later[0].sum((1, 2, 3)).sort().values)
        )
        once, twice = (next(iter(splits.evaluation("test")))[0] for _ in range(2))
        assert once.equal(twice)

    def test_the_global_random_state_is_left_alone(self, folder: Path) -> None:
        splits = replace(load_imagenet(request(folder, subset=4), 0, "imagenet100"), size=24)
        before = torch.get_rng_state()
        list(splits.train(2, epoch=0, seed=0))
        assert torch.get_rng_state().equal(before)

    def test_imagenet100_is_picked_from_a_larger_set(
        self, write_image_folder: Callable[..., Path]
    ) -> None:
        more = [*imagenet100.CLASSES, "n00000001", "n99999999"]
        folder = write_image_folder(more, train=1)
        splits = load_imagenet(request(folder), 0, "imagenet100")
        names = {Path(path).parent.name for path in splits.training.paths}
        assert names == set(imagenet100.CLASSES)

    def test_wrong_number_of_classes_is_refused(self, folder: Path) -> None:
        (folder / "imagenet100").rename(folder / "imagenet")
        with pytest.raises(DataError, match="holds 100 class folders, expected 1000"):
            load_imagenet(request(folder), 0, "imagenet")

    def test_a_flat_validation_folder_is_explained(
        self, tmp_path: Path, write_image_folder: Callable[..., Path]
    ) -> None:
        folder = write_image_folder(list(imagenet100.CLASSES), val=0)
        for class_folder in (folder / "imagenet" / "val").iterdir():
            class_folder.rmdir()
        with pytest.raises(DataError, match=r"val: holds no class folders.*archive is flat"):
            load_imagenet(request(folder), 0, "imagenet100")

    def test_a_class_missing_in_validation_is_named(self, folder: Path) -> None:
        missing = folder / "imagenet100" / "val" / imagenet100.CLASSES[5]
        missing.rename(missing.with_name("n00000001"))
        with pytest.raises(DataError, match="the folder of this class is missing") as error:
            load_imagenet(request(folder), 0, "imagenet100")
        assert error.value.path == missing

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda content: b"", "the file is empty"),
            (lambda content: content[: len(content) // 2], "cannot be decoded"),
            (lambda content: b"<html>404</html>", "cannot be decoded"),
        ],
    )
    def test_damaged_images_are_found_before_training(
        self, folder: Path, damage: Callable[[bytes], bytes], words: str
    ) -> None:
        load_imagenet(request(folder), 0, "imagenet100")  # passes, and is remembered
        path = next((folder / "imagenet100" / "train" / imagenet100.CLASSES[7]).iterdir())
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(DataError, match=words) as error:
            load_imagenet(request(folder), 0, "imagenet100")
        assert error.value.path == path

    def test_images_that_passed_are_not_checked_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_imagenet(request(folder), 0, "imagenet100")
        monkeypatch.setattr(verify, "_verify_group", lambda paths: pytest.fail("checked again"))
        load_imagenet(request(folder), 0, "imagenet100")

    def test_bytes_after_the_end_of_an_image_are_accepted(self, folder: Path) -> None:
        path = next((folder / "imagenet100" / "train" / imagenet100.CLASSES[7]).iterdir())
        path.write_bytes(path.read_bytes() + bytes(5000))
        assert load_imagenet(request(folder), 0, "imagenet100").train_size == 300

    def test_crops_lie_inside_the_image_and_cover_it(self) -> None:
        boxes = [imagefolder._crop_box(50, 40, stream("test", i)) for i in range(300)]
        lefts, tops, rights, bottoms = zip(*boxes, strict=True)
        assert min(lefts) == 0
        assert min(tops) == 0
        assert max(rights) == 50
        assert max(bottoms) == 40
        shares = [(r - l) * (b - t) / 2000 for l, t, r, b in boxes]  # noqa: E741
        assert 0.07 < min(shares) < 0.12
        assert 0.8 < max(shares) <= 1

    @pytest.mark.parametrize("size", [(300, 20), (20, 300)])
    def test_very_long_images_are_cropped_to_an_allowed_ratio(self, size: tuple[int, int]) -> None:
        for i in range(50):
            left, top, right, bottom = imagefolder._crop_box(*size, stream("test", i))
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            assert 0.7 < (right - left) / (bottom - top) < 1.43

    def test_centre_crop_takes_the_middle(self) -> None:
        image = pytest.importorskip("PIL.Image")
        picture = image.new("RGB", (512, 256), (10, 20, 30))
        picture.paste((200, 100, 50), (192, 64, 320, 192))
        pixels = imagefolder.to_bytes(imagefolder.centre_crop(picture, 224))
        assert pixels.shape == (3, 224, 224)
        assert pixels[:, 112, 112].tolist() == [200, 100, 50]
        assert pixels[:, 112, 4].tolist() == [10, 20, 30]
        assert pixels[0].float().mean() == pytest.approx(10 + 190 * (128 / 224) ** 2, abs=1)


def _columns(files: imagefolder.ImageFiles) -> tuple[tuple[str, ...], torch.Tensor]:
    return files.paths, files.labels


class TestWhereDataIsFound:
    def test_data_dir_comes_before_the_environment_before_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = [tmp_path / "given", tmp_path / "environment", tmp_path / "cache" / "fop"]
        for place in places:
            (place / "tinyshakespeare").mkdir(parents=True)
            (place / "tinyshakespeare" / "input.txt").touch()
        monkeypatch.setenv("FOP_DATA", str(places[1]))
        source = SOURCES["tinyshakespeare"]
        assert obtain(source, places[0])[0].is_relative_to(places[0])
        assert obtain(source, None)[0].is_relative_to(places[1])
        monkeypatch.delenv("FOP_DATA")
        assert obtain(source, None)[0].is_relative_to(places[2])

    def test_status_tells_where_and_how(self, cifar10_dir: Path) -> None:
        status = data_status("cifar10", cifar10_dir)
        assert status.found
        assert status.where == str(cifar10_dir / "cifar-10-batches-bin")
        absent = data_status("imagenet", None)
        assert not absent.found
        assert "image-net.org" in absent.how_to_get

    def test_digits_are_always_there(self) -> None:
        assert data_status("digits", None).found

    def test_unknown_data_set_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"no data set is called 'mnist'; there are digits, fas"
        ):
            data_status("mnist", None)

    def test_missing_data_says_where_it_was_looked_for_and_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=f"not found in {tmp_path}.*Register at"):
            obtain(SOURCES["imagenet"], tmp_path)

    def test_a_wrong_data_dir_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="typo: is not a folder"):
            obtain(SOURCES["cifar10"], tmp_path / "typo")


CONTENT = b"the file as it should be" * 1000


@pytest.fixture
def server() -> Iterator[str]:
    """A home page on this machine: /file is right, /short ends early, the rest is absent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/file", "/short"):
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT if self.path == "/file" else CONTENT[:100])

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


class TestDownload:
    @pytest.mark.parametrize("algorithm", ["md5", "sha256"])
    def test_a_file_with_the_right_checksum_arrives(
        self, server: str, tmp_path: Path, algorithm: Literal["md5", "sha256"]
    ) -> None:
        checksum = hashlib.new(algorithm, CONTENT).hexdigest()
        download = Download(f"{server}/file", "sub/name", checksum, algorithm)
        path = fetch(download, tmp_path)
        assert path == tmp_path / "sub" / "name"
        assert path.read_bytes() == CONTENT
        assert [p.name for p in path.parent.iterdir()] == ["name"]

    @pytest.mark.parametrize(
        ("page", "words"),
        [
            ("file", "has md5 .* expected 0123"),
            ("short", "ended after 100 of 24,000 bytes"),
            ("gone", "404"),
        ],
    )
    def test_a_bad_download_leaves_nothing(
        self, server: str, tmp_path: Path, page: str, words: str
    ) -> None:
        with pytest.raises(DataError, match=words) as error:
            fetch(Download(f"{server}/{page}", "name", "0123"), tmp_path)
        assert error.value.path == tmp_path / "name"
        assert "--data-dir" in error.value.fix
        assert list(tmp_path.iterdir()) == []

    def test_no_server_is_an_error_with_a_fix(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"cannot be downloaded from .*Check the network"):
            fetch(Download("http://127.0.0.1:9/file", "name", "0123"), tmp_path)

    def test_a_bad_download_keeps_the_file_that_was_there(
        self, server: str, tmp_path: Path
    ) -> None:
        (tmp_path / "name").write_text("older")
        with pytest.raises(DataError):
            fetch(Download(f"{server}/file", "name", "0123"), tmp_path)
        assert (tmp_path / "name").read_text() == "older"

    def test_absent_data_is_downloaded_once(
        self, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checksum = hashlib.md5(CONTENT).hexdigest()
        download = Download(f"{server}/file", "tinyshakespeare/input.txt", checksum)
        source = replace(SOURCES["tinyshakespeare"], downloads=(download,))
        (path,) = obtain(source, tmp_path)
        assert path.read_bytes() == CONTENT
        assert path.is_relative_to(tmp_path / "cache" / "fop")
        unreachable = replace(download, url="http://127.0.0.1:9/file")
        assert obtain(replace(source, downloads=(unreachable,)), tmp_path) == (path,)

    def test_downloads_land_where_they_are_looked_for(self) -> None:
        for source in catalog._SOURCES:
            paths = {d.path for d in source.downloads}
            layouts = [
                {str(Path(layout.folder) / name) for name in layout.files}
                for layout in source.layouts
            ]
            plain = {path.removesuffix(".gz") for path in paths}
            assert not paths or plain in layouts or paths in layouts

    def test_every_download_has_a_checksum_and_is_announced(self, tmp_path: Path) -> None:
        downloadable = {source.name for source in catalog._SOURCES if source.downloads}
        assert downloadable == {"fashion-mnist", "cifar10", "cifar100", "tinyshakespeare"}
        for source in catalog._SOURCES:
            for download in source.downloads:
                digits = {"md5": 32, "sha256": 64}[download.algorithm]
                assert re.fullmatch(f"[0-9a-f]{{{digits}}}", download.checksum)
                assert download.url.rsplit("/", 1)[0] in source.how_to_get
                assert str(tmp_path / "cache" / "fop") in source.how_to_get


class TestSelection:
    def test_hold_out_takes_the_same_share_of_every_class(self) -> None:
        labels = torch.arange(10).repeat_interleave(torch.arange(10, 110, 10))
        rest, held = hold_out(labels, 0.1)
        assert torch.bincount(labels[held]).tolist() == list(range(1, 11))
        assert torch.cat((rest, held)).sort().values.equal(torch.arange(len(labels)))

    def test_small_classes_are_held_out_and_trained_on(self) -> None:
        labels = torch.arange(5).repeat(3)
        rest, held = hold_out(labels, 0.1)
        assert torch.bincount(labels[held]).tolist() == [1] * 5
        assert torch.bincount(labels[rest]).tolist() == [2] * 5
        assert len(hold_out(labels, 0)[1]) == 0

    @pytest.mark.parametrize(
        ("classes", "imbalance", "total"),
        [(10, 100, 12_406), (10, 50, 13_996), (100, 100, 10_847), (100, 50, 12_608)],
    )
    def test_long_tail_has_the_published_sizes(
        self, classes: int, imbalance: int, total: int
    ) -> None:
        counts = long_tail_counts(50_000 // classes, classes, imbalance)
        assert sum(counts) == total
        assert counts[0] == counts[-1] * imbalance

    def test_long_tail_picks_that_many_of_each_class(self) -> None:
        labels = torch.arange(10).repeat(200)
        chosen = labels[long_tail(labels, 20)]
        assert torch.bincount(chosen).tolist() == long_tail_counts(200, 10, 20)

    def test_groups_are_the_usual_many_medium_and_few_shot_classes(self) -> None:
        counts = torch.tensor(long_tail_counts(500, 100, 100))
        groups = class_groups(100)
        assert (counts[groups["head"]] > 100).all()
        assert ((counts[groups["middle"]] >= 20) & (counts[groups["middle"]] <= 100)).all()
        assert (counts[groups["tail"]] < 20).all()
        assert [len(range(10)[group]) for group in class_groups(10).values()] == [3, 4, 3]


class TestBatches:
    def test_order_depends_on_seed_and_epoch_alone(self, cifar10_dir: Path) -> None:
        splits = load_cifar(request(cifar10_dir), 0.1, "cifar10")
        first = list(splits.train(64, epoch=3, seed=1))
        torch.rand(1)  # whatever ran before
        list(splits.train(32, epoch=2, seed=1))
        again = list(load_cifar(request(cifar10_dir), 0.1, "cifar10").train(64, epoch=3, seed=1))
        for (x, y), (x2, y2) in zip(first, again, strict=True):
            assert x.equal(x2)
            assert y.equal(y2)
        for epoch, seed in ((4, 1), (3, 2)):
            other = next(iter(splits.train(64, epoch=epoch, seed=seed)))
            assert not other[1].equal(first[0][1])

    def test_an_epoch_visits_every_image_once_and_keeps_the_rest(self, fashion_dir: Path) -> None:
        splits = load_fashion(request(fashion_dir), 0.1)
        batches = splits.train(50, epoch=0, seed=0)
        sizes = [len(labels) for _, labels in batches]
        assert sizes == [50, 50, 20]
        assert len(batches) == 3
        seen = torch.cat([inputs for inputs, _ in batches]).sum((1, 2, 3)).sort().values
        everything = splits.normalise(splits.training.pixels).sum((1, 2, 3)).sort().values
        torch.testing.assert_close(seen, everything)

    def test_batch_size_is_capped_at_the_data(self, fashion_dir: Path) -> None:
        splits = load_fashion(request(fashion_dir), 0.1)
        assert [len(labels) for _, labels in splits.train(10**6, 0, 0)] == [120]
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            splits.train(0, 0, 0)

    def test_labels_stay_with_their_images(self, fashion_dir: Path) -> None:
        splits = load_fashion(request(fashion_dir), 0.1)
        floats = splits.normalise(splits.training.pixels)
        for inputs, labels in splits.train(50, epoch=1, seed=0):
            match = (inputs.flatten(1)[:, None] == floats.flatten(1)[None]).all(-1)
            assert match.sum(1).eq(1).all()
            assert splits.training.labels[match.long().argmax(1)].equal(labels)

    def test_evaluation_is_neither_shuffled_nor_augmented(self, cifar10_dir: Path) -> None:
        splits = load_cifar(request(cifar10_dir), 0.1, "cifar10")
        ((inputs, labels),) = splits.evaluation("test")
        assert inputs.equal(splits.normalise(splits.test.pixels))
        assert labels.equal(splits.test.labels)

    def test_normalised_pixels_are_as_specified(self, cifar10_dir: Path) -> None:
        splits = load_cifar(request(cifar10_dir), 0.1, "cifar10")
        ((inputs, _),) = splits.evaluation("test")
        byte = splits.test.pixels[3, 1, 4, 5].item()
        assert inputs[3, 1, 4, 5].item() == pytest.approx((byte / 255 - 0.4822) / 0.2435, rel=1e-5)

    def test_validation_is_held_out_of_training(self, fashion_dir: Path) -> None:
        splits = load_fashion(request(fashion_dir, validation=True), 0.1)
        assert splits.validation is not None
        assert (splits.train_size, len(splits.validation)) == (110, 10)  # 12 a class, 1 held out
        held = {tuple(p) for p in splits.validation.pixels.flatten(1).tolist()}
        trained = {tuple(p) for p in splits.training.pixels.flatten(1).tolist()}
        assert len(held) == 10
        assert not held & trained

    def test_validation_without_a_hold_out_is_refused(self, fashion_dir: Path) -> None:
        with pytest.raises(ValueError, match="validation=True"):
            load_fashion(request(fashion_dir), 0.1).evaluation("validation")

    def test_a_subset_is_the_same_for_all_runs(self, fashion_dir: Path) -> None:
        one, two = (load_fashion(request(fashion_dir, subset=30), 0.1) for _ in range(2))
        assert one.train_size == 30
        assert one.training.pixels.equal(two.training.pixels)
        with pytest.raises(ValueError, match="subset must be at least 1, got 0"):
            load_fashion(request(fashion_dir, subset=0), 0.1)


class TestAugmentation:
    def test_every_result_is_a_shifted_perhaps_mirrored_copy(self) -> None:
        pixels = random_bytes(64, 3, 8, 8)
        result = crop_and_flip(pixels, 2, *random_crops(len(pixels), 2, stream("test")))
        padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
        found = set()
        for image, cut in zip(padded, result, strict=True):
            options = {
                (top, left, mirrored)
                for top in range(5)
                for left in range(5)
                for mirrored in (False, True)
                if _cut(image, top, left, mirrored).equal(cut)
            }
            assert len(options) == 1
            found |= options
        tops, lefts, mirrors = (set(column) for column in zip(*found, strict=True))
        assert tops == lefts == set(range(5))
        assert mirrors == {False, True}

    def test_the_stream_decides_alone(self) -> None:
        pixels = random_bytes(16, 3, 8, 8)
        once, again, other = (
            crop_and_flip(pixels, 2, *random_crops(16, 2, stream(name))) for name in "aab"
        )
        assert once.equal(again)
        assert not once.equal(other)


def _cut(padded: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    cut = padded[:, top : top + 8, left : left + 8]
    return cut.flip(2) if mirrored else cut
