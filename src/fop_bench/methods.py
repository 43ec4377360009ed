"""The optimizers that are compared, each with its defaults and the grid it is tuned on.

A method is a name, a builder and plain options, so that a recipe, a tuning result and a record
can all hold it as text. Options are given for the base batch; `schedules.scaled_options` brings
them to another batch size.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fop_bench.errors import BenchError, unknown
from fop_bench.registry import by_name

Options = Mapping[str, Any]
Grid = Mapping[str, tuple[Any, ...]]


class MethodError(BenchError, ValueError):
    """An unknown method, or an option that a method does not take."""


@dataclass(frozen=True)
class Method:
    """`grid` lists what tuning tries for each option; `follows` names the method whose tuned
    options it takes. `pinned` is what an option means that a record or recipe does not name, where
    the optimizer's own default may change.
    """

    name: str
    summary: str
    defaults: Options
    grid: Grid
    constructor: Callable[[], type[Optimizer]]
    takes_model: bool = False
    adjust: Callable[[dict[str, Any]], dict[str, Any]] = dict
    follows: str | None = None
    pinned: Options = field(default_factory=dict)

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """Every option with its default: what the constructor takes besides the parameters."""
        found = list(inspect.signature(self.constructor().__init__).parameters.values())[2:]
        return {p.name: p.default for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD}

    @property
    def accepts(self) -> frozenset[str]:
        """The names of all options."""
        return frozenset(self.parameters)

    @property
    def has_curvature_interval(self) -> bool:
        return "update_every" in self.defaults

    def taking(self, options: Options) -> dict[str, Any]:
        """Those of some shared options that this method takes."""
        return {name: value for name, value in options.items() if name in self.accepts}

    def check(self, options: Options, where: str) -> None:
        """Every option is one of this method's; a switch is no text, and a number is a number."""
        for name, value in options.items():
            if name not in self.accepts:
                raise MethodError(
                    f"{where}: method {self.name!r} does not take {unknown(name, self.accepts)}; "
                    f"it takes {', '.join(sorted(self.accepts))}"
                )
            default, expected = self.parameters[name], ""
            if isinstance(default, bool):
                expected = "" if isinstance(value, bool) else "true or false"
            elif isinstance(default, (int, float)):
                expected = "" if value is None or type(value) in (int, float) else "a number"
            if expected:
                raise MethodError(
                    f"{where}: {name} of {self.name!r}: expected {expected}, found {value!r}"
                )

    def build(self, model: nn.Module, lr: float, **options: Any) -> Optimizer:
        """The optimizer over the trainable parameters; options not given take the defaults."""
        resolved = {**self.pinned, **self.defaults, **options, "lr": lr}
        self.check(resolved, "build")
        return self.with_own_defaults(model, **self.adjust(resolved))

    def with_own_defaults(self, model: nn.Module, **options: Any) -> Optimizer:
        """The optimizer as its own package has it, but for these options."""
        target: Any = model
        if not self.takes_model:
            target = [p for p in model.parameters() if p.requires_grad]
        try:
            return self.constructor()(target, **options)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise MethodError(f"method {self.name!r}: {error}") from error

    def settings(self, grid: Grid | None = None) -> list[dict[str, Any]]:
        """Every point of the grid, ordered so that all learning rates come once before any comes
        twice.
        """
        axes = {**self.grid, **(grid or {})}
        rates = axes.get("lr", (self.defaults["lr"],))
        others = [name for name in axes if name != "lr"]
        rest = list(itertools.product(*(axes[name] for name in others)))
        points = []
        for offset in range(len(rest)):
            for index, rate in enumerate(_middle_out(rates)):
                # Shifted a step for each rate, so that a small budget sees every value of the other
                # options.
                values = rest[(offset + index) % len(rest)]
                points.append({"lr": rate, **dict(zip(others, values, strict=True))})
        return points


def _middle_out(values: tuple[Any, ...]) -> list[Any]:
    """The middle first, then its neighbours: a short search starts where a good value is likely."""
    middle = (len(values) - 1) / 2
    return sorted(values, key=lambda value: abs(values.index(value) - middle))


def from_package(module: str, name: str, extra: str = "bench") -> Callable[[], Any]:
    """What loads an optimizer's class, or names the extra of fop that brings its package."""

    def load() -> Any:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise MethodError(
                f"{name} comes from the package {error.name!r}, which is not installed: "
                f'pip install "fop[{extra}]"'
            ) from error

    return load


