"""The options of the optimizers: one list, with the type, default and check of each.

The arguments of `FOP` and `KFAC`, the checks and docs/options.md follow it; tests hold them to it.
What may differ between parameter groups (lr, momentum, weight decay, damping) is kept in
`param_groups`, where learning-rate schedulers expect it; `check_group` checks it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from torch import Tensor, nn

from fop import validate
from fop.curvature.base import Curvature
from fop.projection import Coefficient
from fop.rules import (
    DampingRule,
    FixedDamping,
    KLClip,
    RelativeDamping,
    SelfSizing,
    StepRule,
)
from fop.scaling import Number
from fop.validate import Check, integer, number, one_of, unless

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Interval = int | Callable[[int], int]
Skip = str | type[nn.Module] | nn.Module

# Curvature of the very first batch is a poor guide for an interval, so it is refreshed on
# these steps too.
EARLY_REFRESH_STEPS = frozenset({1, 2, 4})

# What serves to set an optimizer up, and is not kept.
SETUP = frozenset({"process_group", "skip", "param_groups"})


# ---- options with options of their own


class _NamedFallback(TypedDict):
    name: Literal["adamw", "sgd"]


class Fallback(_NamedFallback, total=False):
    """The optimizer of parameters without curvature; `betas` and `eps` are AdamW's."""

    lr: float
    betas: tuple[float, float]
    eps: float


class _NamedFisher(TypedDict):
    name: Literal["auto", "empirical", "mc", "exact"]


class Fisher(_NamedFisher, total=False):
    """Where curvature comes from; `likelihood` is for "mc" and "exact", "auto" reads the loss."""

    likelihood: Literal["auto", "categorical", "bernoulli", "gaussian"]
    model_output: Callable[[Any], Tensor]


class _Interval(TypedDict):
    steps: Interval


class Schedule(_Interval, total=False):
    """When the layers refresh their curvature."""

    stagger: bool


# Options and their checks, by name.
FALLBACKS: Mapping[str, Mapping[str, Check]] = {
    "adamw": {"lr": number(low=0.0), "betas": validate.betas, "eps": number(low=0.0)},
    "sgd": {"lr": number(low=0.0)},
}
SAMPLING: Mapping[str, Check] = {
    "likelihood": one_of("auto", "categorical", "bernoulli", "gaussian"),
    "model_output": unless(None, validate.function("what the model returns")),
}
FISHERS: Mapping[str, Mapping[str, Check]] = {
    "auto": {"model_output": SAMPLING["model_output"]},
    "empirical": {"model_output": SAMPLING["model_output"]},
    "mc": SAMPLING,
    "exact": SAMPLING,
}


