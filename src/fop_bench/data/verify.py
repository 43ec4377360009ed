"""Finding truncated and corrupt image files before a long training run starts.

Decoding a million images takes an hour, so only files whose first or last bytes look wrong are
decoded. A set that passed is remembered in the cache by names, sizes and times of its files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fop_bench.data import sources
from fop_bench.data.errors import DataError
from fop_bench.data.imagefolder import read_image

THREADS = 16  # reading headers waits for the disk, not for the processor
GROUP = 256
TAIL = 1024  # real JPEG files may carry a few bytes after the end marker


def verify_images(paths: Sequence[str]) -> None:
    """Raise DataError for the first file that is empty, truncated or not an image."""
    from rich.progress import track

    seen = _receipt(paths)
    if seen.exists():
        return
    groups = [paths[start : start + GROUP] for start in range(0, len(paths), GROUP)]
    with ThreadPoolExecutor(THREADS) as pool:
        checks = pool.map(_verify_group, groups)
        for _ in track(checks, f"checking {len(paths):,} image files", total=len(groups)):
            pass
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.touch()


def _verify_group(paths: Sequence[str]) -> None:
    for path in paths:
        if not _looks_complete(path):
            read_image(path)


def _looks_complete(path: str) -> bool:
    with Path(path).open("rb") as file:
        head = file.read(8)
        file.seek(-min(TAIL, os.fstat(file.fileno()).st_size), os.SEEK_END)
        tail = file.read()
    jpeg = head.startswith(b"\xff\xd8\xff") and b"\xff\xd9" in tail
    png = head == b"\x89PNG\r\n\x1a\n" and b"IEND" in tail
    return jpeg or png


def _receipt(paths: Sequence[str]) -> Path:
    """The cache file that stands for this very set of files having passed."""
    digest = hashlib.sha256()
    for path in paths:
        facts = Path(path).stat()
        if facts.st_size == 0:
            raise DataError(path, "the file is empty", "Replace the file")
        digest.update(f"{Path(path).absolute()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return sources.cache_folder() / "verified" / digest.hexdigest()
