"""SGD, AdamW, KFAC and FOP on scikit-learn's digits, at a small and at the full batch.

Every method searches the same grid of learning rate and momentum, separately for each batch size,
and is scored on a validation split. The best setting is then trained with three seeds, and only
those runs are measured on the test split. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fop

TARGET = 0.95
SEEDS = (1, 2, 3)
TUNING_SEED = 0
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.9, 0.7)
SMALL_BATCH = 64
EPOCHS_SMALL = 8
EPOCHS_FULL = 40
REFRESH_EVERY = 10


@dataclass(frozen=True)
class Setting:
    """What the grid varies; for AdamW the momentum is its first beta."""

    lr: float
    momentum: float


@dataclass(frozen=True)
class Regime:
    """A batch size and the number of epochs every method gets at it."""

    batch_size: int
    epochs: int


@dataclass(frozen=True)
class Run:
    """One training run, and the split its accuracy is measured on."""

    method: str
    regime: Regime
    setting: Setting
    seed: int
    split: str


Curve = list[float]  # accuracy after each epoch


@dataclass(frozen=True)
class Result:
    """One method at one batch size: the setting chosen and a test curve for each seed."""

    method: str
    regime: Regime
    setting: Setting
    curves: list[Curve]

    def epochs_to_target(self) -> list[float]:
        """Epochs each seed needed; a miss is infinite, never dropped."""
        return [
            next((epoch for epoch, value in enumerate(curve, 1) if value >= TARGET), math.inf)
            for curve in self.curves
        ]

    def best(self) -> list[float]:
        return [max(curve) for curve in self.curves]


def sgd(model: nn.Module, setting: Setting, batch_size: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=setting.momentum)


def adamw(model: nn.Module, setting: Setting, batch_size: int) -> torch.optim.Optimizer:
    betas = (setting.momentum, 0.999)
    return torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=betas)


def refresh_interval(batch_size: int) -> int:
    """The library's rule: larger batches renew the curvature more often."""
    scaled = fop.scale_to_batch(batch_size, SMALL_BATCH, lr=1.0, update_every=REFRESH_EVERY)
    return int(scaled["update_every"])


def kfac(model: nn.Module, setting: Setting, batch_size: int) -> torch.optim.Optimizer:
    interval = refresh_interval(batch_size)
    return fop.KFAC(model, lr=setting.lr, momentum=setting.momentum, update_every=interval)


def fop_mean(model: nn.Module, setting: Setting, batch_size: int) -> torch.optim.Optimizer:
    interval = refresh_interval(batch_size)
    return fop.FOP(model, lr=setting.lr, momentum=setting.momentum, update_every=interval)


MakeOptimizer = Callable[[nn.Module, Setting, int], torch.optim.Optimizer]
METHODS: dict[str, MakeOptimizer] = {"SGD": sgd, "AdamW": adamw, "KFAC": kfac, "FOP": fop_mean}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {"SGD": "#999999", "AdamW": "#E69F00", "KFAC": "#0072B2", "FOP": "#D55E00"}


@functools.cache
def load_splits() -> dict[str, tuple[Tensor, Tensor]]:
    """Images and labels of 1,197 training, 300 validation and 300 test digits; always the same."""
    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(
        range(len(labels)), test_size=300, stratify=labels, random_state=0
    )
    train, valid = train_test_split(rest, test_size=300, stratify=labels[rest], random_state=0)
    x, y = torch.as_tensor(images / 16.0, dtype=torch.float32), torch.as_tensor(labels)
    named = {"train": train, "validation": valid, "test": test}
    return {name: (x[indices], y[indices]) for name, indices in named.items()}


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module, split: str) -> float:
    images, labels = load_splits()[split]
    correct: Tensor = model(images).argmax(dim=1) == labels
    return correct.double().mean().item()