def _named(kinds: Mapping[str, Mapping[str, Check]]) -> Check:
    """One of the names, or a dict with it and its options."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            one_of(*kinds)(name, value)
            return
        if "name" not in value:
            raise ValueError(f"{name} must have a 'name', one of {', '.join(map(repr, kinds))}")
        one_of(*kinds)(f"{name}['name']", value["name"])
        options = {key: entry for key, entry in value.items() if key != "name"}
        validate.keys(name, options, kinds[value["name"]], repr(value["name"]))

    return check


def _schedule(name: str, value: object) -> None:
    if isinstance(value, Mapping):
        if "steps" not in value:
            raise ValueError(f"{name} must have 'steps', a whole number or a function of the step")
        checks = {"steps": _schedule, "stagger": validate.flag}
        validate.keys(name, value, checks, "a schedule")
    elif not callable(value):
        integer(" of steps or a function of the step")(name, value)


def _strategy(name: str, value: object) -> None:
    named = isinstance(value, str)
    check = one_of("owner", "all") if named else integer(' of ranks, or "owner" or "all"')
    check(name, value)


# ---- the list


def _option(
    default: Any, check: Check | None = None, *, per_group: bool = False, projects: bool = False
) -> Any:
    """`per_group`: parameter groups may have their own. `projects`: of `FOP` alone."""
    extra = {"check": check, "per_group": per_group, "projects": projects}
    return field(default=default, metadata=extra)


def _choice(*names: str, projects: bool = False) -> Any:
    """One of these, by default the first."""
    return _option(names[0], one_of(*names), projects=projects)


_DAMPING = number(low=0.0, low_open=True)
_COEFFICIENT = unless("adaptive", number(hint=' or "adaptive"'))
_CLIP = number(low=0.0, low_open=True, hint=', "auto" or None to switch it off')


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All arguments besides the model; see `fop.FOP` for what each means."""

    lr: Number = _option(0.1, validate.learning_rate, per_group=True)
    momentum: float = _option(0.7, number(low=0.0), per_group=True)
    weight_decay: float = _option(0.0, number(low=0.0), per_group=True)
    nesterov: bool = _option(False, validate.flag, per_group=True)
    decoupled_weight_decay: bool = _option(False, validate.flag)
    damping: float | DampingRule = _option(
        RelativeDamping(), unless(DampingRule, _DAMPING), per_group=True
    )
    damping_mode: Literal["factored", "exact"] = _choice("factored", "exact")
    factor_decay: float = _option(0.95, number(low=0.0, high=1.0, high_open=True))
    update_every: Interval | Schedule = _option(10, _schedule)
    fisher: Literal["auto", "empirical", "mc", "exact"] | Fisher = _option("auto", _named(FISHERS))
    sharing: Literal["expand", "reduce"] = _choice("expand", "reduce")
    max_factor_size: int = _option(8192, integer(" of rows"))
    beta: Coefficient = _option("adaptive", _COEFFICIENT, projects=True)
    eta: Coefficient = _option("adaptive", _COEFFICIENT, projects=True)
    total: Literal["mean", "sum"] = _choice("mean", "sum", projects=True)
    kl_clip: float | Literal["auto"] | StepRule | None = _option(
        "auto", unless("auto", unless(StepRule, unless(None, _CLIP)))
    )
    loss_reduction: Literal["mean", "sum"] = _choice("mean", "sum")
    halves: Literal["auto", "samples", "microbatches", "ranks"] = _choice(
        "auto", "samples", "microbatches", "ranks", projects=True
    )
    curvature: Literal["kronecker", "ekfac", "diagonal", "identity"] | Curvature = _option(
        "kronecker", unless(Curvature, one_of("kronecker", "ekfac", "diagonal", "identity"))
    )
    fallback: Literal["adamw", "sgd"] | Fallback = _option("adamw", _named(FALLBACKS))
    norms: Literal["unitwise", "fallback"] = _choice("unitwise", "fallback")
    strategy: Literal["owner", "all"] | int = _option("owner", _strategy)
    process_group: ProcessGroup | None = _option(None)
    skip: Skip | Iterable[Skip] = _option(())
    param_groups: Sequence[Mapping[str, Any]] | None = _option(None)

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.metadata["check"] is not None:
                option.metadata["check"](option.name, getattr(self, option.name))
        check_group(self.of_groups)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **fixed: Any) -> Settings:
        """Of a constructor's `locals()`, which editors see one by one; `fixed` has the others."""
        names = {option.name for option in fields(cls)} & arguments.keys()
        return cls(**{name: arguments[name] for name in names}, **fixed)

    @property
    def of_groups(self) -> dict[str, Any]:
        """What parameter groups have, unless they set it themselves."""
        own = {name: getattr(self, name) for name in _PER_GROUP}
        return own | {"damping": self.damping_rule.initial}

    @cached_property
    def fallback_of_groups(self) -> dict[str, Any]:
        """The fallback as every group carries it: a layer may come to need it later."""
        chosen = _as_dict(self.fallback, "name")
        rate = None if chosen["name"] == "sgd" else 1e-3  # None: it takes `lr`
        return {
            "rule": chosen["name"],
            "fallback_lr": chosen.get("lr", rate),
            "betas": tuple(chosen.get("betas", (0.9, 0.999))),
            "eps": chosen.get("eps", 1e-8),
        }

    @cached_property
    def fisher_options(self) -> Fisher:
        defaults = {"likelihood": "categorical", "model_output": None}
        return cast(Fisher, defaults | _as_dict(self.fisher, "name"))

    @cached_property
    def schedule(self) -> Schedule:
        return cast(Schedule, {"stagger": False} | _as_dict(self.update_every, "steps"))

    def halves_among(self, ranks: int) -> str:
        """What the two half-batches are made of, with so many ranks."""
        if self.halves == "auto":
            return "samples" if ranks == 1 else "ranks"
        if self.halves == "ranks" and ranks == 1:
            raise ValueError(
                'halves="ranks" takes even and odd ranks of a process group as the two halves, but '
                'this is a single process: use "samples", or "auto" to have both cases served'
            )
        return self.halves

    @cached_property
    def damping_rule(self) -> DampingRule:
        rule = self.damping
        return rule if isinstance(rule, DampingRule) else FixedDamping(rule)

    @cached_property
    def step_rule(self) -> StepRule:
        if isinstance(self.kl_clip, str):
            return SelfSizing()
        return self.kl_clip if isinstance(self.kl_clip, StepRule) else KLClip(self.kl_clip)

    @cached_property
    def sizes_itself(self) -> bool:
        """Whether the step is sized by a model of the loss."""
        return isinstance(self.step_rule, SelfSizing)

    @cached_property
    def projects(self) -> bool:
        """Whether the update depends on the two half-batch gradients."""
        return self.beta != 0

    @cached_property
    def needs_halves(self) -> bool:
        """Whether the update depends on them, or its size."""
        return self.projects or self.sizes_itself

    @cached_property
    def total_weight(self) -> float:
        """k of algorithm's eta: 1 when g_tot is the mean gradient, 2 when it is g1 + g2."""
        return 1.0 if self.total == "mean" else 2.0

    def described(self) -> str:
        """What most depends on, and what was chosen otherwise than by default."""
        always, never = ("kl_clip", "update_every", "fisher"), (*SETUP, *_PER_GROUP)
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        chosen = {o.name for o in fields(self) if values[o.name] != o.default}.difference(never)
        shown = (name for name in values if name in always or name in chosen)
        return ", ".join(f"{name}: {values[name]}" for name in shown)

    def interval(self, step: int) -> int:
        """Steps between refreshes of the curvature, as of `step`."""
        steps = self.schedule["steps"]
        if callable(steps):
            steps = steps(step)
            integer(" of steps")(f"update_every({step})", steps)
        return steps

    def refresh_due(self, step: int, phase: int = 0) -> bool:
        """Whether a layer's curvature is refreshed on `step`, counted from 1."""
        return step in EARLY_REFRESH_STEPS or (step - 1 - phase) % self.interval(step) == 0


