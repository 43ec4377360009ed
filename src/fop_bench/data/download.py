"""Downloads with progress bar and checksum; a file gets its name only when it is right."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Literal
from urllib.error import HTTPError

from fop_bench.data.errors import DataError

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class Download:
    """A file on its home page with the checksum published for it."""

    url: str
    path: str  # where it goes, relative to the data folder
    checksum: str
    algorithm: Literal["md5", "sha256"] = "md5"


def fetch(download: Download, root: Path) -> Path:
    """Download into `root` and return the file; nothing is left behind if anything goes wrong."""
    target = root / download.path
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two processes may download the same file at the same time.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        partial = Path(name)
        with os.fdopen(handle, "wb") as out:
            found = _copy(download, out)
        if found != download.checksum:
            raise DataError(
                target,
                f"the download from {download.url} has {download.algorithm} {found}, "
                f"expected {download.checksum}",
                "Try again, or get the file by hand and pass its folder as --data-dir",
            )
        partial.chmod(0o644)  # mkstemp makes it private
        partial.replace(target)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise DataError(
            target,
            f"cannot be downloaded from {download.url}: {error}",
            f"Check the network, or put the file there by hand ({download.algorithm} "
            f"{download.checksum}), or pass the folder that holds it as --data-dir",
        ) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return target


def _copy(download: Download, out: IO[bytes]) -> str:
    """Stream the URL into `out`; returns the checksum of what came."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    digest = hashlib.new(download.algorithm, usedforsecurity=False)
    name = TextColumn("{task.description}")
    with (
        urllib.request.urlopen(download.url, timeout=TIMEOUT) as response,
        Progress(name, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as progress,
    ):
        length = response.headers.get("Content-Length")
        expected = int(length) if length else None
        task = progress.add_task(Path(download.path).name, total=expected)
        received = 0
        while chunk := response.read(CHUNK):
            out.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            progress.update(task, completed=received)
    if expected is not None and received != expected:
        raise OSError(f"the connection ended after {received:,} of {expected:,} bytes")
    return digest.hexdigest()
