"""Settings for all tests: one thread, so that results repeat, no deadlines, slow ones first."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples in every run, so that no failure is a matter of luck; FOP_FUZZ=1 draws new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile("fuzz" if os.environ.get("FOP_FUZZ") else "repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for processes of its own comes first, so that none of it is left for the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("distributed", "trainers"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
