"""What ``make demo`` runs: every method on digits-mlp at a small and the full batch, with tuned
settings.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

from fop_bench.compare import comparison_jobs, run_all
from fop_bench.loop import Runtime
from fop_bench.outcome import finish, show_tables
from fop_bench.progress import Display
from fop_bench.recipes import load_recipe

RECIPE = "digits-mlp"


def run_demo(parent: Path, console: Console) -> Path:
    """Runs into a new numbered directory below `parent`, and returns it."""
    recipe = load_recipe(RECIPE)
    configs = recipe.plan()
    root = new_directory(parent)
    # So small a network is slower on several threads than on one.
    torch.set_num_threads(1)
    runtime = Runtime(tensorboard=False, keep_checkpoint=False)
    with Display(console, len(configs), "demo") as display:
        runs = run_all(comparison_jobs(configs, root), runtime, display)
    show_tables(runs, console)
    finish(root, console)
    return root


def new_directory(parent: Path) -> Path:
    """The first free one of 001, 002, ...; made here, so that two demos at once never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(entry.name) for entry in os.scandir(parent) if entry.name.isdigit()]
    number = max(taken, default=0) + 1
    while True:
        try:
            path = parent / f"{number:03d}"
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
