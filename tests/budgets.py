"""What a reader of one step has to follow, and what an accelerator has to launch for it.

    python -m tests.budgets            # the figures, as Markdown

Files and changes of file are those of calls within the library. Kernels are operations that
launch work, views not counted, on the path that accelerators take (here on a CPU that counts as
one).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import fop
from fop.linalg import treat_as_accelerator
from fop_bench.models.resnet import BasicBlock, Bottleneck, ResNet, _projection, _small_stem

LIBRARY = str(Path(fop.__file__).parent)
CURVATURE_STEP, PLAIN_STEP = 11, 12  # with the default interval of 10


@dataclass
class Trace:
    """Calls of the library's functions, in the order of a run."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    changes: int = 0
    functions: dict[str, None] = field(default_factory=dict)  # by their first calls
    _last: str | None = None

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(LIBRARY):
            self.calls += 1
            self.files.add(name)
            self.functions.setdefault(frame.f_code.co_name)
            self.changes += self._last is not None and name != self._last
            self._last = name


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(trace.see)
    try:
        yield
    finally:
        sys.setprofile(before)


def trace_linear(step: int) -> dict[str, Trace]:
    """Of step number `step` of one nn.Linear on one process: each part, and all together."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = fop.FOP(model)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    traces = {name: Trace() for name in ("forward", "backward", "step", "together")}
    for number in range(1, step + 1):
        optimizer.zero_grad()
        if number < step:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            continue
        output: list[torch.Tensor] = []

        def forward(output: list[torch.Tensor] = output) -> None:
            output.append(cross_entropy(model(x), y))

        def backward(output: list[torch.Tensor] = output) -> None:
            output[0].backward()

        parts: dict[str, Callable[[], Any]] = {
            "forward": forward,
            "backward": backward,
            "step": optimizer.step,
        }
        for name, part in parts.items():
            with tracing(traces[name]):
                part()
    whole = traces["together"]
    for name in ("forward", "backward", "step"):
        whole.calls += traces[name].calls
        whole.files |= traces[name].files
        whole.changes += traces[name].changes
    whole.changes += 2  # from one part to the next
    return traces


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    NO_WORK = ("aten.promote_types", "aten.new_empty", "aten.empty")  # no tensor, or memory alone

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not (_is_view(func) or str(func).startswith(self.NO_WORK))
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Whether what is returned shares memory with what was given, and nothing was written."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def kernels_per_layer(
    kind: Callable[..., Any], model: nn.Module, x: torch.Tensor
) -> tuple[int, float]:
    """Of a plain step on the accelerator path: preconditioned layers, and kernels for each."""
    optimizer = kind(model)
    with treat_as_accelerator():
        for number in range(1, 4):  # the third is plain
            optimizer.zero_grad()
            model(x).square().mean().backward()
            counter = Kernels()
            if number < 3:
                optimizer.step()
            else:
                with counter:
                    optimizer.step()
    layers = len(fop.diagnostics(optimizer))
    return layers, counter.count / layers


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 24, enable_nested_tensor=False), torch.randn(4, 3, 32)


def resnet(block: Any, counts: Sequence[int]) -> tuple[nn.Module, torch.Tensor]:
    """With an eighth of the channels: the number of kernels depends on which shapes are equal."""
    stages = [(8 * 2**stage, count) for stage, count in enumerate(counts)]
    model = ResNet(block, stages, _small_stem(8), _projection, 10)
    return model, torch.randn(2, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "24-layer transformer": transformer,
    "ResNet-18": lambda: resnet(BasicBlock, (2, 2, 2, 2)),
    "ResNet-50": lambda: resnet(Bottleneck, (3, 4, 6, 3)),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = ["| one nn.Linear | functions | files | changes of file |", "|---|---|---|---|"]
    for step, name in ((CURVATURE_STEP, "curvature step"), (PLAIN_STEP, "plain step")):
        for part, trace in trace_linear(step).items():
            lines.append(
                f"| {name}, {part} | {trace.calls} | {len(trace.files)} | {trace.changes} |"
            )
    lines += ["", "| kernels per layer, plain step | layers | FOP | KFAC |", "|---|---|---|---|"]
    for name, make in MODELS.items():
        found = [kernels_per_layer(kind, *make()) for kind in (fop.FOP, fop.KFAC)]
        lines.append(f"| {name} | {found[0][0]} | {found[0][1]:.1f} | {found[1][1]:.1f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
