"""The workers of a run: those that measure themselves, and those that are calibrated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, TypeAlias

from daskcnn.events import CalibratedWorker


@dataclass(frozen=True, slots=True)
class Measured:
    """A calibrated worker. seconds: a sample of a whole training step. row: the worker in the log."""

    seconds: float
    row: CalibratedWorker


Refusal: TypeAlias = tuple[str, str]
"""The reason why a worker is of no use, and the remedy."""


class Roster:
    """The workers of one run, by their names in it.

    Attributes
    ----------
    calibrating : The time since when each worker measures itself.
    alive : Calibrated workers that the run has, in the order in which they came: who has which samples must not depend
        on who has measured itself first.
    most : Workers of all kinds that are of use: fewer than the job names once one has brought too little.
    """

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._wanted = wanted
        self._kinds: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._serial = count()
        self.calibrating: dict[str, float] = {}
        self.alive: dict[str, Measured] = {}
        self.most = inf

    def knows(self, worker: str) -> bool:
        """Return True if the run has the worker: it measures itself, or is calibrated."""
        return worker in self._kinds

    def kind(self, worker: str) -> str:
        """Return the kind of a worker that the run has."""
        return self._kinds[worker]

    def full(self, kind: str) -> Refusal | None:
        """Return the refusal of a worker of this kind if the run has as many as the job names, or as pay; else None."""
        if len(self._kinds) >= self.most:
            return f"the run is about as fast with the {self.most:g} that it has", ""
        most = self._wanted.get(kind, 0)
        if not self._wanted or Counter(self._kinds.values())[kind] < most:
            return None
        asked = f"{kind} = {most}, and the run has as many" if most else f"no {kind}"
        remedy = "name as many as there will be, or leave it out to use all; a resumed run may name others"
        return f"cluster.workers (--workers) asks for {asked}", remedy

    def missing(self, least: Mapping[str, int], besides: Iterable[str] = ()) -> dict[str, int]:
        """Return the number of workers of each kind that are missing to these. besides: kinds of others that count."""
        there = Counter([*(self._kinds[worker] for worker in self.alive), *besides])
        return {kind: number - there[kind] for kind, number in least.items() if there[kind] < number}

    def calibrate(self, worker: str, kind: str, now: float) -> None:
        """Let the worker measure itself."""
        self._kinds[worker], self.calibrating[worker] = kind, now
        self._numbers[worker] = next(self._serial)

    def calibrated(self, worker: str, measured: Measured) -> None:
        """Add a worker that has measured itself."""
        del self.calibrating[worker]
        last = next(reversed(self.alive), worker)
        self.alive[worker] = measured
        if self._numbers[last] > self._numbers[worker]:
            self.alive = {name: self.alive[name] for name in sorted(self.alive, key=self._numbers.__getitem__)}

    def drop(self, worker: str) -> None:
        """Forget the worker."""
        known: tuple[dict[str, Any], ...] = self.calibrating, self.alive, self._kinds, self._numbers
        for of in known:
            of.pop(worker, None)

    def overdue(self, now: float, seconds: float) -> list[str]:
        """Return the workers that have been measuring themselves for longer than this."""
        return [worker for worker, begun in self.calibrating.items() if now - begun > seconds]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds a sample of every worker that is alive."""
        return {worker: measured.seconds for worker, measured in self.alive.items()}

    def validate(self) -> None:
        """Assert the invariants between two facts."""
        assert not self.calibrating.keys() & self.alive.keys()
        assert self._kinds.keys() == self.calibrating.keys() | self.alive.keys() == self._numbers.keys()
        assert [*self.alive] == sorted(self.alive, key=self._numbers.__getitem__)
