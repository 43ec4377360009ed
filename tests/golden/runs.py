"""Short trainings of every kind, whose trajectories are recorded: a rebuild must not change them.

    python -m tests.golden.runs        # record the present library's in record.json

All in float64. Of each parameter its norm and one projection are kept, after several steps.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

import fop
from tests.distributed import launch
from tests.distributed.launch import Rank
from tests.distributed.models import Net

RECORD = Path(__file__).with_name("record.json")
KEPT_STEPS = (1, 2, 5, 12)  # curvature is refreshed on steps 1, 2, 4 and 11
CLASSES, WORDS, LENGTH = 3, 7, 4

Trajectory = dict[str, list[list[float]]]


# ---- models, each with the shape of its inputs (None: indices)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, stride=2, groups=2, bias=False),
        nn.ConvTranspose2d(6, 4, 2, dilation=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


class Attending(nn.Module):
    """Embedding, torch's transformer layer, a head on all positions folded into rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, index: Tensor) -> Tensor:
        x = self.layer(self.words(index) + self.places(torch.arange(LENGTH)))
        return self.head(x.flatten(0, 1)).unflatten(0, (-1, LENGTH)).mean(1)


class Tied(nn.Module):
    """An embedding tied to the output, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice = nn.Embedding(WORDS, 5), nn.Linear(5, 5)
        self.out = nn.Linear(5, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index).mean(1)
        return self.out(torch.tanh(self.twice(torch.tanh(self.twice(x)))))[:, :CLASSES]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False))


INPUTS: dict[Callable[[], nn.Module], tuple[int, ...] | None] = {
    mlp: (5,),
    convolutions: (2, 4, 4),
    Attending: None,
    Tied: None,
    Checkpointed: (5,),
    Net: (2, 4, 4),
}


def batch(make: Callable[[], nn.Module], size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), INPUTS[make]
    target = torch.randint(CLASSES, (size,), generator=generator)
    if shape is None:
        return torch.randint(WORDS, (size, LENGTH), generator=generator), target
    return torch.randn(size, *shape, generator=generator, dtype=torch.float64), target


# ---- runs


@dataclass(frozen=True)
class Run:
    make: Callable[[], nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)
    kind: type[fop.FOP] | type[fop.KFAC] = fop.FOP
    size: int = 12
    parts: int = 1  # micro-batches per step
    clip: float | None = None
    schedule: Callable[[Any], Any] | None = None
    resume_at: int | None = None
    frozen_until: int = 0  # the first layer's bias
    summed: bool = False  # the loss


def _cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)


SGD: dict[str, Any] = {"fallback": "sgd"}
ADAMW = {"name": "adamw", "lr": 0.01}
RUNS: dict[str, Run] = {
    "mlp": Run(mlp),
    "mlp, KFAC": Run(mlp, kind=fop.KFAC),
    "mlp, momentum 0, no clip": Run(mlp, {"momentum": 0.0, "kl_clip": None}),
    "mlp, nesterov, decay": Run(mlp, {"nesterov": True, "weight_decay": 0.05}),
    "mlp, decoupled decay": Run(mlp, {"weight_decay": 0.05, "decoupled_weight_decay": True}),
    "mlp, exact damping": Run(mlp, {"damping_mode": "exact", "damping": 0.03}),
    "mlp, ekfac": Run(mlp, {"curvature": "ekfac", "damping": 0.03, "update_every": 3}),
    "mlp, identity": Run(mlp, {"curvature": "identity"}),
    "mlp, exact Fisher": Run(mlp, {"fisher": "exact"}),
    "mlp, sampled Fisher": Run(mlp, {"fisher": "mc"}),
    "mlp, fixed coefficients, sum": Run(mlp, {"beta": 0.3, "eta": 0.8, "total": "sum"}),
    "mlp, odd batch in parts": Run(mlp, size=11, parts=3),
    "mlp, halves of micro-batches": Run(mlp, {"halves": "microbatches"}, parts=4),
    "mlp, clipped gradients": Run(mlp, clip=0.05),
    "mlp, warm restarts": Run(mlp, {"kl_clip": 1e-4}, schedule=_cosine),
    "mlp, staggered": Run(mlp, {"update_every": {"steps": 4, "stagger": True}}),
    "mlp, summed loss": Run(mlp, {"loss_reduction": "sum", "lr": 0.05}, summed=True),
    "mlp, resumed": Run(mlp, resume_at=6),
    "mlp, bias frozen, then not": Run(mlp, frozen_until=5),
    "mlp, groups": Run(
        mlp, {"param_groups": [{"names": "*.bias", "weight_decay": 0.1, "lr": 0.03}]}
    ),
    "convolutions": Run(convolutions),
    "convolutions, KFAC, sgd": Run(convolutions, SGD, kind=fop.KFAC),
    "convolutions, reduce, norms": Run(convolutions, {"sharing": "reduce", "norms": "unitwise"}),
    "convolutions, skip, adamw": Run(convolutions, {"skip": ["3"], "fallback": ADAMW}),
    "convolutions, narrow factors": Run(convolutions, {"max_factor_size": 16}),
    "attention": Run(Attending),
    "attention, KFAC, exact damping": Run(Attending, {"damping_mode": "exact"}, kind=fop.KFAC),
    "tied": Run(Tied),
    "checkpointed": Run(Checkpointed),
}


def trajectory(run: Run) -> Trajectory:
    torch.manual_seed(0)
    model = run.make().double()
    bias: Any = next(iter(model.children())).bias if run.frozen_until else None
    if bias is not None:
        bias.requires_grad_(False)
    optimizer: Any = run.kind(model, **run.settings)
    scheduler = None if run.schedule is None else run.schedule(optimizer)
    kept: Trajectory = {}
    torch.manual_seed(1)
    for step in range(1, KEPT_STEPS[-1] + 1):
        if step == run.resume_at:
            model, state = copy.deepcopy(model), optimizer.state_dict()
            optimizer = run.kind(model, **run.settings)
            optimizer.load_state_dict(state)
        if step == run.frozen_until:
            bias.requires_grad_(True)
        optimizer.zero_grad()
        x, y = batch(run.make, run.size, seed=step)
        for x_part, y_part in zip(
            x.tensor_split(run.parts), y.tensor_split(run.parts), strict=True
        ):
            loss = cross_entropy(model(x_part), y_part, reduction="sum")
            (loss if run.summed else loss / len(x)).backward()
        if run.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        keep(kept, step, dict(model.named_parameters()))
    return kept


def keep(kept: Trajectory, step: int, parameters: dict[str, Tensor]) -> None:
    if step in KEPT_STEPS:
        for name, parameter in parameters.items():
            flat = parameter.detach().flatten()
            waves = torch.arange(1, len(flat) + 1, dtype=flat.dtype).cos()
            kept.setdefault(name, []).append([float(flat.norm()), float(flat @ waves)])


# ---- two ranks

RANKS = 2


def _shared(rank: Rank, how: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = Net().double()
    module = model
    if how == "DDP":
        module = DistributedDataParallel(model)
    elif how == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            fully_shard(child)
        fully_shard(model)
    optimizer = fop.FOP(module, **settings)
    kept: Trajectory = {}
    for step in range(1, KEPT_STEPS[-1] + 1):
        optimizer.zero_grad()
        x, y = batch(Net, 12, seed=step)
        mine = slice(rank.index, None, rank.ranks)
        cross_entropy(module(x[mine]), y[mine]).backward()
        optimizer.step()
        whole = {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p
            for name, p in model.named_parameters()
        }
        keep(kept, step, whole)
    if rank.index == 0:
        (rank.directory / f"{how}, {settings['strategy']}.json").write_text(json.dumps(kept))


def on_ranks(rank: Rank) -> None:
    for how in ("plain", "DDP", "FSDP2"):
        _shared(rank, how, {"strategy": "owner"})
    _shared(rank, "DDP", {"strategy": "all"})


def trajectories_on_ranks() -> dict[str, Trajectory]:
    with tempfile.TemporaryDirectory() as directory:
        failed = launch.run(RANKS, [on_ranks], directory=Path(directory))
        assert not failed, failed
        paths = sorted(Path(directory).glob("*.json"))
        return {f"2 ranks, {path.stem}": json.loads(path.read_text()) for path in paths}


def distance(found: Trajectory, recorded: Trajectory) -> float:
    """Largest difference of two trajectories, relative to the parameters' norms."""
    if found.keys() != recorded.keys():
        return math.inf
    return max(
        abs(one - other) / (1e-3 + pair[0])
        for name in recorded
        for pair, before in zip(found[name], recorded[name], strict=True)
        for one, other in zip(pair, before, strict=True)
    )


def main() -> None:
    found = {name: trajectory(run) for name, run in RUNS.items()}
    found |= trajectories_on_ranks()
    lines = (f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in found.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{len(found)} trajectories in {RECORD.name}\n")


if __name__ == "__main__":
    main()