def _as_dict(value: object, key: str) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {key: value}


# ---- parameter groups

_OWN_CHECKS = {o.name: o.metadata["check"] for o in fields(Settings) if o.metadata["per_group"]}
_PER_GROUP = tuple(_OWN_CHECKS)
# What a group may set for itself.
GROUP_OPTIONS = frozenset({*_PER_GROUP, "fallback_lr"})
# What it may hold, the user's options and the library's own marks. A new one needs a line here, and
# is then checked when an optimizer is built and when a state is loaded.
GROUP_CHECKS: Mapping[str, Check] = {
    **_OWN_CHECKS,
    "reference_lr": validate.learning_rate,
    "fallback_lr": unless(None, number(low=0.0)),
    "betas": validate.betas,
    "eps": number(low=0.0),
    "rule": one_of("curvature", "sgd", "adamw"),
    "steps": integer("", low=0),
    "skipped_steps": integer("", low=0),
    "trust_radius": unless(None, number(low=0.0)),
    "signal": unless(None, number()),
    "refresh_overdue": validate.flag,
}


def check_group(group: Mapping[str, Any]) -> None:
    """Raise where one of a parameter group's own options is of the wrong type or range."""
    for name, check in GROUP_CHECKS.items():
        if name in group:
            check(name, group[name])
    if group.get("nesterov") and group.get("momentum") == 0:
        raise ValueError(
            "nesterov=True needs momentum > 0, but momentum is 0: set momentum, or drop nesterov"
        )
