"""Where the calls of layers have their examples: told by the batch that the model was called with.

A layer sees dimensions, not what they count. The model's own inputs agree in dimension 0, which
counts B examples, wherever that is clear. An input of a layer then is one of

    [B, ...]      as usual
    [T, B, ...]   the sequence first
    [B r, ...]    r rows per example, one after the other: flattened positions, windows, frames
    other         called once for the full batch, or for a selection: no single examples

Where B is not clear, dimension 0 of the layer's own input is taken, and the step compares counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fop._torch import current_pass
from fop.capture.hooks import InertHook
from fop.layers import LayerAdapter


@dataclass(frozen=True)
class Layout:
    """Where one call of a layer has its examples."""

    sequence_first: bool = False  # in dimension 1
    rows: int = 1  # of dimension 0 per example
    mismatch: tuple[int, int] | None = None  # rows that belong to no example, and examples


USUAL, TRANSPOSED = Layout(), Layout(sequence_first=True)

# Fewer indices may count up by chance.
SHORTEST_RANGE = 4


class Examples:
    """What layers are told during forward passes of one model."""

    def __init__(self) -> None:
        # Those that run, for a model may call itself; None while a part of one is run again.
        self._forwards: list[_Forward | None] = []
        # For parts that activation checkpointing runs again, during backward.
        self._known: dict[tuple[object, tuple[int, ...]], Layout] = {}

    @property
    def current(self) -> _Forward | None:
        return self._forwards[-1] if self._forwards else None

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, part: bool) -> None:
        """Of the model or, where it is not called itself, of a part of it."""
        running = self.current
        if not part or (running is None and current_pass() == -1):
            running = _Forward(args, kwargs)
        self._forwards.append(running)

    def end(self) -> None:
        if self._forwards:  # a step may have come in between
            self._forwards.pop()

    def forget(self) -> None:
        """At a step: no forward pass runs, whatever an interrupted one left behind."""
        self._forwards.clear()
        self._known.clear()

    def layout(
        self,
        whose: object,
        adapter: LayerAdapter,
        x: Tensor,
        *,
        read: bool = False,
        sequence_first: bool | None = None,
    ) -> Layout:
        """Of a call with input x; `read`: the values of indices may be read by the host.

        `whose` stands for the module, and stays the same while it is trained. Where the module
        says if its sequence is first, x has the examples in dimension 0 all the same.
        """
        key, forward, found = (whose, tuple(x.shape)), self.current, USUAL
        if forward is None and current_pass() != -1:
            return self._known.get(key, USUAL)
        if forward is not None and sequence_first is not None:
            found = forward.declared(x, sequence_first)
        elif forward is not None:
            found = forward.layout(adapter, x, read)
        self._known[key] = found
        return found


class _Forward:
    """One forward pass of the model, and what its layers have shown so far."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        for mapping in (value for value in values if isinstance(value, Mapping)):
            values += mapping.values()
        inputs = [value for value in values if _counts(value)]
        lists = (value for value in values if isinstance(value, (list, tuple)))
        listed = [member for members in lists for member in members if _counts(member)]
        self._inputs = inputs + listed
        # A list may also hold one image per example, so its word alone is not enough.
        self._confirmed = bool(inputs)
        self._seen = False  # a layer saw as many examples as the inputs have
        self._sequence_first = False  # the last layer that left no doubt did
        # First dimensions that had several rows per example without a doubt.
        self._folded: set[torch.Size] = set()
        sizes = {tensor.shape[0] for tensor in self._inputs}
        sizes = sizes - {1} or sizes  # what has one row goes with all examples
        self.size: int | None = sizes.pop() if len(sizes) == 1 and 0 not in sizes else None

    def declared(self, x: Tensor, sequence_first: bool) -> Layout:
        n, size = x.shape[0], self.size
        if size is None:
            return USUAL
        if n == size:
            self._agree(TRANSPOSED if sequence_first else USUAL)
            return USUAL
        if sequence_first:  # the model's inputs may well have the sequence first, too
            self.size = None
            return USUAL
        if n % size == 0 and self._confirmed:
            self._folded.add(x.shape[:2])
            return Layout(rows=n // size)
        return self._mismatch(n, size, certain=self._seen)

    def layout(self, adapter: LayerAdapter, x: Tensor, read: bool) -> Layout:
        size, free = self.size, adapter.free_dimensions(x)
        if size is None or (free == 0 and size == 1):
            return USUAL
        n = x.shape[0] if free else 1
        if adapter.one_hot:
            return self._of_indices(x, n, size, read)
        if free and n == size:
            return self._agree(USUAL)
        if free > 1 and x.shape[1] == size:
            in_doubt = n % size == 0 or n == 1
            # What nn.MultiheadAttention returns looks transposed with batch_first=True, too.
            if not in_doubt or (x.shape[:2] not in self._folded and self._looks_transposed(x)):
                return self._agree(TRANSPOSED)
        if free and n % size == 0 and (self._confirmed or self._is_input(x)):
            return Layout(rows=n // size)
        return self._mismatch(n, size, certain=self._seen)

    def _of_indices(self, x: Tensor, n: int, size: int, read: bool) -> Layout:
        """Positions are looked up for the full batch, and may be as many as examples."""
        given = self._is_input(x)
        if x.dim() > 0 and n == size:
            if not given and read and _are_positions(x):
                return Layout(mismatch=(n, size))
            return self._agree(USUAL)
        if n > 1 and x.dim() > 1 and x.shape[1] == size:
            return self._agree(TRANSPOSED)
        # What goes with tokens (their types, say) has the shape of the tokens.
        if n % size == 0 and (given or x.shape[:2] in self._folded):
            self._folded.add(x.shape[:2])
            return Layout(rows=n // size)
        return self._mismatch(n, size, certain=self._confirmed and not given)

    def _agree(self, layout: Layout) -> Layout:
        self._confirmed = self._seen = True
        self._sequence_first = layout.sequence_first
        return layout

    def _mismatch(self, n: int, size: int, *, certain: bool) -> Layout:
        if certain:
            return Layout(mismatch=(n, size))
        self.size = None  # then it was the model that was called with something else than a batch
        return USUAL

    def _looks_transposed(self, x: Tensor) -> bool:
        """Of [B r, B, ...], which may also be r rows per example, each of B positions."""
        lengths = {tensor.shape[1] for tensor in self._inputs if 1 < tensor.dim() < 4}
        turned = x.shape[0] > 1 and x.stride(0) < x.stride(1)
        return turned or x.shape[0] in lengths or self._sequence_first

    def _is_input(self, x: Tensor) -> bool:
        """Whether x is one of the model's inputs, or a view of it."""
        address = x.untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == address for t in self._inputs)


def _counts(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and value.dim() > 0
    )


def _are_positions(indices: Tensor) -> bool:
    """Whether indices count up, or depend on distances alone, as a table of relative ones does."""
    if len(indices) < SHORTEST_RANGE:
        return False
    if indices.dim() == 1:
        return bool((indices.diff() == 1).all())
    square = indices.dim() == 2 and indices.shape[0] == indices.shape[1]
    shifted = square and bool((indices[1:, 1:] == indices[:-1, :-1]).all())
    return shifted and bool((indices != indices[0, 0]).any())


class BatchHook(InertHook):
    """The hooks around the forward of a model."""

    def __init__(self, examples: Examples | None = None, *, part: bool = False) -> None:
        super().__init__(examples)
        self._part = part

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._run is not None and torch.is_grad_enabled():
            self._run(self, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._run is not None and torch.is_grad_enabled():
            self._run(self)

    def run(self, *inputs: Any) -> None:
        examples = self._owner()
        if examples is not None and inputs:
            examples.begin(*inputs, part=self._part)
        elif examples is not None:
            examples.end()


def hook_batch(model: nn.Module, examples: Examples) -> list[RemovableHandle]:
    """Start to note what the model is called with; the handles stop it.

    Also its parts, for training steps that call them one by one (`self.net(x)` in Lightning).
    """
    parts = [part for part in model.children() if next(part.children(), None) is not None]
    handles = []
    for module in (model, *parts):
        if module is model or not isinstance(module, nn.MultiheadAttention):
            hook = BatchHook(examples, part=module is not model)
            handles += [
                module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True),
                module.register_forward_hook(hook.after, always_call=True),
            ]
    return handles