def _twice_the_step(options: dict[str, Any]) -> dict[str, Any]:
    """Doubles the KFAC update before its KL clip, exactly as FOP with total="sum" and beta = 0
    would.

    Doubling lr alone would change nothing wherever the clip is active, because the clip divides
    by lr.
    """
    clip = options["kl_clip"]
    return {**options, "lr": 2 * options["lr"], "kl_clip": None if clip is None else 2 * clip}


# Appendix C.1 for the methods of its table; where others are given (C.2, C.3) the recipes have
# them.
SGD_RATES = (0.01, 0.05, 0.1, 0.5, 1.0)
ADAMW_RATES = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
# Not in the paper at this scale: five values as for the others, around what works on small
# networks.
LAMB_RATES = (1e-3, 5e-3, 1e-2, 5e-2, 0.1)

SECOND_ORDER = {
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "damping": 1e-3,
    "update_every": 10,
}
# What results on record assumed before the library's own defaults moved on.
PINNED = {"fallback": "sgd", "kl_clip": 1e-3}
# Momentum and damping interact through the KL clip, so both are searched, for KFAC and FOP alike.
SECOND_ORDER_GRID = {"lr": SGD_RATES, "momentum": (0.9, 0.7), "damping": (1e-3, 1e-4)}

_FOP, _KFAC = from_package("fop", "FOP"), from_package("fop", "KFAC")


def _second_order(
    name: str,
    summary: str,
    constructor: Callable[[], type[Optimizer]],
    adjust: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    follows: str | None = None,
    **options: Any,
) -> Method:
    """A method of fop, with these options of its own."""
    defaults = {**SECOND_ORDER, **options}
    return Method(
        name, summary, defaults, SECOND_ORDER_GRID, constructor, True, adjust, follows, PINNED
    )


METHODS: dict[str, Method] = by_name(
    Method(
        "sgd",
        "SGD with momentum (torch)",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False},
        {"lr": SGD_RATES, "momentum": (0.9, 0.7), "nesterov": (False, True)},
        lambda: torch.optim.SGD,
    ),
    Method(
        "adamw",
        "AdamW (torch)",
        {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 1e-2},
        {"lr": ADAMW_RATES, "weight_decay": (1e-2, 1e-4), "betas": ((0.9, 0.999), (0.9, 0.99))},
        lambda: torch.optim.AdamW,
    ),
    Method(
        "lamb",
        "LAMB (pytorch-optimizer)",
        {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0},
        {"lr": LAMB_RATES, "weight_decay": (0.0, 1e-2), "betas": ((0.9, 0.999), (0.9, 0.99))},
        from_package("pytorch_optimizer", "Lamb"),
    ),
    Method(
        "shampoo",
        "Shampoo as first published, no grafting (pytorch-optimizer)",
        {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "preconditioning_compute_steps": 1},
        {"lr": SGD_RATES, "matrix_eps": (1e-6, 1e-4), "momentum": (0.0, 0.5)},
        from_package("pytorch_optimizer", "Shampoo"),
    ),
    Method(
        "soap",
        "SOAP: Adam in Shampoo's eigenbasis (pytorch-optimizer)",
        {"lr": 3e-3, "betas": (0.95, 0.95), "weight_decay": 1e-2, "precondition_frequency": 10},
        {"lr": ADAMW_RATES, "weight_decay": (1e-2, 1e-4), "betas": ((0.95, 0.95), (0.9, 0.99))},
        from_package("pytorch_optimizer", "SOAP"),
    ),
    _second_order("kfac", "KFAC (fop)", _KFAC),
    _second_order(
        "kfac-2x",
        "the control of every FOP comparison: KFAC with lr and KL clip doubled",
        _KFAC,
        adjust=_twice_the_step,
        follows="kfac",
    ),
    _second_order("fop", "FOP with g_tot = mean of the two gradients (fop)", _FOP, total="mean"),
    _second_order("fop-sum", "FOP with g_tot = g1 + g2 (fop)", _FOP, total="sum"),
    _second_order(
        "sp-ngd",
        "KFAC as in SP-NGD: empirical Fisher, stale factors, unit-wise norm layers",
        _KFAC,
        fisher="empirical",
        update_every=50,
        norms="unitwise",
    ),
)

CONTROL = "kfac-2x"
FOP_METHODS = ("fop", "fop-sum")


def get_method(name: str) -> Method:
    if name not in METHODS:
        raise MethodError(
            f"unknown method {unknown(name, METHODS)}: choose one of {', '.join(METHODS)}"
        )
    return METHODS[name]


def with_control(names: tuple[str, ...]) -> tuple[str, ...]:
    """The methods, with KFAC at twice the step added wherever FOP is among them."""
    if CONTROL in names or not any(name in FOP_METHODS for name in names):
        return names
    return (*names, CONTROL)
