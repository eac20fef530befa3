"""Groups of k workers whose sums of speeds are as nearly equal as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from daskcnn.partition.proportional import speeds

MOST_LOOKED_AT = 20_000
"""Up to this many ways to form groups are all tried; if there are more, a greedy choice is improved by swaps."""
_LEAST_GAIN = 1e-12  # of the sum of squares; less is rounding, and might go on for ever

_Groups = list[tuple[int, ...]]
"""Workers by their index."""


@dataclass(frozen=True, slots=True)
class Formed:
    """Groups of workers, and the workers in no group, by name, in the order in which they were given."""

    groups: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]


def form_groups(seconds: Mapping[str, float], size: int) -> Formed:
    """Form groups of exactly `size` workers, by seconds per unit of work. If some are left over, they are the slowest.

    The sum of squares of the groups' speeds is the least possible, or near to it if there are too many ways to check
    all. Raises ValueError for a size below 1 or above the number of workers, or seconds that are not finite and above
    0.
    """
    names = list(seconds)
    if not 1 <= size <= len(names):
        raise ValueError(f"size={size}: a group has 1 worker or more, and there are {len(names)}; set another size")
    speed = speeds(list(seconds.values()))
    fastest = sorted(range(len(names)), key=lambda i: -speed[i])  # of equal ones the earlier
    chosen = fastest[: len(names) // size * size]
    found = _least_uneven(chosen, speed, size)
    groups = sorted(tuple(sorted(group)) for group in found)
    left_out = sorted(set(fastest) - set(chosen))
    return Formed(tuple(tuple(names[i] for i in group) for group in groups), tuple(names[i] for i in left_out))


def unevenness(totals: Sequence[float]) -> float:
    """Return the sum of squares of the groups' speeds, to be minimised: it is least if the groups are equal."""
    return math.fsum(total * total for total in totals)


def _least_uneven(workers: list[int], speed: Sequence[float], size: int) -> _Groups:
    """Return the least uneven groups; `workers` has the fastest first."""
    if _ways(len(workers), size) > MOST_LOOKED_AT:
        return _swapped(_greedy(workers, speed, size), speed)
    return min(_all_ways(workers, size), key=lambda groups: unevenness(_totals(groups, speed)))


def _ways(workers: int, size: int) -> int:
    """Return the number of ways to form the groups."""
    groups = workers // size
    return math.factorial(workers) // (math.factorial(size) ** groups * math.factorial(groups))


def _all_ways(workers: list[int], size: int) -> Iterator[_Groups]:
    if not workers:
        yield []
        return
    first, *others = workers
    for rest in combinations(others, size - 1):
        for groups in _all_ways([w for w in others if w not in rest], size):
            yield [(first, *rest), *groups]


def _totals(groups: _Groups, speed: Sequence[float]) -> list[float]:
    return [math.fsum(speed[i] for i in group) for group in groups]


def _greedy(workers: list[int], speed: Sequence[float], size: int) -> _Groups:
    """Give each worker, the fastest first, to the slowest group with a free place (Graham 1969, for equal sizes)."""
    groups: list[list[int]] = [[] for _ in range(len(workers) // size)]
    for worker in workers:
        open_ = [group for group in groups if len(group) < size]
        min(open_, key=lambda group: math.fsum(speed[i] for i in group)).append(worker)
    return [tuple(group) for group in groups]


def _swapped(groups: _Groups, speed: Sequence[float]) -> _Groups:
    """Swap workers of two groups while that makes the groups more alike."""
    own = [list(group) for group in groups]
    totals = _totals(groups, speed)
    pairs = list(combinations(range(len(own)), 2))
    while sum(_swap(own, totals, a, b, speed) for a, b in pairs):  # each swap makes the sum of squares less
        pass
    return [tuple(group) for group in own]


def _swap(own: list[list[int]], totals: list[float], a: int, b: int, speed: Sequence[float]) -> bool:
    """Make the best swap between two groups, if it helps. Moving d lowers the sum of squares by 2·d·(apart - d)."""
    apart = totals[a] - totals[b]
    gains = [
        (d * (apart - d), i, j)
        for i, one in enumerate(own[a])
        for j, other in enumerate(own[b])
        for d in [speed[one] - speed[other]]
    ]
    gain, i, j = max(gains)
    if gain <= _LEAST_GAIN * (totals[a] ** 2 + totals[b] ** 2):
        return False
    own[a][i], own[b][j] = own[b][j], own[a][i]
    for group in (a, b):
        totals[group] = math.fsum(speed[i] for i in own[group])
    return True
