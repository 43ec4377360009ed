"""A damaged file ends in one message that names file and cure, and takes nothing else along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fop_bench.config import ConfigError
from fop_bench.costs import accelerator
from fop_bench.errors import BenchError, RecordError
from fop_bench.landscape import Landscape, Step, read_landscape, write_landscape
from fop_bench.loop import Runtime, train
from fop_bench.memory import Measurement, read_measurements, write_measurements
from fop_bench.recipes import load_recipe
from fop_bench.records import read_run
from fop_bench.scaling import Scaling, Timing, predict_all, read_scaling, write_scaling
from fop_bench.tuned import Setting, read_tuned, write_tuned
from fop_bench.workloads import WORKLOADS
from tests.bench.commands import refused
from tests.bench.recorded import write_run
from tests.bench.test_loop import Interrupting
from tests.bench.tiny import TinyWorkload, tiny_config

QUIET = Runtime(checkpoint_seconds=0.0, tensorboard=False)
WORKLOAD: Any = TinyWorkload()
GONE = object()

# What a file can hold in place of what belongs there.
WRONG: dict[str, Any] = {
    "gone": GONE, "null": None, "true": True, "text": "x", "empty": "", "list": [], "table": {},
    "nested list": [[1]], "nested table": {"a": {"b": []}}, "huge": 10**120, "negative": -1,
    "fraction": 0.5,
}  # fmt: skip
# Files that are no record whatever was in them.
BYTES = {
    "empty": b"",
    "binary": bytes(range(256)),
    "cut": b'{"schema": 1, "wor',
    "a number": b"7",
    "a list": b"[]",
    "NaN": b'{"schema": NaN}',
    "infinite": b'{"schema": 1e999}',
    "too many digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "half a character": b'{"schema": "\\ud800"}',
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry of a document but the document itself."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in entries:
        yield (*path, key)
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*path, key))


def with_entry(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


@pytest.fixture
def one_run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "runs", method="fop", accuracies=[0.5, 0.95], options={"betas": [0.9, 0.99]},
        ranks=2, earlier_ranks=[1], evaluations=2,
    )  # fmt: skip


# Wherever one of these stands in meta.json, nothing can be made of the record.
TEXTS, NUMBERS = ("workload", "method", "metric", "status"), ("batch_size", "ranks")
TABLES = ("config", "config.options", "config.schedule", "versions", "machine")
NOT_TEXT = ("null", "true", "empty", "list", "table", "huge", "negative", "fraction")
NOT_COUNT = ("null", "true", "text", "list", "table", "huge", "negative", "fraction")
NOT_TABLE = ("null", "true", "text", "list", "huge", "fraction")
REFUSED = [
    *((name, kind) for name in TEXTS for kind in ("gone", *NOT_TEXT)),
    *((name, kind) for name in NUMBERS for kind in NOT_COUNT),
    *((name, kind) for name in TABLES for kind in NOT_TABLE),
    *((name, "gone") for name in ("schema", "batch_size", "seed", "config", "target")),
    *(("target", kind) for kind in ("null", "true", "text", "list", "huge")),
    *(("seed", kind) for kind in ("null", "true", "text", "huge", "fraction")),
    *(("higher_is_better", kind) for kind in ("gone", "null", "text", "fraction")),
    *(("earlier_ranks", kind) for kind in ("null", "text", "table", "nested list")),
    *(("config.options.lr", kind) for kind in ("table", "nested list", "nested table")),
    *(("evaluations", kind) for kind in ("null", "text", "negative", "huge")),
]


@pytest.mark.parametrize(("entry", "kind"), REFUSED)
def test_an_entry_of_the_wrong_kind_is_named(one_run: Path, entry: str, kind: str) -> None:
    path = one_run / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(with_entry(meta, tuple(entry.split(".")), WRONG[kind])))
    with pytest.raises(RecordError) as error:
        read_run(one_run)
    message = str(error.value)
    assert str(path) in message
    assert entry.rpartition(".")[2] in message or "is not JSON" in message
    assert "delete that run and repeat it" in message or "fop-bench that wrote it" in message


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("entry", ["epoch", "step", "train_time", "train_loss", "test_accuracy"])
def test_a_line_of_the_wrong_kind_is_named(one_run: Path, entry: str, kind: str) -> None:
    fine = {
        "train_loss": ("gone", "null", "negative", "fraction"),
        "test_accuracy": ("gone", "null", "negative", "fraction"),
        "epoch": ("fraction",),
        "train_time": ("fraction",),
    }
    path = one_run / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    damaged = json.dumps(with_entry(json.loads(first), (entry,), WRONG[kind]))
    path.write_text(f"{damaged}\n{second}\n")
    if kind in fine.get(entry, ()):
        assert len(read_run(one_run).metrics) == 2
        return
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 1.*delete that run"):
        read_run(one_run)


def test_evaluations_that_were_lost_are_missed(one_run: Path) -> None:
    metrics = one_run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for content in (lines[0], "", lines[1] + lines[0], lines[0] + lines[0]):
        metrics.write_text(content)
        with pytest.raises(RecordError, match=r"evaluations were recorded|steps do not rise"):
            read_run(one_run)
    metrics.unlink()
    with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be read"):
        read_run(one_run)


def spoil(path: Path, how: str) -> None:
    path.unlink()
    if how == "a directory":
        path.mkdir()
    else:
        path.write_bytes(BYTES[how])


@pytest.mark.parametrize("how", ["a directory", *BYTES])
@pytest.mark.parametrize("name", ["meta.json", "metrics.jsonl"])
def test_a_run_that_cannot_be_read_is_named(one_run: Path, name: str, how: str) -> None:
    spoil(one_run / name, how)
    with pytest.raises(RecordError) as error:
        read_run(one_run)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["a directory", "binary", "cut", "NaN"])
@pytest.mark.parametrize("name", ["meta.json", "metrics.jsonl", "memory.json", "landscape.json"])
def test_other_runs_of_the_report_are_still_shown(
    one_run: Path, tmp_path: Path, name: str, how: str
) -> None:
    root = tmp_path / "runs"
    write_run(root, method="sgd", accuracies=[0.5, 0.95])
    damaged = one_run / name if name.startswith("met") else root / name
    damaged.touch()
    spoil(damaged, how)
    message = refused("report", root)
    assert "1 not in" in message
    assert str(damaged.relative_to(root)) in message
    page, text = ((root / f"report.{kind}").read_text() for kind in ("html", "md"))
    for shown in (page, text):
        assert "Damaged records" in shown
        assert name in shown
        assert "SGD" in shown
        assert str(tmp_path) not in shown


def test_a_report_of_damaged_records_alone_is_refused(one_run: Path, tmp_path: Path) -> None:
    spoil(one_run / "meta.json", "cut")
    assert "meta.json is not JSON" in refused("report", tmp_path / "runs")
    assert not (tmp_path / "runs" / "report.html").exists()


def recorded_files(folder: Path) -> dict[str, Path]:
    places = (-1.0, 0.0, 1.0)
    losses = tuple(tuple(x * x + y * y for x in places) for y in places)
    steps = (Step("sgd", 0.1, 0.0, 0.9, 0.1),)
    surface = Landscape("digits-mlp", 64, 0, "random", places, places, losses, 1.0, steps)
    hardware = accelerator("h100")
    predictions = predict_all("digits-mlp", ["sgd"], [64], [1, 4], 10, hardware)
    timings = (Timing("sgd", 64, 1, (0.1, 0.2), (0.1,), (0.1, 0.2), (1,)),)
    record = Scaling("digits-mlp", 10, timings, predictions, (hardware,), 0.1)
    return {
        "memory": write_measurements(
            [Measurement("digits-mlp", "sgd", 64, "cpu", 1e6)], folder / "memory.json"
        ),
        "scaling": write_scaling(record, folder / "scaling.json"),
        "landscape": write_landscape(surface, folder / "landscape.json"),
    }


READERS: dict[str, Any] = {
    "memory": read_measurements, "scaling": read_scaling, "landscape": read_landscape,
}  # fmt: skip
# Nobody reads these.
FREE = ("versions", "machine", "note", "device", "source", "hardware", "seed", "x", "y")


@pytest.mark.parametrize("name", READERS)
def test_every_entry_of_a_measurement_is_checked(tmp_path: Path, name: str) -> None:
    path = recorded_files(tmp_path)[name]
    document = json.loads(path.read_text())
    READERS[name](path)
    checked = 0
    for place in places(document):
        if any(key in FREE for key in place):
            continue
        for kind in ("true", "table", "nested table", "huge", "nested list"):
            if (place[-1], kind) in {("overlaps", "true"), ("parts", "table")}:
                continue
            path.write_text(json.dumps(with_entry(document, place, WRONG[kind])))
            with pytest.raises(RecordError, match=rf"{name}\.json.*measure") as error:
                READERS[name](path)
            assert "\n" not in str(error.value)
            checked += 1
    assert checked > 20
    for how in BYTES:
        spoil(path, how)
        with pytest.raises(RecordError, match=rf"{name}\.json"):
            READERS[name](path)


RECIPE = """
title = "mine"
source = "me"
workload = "digits-mlp"
methods = ["sgd", "fop"]
batch_sizes = [64]
seeds = [0]
tuned = "tuned.toml"
epochs = 3
base_batch = 64
lr_rule = "none"
interval_rule = "none"
subset = 100
accumulate = 1
amp = "off"
compile = false
evaluate_every = 5
[schedule]
name = "cosine"
warmup_epochs = 0.5
milestones = [1]
[method]
weight_decay = 0.1
[for.fop]
epochs = 2
[for.fop.method]
damping = 0.1
[grid.fop]
damping = [0.1]
[tune]
trials = 2
seeds = [5]
epochs = 1
"""


def write_recipe(folder: Path) -> Path:
    write_tuned(
        folder / "tuned.toml",
        {"trials": 1, "seeds": [1]},
        (Setting("digits-mlp", "sgd", 64, {"lr": 0.1, "nesterov": True}, {"missed": 0}),),
    )
    path = folder / "mine.toml"
    path.write_text(RECIPE)
    return path


# Only the optimizer itself knows which numbers it takes, and says so before anything is trained.
NUMBERS_OF_METHODS = {"method.weight_decay", "for.fop.method.damping", "grid.fop.damping.0"}
FINE: dict[str, set[str]] = {
    "null": {"subset", "evaluate_every", *NUMBERS_OF_METHODS},
    "true": {"compile"},
    "text": {"title", "source"},
    "empty": {"title", "source"},
    "list": {"schedule.milestones"},
    "table": {"schedule", "method", "for", "for.fop", "for.fop.method", "grid", "grid.fop", "tune"},
    "negative": NUMBERS_OF_METHODS,
    "fraction": {"schedule.warmup_epochs", *NUMBERS_OF_METHODS},
}


@pytest.mark.parametrize("kind", [k for k in WRONG if k != "gone"])
def test_a_recipe_is_refused_or_planned_whatever_it_holds(tmp_path: Path, kind: str) -> None:
    """As YAML, which unlike TOML can hold null."""
    yaml = pytest.importorskip("yaml")
    whole = load_recipe(str(write_recipe(tmp_path)))
    table = {**deepcopy(dict(whole.table)), "tuned": "tuned.toml"}
    path, refused, planned = tmp_path / "mine.yaml", [], []
    for place in places(table):
        path.write_text(yaml.safe_dump(with_entry(table, place, WRONG[kind])))
        try:
            load_recipe(str(path)).plan()
            planned.append(".".join(map(str, place)))
        except BenchError as error:
            refused.append((place, str(error)))
    assert set(planned) == FINE.get(kind, set())
    for place, message in refused:
        assert any(word in message for word in ("mine", str(place[-1]), "/x")), message


@pytest.mark.parametrize("name", ["mine.toml", "mine.yaml", "tuned.toml"])
@pytest.mark.parametrize("how", ["a directory", "binary", "deep", "cut"])
def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path, name: str, how: str) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / name).touch()
    spoil(tmp_path / name, how)
    chosen = recipe if name == "tuned.toml" else tmp_path / name
    assert name in refused("train", chosen)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("entry", ["workload", "method", "batch_size", "options", "options.lr"])
def test_a_tuned_setting_of_the_wrong_kind_is_refused(
    tmp_path: Path, entry: str, kind: str
) -> None:
    yaml = pytest.importorskip("yaml")
    setting = asdict(Setting("digits-mlp", "sgd", 64, {"lr": 0.1}, {}))
    if (entry, kind) in {("options", "table"), ("options.lr", "gone"), ("options.lr", "fraction")}:
        return
    changed = with_entry(setting, tuple(entry.split(".")), WRONG[kind])
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "setting": [changed]}))
    if (entry, kind) == ("workload", "text"):
        assert read_tuned(path).options("digits-mlp", "sgd", 64) == {}
        return
    with pytest.raises((BenchError, ConfigError)):
        load_recipe("digits-mlp", tuned=path).run(WORKLOADS["digits-mlp"], "sgd", 64, 0)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after two of its three epochs of seven steps."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(epochs=3), WORKLOAD, folder, QUIET, reporter=Interrupting(after=17))
    return folder


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(stopped_run, tmp_path / "run")


def resume(run_dir: Path) -> Any:
    return train(tiny_config(epochs=3), WORKLOAD, run_dir, QUIET, resume=True)


CHECKPOINT = ("model", "optimizer", "schedule", "scaler", "rng", "epoch", "step", "train_time")
INNER = ("model.0.weight", "optimizer.param_groups", "optimizer.state", "schedule.scale",
         "schedule.best", "schedule.bad_epochs")  # fmt: skip


def spoilt_checkpoints() -> Iterator[tuple[str, Any]]:
    for entry in (*CHECKPOINT, *INNER, "schema"):
        for kind in ("gone", "null", "text", "nested list"):
            # An enabled scaler is for CUDA alone; without one its entry says nothing.
            if (entry, kind) != ("scaler", "nested list"):
                yield entry, WRONG[kind]
    nan, wide = torch.full((16, 8), float("nan")), torch.zeros(3, 3)
    yield from (("model.0.weight", tensor) for tensor in (nan, wide))
    yield from (("rng", value) for value in ([[wide]], [[torch.zeros(3, dtype=torch.uint8)]]))
    yield from (("epoch", value) for value in (99, -1, 1, 1.5, True, 10**30))
    yield from (("step", value) for value in (99, -1, 13))
    yield from (("train_time", value) for value in (-1.0, float("nan"), float("inf")))
    yield "schedule.best", float("nan")


@pytest.mark.parametrize(
    ("entry", "value"), [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(
        spoilt_checkpoints())]
)  # fmt: skip
def test_a_checkpoint_that_is_not_of_this_run_is_named(
    stopped: Path, entry: str, value: Any
) -> None:
    path = stopped / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    top, _, inner = entry.partition(".")
    torch.save(with_entry(state, (top, inner) if inner else (top,), value), path)
    with pytest.raises(RecordError, match=r"checkpoint\.pt") as error:
        resume(stopped)
    assert "delete that file" in str(error.value) or "fop-bench that wrote it" in str(error.value)


@pytest.mark.parametrize("how", ["a directory", "empty", "binary", "cut", "half"])
def test_a_checkpoint_that_cannot_be_read_is_named_and_its_cure_works(
    stopped: Path, how: str
) -> None:
    path = stopped / "checkpoint.pt"
    if how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        spoil(path, how)
    with pytest.raises(RecordError, match=r"checkpoint\.pt cannot be read .*delete that file"):
        resume(stopped)
    path.rmdir() if how == "a directory" else path.unlink()
    assert resume(stopped).metrics[-1]["epoch"] == 3


def test_records_that_end_before_the_checkpoint_are_missed(stopped: Path) -> None:
    metrics = stopped / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(RecordError, match="it is at step 14, the records before it end at 6"):
        resume(stopped)
