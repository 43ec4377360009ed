"""Parcels of layers in buckets, on their way to owners and opened there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fop.block import Block
from fop.capture import Statistics
from fop.distributed.base import Counts, Request
from fop.distributed.comm import Comm, Handle
from fop.distributed.packing import Bucket, Parcel
from fop.distributed.totals import SummedTotals
from fop.scaling import Number
from fop.shards import local

Pack = Callable[[Any, list[Tensor]], None]  # of a parcel's key, into its places


@dataclass
class Letter:
    """A bucket that is being summed."""

    bucket: Bucket
    flat: Tensor
    handle: Handle
    label: str

    @staticmethod
    def to_owner(comm: Comm, bucket: Bucket, what: str, pack: Pack) -> Letter:
        flat, label = packed(bucket, pack), label_of(what, bucket)
        return Letter(bucket, flat, comm.reduce_in_row(flat, bucket.owner, label), label)

    @staticmethod
    def to_all(comm: Comm, bucket: Bucket, pack: Pack) -> Letter:
        flat, label = packed(bucket, pack), "gradients of parameters in no layer"
        return Letter(bucket, flat, comm.sum_of_all(flat, label), label)


class Arrived:
    """Waits where something is first asked for."""

    def __init__(
        self,
        comm: Comm,
        request: Request,
        mail: dict[str, list[Letter]],
        *,
        averaged: bool,
        sharded: bool,
    ) -> None:
        self._comm = comm
        self._averaged = averaged
        self._sharded = sharded
        self._request = request
        self._mail = mail
        self._opened: dict[str, dict[Any, list[Tensor]]] = {}

    def _open(self, kind: str) -> dict[Any, list[Tensor]]:
        """Parcels by layer; those of a row's owners are summed over the other rows first."""
        if kind not in self._opened:
            comm = self._comm
            mine = []
            for letter in self._mail[kind]:
                letter.handle.wait()
                if kind == "gradient":  # on all ranks already
                    mine.append((letter, letter.handle))
                elif letter.bucket.owner == comm.place:
                    mine.append((letter, comm.sum_of_column(letter.flat, letter.label)))
            self._opened[kind] = found = {}
            for letter, handle in mine:
                handle.wait()
                if kind != "curvature" and not (kind == "average" and self._sharded):
                    letter.flat.div_(comm.ranks)
                found.update(letter.bucket.views(letter.flat))
            self._mail[kind] = []
        return self._opened[kind]

    def average(self, block: Block) -> Sequence[Tensor]:
        if self._averaged and not self._sharded:
            return block.gradients(self.gradients(block.parameters))
        return self._open("average")[block]

    def gradients(self, parameters: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
        if self._averaged:  # a rank without a backward pass has zeros to bring
            return {
                p: torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
                for p in parameters
            }
        found = self._open("gradient")
        return {p: found[p][0] for p in parameters}

    def signed(self, block: Block) -> Sequence[Tensor] | None:
        return self._open("difference").get(block) if self._request.halves else None

    def examples(self, block: Block) -> tuple[Number, Number]:
        totals = self._request.totals
        assert isinstance(totals, SummedTotals)
        return totals.examples(block)

    def rescaling(self, block: Block) -> Tensor | None:
        if self._sharded:
            totals = self._request.totals
            assert isinstance(totals, SummedTotals)
            return totals.gradient_ratio(block)
        # The gradient is the same on all ranks, and so is what was done to it.
        return block.rescaling(self._request.loss_scale) if self._averaged else None

    def sums(self, block: Block, counts: Counts) -> Statistics:
        inputs, outputs, *squares = self._open("curvature")[block]
        forms = block.capture.forms
        return Statistics(
            inputs=forms.inputs.unpack(inputs),
            outputs=forms.outputs.unpack(outputs),
            squares=squares[0].clone() if squares else None,
            examples=int(counts.examples),
            rows=int(counts.rows),
            passes=int(counts.passes),
        )


def sum_parcel(block: Block, owner: int) -> Parcel:
    forms, squares = block.capture.forms, block.capture.square_shapes
    shapes = (forms.inputs.message_shape, forms.outputs.message_shape, *squares)
    return Parcel(block, owner, shapes, forms.dtype, block.weight.device)


def gradient_parcel(block: Block, owner: int, dtype: torch.dtype | None = None) -> Parcel:
    shapes = tuple(tuple(part.shape) for part in block.slices)
    weight = block.weight
    return Parcel(block, owner, shapes, dtype or weight.dtype, weight.device)


def update_parcel(block: Block, owner: int) -> Parcel:
    """Updates travel before they are clipped, and float16 could not hold them."""
    dtype = torch.float32 if block.weight.dtype == torch.float16 else None
    return gradient_parcel(block, owner, dtype)


def packed(bucket: Bucket, pack: Pack) -> Tensor:
    flat = bucket.empty()
    for key, places in bucket.views(flat).items():
        pack(key, places)
    return flat


def copy_or_zero(source: Tensor | None, target: Tensor) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)


def label_of(what: str, bucket: Bucket) -> str:
    names = [repr(parcel.key.name) for parcel in bucket.parcels if isinstance(parcel.key, Block)]
    return f"{what} of {', '.join(names)}"
