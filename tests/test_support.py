"""The page of what is supported is up to date, complete, and names real tests."""

from __future__ import annotations

from tests import support


def test_the_page_is_what_registry_and_tests_say() -> None:
    assert support.PAGE.read_text() == support.page(), "run `make support`"


def test_every_registered_layer_has_a_row_and_every_named_test_exists() -> None:
    described = {row.what for row in support.layers()}
    assert {f"`nn.{module.__name__}`" for module in support.REGISTERED} <= described
    for path, function in support.named_tests():
        assert function in support.defined_tests(path), f"{path.name} has no {function}"
