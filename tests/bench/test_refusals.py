"""What cannot be done is said in one message before anything is done: options, disks, packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fop_bench.config import ConfigError
from fop_bench.loop import Runtime, train
from fop_bench.methods import METHODS
from fop_bench.progress import Reporter
from fop_bench.records import load_runs, read_run
from fop_bench.tune import Budget
from tests.bench.commands import refused, run
from tests.bench.recorded import write_run
from tests.bench.tiny import TinyWorkload, tiny_config

ROOT = Path(__file__).parents[2]
QUICK = ["--epochs", 1, "--threads", 1, "--device", "cpu"]
WORKLOAD: Any = TinyWorkload()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


AT_LEAST_ONE = [
    *(("train", option) for option in (
        "--epochs", "--batch-size", "--subset", "--accumulate", "--threads")),
    *(("tune", option) for option in ("--trials", "--epochs", "--batch-sizes", "--subset")),
    *(("compare", option) for option in ("--epochs", "--batch-sizes", "--accumulate")),
    *(("sweep", option) for option in ("--epochs", "--batch-sizes")),
    *(("landscape", option) for option in ("--batch-size", "--resolution", "--subset")),
    ("memory", "--batch-sizes"),
    *(("scaling", option) for option in (
        "--interval", "--blocks", "--rounds", "--ranks", "--model-ranks", "--batch-sizes")),
]  # fmt: skip


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize(("command", "option"), AT_LEAST_ONE)
def test_a_number_below_one_is_refused(command: str, option: str, number: str) -> None:
    more = ["damping"] if command == "sweep" else []
    message = refused(command, "digits-mlp", *more, option, number)
    assert option in message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "digits-mlp", "--seed", -1],
        ["train", "digits-mlp", "--checkpoint-seconds", "nan"],
        ["train", "digits-mlp", "--checkpoint-seconds", -1],
        ["train", "digits-mlp", "--set", "method.lr=nan"],
        ["train", "digits-mlp", "--set", "method.lr=0"],
        ["train", "digits-mlp", "--set", "method.weight_decay=inf"],
        ["train", "digits-mlp", "--set", "method=5"],
        ["train", "digits-mlp", "--set", "schedule.warmup_epochs=nan"],
        ["compare", "digits-mlp", "--seeds", -1],
        ["compare", "digits-mlp", "--seeds", ","],
        ["compare", "digits-mlp", "--methods", ","],
        ["tune", "digits-mlp", "--seeds", "0,x"],
        ["tune", "digits-mlp", "--set", "tune.trials=0"],
        ["sweep", "digits-mlp", "lr", "--values", "0"],
        ["sweep", "digits-mlp", "lr", "--values", "nan"],
        ["sweep", "digits-mlp", "lr", "--values", "1979-05-27"],
        ["landscape", "digits-mlp", "--resolution", 4],
        ["landscape", "digits-mlp", "--span", "inf"],
        ["landscape", "digits-mlp", "--methods", ""],
        ["memory", "digits-mlp", "--methods", "nope"],
        ["scaling", "digits-mlp", "--device", "gpu"],
        ["scaling", "digits-mlp", "--utilisation", "nan"],
        ["report", ".", "--out", "report.pdf"],
    ],
)
def test_a_value_that_makes_no_sense_is_refused(arguments: list[Any]) -> None:
    refused(*arguments)
    assert not list(Path().rglob("meta.json"))


def test_a_budget_of_nothing_is_refused() -> None:
    for budget in ((0, (1,)), (-1, (1,)), (1, ()), (1, (-1,)), (1, (1,), 0)):
        with pytest.raises(ConfigError, match="tuning: "):
            Budget(*budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "digits-mlp", "--method", "sgd", "--set", "method.momentun=1"],
         ["did you mean momentum?", "sgd takes dampening, differentiable,"]),
        # Of another method, so that it would be silently without effect.
        (["train", "digits-mlp", "--method", "sgd", "--set", "method.damping=1"],
         ["no method here takes 'damping'", "sgd takes dampening"]),
        (["compare", "digits-mlp", "--methods", "sgd,adamw", "--set", "method.damping=1"],
         ["sgd takes dampening", "adamw takes amsgrad, betas"]),
        (["train", "digits-mlp", "--set", "epoch=1"],
         ["did you mean epochs?", "known: accumulate"]),
        (["train", "digits-mlp", "--set", "schedule.patienc=1"], ["did you mean patience?"]),
        (["train", "digit-mlp"], ["did you mean digits-mlp?"]),
        (["train", "digits-mlp", "--method", "fopp"], ["did you mean fop?"]),
        (["train", "digits-mlp", "--epoch", "1"], ["--epochs"]),
        (["sweep", "digits-mlp", "dampin"], ["did you mean damping?"]),
        (["train", "digits-mlp", "--method", "sgd", "--set", "method.nesterov=False"],
         ["nesterov of 'sgd': expected true or false, found 'False'"]),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_likely_one(
    arguments: list[str], parts: list[str]
) -> None:
    message = refused(*arguments)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_learning_rate_and_momentum_can_be_swept(option: str) -> None:
    result = run("sweep", "digits-mlp", option, "--values", "0.05,0.5", "--methods", "sgd,adamw",
                 "--batch-sizes", 512, "--seeds", 0, *QUICK)  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = load_runs(Path(f"runs/sweep/digits-mlp-{option}"))
    found = {(r.meta["method"], r.meta["config"]["options"].get(option)) for r in runs}
    takers = {"lr": ("sgd", "adamw"), "momentum": ("sgd",)}[option]
    assert found == {(method, value) for method in takers for value in (0.05, 0.5)}
    assert f"digits-mlp-{option}.png" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["train", "digits-mlp", *QUICK],
        ["tune", "digits-mlp", "--methods", "sgd", "--trials", 1, *QUICK],
        ["compare", "digits-mlp", "--methods", "sgd", *QUICK],
        ["sweep", "digits-mlp", "damping", *QUICK],
        ["landscape", "digits-mlp", "--resolution", 3],
        ["memory", "digits-mlp", "--methods", "sgd"],
        ["scaling", "digits-mlp", "--no-measure"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_a_place_that_cannot_be_written_is_named(command: list[Any], place: str) -> None:
    Path("file").write_text("mine")
    assert "--out" in (message := refused(*command, "--out", place))
    assert place in message
    assert "cannot be written" in message
    assert Path("file").read_text() == "mine"


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", accuracies=[0.5, 0.95])
    Path("file").write_text("mine")
    for place in ("file/report.html", "/proc/report.html"):
        assert f"{place} cannot be written" in refused("report", "runs", "--out", place)
    Path("report.md").mkdir()
    assert "report.md" in refused("report", "runs", "--out", "report.html")


class Filling(Reporter):
    """The disk is full after so many steps: what is opened then is /dev/full, which is real."""

    def __init__(self, run_dir: Path, after: int, name: str) -> None:
        self.left, self.trap = after, run_dir / f".{name}.{os.getpid()}.tmp"

    def stepped(self, steps: int, images: int, loss: float | None) -> None:
        self.left -= steps
        if self.left == 0:
            self.trap.symlink_to("/dev/full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "meta.json"])
def test_a_full_disk_is_named_and_costs_nothing_recorded(tmp_path: Path, name: str) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    quiet = Runtime(checkpoint_seconds=0.0, tensorboard=False)
    config = tiny_config(epochs=3)
    full = rf"{name} cannot be written \(No space left on device\): free some space"
    with pytest.raises(Exception, match=full):
        train(config, WORKLOAD, run_dir, quiet, reporter=Filling(run_dir, 16, name))
    assert read_run(run_dir).meta["status"] == "running"
    assert len(read_run(run_dir).metrics) >= 6
    resumed = train(config, WORKLOAD, run_dir, quiet, resume=True)
    wanted = train(config, WORKLOAD, whole, quiet)
    assert [r["test_loss"] for r in resumed.metrics] == [r["test_loss"] for r in wanted.metrics]


def test_any_other_error_of_the_system_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import tensorboard

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "events")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", full)
    message = refused("train", "digits-mlp", "--method", "sgd", *QUICK)
    assert "Error: events: No space left on device: free some space" in message


# Blocks the packages of the extra, as if only the wheel and torch were there.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["fop-bench", *{arguments!r}]
from fop_bench.__main__ import main
main()
"""
EXTRA = ["typer", "click", "rich", "jinja2", "markupsafe", "matplotlib", "numpy", "PIL", "yaml",
         "pytorch_optimizer", "tensorboard", "sklearn"]  # fmt: skip


