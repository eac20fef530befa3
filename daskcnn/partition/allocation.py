"""The samples of each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeAlias

Range: TypeAlias = tuple[int, int]
"""Half-open: (lo, hi) stands for samples lo … hi - 1."""
Ranges: TypeAlias = tuple[Range, ...]

_NOTHING: Ranges = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The samples 0 … total - 1; each belongs to one worker or is free. Operations return a new Allocation.

    ranges: of each worker, sorted and as few as possible; workers in the order in which they came. free: ranges that no
    worker has yet. granted: increments that each worker has had.
    """

    total: int
    ranges: Mapping[str, Ranges]
    free: Ranges
    granted: Mapping[str, int]

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers, in the order in which they came."""
        return tuple(self.ranges)

    @property
    def given(self) -> int:
        """Samples that have a worker."""
        return self.total - count(self.free)

    def size(self, worker: str) -> int:
        """Return the number of this worker's samples. Raises ValueError for a worker that is not here."""
        if worker not in self.ranges:
            raise ValueError(f"worker={worker!r}: not among {list(self.ranges)}; let it join first")
        return count(self.ranges[worker])

    def sizes(self) -> dict[str, int]:
        """Samples of each worker."""
        return {worker: count(ranges) for worker, ranges in self.ranges.items()}

    def give(self, samples: Mapping[str, int], increment: int) -> Allocation:
        """Give the next free samples to these workers, in this order, as their increment of this number."""
        ranges, free = dict(self.ranges), self.free
        for worker, number in samples.items():
            taken, free = take(free, number)
            ranges[worker] = union(ranges[worker], taken)
        return replace(self, ranges=ranges, free=free, granted={**self.granted, **dict.fromkeys(samples, increment)})

    def without(self, worker: str, samples: Mapping[str, int]) -> Allocation:
        """Remove a worker and give its samples to the others; `samples` says how many to each."""
        ranges, left = dict(self.ranges), self.ranges[worker]
        for other, number in samples.items():
            taken, left = take(left, number)
            ranges[other] = union(ranges[other], taken)
        assert not left, f"{count(left)} samples of {worker} went to nobody"
        del ranges[worker]
        return replace(self, ranges=ranges, granted={w: n for w, n in self.granted.items() if w != worker})

    def with_joined(self, worker: str, samples: Mapping[str, int], increment: int) -> Allocation:
        """Add a worker and give it the last samples of the others; `samples` says how many of each."""
        there = replace(self, ranges={**self.ranges, worker: _NOTHING}, granted={**self.granted, worker: increment})
        return there.with_moved(worker, {other: -number for other, number in samples.items()})

    def with_moved(self, worker: str, samples: Mapping[str, int]) -> Allocation:
        """Move a worker's last samples to the others; `samples` says how many to each, or below 0 how many from it."""
        ranges = dict(self.ranges)
        for other, number in samples.items():
            giver, taker = (worker, other) if number > 0 else (other, worker)
            ranges[giver], moved = take(ranges[giver], count(ranges[giver]) - abs(number))
            ranges[taker] = union(ranges[taker], moved)
        return replace(self, ranges=ranges)

    def shifted(self, samples: Mapping[str, int]) -> Allocation:
        """Move the last samples of workers to others; `samples` says how many each gets, or below 0 how many it gives.

        They add up to 0.
        """
        ranges, moved = dict(self.ranges), _NOTHING
        for worker, number in samples.items():
            if number < 0:
                ranges[worker], given = take(ranges[worker], count(ranges[worker]) + number)
                moved = union(moved, given)
        for worker, number in samples.items():
            if number > 0:
                taken, moved = take(moved, number)
                ranges[worker] = union(ranges[worker], taken)
        assert not moved, f"{count(moved)} samples went to nobody"
        return replace(self, ranges=ranges)

    def check(self) -> None:
        """Assert the invariants: every sample exactly once, ranges sorted and merged, the same workers everywhere."""
        assert self.ranges.keys() == self.granted.keys()
        for ranges in (*self.ranges.values(), self.free):
            assert ranges == union(ranges), f"not sorted and merged: {ranges}"
            assert all(lo < hi for lo, hi in ranges), f"an empty range: {ranges}"
        everything = sorted(r for ranges in (*self.ranges.values(), self.free) for r in ranges)
        edges = [0, *(edge for r in everything for edge in r), self.total]
        assert edges[::2] == edges[1::2], f"samples twice or missing: {everything}"

    def to_dict(self) -> dict[str, Any]:
        """Return the allocation in a form that JSON can keep. The workers are a list, because their order counts."""
        workers = [
            {"name": worker, "ranges": [list(r) for r in ranges], "granted": self.granted[worker]}
            for worker, ranges in self.ranges.items()
        ]
        return {"total": self.total, "workers": workers, "free": [list(r) for r in self.free]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Allocation:
        """Invert `to_dict`. Raises ValueError if the record is not an allocation."""
        try:
            ranges = {each["name"]: _ranges(each["ranges"]) for each in record["workers"]}
            granted = {each["name"]: each["granted"] for each in record["workers"]}
            allocation = cls(record["total"], ranges, _ranges(record["free"]), granted)
            whole = allocation.total, *granted.values(), *chain(*allocation.free, *chain(*ranges.values()))
            if not all(type(n) is int and n >= 0 for n in whole) or not all(type(w) is str for w in ranges):
                raise ValueError("a name is no string, or a number is no whole one")
            allocation.check()
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"allocation: not a valid record ({error!r}); use an earlier checkpoint") from error
        return allocation


def count(ranges: Ranges) -> int:
    """Return the number of samples in these ranges."""
    total = 0
    for lo, hi in ranges:
        total += hi - lo
    return total


def take(ranges: Ranges, number: int) -> tuple[Ranges, Ranges]:
    """Return the first `number` samples, and the rest."""
    taken: list[Range] = []
    for i, (lo, hi) in enumerate(ranges):
        if number < hi - lo:
            head = ((lo, lo + number),) if number else ()
            return (*taken, *head), ((lo + number, hi), *ranges[i + 1 :])
        taken.append((lo, hi))
        number -= hi - lo
    assert number == 0, f"{number} samples more than there are"
    return tuple(taken), ()


def union(*several: Ranges) -> Ranges:
    """Return all these (disjoint) ranges, sorted, neighbours merged."""
    edges = sorted(r for ranges in several for r in ranges)
    starts = [lo for i, (lo, _) in enumerate(edges) if i == 0 or edges[i - 1][1] != lo]
    ends = [a[1] for a, b in pairwise(edges) if a[1] != b[0]] + [hi for _, hi in edges[-1:]]
    return tuple(zip(starts, ends, strict=True))


def _ranges(pairs: Iterable[Sequence[int]]) -> Ranges:
    return tuple((lo, hi) for lo, hi in pairs)
