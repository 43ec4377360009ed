"""The options are written once, in `fop.settings.Settings`; all else is held to that list."""

from __future__ import annotations

import ast
import inspect
import typing
from dataclasses import fields
from typing import Any, Literal

import pytest

import fop
from fop import settings
from fop.settings import FALLBACKS, FISHERS, GROUP_OPTIONS, Fallback, Fisher, Schedule, Settings
from tests import options
from tests.common import library_defaults, mlp

LISTED = {option.name: option for option in fields(Settings)}
OF_KFAC = {name: o for name, o in LISTED.items() if not o.metadata["projects"]}
both = pytest.mark.parametrize(("kind", "listed"), [(fop.FOP, LISTED), (fop.KFAC, OF_KFAC)])


@both
def test_signatures_are_the_list(kind: Any, listed: dict[str, Any]) -> None:
    """Names, order, types and defaults; only the model and lr may be given by position."""
    with library_defaults():
        model, lr, *others = list(inspect.signature(kind).parameters.values())
    assert model.name == "model"
    assert {p.kind for p in (model, lr)} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}
    found = [(p.name, p.annotation, p.default) for p in (lr, *others)]
    assert found == [(o.name, o.type, o.default) for o in listed.values()]
    assert len(found) <= 25


@both
def test_every_argument_reaches_the_settings(kind: Any, listed: dict[str, Any]) -> None:
    """One that did not would change nothing, and a wrong one not be refused."""
    unchecked = {"process_group", "param_groups", "skip"}
    assert {name for name, o in LISTED.items() if o.metadata["check"] is None} == unchecked
    for name in listed.keys() - unchecked:
        with pytest.raises((TypeError, ValueError), match=name):
            kind(mlp(), **{name: object()})


def test_choices_are_those_of_the_types() -> None:
    """What a type checker allows is what passes the checks."""
    for name, option in LISTED.items():
        expression = ast.parse(str(option.type), mode="eval").body
        for part in ast.walk(expression):
            if isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Literal":
                choices = ast.literal_eval(part.slice)
                for choice in [choices] if isinstance(choices, str) else choices:
                    option.metadata["check"](name, choice)
                with pytest.raises((TypeError, ValueError), match=name):
                    option.metadata["check"](name, "another")


@pytest.mark.parametrize(
    ("typed", "kinds"), [(Fallback, FALLBACKS), (Fisher, FISHERS)], ids=["fallback", "fisher"]
)
def test_dicts_have_the_keys_of_their_types(typed: Any, kinds: Any) -> None:
    hints = typing.get_type_hints(typed, vars(settings))
    assert {"name", *(key for checks in kinds.values() for key in checks)} == hints.keys()
    assert hints["name"] == Literal[tuple(kinds)]


def test_a_dict_with_the_defaults_is_the_default() -> None:
    plain = Settings()
    told = Settings(
        fallback={"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
        fisher={"name": "auto"},
        update_every={"steps": 10, "stagger": False},
    )
    assert plain.fallback_of_groups == told.fallback_of_groups
    assert plain.fisher_options == told.fisher_options
    assert plain.schedule == told.schedule
    assert told.schedule.keys() == typing.get_type_hints(Schedule, vars(settings)).keys()


def test_groups_take_what_the_list_says() -> None:
    per_group = {name for name, option in LISTED.items() if option.metadata["per_group"]}
    assert per_group | {"fallback_lr"} == GROUP_OPTIONS


def test_the_page_is_up_to_date() -> None:
    assert options.meanings().keys() - {"model"} == LISTED.keys()
    assert options.PAGE.read_text() == options.page(), "run `make support`"
