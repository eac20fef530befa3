"""Pairs of workers swap half of their samples, so that each sees more of the data (Hegde & Usmani §5.1.1)."""

from __future__ import annotations

from dataclasses import replace

from daskcnn.partition.allocation import Allocation, Ranges, count, take, union


def swap_halves(allocation: Allocation, number: int) -> Allocation:
    """Return the allocation after the exchange of this number, counted from 0. No worker's number of samples changes.

    Workers are the corners of a hypercube and swap along one of its edges after the other: after log2(k) exchanges the
    samples of each come from all k. A worker without a partner keeps its own.
    """
    workers, ranges = allocation.workers, dict(allocation.ranges)
    axes = max(1, (len(workers) - 1).bit_length())
    distance = 1 << (number % axes)
    for i, one in enumerate(workers):
        if not i & distance and i | distance < len(workers):
            other = workers[i | distance]
            half = min(allocation.size(one), allocation.size(other)) // 2
            # a worker's samples lie in runs, one of each worker that they came from: some of every run go on
            (given, kept), (taken, left) = (_spread(ranges[w], half, 2 << axes) for w in (one, other))
            ranges[one], ranges[other] = union(kept, taken), union(left, given)
    return replace(allocation, ranges=ranges)


def _spread(ranges: Ranges, number: int, pieces: int) -> tuple[Ranges, Ranges]:
    """Return `number` samples, at most half of all, from pieces of equal size; and the rest."""
    size, pieces = count(ranges), min(number, pieces)
    taken: list[Ranges] = []
    left: list[Ranges] = []
    for i in range(pieces):
        piece, ranges = take(ranges, size * (i + 1) // pieces - size * i // pieces)
        some, rest = take(piece, number * (i + 1) // pieces - number * i // pieces)
        taken.append(some)
        left.append(rest)
    return union(*taken), union(ranges, *left)