def train(run: Run) -> Curve:
    torch.set_num_threads(1)  # the matrices are too small for more to pay off
    images, labels = load_splits()["train"]
    model = build_model(run.seed)
    optimizer = METHODS[run.method](model, run.setting, run.regime.batch_size)
    shuffle = torch.Generator().manual_seed(run.seed)
    curve = []
    for _ in range(run.regime.epochs):
        for batch in torch.randperm(len(labels), generator=shuffle).split(run.regime.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        curve.append(accuracy(model, run.split))
    return curve


def train_all(
    runs: Sequence[Run], description: str, pool: Executor, progress: Progress
) -> dict[Run, Curve]:
    task = progress.add_task(description, total=len(runs))
    curves = {}
    for run, curve in zip(runs, pool.map(train, runs), strict=True):
        curves[run] = curve
        progress.advance(task)
    return curves


def tune_and_test(regimes: Sequence[Regime], pool: Executor, progress: Progress) -> list[Result]:
    """Tune every method at every batch size on validation, then test the winners on all seeds."""
    cells = list(itertools.product(regimes, METHODS))
    grid = [Setting(lr, momentum) for lr, momentum in itertools.product(LEARNING_RATES, MOMENTA)]

    def trial(regime: Regime, method: str, setting: Setting) -> Run:
        return Run(method, regime, setting, TUNING_SEED, "validation")

    trials = [trial(*cell, setting) for cell, setting in itertools.product(cells, grid)]
    tuned = train_all(trials, "tuning on validation", pool, progress)
    # The mean accuracy over a run rewards arriving early and arriving high.
    score = {run: statistics.fmean(curve) for run, curve in tuned.items()}
    winners = [
        max((trial(*cell, setting) for setting in grid), key=score.__getitem__) for cell in cells
    ]

    finals = [
        Run(winner.method, winner.regime, winner.setting, seed, "test")
        for winner, seed in itertools.product(winners, SEEDS)
    ]
    tested = list(train_all(finals, f"testing, {len(SEEDS)} seeds", pool, progress).values())
    return [
        Result(winner.method, winner.regime, winner.setting, tested[start : start + len(SEEDS)])
        for winner, start in zip(winners, itertools.count(step=len(SEEDS)), strict=False)
    ]


def mean_and_spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Mean ± standard deviation; -- when any run missed, with how many did not."""
    reached = sum(map(math.isfinite, values))
    if reached < len(values):
        return "--" if reached == 0 else f"-- ({reached} of {len(values)})"
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return f"{scale * mean:.1f} ± {scale * spread:.1f}"


HEADER = ("batch", "method", "lr", "momentum", f"epochs to {TARGET:.0%}", "best accuracy, %")


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [
        (
            f"{result.regime.batch_size:,}",
            result.method,
            f"{result.setting.lr:g}",
            f"{result.setting.momentum:g}",
            mean_and_spread(result.epochs_to_target()),
            mean_and_spread(result.best(), scale=100),
        )
        for result in results
    ]


def rich_table(results: Sequence[Result]) -> Table:
    table = Table(title=f"digits, test split, {len(SEEDS)} seeds: mean ± standard deviation")
    for name in HEADER:
        table.add_column(name, justify="left" if name == "method" else "right")
    for _, rows in itertools.groupby(table_rows(results), key=lambda row: row[0]):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def markdown_table(results: Sequence[Result]) -> str:
    rows = [HEADER, ("---",) * len(HEADER), *table_rows(results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw_curves(axis: Axes, result: Result) -> None:
    by_epoch = [[100 * value for value in values] for values in zip(*result.curves, strict=True)]
    epochs = range(1, len(by_epoch) + 1)
    colour = COLOURS[result.method]
    low, high = list(map(min, by_epoch)), list(map(max, by_epoch))
    axis.fill_between(epochs, low, high, color=colour, alpha=0.18, linewidth=0)
    mean = list(map(statistics.fmean, by_epoch))
    axis.plot(epochs, mean, color=colour, linewidth=2.4, label=result.method)


def draw(results: Sequence[Result], path: Path) -> None:
    """Test accuracy against epochs, one panel a batch size: mean line, band from worst to best."""
    panels = [
        (regime, list(group))
        for regime, group in itertools.groupby(results, key=lambda result: result.regime)
    ]
    with plt.rc_context({"font.size": 14, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(12, 5), sharey=True, layout="constrained", squeeze=False
        )
        for axis, (regime, group) in zip(axes[0], panels, strict=True):
            for result in group:
                draw_curves(axis, result)
            axis.axhline(100 * TARGET, color="black", linestyle=":", linewidth=1.4)
            full = regime.epochs == EPOCHS_FULL
            axis.set_title(f"batch {regime.batch_size:,}{' (full)' if full else ''}")
            axis.set_xlabel("epochs (one step each)" if full else "epochs")
            axis.set_xlim(1, regime.epochs)
            axis.set_ylim(60, 100)
            axis.grid(alpha=0.25)
        axes[0][0].set_ylabel("test accuracy, %")
        axes[0][0].legend(loc="lower right", frameon=False)
        figure.suptitle(
            f"MLP on digits, {len(SEEDS)} seeds (line: mean, band: range; dotted: target)"
        )
        partial = path.with_name(f".{path.name}")
        figure.savefig(partial, dpi=180, format="png")
        plt.close(figure)
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: an interrupted run leaves no half file under the final name."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def record(results: Sequence[Result], seconds: float) -> str:
    return json.dumps(
        {
            "target": TARGET,
            "seeds": SEEDS,
            "grid": {"lr": LEARNING_RATES, "momentum": MOMENTA, "scored on": "validation"},
            "seconds": round(seconds, 1),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "results": [asdict(result) for result in results],
        },
        indent=1,
    )


def new_directory(root: Path) -> Path:
    """The next free number below `root`, so that no earlier run is overwritten."""
    root.mkdir(parents=True, exist_ok=True)
    numbers = (int(path.name) for path in root.iterdir() if path.name.isdecimal())
    directory = root / f"{max(numbers, default=0) + 1:03d}"
    directory.mkdir()  # fails, rather than shares, if another demo took the number just now
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="SGD, AdamW, KFAC and FOP on digits.")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="where to number the runs"
    )
    directory = new_directory(parser.parse_args().output)
    console = Console()
    train_size = len(load_splits()["train"][1])
    regimes = (Regime(SMALL_BATCH, EPOCHS_SMALL), Regime(train_size, EPOCHS_FULL))
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("runs, left"),
        TimeRemainingColumn(),
    )

    began = time.perf_counter()
    # Spawned, not forked: torch's threads do not survive a fork.
    workers = ProcessPoolExecutor(
        max_workers=min(4, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    )
    with workers as pool, Progress(*columns, console=console) as progress:
        results = tune_and_test(regimes, pool, progress)
    seconds = time.perf_counter() - began

    write_text(directory / "results.json", record(results, seconds))
    write_text(directory / "table.md", markdown_table(results))
    draw(results, directory / "accuracy.png")

    console.print(rich_table(results))
    console.print(
        f"Each method and batch size: the best of the same {len(LEARNING_RATES) * len(MOMENTA)} "
        f"settings (lr {', '.join(f'{lr:g}' for lr in LEARNING_RATES)}; momentum "
        f"{', '.join(map(str, MOMENTA))}) on the validation split, searched just now with one "
        "seed.\nThe test split was used for the table and the plot alone. "
        "-- : not every seed reached the target."
    )
    console.print(f"{seconds:.0f} s. Plot, table and records: {directory}", highlight=False)


if __name__ == "__main__":
    main()
