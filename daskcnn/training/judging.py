"""The validation samples that are judged during training: a seeded part of them, sized by the seconds of training.

Theory of operation. Judging a sample takes about a third of the time of training on it. A run may spend `TARGET` of the
seconds that each replica computes on judging: for Q, which each replica measures on the same samples, and for the
center, whose samples are divided. Both are sized before a round, by the seconds that were spent so far and those that
the round is expected to take. A round that spends less leaves more to those after it.

The center is judged on all validation samples whenever they fit in beside the `FEWEST` for Q; only that decides which
weights are the best. Q is then measured on what else fits in. Otherwise the center is judged on a part, of `FEWEST` at
least. A part is the beginning of a seeded order of all validation samples, another one in each round, the same for all
replicas of a round. Where replicas push within a round Q is measured before some of the pushes, the same ones behind a
barrier, and holds until it is measured again. No clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive

TARGET = 0.04
"""Part of the seconds of training that judging may take."""
FEWEST = 100
"""Samples of a part at least: the standard error of an accuracy is 5 % at most then."""
FORWARD = 1 / 3
"""Seconds to judge a sample, of those to train on it, until they are measured."""
APART = round(FEWEST * FORWARD / (TARGET / 2))
"""Samples to train on between two measurements of Q at least, so that they take half of what judging may."""


class JudgedPart(NamedTuple):
    """Samples lo…hi of a split.

    draw: number of a seeded order of all validation samples, in which they take each other's places first; None: none.
    """

    lo: int
    hi: int
    draw: int | None = None

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.hi - self.lo

    @classmethod
    def of(cls, lo: int, samples: int, whole: int, draw: int) -> JudgedPart:
        """Return a part of this size of `whole` validation samples, which begin at `lo`."""
        return cls(lo, lo + samples, draw if samples < whole else None)

    def first(self, samples: int) -> JudgedPart:
        """Return the first samples of it, at least one, if it has more than this number."""
        return self._replace(hi=min(self.hi, self.lo + max(1, samples)))

    def indices(self, first: int, end: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the samples in ascending order. first, end: of all validation samples."""
        if self.draw is None:
            return np.arange(self.lo, self.hi)
        keys = derive(np, derive(np, np.arange(end - first).astype(np.uint64), seed), self.draw)
        return first + np.sort(np.argsort(keys, kind="stable")[self.lo - first : self.hi - first])


def pushes_a_measurement(rounds: Collection[tuple[int, int]]) -> int:
    """Return the pushes of each replica from one measurement of Q to the next. rounds: their samples and pushes."""
    return max((-(-APART * pushes // samples) for samples, pushes in rounds if pushes > 1), default=1)


class JudgingCost(NamedTuple):
    """The cost of judging to a replica in a round.

    allowed: seconds that it may take. own: seconds for each sample that Q is measured on. center: seconds for each
    sample that all replicas together judge the center on.
    """

    allowed: float
    own: float
    center: float


def judged_sizes(validation: int, costs: Sequence[JudgingCost], *, whole: bool) -> tuple[int, int]:
    """Return the samples to measure Q on, and those to judge the center on.

    Half of what is allowed is left for later rounds, so that they can judge the center on all samples. whole: the
    center is judged on all, whatever it costs.
    """
    fewest = min(FEWEST, validation)
    if whole or all(fewest * cost.own + validation * cost.center <= cost.allowed for cost in costs):
        most = min((_affordable((c.allowed - validation * c.center) / 2, c.own) for c in costs), default=0.0)
        return int(min(validation, max(fewest, most))), validation
    most = min(_affordable(cost.allowed / 2 - fewest * cost.own, cost.center) for cost in costs)
    return fewest, int(min(validation, max(fewest, most)))


def _affordable(allowed: float, each: float) -> float:
    """Return the samples that these seconds are enough for."""
    return allowed / each if each else math.inf


@dataclass(slots=True)
class _Spent:
    """Seconds of training and of judging of a replica so far. each: those of the last sample judged; None: unknown."""

    trained: float = 0.0
    judged: float = 0.0
    each: float | None = None


class Judging:
    """Sizes the evaluations of a run by the seconds that its replicas have measured.

    Parameters
    ----------
    book : Its entries of a checkpoint, if any.
    sized : Evaluations may be of a part.
    even : Sizes go by numbers of samples, and not by measured seconds.
    keeps_best : The best weights count, so that the center is always judged on all samples.
    """

    def __init__(
        self, book: Mapping[str, Any], validation: int, *, sized: bool, even: bool = False, keeps_best: bool = False
    ) -> None:
        self._validation, self._sized, self._even, self._keeps_best = validation, sized, even, keeps_best
        spent = book.get("judging", {}).items()
        self._spent = {name: _Spent(own["trained"], own["judged"], own["each"]) for name, own in spent}

    def book(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return {"judging": {name: asdict(own) for name, own in self._spent.items()}} if self._sized else {}

    def sizes(self, costs: Sequence[JudgingCost], *, last: bool = False) -> tuple[int, int]:
        """Return the samples to measure Q on, and those to judge the center on. last: it is the run's last center."""
        if not self._sized:
            return self._validation, self._validation
        return judged_sizes(self._validation, costs, whole=last or self._keeps_best)

    def cost(
        self, replica: str, samples: int, seconds: float, *, own: int, share: float, alone: float | None = None
    ) -> JudgingCost:
        """Return the cost of judging to a replica in a round: its samples, and the seconds to train on each.

        own: times that it measures Q. share: the part of the center's evaluation that it pays for. alone: seconds of a
        sample of the worker that judges, where that is one of several.
        """
        spent = self._spent.get(replica) or _Spent()
        seconds, alone = (1.0, None) if self._even else (seconds, alone)
        each = (alone or seconds) * FORWARD if spent.each is None else spent.each
        allowed = TARGET * (spent.trained + samples * seconds) - spent.judged
        return JudgingCost(allowed, each * own, each * share)

    def add(
        self,
        replica: str,
        samples: int,
        busy: float,
        *,
        own: int,
        center: int,
        evaluation: float,
        paid: Collection[str],
    ) -> None:
        """Count a round. own, center: samples that were judged for Q, and of the center.

        paid: the replicas that the center's seconds are counted for, in equal parts.
        """
        if not self._sized:
            return
        spent = self._spent.setdefault(replica, _Spent())
        if self._even:
            busy, evaluation = float(samples), (own + center) * FORWARD
        spent.trained += busy
        if own + center:
            spent.each = evaluation / (own + center)
            spent.judged += own * spent.each
            for each in paid:
                self._spent.setdefault(each, _Spent()).judged += center * spent.each / len(paid)
