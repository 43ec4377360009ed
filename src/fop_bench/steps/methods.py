"""The optimizers that are timed, each behind one call: take a step on this batch.

`interval` is the number of steps between refreshes of the curvature. Every method does all its
curvature work on the same step, with the arguments its own package has for that:

    fop           update_every
    singd         T
    Shampoo       preconditioning_compute_steps and statistics_compute_steps
    SOAP          precondition_frequency (its statistics are refreshed on every step all the same)
    Kron          pre_conditioner_update_probability = 1 / interval, which it counts, not draws
    curvlinops    a new operator every `interval` steps: it has no optimizer, so the step is ours
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fop_bench.methods import from_package, get_method
from fop_bench.registry import by_name
from fop_bench.stepper import Stepper

LR = 1e-4  # small, so that random labels do no harm to any of them


class SingdStepper(Stepper):
    """singd keeps its matrices beside `state`, and leaves all other layers to somebody else."""

    def state(self) -> list[Any]:
        matrices: Any = self.optimizers[0]
        return [*super().state(), matrices.Ks, matrices.Cs, matrices.m_Ks, matrices.m_Cs]


class CurvlinopsStepper(Stepper):
    """SGD with momentum on gradients multiplied with the inverse of a KFAC operator.

    The operator runs its own forward and backward pass over the batch, because that is how
    curvlinops computes factors. Of one batch, because it has no moving averages.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), LR, momentum=0.9))
        self._interval = interval
        self._taken = 0
        self._preconditioned = [p for m in _kfac_layers(model) for p in m.parameters()]
        self._inverse: Any = None

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        (optimizer,) = self.optimizers
        if self._taken % self._interval == 0:
            self._inverse = None  # the old one goes before the new one comes
            self._inverse = self._refreshed(inputs, labels)
        self._taken += 1
        optimizer.zero_grad()
        cross_entropy(self.model(inputs), labels).backward()
        gradients = [p.grad for p in self._preconditioned]
        for parameter, direction in zip(
            self._preconditioned, self._inverse @ gradients, strict=True
        ):
            parameter.grad = direction
        optimizer.step()

    def _refreshed(self, inputs: Tensor, labels: Tensor) -> Any:
        curvlinops = importlib.import_module("curvlinops")
        operator = curvlinops.KFACLinearOperator(
            self.model,
            nn.CrossEntropyLoss(),
            self._preconditioned,
            [(inputs, labels)],
            fisher_type="empirical",
            kfac_approx="expand",
            separate_weight_and_bias=False,
            check_deterministic=False,
            num_data=len(inputs),
            num_per_example_loss_terms=1,
        )
        return curvlinops.KFACInverseLinearOperator(
            operator, damping=1e-3, use_heuristic_damping=True
        )

    def state(self) -> list[Any]:
        inverse = self._inverse
        kept = [inverse._inverse_input_covariances, inverse._inverse_gradient_covariances]
        factors = [inverse._A._input_covariances, inverse._A._gradient_covariances]
        return [*super().state(), *kept, *factors]


Build = Callable[[nn.Module, int], Stepper]


@dataclass(frozen=True)
class TimedMethod:
    """`refreshes` tells whether a step, counted from 1, refreshes curvature at an interval."""

    name: str
    build: Build
    refreshes: Callable[[int, int], bool] | None = None  # None: no curvature
    staggered: bool = False  # spreads a refresh over the interval

    @property
    def intervals(self) -> tuple[int, ...]:
        if self.refreshes is None:
            return (1,)
        return (10,) if self.staggered else (1, 10)


def _kfac_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d)))


def _of(name: str, interval_option: str | None = None, **options: Any) -> Build:
    """A method of the bench, all but `options` and its interval as its own package has it."""

    def build(model: nn.Module, interval: int) -> Stepper:
        timing: dict[str, Any] = {} if interval_option is None else {interval_option: interval}
        method = get_method(name)
        return Stepper(model, method.with_own_defaults(model, lr=LR, **timing, **options))

    return build


def _staggered(model: nn.Module, interval: int) -> Stepper:
    every = {"steps": interval, "stagger": True}
    return Stepper(model, get_method("kfac").with_own_defaults(model, lr=LR, update_every=every))


def _shampoo(model: nn.Module, interval: int) -> Stepper:
    optimizer = from_package("pytorch_optimizer", "ScalableShampoo")()(
        model.parameters(),
        lr=LR,
        start_preconditioning_step=1,
        preconditioning_compute_steps=interval,
        statistics_compute_steps=interval,
    )
    return Stepper(model, optimizer)


def _kron(model: nn.Module, interval: int) -> Stepper:
    optimizer = from_package("pytorch_optimizer", "Kron")()(
        model.parameters(), lr=LR, pre_conditioner_update_probability=1 / interval
    )
    return Stepper(model, optimizer)


def _singd(model: nn.Module, interval: int) -> Stepper:
    singd = from_package("singd.optim.optimizer", "SINGD", "peers")()
    second_order: Any = singd(model, lr=LR, T=interval, lr_cov=1e-4, warn_unsupported=False)
    served = {p for group in second_order.param_groups for p in group["params"]}
    others = [p for p in model.parameters() if p not in served]
    rest = [torch.optim.SGD(others, LR, momentum=0.9)] if others else []
    return SingdStepper(model, second_order, *rest)


def _fop_refreshes(step: int, interval: int) -> bool:
    return step in (1, 2, 4) or (step - 1) % interval == 0


def _first_of_interval(step: int, interval: int) -> bool:
    return (step - 1) % interval == 0


def _last_of_interval(step: int, interval: int) -> bool:
    return step % interval == 0


STAGGERED = "kfac-staggered"
METHODS = by_name(
    TimedMethod("sgd", _of("sgd", momentum=0.9)),
    TimedMethod("adamw", _of("adamw")),
    TimedMethod("lamb", _of("lamb")),
    TimedMethod("kron", _kron, _last_of_interval),
    TimedMethod("soap", _of("soap", "precondition_frequency"), _first_of_interval),
    TimedMethod("scalable-shampoo", _shampoo, _last_of_interval),
    TimedMethod("singd", _singd, _first_of_interval),
    TimedMethod("curvlinops", CurvlinopsStepper, _first_of_interval),
    TimedMethod("kfac", _of("kfac", "update_every"), _fop_refreshes),
    TimedMethod("fop", _of("fop", "update_every"), _fop_refreshes),
    TimedMethod(STAGGERED, _staggered, _fop_refreshes, staggered=True),
)
OURS = ("kfac", "fop")
OWN = ("sgd", *OURS, STAGGERED)  # what must run: a failure of these is not a footnote


def tensor_bytes(roots: list[Any], without: Iterable[Tensor] = ()) -> int:
    """Bytes of all tensors reachable from `roots` but `without` these, each storage once."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in without}
    seen: set[int] = set()
    found: dict[int, int] = {}
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
        elif hasattr(item, "__dict__") and not isinstance(item, (type, nn.Module)):
            stack += vars(item).values()
    return sum(size for address, size in found.items() if address not in ignored)
