"""Outputs of stages, and gradients of them, as a worker has them: all channels, or those that it adds to its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from daskcnn.arrays import Array
from daskcnn.sharded.passes import joined
from daskcnn.sharded.stages import Share, Stage, added_channels


class Held(NamedTuple):
    """Channels of a stage's outputs, or of their gradient, from this one on. own: whether they may be written to."""

    start: int
    array: Array
    own: bool = False

    @property
    def stop(self) -> int:
        """Number of the channel behind the last."""
        return self.start + int(self.array.shape[-1])

    def channels(self, part: slice) -> Array:
        """These channels, by their numbers."""
        return self.array[..., part.start - self.start : part.stop - self.start]


def own_addends(
    stage: Stage, share: Share, held: Mapping[int, Held], widths: Mapping[int, int], images: Array
) -> list[Array | None]:
    """The channels of each of a stage's addends that go to a share's own; None where there are none.

    widths: channels of the outputs of each stage. images: the network's input.
    """
    found: list[Array | None] = []
    for addend in stage.addends:
        if addend.inputs:
            parts = [held[source].channels(part) for source, part, _ in added_channels(addend, share, widths)]
        else:
            parts = [images[..., share.own]] if share.start < images.shape[-1] else []
        found.append(np.ascontiguousarray(joined(parts)) if parts else None)
    return found


def gradients_of(
    stage: Stage, share: Share | None, dx: Array | None, more: Sequence[Array | None], widths: Mapping[int, int]
) -> Iterator[tuple[int, Held]]:
    """What a stage's way back gives the stages that it works on, from the gradients of its input and of its addends."""
    start = 0
    for source in stage.inputs if dx is not None else ():
        assert dx is not None, "asked for"
        yield source, Held(0, dx[..., start : start + widths[source]], own=True)
        start += widths[source]
    for addend, dy in zip(stage.addends, more, strict=False):
        assert share is not None, "only shards add"
        for source, part, place in added_channels(addend, share, widths):
            assert dy is not None, "there are such channels"
            yield source, Held(part.start, dy[..., place])


def summed_up(parts: Sequence[Held]) -> Held:
    """The gradient of all channels that the parts have, 0 where none has any. Parts of its own may be written to."""
    if len(parts) == 1:
        return parts[0]
    start, stop = min(part.start for part in parts), max(part.stop for part in parts)
    whole = next((part for part in parts if part.own and (part.start, part.stop) == (start, stop)), None)
    if whole is None:
        first = parts[0].array
        whole = Held(start, np.zeros((*first.shape[:-1], stop - start), first.dtype), own=True)
    for part in parts:
        if part is not whole:
            at = whole.channels(slice(part.start, part.stop))
            at += part.array
    return whole


def put_in_place(parts: Sequence[Array], places: Sequence[slice | None]) -> Sequence[Array]:
    """Parts of a gradient, which add up, as parts of all of its channels. places: where each lies; None: it is all."""
    if all(place is None for place in places):
        return parts
    stop = max(part.shape[-1] if place is None else place.stop for part, place in zip(parts, places, strict=True))
    total = np.zeros((*parts[0].shape[:-1], stop), parts[0].dtype)
    for part, place in zip(parts, places, strict=True):
        at = total if place is None else total[..., place]
        at += part
    return [total]
