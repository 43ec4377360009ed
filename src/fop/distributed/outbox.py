"""Messages that leave during a backward pass, as soon as their layers are complete.

All ranks must send in one order, while autograd may complete layers in another. So buckets leave
strictly in the order of the list: a bucket whose layers are complete waits for those before it, and
what is left at the end of the pass leaves then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fop.block import Block
from fop.distributed.comm import Comm
from fop.distributed.mail import Letter, Pack
from fop.distributed.packing import Bucket, Parcel, into_buckets


@dataclass(frozen=True)
class Channel:
    """Messages of one kind, last layers first, which is how backward passes complete them."""

    kind: str
    what: str
    parcels: Sequence[Parcel]
    pack: Pack


class Outbox:
    """The buckets of all channels, in the order in which they leave."""

    def __init__(self, comm: Comm, blocks: Sequence[Block], channels: Sequence[Channel]) -> None:
        self._comm = comm
        self._waiting_for = set(blocks)
        position = {block: i for i, block in enumerate(reversed(blocks))}
        queue: list[tuple[int, int, Channel, Bucket]] = []
        for number, channel in enumerate(channels):
            for bucket in into_buckets(channel.parcels):
                last = max(position[parcel.key] for parcel in bucket.parcels)  # type: ignore[index]
                queue.append((last, number, channel, bucket))
        self._queue = [
            (channel, bucket) for *_, channel, bucket in sorted(queue, key=lambda entry: entry[:2])
        ]
        self.sent: dict[str, list[Letter]] = {channel.kind: [] for channel in channels}
        self.closed = False
        self.outdated = False  # a later pass has added to what was sent

    def complete(self, block: Block) -> None:
        """The running pass adds nothing more to this layer."""
        if self.closed:
            self.outdated = True
            return
        self._waiting_for.discard(block)
        while self._queue and self._is_complete(self._queue[0][1]):
            self._send_next()

    def _is_complete(self, bucket: Bucket) -> bool:
        return not any(parcel.key in self._waiting_for for parcel in bucket.parcels)

    def close(self) -> None:
        """Send the rest."""
        while self._queue:
            self._send_next()
        self.closed = True

    def _send_next(self) -> None:
        channel, bucket = self._queue.pop(0)
        letter = Letter.to_owner(self._comm, bucket, channel.what, channel.pack)
        self.sent[channel.kind].append(letter)
