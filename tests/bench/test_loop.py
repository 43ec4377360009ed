"""A run can be stopped at any moment and goes on as if it had not; nothing is overwritten."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fop_bench.config import ConfigError
from fop_bench.loop import RunExistsError, Runtime, train
from fop_bench.methods import METHODS
from fop_bench.progress import Reporter
from fop_bench.records import WALL_CLOCK_FIELDS, read_run
from fop_bench.training import Training
from tests.bench.tiny import TinyWorkload, tiny_config

ROOT = Path(__file__).parents[2]
QUIET = Runtime(checkpoint_seconds=0.0, tensorboard=False)
WORKLOAD: Any = TinyWorkload()


def lines(run_dir: Path) -> list[str]:
    """The metrics file without its wall-clock fields, otherwise as it is."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for name in WALL_CLOCK_FIELDS:
            del record[name]
    return [json.dumps(record) for record in records]


class Interrupting(Reporter):
    """Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def stepped(self, steps: int, images: int, loss: float | None) -> None:
        self.left -= steps
        if self.left == 0:
            raise KeyboardInterrupt


def kill_when_recorded(run_dir: Path, records: int) -> None:
    """Runs the tiny workload in a process of its own, and kills it once it has so many records."""
    command = [sys.executable, "-m", "tests.bench.tiny", str(run_dir), "fop", "0.03"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + 60
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < records:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run recorded nothing"
            time.sleep(0.01)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_killed_run_records_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_when_recorded(killed, 8)  # inside the third of six epochs
    assert read_run(killed).meta["status"] == "running"
    train(tiny_config("fop"), WORKLOAD, killed, QUIET, resume=True)
    train(tiny_config("fop"), WORKLOAD, whole, QUIET)
    assert lines(killed) == lines(whole)
    assert read_run(killed).meta["status"] == "complete"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_with_ctrl_c_goes_on(tmp_path: Path, method: str) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    config = tiny_config(method, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        train(config, WORKLOAD, stopped, QUIET, reporter=Interrupting(after=17))
    assert 0 < len(lines(stopped)) < 17
    resumed = train(config, WORKLOAD, stopped, QUIET, resume=True)
    train(config, WORKLOAD, whole, QUIET)
    assert lines(stopped) == lines(whole)
    assert resumed.metrics[-1]["epoch"] == 4


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    config = tiny_config("fop", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, WORKLOAD, stopped, QUIET, reporter=Interrupting(after=5))
    assert not (stopped / "checkpoint.pt").exists()
    train(config, WORKLOAD, stopped, QUIET, resume=True)
    train(config, WORKLOAD, whole, QUIET)
    assert lines(stopped) == lines(whole)


def test_time_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config = tiny_config(epochs=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, WORKLOAD, tmp_path, QUIET, reporter=Interrupting(after=20))
    before = read_run(tmp_path).metrics[-1]["train_time"]
    times = [r["train_time"] for r in train(config, WORKLOAD, tmp_path, QUIET, resume=True).metrics]
    assert times == sorted(times)
    assert times[-1] >= before * 0.5 > 0


def test_a_finished_run_is_returned_and_not_repeated(tmp_path: Path) -> None:
    first = train(tiny_config(epochs=2), WORKLOAD, tmp_path, QUIET)
    again = train(tiny_config(epochs=2), WORKLOAD, tmp_path, QUIET, resume=True)
    assert again.metrics == first.metrics
    assert again.meta == first.meta


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(epochs=1), WORKLOAD, run_dir, QUIET)
    recorded = lines(run_dir)
    with pytest.raises(RunExistsError, match="holds this run already, status 'complete'"):
        train(tiny_config(epochs=1), WORKLOAD, run_dir, QUIET)
    other = tiny_config(epochs=1, options={"lr": 0.5})
    with pytest.raises(RunExistsError, match=r"other settings .*options\.lr: 0\.1 / 0\.5"):
        train(other, WORKLOAD, run_dir, QUIET, resume=True)
    assert lines(run_dir) == recorded
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RunExistsError, match="exists and is no run"):
        train(tiny_config(epochs=1), WORKLOAD, tmp_path / "mine", QUIET, resume=True)


def test_a_loss_that_is_not_finite_is_recorded_as_divergence(tmp_path: Path) -> None:
    poisoned: Any = TinyWorkload(poison=math.nan)
    run = train(tiny_config(), poisoned, tmp_path, QUIET)
    assert run.meta["status"] == "diverged"
    assert run.meta["diverged_at_step"] == 1
    assert "training loss is nan at step 1" in run.meta["reason"]
    assert run.to_target() == math.inf


def test_a_rate_that_explodes_is_recorded_as_divergence(tmp_path: Path) -> None:
    config = tiny_config("shampoo", options={"lr": 1e30}, epochs=3)
    run = train(config, WORKLOAD, tmp_path, QUIET)
    assert run.meta["status"] == "diverged"
    assert len(run.metrics) < 9


def parameters_after(config: Any, steps: int = 5) -> torch.Tensor:
    splits = WORKLOAD.splits(None, device=torch.device("cpu"), validation=False, subset=None)
    training = Training(config, NoDropout(), splits, QUIET)  # type: ignore[arg-type]
    for inputs, targets in list(splits.train(32, 0, 0))[:steps]:
        training.take_step(inputs, targets)
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


class NoDropout(TinyWorkload):
    def model(self, seed: int) -> torch.nn.Module:
        model = super().model(seed)
        model[2] = torch.nn.Identity()  # type: ignore[index]
        return model


@pytest.mark.parametrize("method", ["sgd", "kfac"])
def test_accumulated_pieces_make_the_same_step(method: str) -> None:
    whole = parameters_after(tiny_config(method))
    pieces = parameters_after(tiny_config(method, accumulate=2))
    torch.testing.assert_close(pieces, whole, rtol=1e-3, atol=1e-5)


def test_uneven_pieces_are_weighted_by_their_size() -> None:
    whole = parameters_after(tiny_config("sgd"))
    pieces = parameters_after(tiny_config("sgd", accumulate=5))  # 32 = 7 + 7 + 7 + 7 + 4
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)


def test_bf16_trains_and_is_recorded(tmp_path: Path) -> None:
    run = train(tiny_config("fop", amp="bf16", epochs=4), WORKLOAD, tmp_path, QUIET)
    assert run.meta["config"]["amp"] == "bf16"
    assert run.best() > 0.8


def test_fp16_needs_cuda(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp16 needs a CUDA device, found cpu: use --amp bf16"):
        train(tiny_config(amp="fp16"), WORKLOAD, tmp_path, QUIET)


def test_the_optimizer_follows_the_schedule_in_every_group() -> None:
    config = tiny_config("kfac-2x", batch_size=64)
    splits = WORKLOAD.splits(None, device=torch.device("cpu"), validation=False, subset=None)
    training = Training(config, WORKLOAD, splits, QUIET)
    inputs, targets = next(iter(splits.train(64, 0, 0)))
    training.take_step(inputs, targets)
    # 200 examples in batches of 64: 4 steps an epoch, two epochs of warm-up, the first of 8 steps.
    # The linear rule doubles the base rate of 0.1, and the control doubles it once more.
    assert training.schedule.peak == pytest.approx(0.2)
    assert [g["lr"] for g in training.optimizer.param_groups] == [pytest.approx(0.4 / 8)]


def test_training_time_excludes_evaluation(tmp_path: Path) -> None:
    class SlowToEvaluate(TinyWorkload):
        def evaluate(self, model: Any, batches: Any) -> dict[str, float]:
            time.sleep(0.2)
            return super().evaluate(model, batches)

    slow: Any = SlowToEvaluate()
    config = tiny_config(epochs=3, evaluate_every=None)
    run = train(config, slow, tmp_path, QUIET)
    assert 0 < run.metrics[-1]["train_time"] < 0.4


def test_warming_up_leaves_no_trace() -> None:
    splits = WORKLOAD.splits(None, device=torch.device("cpu"), validation=False, subset=None)
    training = Training(tiny_config("fop"), WORKLOAD, splits, QUIET)
    before = [p.clone() for p in training.model.parameters()]
    random_state = torch.get_rng_state()
    training.warm_up()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, training.model.parameters(), before))
    assert training.watch.seconds == 0


def test_training_time_includes_waiting_for_batches(tmp_path: Path) -> None:
    waiting: Any = replace(TinyWorkload(), pause=0.02)
    run = train(tiny_config(epochs=1), waiting, tmp_path, QUIET)
    assert run.metrics[-1]["train_time"] >= 7 * 0.02


def test_evaluations_inside_an_epoch_have_fractional_epochs(tmp_path: Path) -> None:
    run = train(tiny_config(epochs=1), WORKLOAD, tmp_path, QUIET)  # 7 steps, evaluated every 3
    assert [r["epoch"] for r in run.metrics] == [pytest.approx(3 / 7), pytest.approx(6 / 7), 1]
    assert [r["step"] for r in run.metrics] == [3, 6, 7]


def test_meta_tells_what_ran(tmp_path: Path) -> None:
    run = train(tiny_config("fop", batch_size=64, epochs=1), WORKLOAD, tmp_path, QUIET)
    assert run.meta["config"] == tiny_config("fop", batch_size=64, epochs=1).as_dict()
    assert run.meta["at_batch_size"] == {"lr": pytest.approx(0.2), "update_every": 5}
    assert run.meta["steps_per_epoch"] == 4
    assert run.meta["train_size"] == 200
    assert {"python", "torch", "fop"} <= set(run.meta["versions"])
    assert {"cores", "device", "processor"} <= set(run.meta["machine"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_hold_the_records_and_the_layers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    runtime = Runtime(checkpoint_seconds=0.0, tensorboard=True)
    config = tiny_config("fop", epochs=3, evaluate_every=None)
    with pytest.raises(KeyboardInterrupt):
        train(config, WORKLOAD, tmp_path, runtime, reporter=Interrupting(after=20))
    run = train(config, WORKLOAD, tmp_path, runtime, resume=True)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("run/test_accuracy")
    assert [event.step for event in scalars] == [7, 14, 21]
    assert [event.value for event in scalars] == pytest.approx(
        [record["test_accuracy"] for record in run.metrics]
    )
    for quantity in ("s", "beta", "eta", "cos2"):
        assert len(events.Scalars(f"layers/0/{quantity}")) == 3
    assert 0.5 <= events.Scalars("layers/3/eta")[0].value <= 1


@pytest.mark.parametrize("method", ["sgd", "fop"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_trains_alike(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    # Dynamo without the code generator, which needs a compiler on the machine.
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="eager"))
    plain = train(tiny_config(method, epochs=2), WORKLOAD, tmp_path / "plain", QUIET)
    fast = train(tiny_config(method, epochs=2, compile=True), WORKLOAD, tmp_path / "fast", QUIET)
    ours = [record["test_loss"] for record in fast.metrics]
    assert ours == pytest.approx([record["test_loss"] for record in plain.metrics], rel=1e-3)
