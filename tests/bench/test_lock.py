"""One process at a time trains into a directory, and no lock outlives its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fop_bench.lock import LOCK, RunLockedError, run_lock
from fop_bench.loop import RunExistsError, Runtime, train
from fop_bench.records import read_run
from tests.bench.tiny import TinyWorkload, tiny_config

ROOT = Path(__file__).parents[2]
QUIET = Runtime(checkpoint_seconds=0.0, tensorboard=False)
WORKLOAD: Any = TinyWorkload()
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


@contextmanager
def another_process(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Trains into the directory, slowly; killed in the end."""
    command = [sys.executable, "-m", "tests.bench.tiny", str(run_dir), "sgd", "0.05"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists():
            assert process.poll() is None, "the run ended before it recorded anything"
            assert time.monotonic() < deadline, "the run recorded nothing"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_run_in_progress_is_refused_and_one_that_was_killed_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with another_process(run_dir) as process:
        for resume in (True, False):
            with pytest.raises(RunLockedError, match=f"by process {process.pid} on .*--out"):
                train(tiny_config(), WORKLOAD, run_dir, QUIET, resume=resume)
    assert (run_dir / LOCK).exists()
    assert train(tiny_config(), WORKLOAD, run_dir, QUIET, resume=True).finished
    assert not (run_dir / LOCK).exists()


def test_of_two_commands_at_once_one_succeeds(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "fop_bench", "train", "digits-mlp", "--method", "sgd", "--out",
        str(tmp_path / "same"), "--epochs", "5", "--threads", "1", "--no-tensorboard",
    ]  # fmt: skip
    started = [
        subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    messages = [process.communicate(timeout=120)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 1], messages
    failed = next(m for m, p in zip(messages, started, strict=True) if p.returncode)
    assert "is being trained into by process" in failed or "holds this run already" in failed
    assert "Traceback" not in failed
    assert len(read_run(tmp_path / "same").metrics) == 5


def test_a_directory_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    kept = tmp_path / "runs"
    kept.mkdir()
    with pytest.raises(ZeroDivisionError), run_lock(kept / "a" / "b"):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [kept]
    with run_lock(kept / "a" / "b"):
        (kept / "a" / "b" / "meta.json").touch()
    assert [path.name for path in (kept / "a" / "b").iterdir()] == ["meta.json"]


def test_a_lock_left_behind_is_no_users_file(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on a host that is gone")
    (tmp_path / ".meta.json.1.tmp").touch()
    assert train(tiny_config(epochs=1), WORKLOAD, tmp_path, QUIET).finished
    assert {path.name for path in tmp_path.iterdir()} == {
        "meta.json", "metrics.jsonl", "checkpoint.pt",
    }  # fmt: skip
    with pytest.raises(RunExistsError, match="holds this run already"):
        train(tiny_config(epochs=1), WORKLOAD, tmp_path, QUIET)


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fop_bench.lock._try_lock", unsupported)
    with pytest.warns(UserWarning, match="has no locks"), run_lock(tmp_path / "run"):
        pass
