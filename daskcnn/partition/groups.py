"""Groups of k workers whose speeds add up to as nearly the same as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from daskcnn.partition.proportional import speeds

MOST_LOOKED_AT = 20_000
"""Ways to form groups that are all looked at; where there are more, a greedy one is improved by swaps."""
_LEAST_GAIN = 1e-12  # of the sum of squares; less is rounding, and might go on for ever

_Groups = list[tuple[int, ...]]
"""Workers by their index."""


@dataclass(frozen=True, slots=True)
class Formed:
    """Groups of workers and who is in none, by name, in the order in which the workers were given."""

    groups: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]


def form_groups(seconds: Mapping[str, float], size: int) -> Formed:
    """Groups of exactly `size` workers, by seconds per unit of work; where some are left over, the slowest ones.

    The sum of squares of the groups' speeds is the least there is, or near to it where there are too many ways to look
    at. Raises ValueError for a size that is no number of these workers, or seconds that are not finite and above 0.
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
    """What is to be small: the sum of squares, which is least where the groups are equal, as their sum is given."""
    return math.fsum(total * total for total in totals)


def _least_uneven(workers: list[int], speed: Sequence[float], size: int) -> _Groups:
    """`workers`: the fastest first."""
    if _ways(len(workers), size) > MOST_LOOKED_AT:
        return _swapped(_greedy(workers, speed, size), speed)
    return min(_all_ways(workers, size), key=lambda groups: unevenness(_totals(groups, speed)))


def _ways(workers: int, size: int) -> int:
    """How many ways there are to form the groups."""
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
    """Each worker, the fastest first, to the slowest group that has room (Graham 1969, for groups of one size)."""
    groups: list[list[int]] = [[] for _ in range(len(workers) // size)]
    for worker in workers:
        open_ = [group for group in groups if len(group) < size]
        min(open_, key=lambda group: math.fsum(speed[i] for i in group)).append(worker)
    return [tuple(group) for group in groups]


def _swapped(groups: _Groups, speed: Sequence[float]) -> _Groups:
    """Swap a worker of one group for one of another while that makes the groups more alike."""
    own = [list(group) for group in groups]
    totals = _totals(groups, speed)
    pairs = list(combinations(range(len(own)), 2))
    while sum(_swap(own, totals, a, b, speed) for a, b in pairs):  # each swap makes the sum of squares less
        pass
    return [tuple(group) for group in own]


def _swap(own: list[list[int]], totals: list[float], a: int, b: int, speed: Sequence[float]) -> bool:
    """The best swap between two groups, if it helps: moving d makes the sum of squares 2·d·(apart - d) less."""
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
