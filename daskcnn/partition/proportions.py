"""Whole numbers in proportion to weights: kernels over workers, samples over workers.

Groups of k workers whose sums of speeds are as nearly equal as possible.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

_Vector = npt.NDArray[np.float64]


def proportional(total: int, weights: Sequence[float]) -> list[int]:
    """Cut `total` into parts in proportion to `weights` that add up to it exactly.

    Largest remainder: every part is within one of its quota; of equal remainders the earlier is rounded up.
    Raises ValueError for a negative total, no weights, a weight that is negative or not finite, or a zero sum.
    """
    if total < 0:
        raise ValueError(f"total={total}: there is nothing to share out; give 0 or more")
    if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or max(weights) == 0:
        raise ValueError(f"weights={list(weights)}: need finite weights of 0 or more, at least one above 0")
    return level(total, weights, [0] * len(weights), [total] * len(weights))


def as_counted(seconds: Sequence[float], *, even: bool) -> list[float]:
    """Return the workers' seconds that shares go by: those measured, or equal ones, so that no clock decides."""
    return [1.0] * len(seconds) if even else list(seconds)


def kernel_shards(num_kernels: int, seconds: Sequence[float]) -> list[int]:
    """Return kernels for each worker by its calibrated seconds (Marques et al., eq. 1), none for one that is very slow.

    Raises ValueError for no workers or seconds that are not finite and above 0.
    """
    return proportional(num_kernels, speeds(seconds))


def balanced_shards(num_kernels: int, seconds: Sequence[float], fixed: Sequence[float]) -> list[int]:
    """Return kernels for each worker so that the slowest finishes as early as whole kernels allow.

    A worker with n of K kernels takes n/K · seconds (of work on all kernels, and to send what they give) + fixed (for
    the input that any kernel needs), and nothing without kernels. Among equally fast cuts eq. 1's is taken. Raises
    ValueError as `kernel_shards` does, and for fixed seconds that are not finite and 0 or more, one per worker.
    """
    paper = kernel_shards(num_kernels, seconds)
    if len(fixed) != len(seconds) or not all(math.isfinite(each) and each >= 0 for each in fixed):
        raise ValueError(
            f"fixed={list(fixed)}: need finite seconds of 0 or more, one for each of {len(seconds)} workers"
        )
    return min(paper, _earliest(num_kernels, seconds, fixed), key=lambda cut: longest_share(cut, seconds, fixed))


def longest_share(shares: Sequence[int], seconds: Sequence[float], fixed: Sequence[float]) -> float:
    """Return the seconds until the last worker finishes its share, counted as in `balanced_shards`."""
    total = sum(shares)
    return max((_taken(n, total, *cost) for n, *cost in zip(shares, seconds, fixed, strict=True)), default=0.0)


def _taken(n: int, total: int, seconds: float, fixed: float) -> float:
    return seconds * (n / total) + fixed if n else 0.0


def _earliest(num_kernels: int, seconds: Sequence[float], fixed: Sequence[float]) -> list[int]:
    """Give each kernel to the worker that would finish it first. Times only grow, so the largest is the least."""
    costs, shares = list(zip(seconds, fixed, strict=True)), [0] * len(seconds)
    ends = [(_taken(1, max(1, num_kernels), *cost), w) for w, cost in enumerate(costs)]
    heapq.heapify(ends)
    for _ in range(num_kernels):
        w = ends[0][1]
        shares[w] += 1
        heapq.heapreplace(ends, (_taken(shares[w] + 1, num_kernels, *costs[w]), w))
    return shares


def speeds(seconds: Sequence[float]) -> list[float]:
    """Return speeds relative to the fastest, in (0, 1], from seconds per unit of work. Raises as `kernel_shards`."""
    if not seconds:
        raise ValueError("seconds=[]: no workers to share the work; give the time of at least one")
    for each in seconds:
        if not (math.isfinite(each) and each > 0):
            raise ValueError(f"seconds={each}: a worker's time must be finite and above 0; calibrate the worker again")
    fastest = min(seconds)
    # the bound keeps quotas finite: a worker 10^12 times slower than another gets no work anyway
    return [max(fastest / each, 1e-12) for each in seconds]


def level(total: int, weights: Sequence[float], lower: Sequence[int], upper: Sequence[int]) -> list[int]:
    """Return whole numbers that add up to `total`, lower_i ≤ s_i ≤ upper_i, as proportional as the bounds allow.

    Where a bound applies, the others share what it adds or takes in proportion. Needs sum(lower) ≤ total ≤
    sum(upper) and weights above 0 (0 only where no bound can apply).
    """
    high = np.asarray(upper, dtype=np.float64)
    quota = _quotas(total, np.asarray(weights, dtype=np.float64), np.asarray(lower, dtype=np.float64), high)
    sizes = np.floor(quota)
    by_remainder = np.argsort(sizes - quota, kind="stable")
    room = by_remainder[sizes[by_remainder] < high[by_remainder]]
    sizes[room[: total - int(sizes.sum())]] += 1
    return [int(size) for size in sizes]


def _quotas(total: int, weights: _Vector, low: _Vector, high: _Vector) -> _Vector:
    """Return clip(λ·weights, low, high) for the λ at which it adds up to `total` (pegging, Bitran and Hax 1981)."""
    weights = weights / weights.max()
    quota, active = np.zeros(len(weights)), np.ones(len(weights), dtype=bool)
    while active.any():
        rest = total - quota[~active].sum()
        quota[active] = rest * (weights[active] / weights[active].sum())
        below, above = active & (quota < low), active & (quota > high)
        if not (below.any() or above.any()):
            break
        lacking, excess = (low - quota)[below].sum(), (quota - high)[above].sum()
        if lacking >= excess:
            quota[below], active = low[below], active & ~below
        if excess >= lacking:
            quota[above], active = high[above], active & ~above
    return quota


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
    all. Raises ValueError for a size below 1 or above the number of workers, and as `kernel_shards` for seconds.
    """
    names = list(seconds)
    if not 1 <= size <= len(names):
        raise ValueError(f"size={size}: a group has 1 worker or more, and there are {len(names)}; set another size")
    speed = speeds(list(seconds.values()))
    fastest = sorted(range(len(names)), key=lambda i: -speed[i])  # of equal ones the earlier
    count = len(names) // size
    chosen, left_out = fastest[: count * size], sorted(fastest[count * size :])
    ways = math.factorial(count * size) // (math.factorial(size) ** count * math.factorial(count))
    if ways > MOST_LOOKED_AT:
        found = _swapped(_greedy(chosen, speed, size), speed)
    else:
        found = min(_all_ways(chosen, size), key=lambda groups: unevenness(_totals(groups, speed)))
    groups = sorted(tuple(sorted(group)) for group in found)
    return Formed(tuple(tuple(names[i] for i in group) for group in groups), tuple(names[i] for i in left_out))


def unevenness(totals: Sequence[float]) -> float:
    """Return the sum of squares of the groups' speeds, to be minimised: it is least if the groups are equal."""
    return math.fsum(total * total for total in totals)


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
