"""Forward passes that a step rule can run again: a part of each batch, and the loss at its output.

Kept are every k-th example of what the model was given, its output for them, the gradient there,
and the likelihood that was read of it (`fop.likelihood`). With these the loss of other outputs is
known without labels. What was recorded goes when gradients are zeroed, and after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fop.likelihood import Reading

# Examples of a batch that are run again: a quarter, but not fewer or more than these.
SMALLEST_PART, LARGEST_PART = 64, 1024
SHARE = 4


@dataclass(frozen=True)
class Inputs:
    """What the model was given in one forward pass: a part of it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    find: Callable[[Any], Tensor] = field(repr=False)  # the output in what the model returns
    stride: int  # every so many examples are taken
    examples: int | None  # in the batch; None where that is not known, and all of it is taken

    @staticmethod
    def of(
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Tensor,
        examples: int | None,
        find: Callable[[Any], Tensor],
    ) -> Inputs:
        stride = 1 if examples is None else part_stride(examples)
        if stride == 1:
            return Inputs(args, kwargs, find, 1, examples)
        some = _taken((args, dict(kwargs)), examples, stride)
        return Inputs(some[0], some[1], find, stride, examples)

    def part(self, tensor: Tensor) -> Tensor:
        """Of a tensor shaped like the model's output, or that broadcasts to it."""
        if self.stride == 1 or self.examples is None or tensor.shape[0] == 1:
            return tensor
        rows = tensor.shape[0] // self.examples
        if rows == 1:
            return tensor[:: self.stride]
        taken: Tensor = tensor.unflatten(0, (self.examples, rows))[:: self.stride]
        return taken.flatten(0, 1)

    @property
    def weight(self) -> float:
        """How many examples each of those taken stands for."""
        if self.examples is None:
            return 1.0
        return self.examples / len(range(0, self.examples, self.stride))


@dataclass(frozen=True)
class Forward:
    """A forward pass that a backward pass has come back to: the same part of all of it."""

    inputs: Inputs
    output: Tensor
    gradient: Tensor
    reading: Reading

    @property
    def weight(self) -> float:
        """How many examples each of those taken stands for."""
        return self.inputs.weight


def part_stride(examples: int) -> int:
    """k of every k-th example."""
    wanted = min(LARGEST_PART, max(SMALLEST_PART, examples // SHARE))
    return max(1, examples // wanted)


def _taken(value: Any, examples: int | None, stride: int) -> Any:
    """Inputs with every k-th example only, whatever they are nested in."""
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] == examples:
            return value[::stride].clone()  # lets go of the rest
        return value
    if isinstance(value, Mapping):
        found = {key: _taken(member, examples, stride) for key, member in value.items()}
        try:
            return type(value)(found)  # type: ignore[call-arg]
        except TypeError:
            return found
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_taken(member, examples, stride) for member in value)
    return value


class Forwards:
    """Those of the gradients that are there now."""

    def __init__(self) -> None:
        self._complete: list[Forward] = []
        self.unreadable: str | None = None  # why the loss of one of them is not known

    @property
    def complete(self) -> Sequence[Forward]:
        return self._complete

    def add(
        self,
        inputs: Inputs,
        output: Tensor,
        gradient: Tensor,
        reading: Reading | str,
    ) -> None:
        """A backward pass has come to the output of a forward pass."""
        if not isinstance(reading, Reading):
            self.unreadable = reading
            return
        z, g = (inputs.part(tensor).clone() for tensor in (output, gradient))
        self._complete.append(Forward(inputs, z, g, reading))

    def forget(self) -> None:
        self._complete.clear()
        self.unreadable = None