@pytest.mark.parametrize(
    ("blocked", "arguments"),
    [
        (EXTRA, ["--help"]),
        (["matplotlib"], ["report", "runs"]),
        (["pytorch_optimizer"], ["train", "digits-mlp", "--method", "lamb"]),
        (["tensorboard"], ["train", "digits-mlp", "--method", "sgd", "--epochs", "1"]),
    ],
)
def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, blocked: list[str], arguments: list[str]
) -> None:
    write_run(tmp_path / "runs", accuracies=[0.5, 0.95])
    program = WITHOUT.format(blocked=blocked, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert 'pip install "fop[bench]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [m for m in METHODS if METHODS[m].takes_model])
def test_options_that_a_record_does_not_name_keep_their_meaning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library's own defaults become: momentum 0.9, SGD as fallback, KL clip 1e-3."""
    given: dict[str, Any] = {}
    method = METHODS[name]
    optimizer: Any = method.constructor()

    def note(self: Any, model: Any, lr: float = 0.5, **options: Any) -> None:
        given.update(options)

    monkeypatch.setattr(optimizer, "__init__", note)
    assert method.accepts  # inspected before
    method.build(torch.nn.Linear(2, 2), 0.1)
    doubled = 2 if name == "kfac-2x" else 1
    assert (given["momentum"], given["fallback"]) == (0.9, "sgd")
    assert given["kl_clip"] == doubled * 1e-3
