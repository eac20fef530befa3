"""Seconds that bytes take on their way. Bandwidths are bytes a second each way; none is no limit."""

from __future__ import annotations

import math


class Line:
    """One direction of a link that several share: who began to send first is carried first."""

    __slots__ = ("_free", "bandwidth")

    def __init__(self, bandwidth: float = math.inf) -> None:
        self.bandwidth = bandwidth
        self._free = 0.0

    def carry(self, begin: float, nbytes: float) -> float:
        """When the last of these bytes is through whose first is there at `begin`."""
        if self.bandwidth == math.inf:
            return begin
        free = self._free
        self._free = free = (begin if begin > free else free) + nbytes / self.bandwidth  # `max` takes twice as long
        return free


class Link:
    """A worker's own link: latency in seconds a message."""

    __slots__ = ("bandwidth", "latency")

    def __init__(self, bandwidth: float = math.inf, latency: float = 0.0) -> None:
        self.bandwidth, self.latency = bandwidth, latency

    def arrival(self, begin: float, nbytes: float, shared: Line) -> float:
        """When a message sent at `begin` is there that goes over this link and, at the same time, a shared one.

        The slower of the two decides. The shared one is taken only for as long as the bytes need it, so that a slow
        worker does not keep it from the others.
        """
        first = begin + self.latency
        own, carried = first + nbytes / self.bandwidth, shared.carry(first, nbytes)
        return own if own > carried else carried
