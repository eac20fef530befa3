"""What runs without Dask have in common: their members, their surroundings, and the events that they have logged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.context import Dispatch, RunContext, Scoring
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.events import Event
from daskcnn.job.tables import Job
from daskcnn.runs.state import TrainingState
from daskcnn.store import Dataset

E = TypeVar("E", bound=Event)


def member(name: str, kind: Literal["cpu", "gpu", "ps"]) -> Member:
    """A worker of this process. Its address is its name."""
    return Member(name, name, "here", kind, 1, 1 << 30, called=name)


@dataclass(frozen=True)
class Ways:
    """The ways to the workers of a run, in place of those to a cluster.

    Attributes
    ----------
    name : the run's name on its workers.
    limit : seconds that judging may take.
    """

    name: str
    connection: Connection
    workers: RunWorkers
    dispatch: Dispatch
    results: Results
    limit: float

    def context(self, job: Job, dataset: Dataset, events: list[Event], saved: list[TrainingState]) -> RunContext:
        """The surroundings of a run, which adds to its events and to its saved states."""
        calibrations = dict[str, Calibration]()
        scoring = Scoring(self.name, self.dispatch, self.results, self.limit, calibrations)
        ways = self.connection, self.workers, self.dispatch, self.results, calibrations, scoring
        return RunContext(self.name, job, dataset, events.append, saved.append, *ways)


def of_kind(events: Iterable[Event], kind: type[E]) -> list[E]:
    """The events of a kind, in order."""
    return [event for event in events if isinstance(event, kind)]
