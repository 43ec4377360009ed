"""What went wrong in words that a user can act on: which file or option, and the cure."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from pathlib import Path


class BenchError(Exception):
    """A fault that the user can mend. The command line shows its message, without a traceback."""


class RecordError(BenchError, RuntimeError):
    """A recorded file holds something else than a readable record."""


class WriteError(BenchError, RuntimeError):
    """A file cannot be written."""

    def __init__(self, path: Path | str, error: OSError) -> None:
        super().__init__(f"{path} cannot be written ({reason(error)}): {cure(error, FORBIDDEN)}")


FULL = "free some space and repeat the command (train: with --resume); older records are intact"
TAKEN = "a file is where a directory has to be, or the other way round: choose another --out"
FORBIDDEN = "choose a place that you may write to, for example with --out"
CURES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.ENOTDIR: TAKEN,
    errno.EISDIR: TAKEN,
    errno.EEXIST: TAKEN,
    errno.EACCES: FORBIDDEN,
    errno.EPERM: FORBIDDEN,
    errno.EROFS: FORBIDDEN,
}


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def cure(error: OSError, otherwise: str = "check the path and the disk") -> str:
    return CURES.get(error.errno or 0, otherwise)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install; None for a module of our own, whose absence is no fault of the user's."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "fop", "fop_bench"):
        return None
    return f'fop-bench needs the package {name!r}, which is not installed: pip install "fop[bench]"'


def unknown(name: str, known: Iterable[str]) -> str:
    """A name nobody knows, with the known one that it is most like."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"{name!r} (did you mean {close[0]}?)" if close else repr(name)
