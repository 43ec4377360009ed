"""One process at a time trains into a run directory.

The lock is the operating system's, on a file in the directory: it ends with the process that holds
it, however that ends, so that no run has to be freed by hand.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fop_bench.errors import BenchError, WriteError

LOCK = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunLockedError(BenchError, RuntimeError):
    """Another process trains into this directory."""


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Holds the directory, which is made if need be; if nothing was put there it goes again."""
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(path)
    except OSError as error:
        raise WriteError(path, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)
        with suppress(OSError):  # the first that is not empty ends it
            for folder in made:
                folder.rmdir()


def _open_locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            # The last holder may have deleted the file after we opened it; then we hold nothing.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        _try_lock(handle)
    except OSError as error:
        if error.errno in HELD:
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            raise RunLockedError(
                f"{path.parent} is being trained into by {holder}: wait until that has ended, or "
                "choose another directory with --out"
            ) from error
        if error.errno not in UNSUPPORTED:
            raise
        warnings.warn(
            f"{path}: this file system has no locks, so that nothing keeps a second process from "
            "training into the same directory",
            stacklevel=2,
        )
