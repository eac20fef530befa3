"""Successive halving of a sweep (ASHA): which runs end early, by their accuracies at rungs. No clock.

Rungs are epochs: the full length divided by `factor`, once, twice, and on. A run that reaches a rung is compared with
all that reached it before. It goes on if it is among the best 1/factor of them, itself included, and ends otherwise. So
none waits for others (Li et al., A system for massively parallel hyperparameter tuning, 2020). All runs are begun at
full length: the schedule of the rate goes by what is done of it, and a run that was begun short cannot be made longer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Run = TypeVar("Run", int, str)


@dataclass(frozen=True, slots=True)
class Halving:
    """The rules: of those at a rung the best 1/factor go on; no rung is before `first` epochs."""

    factor: int = 3
    first: float = 1.0

    def rungs(self, epochs: float) -> tuple[float, ...]:
        """Return the rungs of a run of this length, the earliest first."""
        found, rung = list[float](), epochs / self.factor
        while rung >= self.first:
            found.append(rung)
            rung /= self.factor
        return (*reversed(found),)


@dataclass(frozen=True, slots=True)
class EpochScore:
    """An evaluation of a run: after this many epochs, at a time, with a score of which more is better."""

    epoch: float
    at: float
    score: float


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """A run's end at a rung. place: among the runs that had reached it, from 1 on."""

    rung: float
    score: float
    place: int
    of: int

    def __str__(self) -> str:
        return f"ended at epoch {self.rung:.4g} by --stop asha: place {self.place} of {self.of}"


def early_ends(
    runs: Mapping[Run, Iterable[EpochScore]], lengths: Mapping[Run, float], rules: Halving | None = None
) -> dict[Run, EarlyEnd]:
    """Return the runs that end early.

    Whatever comes later changes nothing of it: a run is judged by those that reached its rung before it.

    Parameters
    ----------
    runs : the evaluations of each run so far, in any order.
    lengths : epochs of each run; runs of one length are compared.
    """
    rules = rules or Halving()
    ended, boards = dict[Run, EarlyEnd](), dict[tuple[float, float], list[float]]()
    for _, rung, run, score in sorted(_arrivals(runs, lengths, rules)):
        if run in ended:
            continue
        board = boards.setdefault((lengths[run], rung), [])
        place = 1 + sum(other > score for other in board)
        insort(board, score)
        if place > max(1, len(board) // rules.factor) and len(board) >= rules.factor:
            ended[run] = EarlyEnd(rung, score, place, len(board))
    return ended


def _arrivals(
    runs: Mapping[Run, Iterable[EpochScore]], lengths: Mapping[Run, float], rules: Halving
) -> Iterable[tuple[float, float, Run, float]]:
    """Yield when each run reached each rung, and its score there."""
    for run, scores in runs.items():
        seen = sorted((look.epoch, look.at, look.score) for look in scores)
        for rung in rules.rungs(lengths[run]):
            for epoch, at, score in seen:
                if epoch >= rung * (1 - 1e-9):
                    yield at, rung, run, score
                    break
