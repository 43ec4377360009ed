"""The commands, run as a user runs them, and the files and overrides they read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from fop_bench.config import ConfigError, merged, parse_overrides, read_file
from fop_bench.demo import new_directory
from fop_bench.memory import Measurement
from fop_bench.methods import METHODS, get_method
from fop_bench.recipes import RECIPES, available, load_recipe
from fop_bench.records import load_runs, read_run
from fop_bench.workloads import WORKLOADS
from tests.bench.commands import run

QUICK = ["--epochs", "1", "--threads", "1", "--device", "cpu"]


def succeed(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments: Any) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The console read the width when it was made, which may have been for another test.
    console = importlib.import_module("fop_bench.cli.app").console
    monkeypatch.setattr(console, "width", 200)


def test_list_shows_everything_with_the_state_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.delenv("FOP_DATA", raising=False)
    output = succeed("list", "--data-dir", tmp_path)
    for name in (*WORKLOADS, *METHODS, *available()):
        assert name in output
    assert "digits: found" in output
    assert "imagenet: missing" in output


def test_train_records_a_run_and_resumes_it() -> None:
    output = succeed("train", "digits-mlp", "--method", "sgd", "--batch-size", 256, *QUICK)
    run_dir = Path("runs/train/digits-mlp/sgd/b256/s0")
    assert str(run_dir) in output
    recorded = read_run(run_dir)
    assert recorded.meta["status"] == "complete"
    assert recorded.meta["config"]["epochs"] == 1
    assert list(run_dir.glob("events.out.tfevents.*"))
    refused = fail("train", "digits-mlp", "--method", "sgd", "--batch-size", 256, *QUICK)
    assert "continue it with --resume" in refused
    succeed("train", "digits-mlp", "--method", "sgd", "--batch-size", 256, *QUICK, "--resume")
    assert read_run(run_dir) == recorded


def test_overrides_reach_the_optimizer() -> None:
    succeed(
        "train", "digits-mlp", "--batch-size", 256, *QUICK, "--no-tensorboard", "--out", "here",
        "--set", "method.damping=3e-4", "--set", "method.kl_clip=none",
        "--set", "schedule.name=power", "--set", "schedule.exponent=4",
        "--amp", "bf16", "--accumulate", 2, "--seed", 5, "--subset", 500,
    )  # fmt: skip
    config = read_run(Path("here")).meta["config"]
    assert config["method"] == "fop"
    assert config["options"]["damping"] == 3e-4
    assert config["options"]["kl_clip"] is None
    assert (config["schedule"]["name"], config["schedule"]["exponent"]) == ("power", 4)
    assert (config["amp"], config["accumulate"], config["seed"]) == ("bf16", 2, 5)
    assert config["subset"] == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "mnist"], "'mnist' is no recipe"),
        (["train", "digits-mlp", "--method", "adam"], "unknown method 'adam'"),
        (["train", "digits-mlp", "--set", "damping"], "expected KEY=VALUE"),
        (["train", "digits-mlp", "--set", "dampin=1"], "unknown 'dampin'"),
        (
            ["train", "digits-mlp", "--set", "method.dampin=1"],
            "takes 'dampin' (did you mean damping?); fop takes beta,",
        ),
        (
            ["train", "digits-mlp", "--set", "schedule.name=linear"],
            "schedule.name: expected one of 'constant'",
        ),
        (
            ["train", "digits-mlp", "--set", "seeds=1"],
            "seeds: expected a list of whole numbers >= 0",
        ),
        (["train", "digits-mlp", "--set", "method.damping=-1"], "method 'fop': damping must be"),
        (["train", "digits-mlp", "--set", "epochs=0"], "epochs: expected a whole number >= 1"),
        (["train", "digits-mlp", "--amp", "fp8"], "amp: expected one of 'off', 'bf16', 'fp16'"),
        (["train", "digits-mlp", "--device", "gpu"], "--device 'gpu'"),
        (["compare", "digits-mlp", "--seeds", "a"], "--seeds 'a': expected whole numbers"),
        (["sweep", "digits-mlp", "dampin"], "unknown sweep 'dampin' (did you mean damping?)"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_answered_with_one_message(arguments: list[str], message: str) -> None:
    output = fail(*arguments)
    assert message in output
    assert "Traceback" not in output


def test_missing_data_is_named_before_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    output = fail("train", "imagenet1k-resnet50", "--data-dir", tmp_path, "--device", "cpu")
    assert "imagenet" in output
    assert not Path("runs").exists()


def test_tune_compare_and_report_work_together() -> None:
    succeed(
        "tune", "digits-mlp", "--methods", "sgd,fop", "--batch-sizes", 512, "--trials", 2,
        "--seeds", 50, *QUICK,
    )  # fmt: skip
    tuned = Path("runs/tune/digits-mlp/tuned.toml")
    content = read_file(tuned)
    assert [entry["method"] for entry in content["setting"]] == ["sgd", "fop"]
    assert content["budget"] == {
        "trials": 2, "seeds": [50], "split": "validation", "epochs": 1,
        "chosen_by": content["budget"]["chosen_by"],
    }  # fmt: skip
    output = succeed(
        "compare", "digits-mlp", "--methods", "sgd,fop", "--batch-sizes", 512, "--seeds", "0,1",
        "--tuned", tuned, *QUICK,
    )  # fmt: skip
    runs = load_runs(Path("runs/compare/digits-mlp"))
    assert {r.meta["method"] for r in runs} == {"sgd", "fop", "kfac-2x"}
    assert len(runs) == 6
    chosen = {entry["method"]: entry["options"]["lr"] for entry in content["setting"]}
    for recorded in runs:
        if recorded.meta["method"] in chosen:
            options = recorded.meta["config"]["options"]
            assert options["lr"] == chosen[recorded.meta["method"]]
    assert "batch size" in output
    assert "2 trials and 1 seeds for every method" in output
    for line in ("runs/compare/digits-mlp/report.html", "digits-mlp-epochs.png"):
        assert line in output
    page = Path("runs/compare/digits-mlp/report.html").read_text()
    assert "data:image/" in page
    Path("runs/compare/digits-mlp/report.html").unlink()
    succeed("report", "runs/compare/digits-mlp", "--out", "again.html")
    assert Path("again.html").read_text().count("<table") == page.count("<table")


def test_sweep_ends_with_a_plot() -> None:
    output = succeed(
        "sweep", "digits-mlp", "damping", "--values", "1e-3,1e-2", "--methods", "kfac",
        "--batch-sizes", 512, "--seeds", 0, *QUICK,
    )  # fmt: skip
    assert "digits-mlp-damping.png" in output
    assert "trials" in output
    assert len(load_runs(Path("runs/sweep/digits-mlp-damping"))) == 2


def test_landscape_writes_its_pictures_once() -> None:
    arguments = ["landscape", "digits-mlp", "--resolution", 3, "--warmup", 2, "--threads", 1,
                 "--device", "cpu"]  # fmt: skip
    succeed(*arguments)
    folder = Path("runs/landscape/digits-mlp")
    assert len(list(folder.glob("*.png"))) == 2
    surface = json.loads((folder / "landscape.json").read_text())
    assert [step["method"] for step in surface["steps"]] == ["sgd", "kfac", "fop"]
    assert "exists: choose another directory" in fail(*arguments)


def test_memory_measures_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(workload: str, method: str, batch_size: int, **_: Any) -> Measurement:
        return Measurement(workload, method, batch_size, "cpu", 1e6 * batch_size)

    monkeypatch.setattr("fop_bench.memory.measure", measure)
    output = succeed(
        "memory", "digits-mlp", "--methods", "sgd", "--batch-sizes", 64, "--device", "cpu"
    )
    assert "64.0 MB" in output
    assert Path("runs/memory/digits-mlp/memory.png").is_file()


def test_every_demo_has_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "demo" / "007").mkdir(parents=True)
    (tmp_path / "demo" / "notes").mkdir()
    names = [new_directory(tmp_path / "demo").name for _ in range(2)]
    assert names == ["008", "009"]


def test_the_demo_compares_all_methods_with_tuned_settings() -> None:
    recipe = load_recipe("digits-mlp")
    plan = recipe.plan()
    assert {config.method for config in plan} == set(METHODS)
    assert len(plan) == len(METHODS) * 2 * 3
    assert recipe.tuned is not None
    assert recipe.tuned.budget["split"] == "validation"
    assert not set(recipe.tuned.budget["seeds"]) & set(recipe.seeds)
    for name, method in METHODS.items():
        for batch_size in recipe.batch_sizes(WORKLOADS["digits-mlp"]):
            assert recipe.tuned.options("digits-mlp", name, batch_size), (name, batch_size)
            assert method.follows or any(s.method == name for s in recipe.tuned.settings)


@pytest.mark.parametrize("name", available())
def test_every_recipe_can_be_planned(name: str) -> None:
    recipe = load_recipe(name)
    methods = {config.method for config in recipe.plan()}
    assert set(recipe.methods) <= methods
    assert ("kfac-2x" in methods) >= bool({"fop", "fop-sum"} & methods)
    assert recipe.source
    for method in recipe.methods:
        chosen = get_method(method)
        assert chosen.settings(recipe.grid(chosen))


def test_every_row_of_the_papers_tables_has_a_file() -> None:
    rows = [f"cifar10-resnet18-b{b}" for b in (2048, 4096, 8192, 16384, 32768, 50000)]
    rows += [f"imagenet100-t2tvit-{m}" for m in ("adamw", "kfac", "fop")]
    rows += [f"imagenet1k-resnet50-{m}" for m in ("sgd", "shampoo", "lamb", "kfac", "fop")]
    rows += [f"cifar-lt-{m}" for m in ("sgd", "kfac", "fop")]
    assert set(rows) <= set(available())


def test_the_papers_settings_are_those_of_its_appendix() -> None:
    imagenet = load_recipe("imagenet1k-resnet50")
    workload = WORKLOADS["imagenet1k-resnet50"]
    fop, sgd = (imagenet.run(workload, name, 8192, 0) for name in ("fop", "sgd"))
    assert (fop.epochs, sgd.epochs) == (50, 80)
    assert (fop.schedule.name, sgd.schedule.name) == ("power", "cosine")
    assert fop.schedule.warmup_epochs == sgd.schedule.warmup_epochs == 5
    grid = imagenet.grid(METHODS["fop"])
    assert grid["schedule.exponent"] == (4, 5, 6)
    assert grid["update_every"] == (800, 1600, 2400)
    tail = load_recipe("cifar-lt").run(WORKLOADS["cifar10-lt-100"], "fop", 128, 0)
    assert (tail.epochs, tail.schedule.milestones, tail.options["damping"]) == (
        200,
        (160, 180),
        1e-3,
    )
    assert (tail.options["lr"], tail.options["weight_decay"]) == (0.1, 2e-4)
    transformer = load_recipe("imagenet100-t2tvit").run(
        WORKLOADS["imagenet100-t2tvit"], "kfac", 512, 0
    )
    assert transformer.options["fallback"] == "adamw"


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'workload = "digits-mlp"\n[for.b64]\nepochs = 7\n[for.fop]\nepochs = 8\n'
        "[for.fop.method]\ndamping = 0.2\n[for.fop.schedule]\nname = 'cosine'\n"
    )
    given = parse_overrides(["epochs=2", "method.damping=0.3", "schedule.name=power"])
    workload = WORKLOADS["digits-mlp"]
    plain = load_recipe(str(mine))
    assert plain.run(workload, "sgd", 64, 0).epochs == 7
    assert plain.run(workload, "fop", 64, 0).epochs == 8
    assert plain.run(workload, "fop", 64, 0).options["damping"] == 0.2
    run_config = load_recipe(str(mine), given).run(workload, "fop", 64, 0)
    assert (run_config.epochs, run_config.schedule.name) == (2, "power")
    assert run_config.options["damping"] == 0.3
    # What a sweep or a search varies is varied all the same.
    varied = load_recipe(str(mine), given).run(workload, "fop", 64, 0, options={"damping": 0.4})
    assert varied.options["damping"] == 0.4


def test_yaml_says_the_same_as_toml(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(
        'workload = "digits-mlp"\nepochs = 3\n[method]\ndamping = 1e-4\n'
    )
    (tmp_path / "one.yaml").write_text(
        "workload: digits-mlp\nepochs: 3\nmethod:\n  damping: 1e-4\n"
    )
    assert read_file(tmp_path / "one.toml") == read_file(tmp_path / "one.yaml")
    recipe = load_recipe(str(tmp_path / "one.yaml"))
    run_config = recipe.run(WORKLOADS["digits-mlp"], "fop", 64, 0)
    assert run_config.options["damping"] == 1e-4
    # A shared option goes to the methods that take it.
    assert "damping" not in recipe.run(WORKLOADS["digits-mlp"], "sgd", 64, 0).options


def test_a_recipe_extends_another_and_says_what_differs(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "cifar-lt"\nseeds = [9]\n[for.b128]\nepochs = 7\n')
    recipe = load_recipe(str(mine))
    assert recipe.seeds == (9,)
    assert {config.epochs for config in recipe.plan()} == {7}
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"in a circle: a\.toml -> b\.toml -> a\.toml"):
        load_recipe(str(tmp_path / "a.toml"))


def test_broken_files_are_named(tmp_path: Path) -> None:
    for name, content in (("x.toml", "a = ["), ("x.yaml", "a: [")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=rf"x\.{name[2:]} is not valid"):
            read_file(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        read_file(tmp_path / "none.toml")


def test_overrides_parse_as_toml_values() -> None:
    table = parse_overrides(["a.b=1e-4", "a.c=true", "d=[1, 2]", "e=word", "f=none", "g='x=y'"])
    assert table == {
        "a": {"b": 1e-4, "c": True}, "d": [1, 2], "e": "word", "f": None, "g": "x=y",
    }  # fmt: skip
    assert merged({"a": {"b": 1, "z": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "z": 2}}
    with pytest.raises(ConfigError, match="a was already given a value"):
        parse_overrides(["a=1", "a.b=2"])


def test_recipes_are_part_of_the_package() -> None:
    assert RECIPES.parent.name == "fop_bench"
    assert len(available()) >= 17
