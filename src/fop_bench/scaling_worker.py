"""The processes that `scaling` times: one rank each, started by torchrun or alone.

Inputs are
made up and lie in memory, so that a step is forward, backward and optimizer, and nothing else.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fop_bench.costs import BYTES, Hardware, shape_of
from fop_bench.methods import get_method
from fop_bench.parallel import Ranks, process_group
from fop_bench.processes import answer
from fop_bench.scaling import REFERENCE
from fop_bench.stepper import Stepper
from fop_bench.workloads import WORKLOADS, Workload

RATE = 1e-4  # of learning: a step costs the same at any, and random labels diverge at none
SMALL_BATCH = 4
PRODUCT_SIZE = 512
MESSAGE = 2**21  # numbers in the message whose time gives the bandwidth
MOMENTUM_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def main(request: dict[str, Any]) -> None:
    device = torch.device(request["device"])
    torch.set_num_threads(1)
    with process_group(device) as (ranks, own_device):
        work = {"steps": time_steps, "probe": probe}[request["kind"]]
        found = work(request, ranks, own_device)
        if ranks.first:
            answer(found)


def time_steps(request: dict[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Seconds of a step in each block on the slowest rank, by the clock and of its processor, and
    the bytes of curvature that each rank keeps.

    A block is a curvature interval, so that each holds one step that refreshes curvature. The first
    one warms up. Blocks of the reference alternate with the method's own, so that both meet the
    same disturbances.
    """
    step, optimizer = _training(request, request["method"], ranks, device)
    reference, _ = _training(request, REFERENCE, ranks, device)
    interval = request["interval"]
    blocks = [
        [*_block(step, interval, ranks, device), *_block(reference, interval, ranks, device)]
        for _ in range(request["blocks"] + 1)
    ]
    of_ranks = ranks.gathered(blocks[1:])
    state_bytes = ranks.gathered(curvature_bytes(optimizer))
    clock, processor, beside, _ = (
        [max(block[kind] for block in same) for same in zip(*of_ranks, strict=True)]
        for kind in range(4)
    )
    return {
        "seconds": clock,
        "cpu_seconds": processor,
        "reference_seconds": beside,
        "state_bytes": state_bytes,
    }


def _training(
    request: dict[str, Any], name: str, ranks: Ranks, device: torch.device
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """A step of a method on this rank's share, and its optimizer."""
    workload, method = WORKLOADS[request["workload"]], get_method(name)
    model = ranks.wrap(workload.model(0).to(device))
    options: dict[str, Any] = dict(workload.optimizer_overrides) if method.takes_model else {}
    if method.has_curvature_interval:
        options["update_every"] = request["interval"]
    optimizer = method.build(model, lr=RATE, **options)
    examples = request["batch_size"]
    inputs, targets = (ranks.share.of(part) for part in _batch(workload, examples, device))
    weight = len(inputs) * ranks.count / examples
    stepper = Stepper(
        model, optimizer, loss=lambda output, target: workload.loss(output, target) * weight
    )
    return lambda: stepper.step(inputs, targets), optimizer


def _block(
    step: Callable[[], None], interval: int, ranks: Ranks, device: torch.device
) -> tuple[float, float]:
    """Seconds of a step by the clock and of the processor, the mean of a block."""
    ranks.total(torch.zeros(1, device=device))  # start together
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(interval):
        step()
    _wait(device)
    passed = time.perf_counter() - start
    return passed / interval, (time.process_time() - cpu_start) / interval


def _batch(workload: Workload, examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = workload.made_up(examples)
    with torch.no_grad():
        output = workload.model(0)(inputs[:2])
    shape = (examples, *output.shape[1:-1])
    targets = torch.randint(output.shape[-1], shape, generator=torch.Generator().manual_seed(1))
    return inputs.to(device), targets.to(device)


def curvature_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of everything that an optimizer keeps besides what SGD and AdamW keep too."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in MOMENTUM_KEYS and value.dim()
    )


def probe(request: dict[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """The constants of the cost model on this machine, from short runs on all ranks at once."""
    workload = WORKLOADS[request["workload"]]
    model = workload.model(0).to(device)
    large = max(request["batch_size"] // ranks.count, 2 * SMALL_BATCH)
    shape = shape_of(model, workload.made_up(1).to(device))
    few, many = (_backward_seconds(workload, model, n, device) for n in (SMALL_BATCH, large))
    work = shape.training_operations()
    rate = (large - SMALL_BATCH) * work / max(many - few, 0.1 * many)
    left = max(few - SMALL_BATCH * work / rate, 1e-6)
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
    definite = matrix @ matrix.T + PRODUCT_SIZE * torch.eye(PRODUCT_SIZE, device=device)
    product = _median(lambda: matrix @ matrix, device)
    inverse = _median(lambda: torch.cholesky_inverse(torch.linalg.cholesky(definite)), device)
    latency, bandwidth = 1e-6, math.inf
    if not ranks.alone:
        # An all-reduce is two rings.
        latency = _median(lambda: ranks.total(torch.zeros(1, device=device)), device) / 2
        message = torch.zeros(MESSAGE, device=device)
        moved = 2 * BYTES * MESSAGE * (ranks.count - 1) / ranks.count
        both = _median(lambda: dist.all_reduce(message), device)
        bandwidth = moved / max(both - 2 * latency, 0.1 * both)
    hardware = Hardware(
        name="this machine",
        source=f"probes on {ranks.count} ranks, one thread each, {device.type}",
        train_rate=rate,
        product_rate=2 * PRODUCT_SIZE**3 / product,
        decompose_rate=PRODUCT_SIZE**3 / inverse,
        latency=latency,
        bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        host_ranks=ranks.count,
        overhead=left / len(shape.layers),
        overlaps=device.type == "cuda",  # on a CPU messages and products share the core
        solves=device.type == "cpu",
    )
    return asdict(hardware)


def _backward_seconds(
    workload: Workload, model: nn.Module, examples: int, device: torch.device
) -> float:
    inputs, targets = _batch(workload, examples, device)

    def backward() -> None:
        model.zero_grad()
        torch.autograd.backward(workload.loss(model(inputs), targets))

    return _median(backward, device)


def _median(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
