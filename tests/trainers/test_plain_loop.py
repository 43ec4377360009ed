"""The example of a plain loop does what it promises."""

from __future__ import annotations

from pathlib import Path

from tests.common import same, snapshot
from tests.trainers.common import example


def test_the_example_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    loop = example("plain_loop")
    whole = loop.train(epochs=3, checkpoint=None)
    assert loop.accuracy(whole) > 0.9  # 0.25 by chance
    checkpoint = tmp_path / "stopped.pt"
    first = loop.train(epochs=1, checkpoint=checkpoint)
    assert not same(snapshot(first), snapshot(whole))
    second = loop.train(epochs=3, checkpoint=checkpoint)
    assert same(snapshot(second), snapshot(whole))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped.pt"]
