"""The optimizers that are timed, each behind one call: take a step on this batch.

`interval` is the number of steps between renewals of the curvature. Every method does all its
curvature work on the same step, with the arguments its own package has for that:

    fop           update_every
    singd         T
    Shampoo       preconditioning_compute_steps and statistics_compute_steps
    SOAP          precondition_frequency (its statistics are renewed on every step all the same)
    Kron          pre_conditioner_update_probability = 1 / interval, which it counts, not draws
    curvlinops    a new operator every `interval` steps: it has no optimizer, so the step is ours
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import fop

LR = 1e-4  # small, so that random labels do no harm to any of them


class Stepper:
    """A model and what trains it. `step` is everything a training loop does with a batch."""

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        self.model = model
        self.optimizers = optimizers

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        cross_entropy(self.model(inputs), labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[Any]:
        """Whatever holds the tensors that live on between steps."""
        return [optimizer.state for optimizer in self.optimizers]


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
            self._inverse = self._renewed(inputs, labels)
        self._taken += 1
        optimizer.zero_grad()
        cross_entropy(self.model(inputs), labels).backward()
        gradients = [p.grad for p in self._preconditioned]
        for parameter, direction in zip(
            self._preconditioned, self._inverse @ gradients, strict=True
        ):
            parameter.grad = direction
        optimizer.step()

    def _renewed(self, inputs: Tensor, labels: Tensor) -> Any:
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
class Method:
    """`renews` tells whether a step, counted from 1, renews curvature at an interval."""

    name: str
    label: str
    build: Build
    renews: Callable[[int, int], bool] | None = None  # None: no curvature
    staggered: bool = False  # spreads a renewal over the interval

    @property
    def intervals(self) -> tuple[int, ...]:
        if self.renews is None:
            return (1,)
        return (10,) if self.staggered else (1, 10)


def _kfac_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d)))


def _plain(load: Callable[[], Any], **options: Any) -> Build:
    def build(model: nn.Module, interval: int) -> Stepper:
        return Stepper(model, load()(model.parameters(), lr=LR, **options))

    return build


def _peer(name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("pytorch_optimizer"), name)


def _fop(optimizer: Callable[..., Optimizer], **options: Any) -> Build:
    def build(model: nn.Module, interval: int) -> Stepper:
        return Stepper(model, optimizer(model, lr=LR, update_every=interval, **options))

    return build


def _shampoo(model: nn.Module, interval: int) -> Stepper:
    optimizer = _peer("ScalableShampoo")()(
        model.parameters(),
        lr=LR,
        start_preconditioning_step=1,
        preconditioning_compute_steps=interval,
        statistics_compute_steps=interval,
    )
    return Stepper(model, optimizer)


def _soap(model: nn.Module, interval: int) -> Stepper:
    optimizer = _peer("SOAP")()(model.parameters(), lr=LR, precondition_frequency=interval)
    return Stepper(model, optimizer)


def _kron(model: nn.Module, interval: int) -> Stepper:
    optimizer = _peer("Kron")()(
        model.parameters(), lr=LR, pre_conditioner_update_probability=1 / interval
    )
    return Stepper(model, optimizer)


def _singd(model: nn.Module, interval: int) -> Stepper:
    singd = importlib.import_module("singd.optim.optimizer").SINGD
    second_order = singd(model, lr=LR, T=interval, lr_cov=1e-4, warn_unsupported=False)
    served = {p for group in second_order.param_groups for p in group["params"]}
    others = [p for p in model.parameters() if p not in served]
    rest = [torch.optim.SGD(others, LR, momentum=0.9)] if others else []
    return SingdStepper(model, second_order, *rest)


def _fop_renews(step: int, interval: int) -> bool:
    return step in (1, 2, 4) or (step - 1) % interval == 0


def _first_of_interval(step: int, interval: int) -> bool:
    return (step - 1) % interval == 0


def _last_of_interval(step: int, interval: int) -> bool:
    return step % interval == 0


def _register(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}


METHODS = _register(
    Method("sgd", "SGD, momentum", _plain(lambda: torch.optim.SGD, momentum=0.9)),
    Method("adamw", "AdamW", _plain(lambda: torch.optim.AdamW)),
    Method("lamb", "LAMB", _plain(_peer("Lamb"))),
    Method("kron", "Kron", _kron, _last_of_interval),
    Method("soap", "SOAP", _soap, _first_of_interval),
    Method("shampoo", "Shampoo (scalable)", _shampoo, _last_of_interval),
    Method("singd", "singd, dense", _singd, _first_of_interval),
    Method("curvlinops", "curvlinops KFAC", CurvlinopsStepper, _first_of_interval),
    Method("kfac", "**fop.KFAC**", _fop(fop.KFAC), _fop_renews),
    Method("fop", "**fop.FOP**", _fop(fop.FOP), _fop_renews),
)
OURS = ("kfac", "fop")
STAGGERED = "kfac-staggered"
OWN = ("sgd", *OURS, STAGGERED)  # what must run: a failure of these is not a footnote

# Left out where the library has no such option, so that other versions can be measured too.
if "stagger" in inspect.signature(fop.KFAC).parameters:
    METHODS |= _register(
        Method(
            STAGGERED,
            "**fop.KFAC, staggered**",
            _fop(fop.KFAC, stagger=True),
            _fop_renews,
            staggered=True,
        )
    )


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
