"""A run's surroundings on a cluster: its job and data, its workers, and the ways to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from distributed import Client

from daskcnn.cluster.link.calls import ask_workers
from daskcnn.cluster.link.client import Connection, heed_signals
from daskcnn.cluster.link.members import Members
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.dispatch import Dispatch
from daskcnn.cluster.run.results import Results, Scoring
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.worker.session import forget_run
from daskcnn.events import Event, Warned
from daskcnn.job.tables import Job
from daskcnn.runs.state import TrainingState
from daskcnn.sharded.balance import WorkerLinks
from daskcnn.store import Dataset

FREED = 20.0  # seconds at most that workers may take to free what a run keeps: one that hangs is left alone


@dataclass
class RunContext:
    """The values that the parts of a run share.

    Attributes
    ----------
    name : the run as it shows in task names.
    save : takes a state that is to be kept.
    calibrations : measurements of each calibrated worker.
    links : the workers' links, once a layer-sharded run has measured them.
    """

    name: str
    job: Job
    dataset: Dataset
    emit: Callable[[Event], None]
    save: Callable[[TrainingState], None]
    connection: Connection
    workers: RunWorkers
    dispatch: Dispatch
    results: Results
    calibrations: dict[str, Calibration]
    scoring: Scoring
    links: WorkerLinks | None = None

    @classmethod
    def of(
        cls,
        client: Client,
        name: str,
        job: Job,
        dataset: Dataset,
        members: Members,
        *,
        emit: Callable[[Event], None],
        save: Callable[[TrainingState], None],
        interrupted: Callable[[], int | None] = lambda: None,
    ) -> RunContext:
        """Put the surroundings of a run together. interrupted: gives the number of the signal that came, if one did."""
        connection, cluster = Connection(client, heed_signals(interrupted)), job.cluster
        workers = RunWorkers(connection, members, emit)
        workers.news.subscribe(client, name)
        dispatch, results = Dispatch(name, workers, cluster.stall_timeout), Results(workers, cluster.stall_timeout)
        calibrations = dict[str, Calibration]()
        scoring = Scoring(name, dispatch, results, cluster.stall_timeout, calibrations)
        return cls(name, job, dataset, emit, save, connection, workers, dispatch, results, calibrations, scoring)

    def only(self, names: Iterable[str]) -> RunContext:
        """The same surroundings with these workers only. What becomes of them is told to the whole one."""
        workers, cluster = self.workers.only(names), self.job.cluster
        dispatch, results = self.dispatch.only(workers), Results(workers, cluster.stall_timeout)
        scoring = Scoring(self.name, dispatch, results, cluster.stall_timeout, self.calibrations)
        return replace(self, workers=workers, dispatch=dispatch, results=results, scoring=scoring)

    @property
    def samples(self) -> int:
        """Samples that are trained on; those of the validation slice lie behind them."""
        return len(self.dataset.train) - self.job.data.validation

    def close(self) -> None:
        """Free what the run keeps on the workers that are left, and warn of those that do not answer."""
        connection = self.connection
        connection.ignore_signals()
        self.workers.news.unsubscribe(connection.client, self.name)
        there = {member.address: name for name, member in self.workers.alive.items()}
        addresses = connection.workers().keys() & there.keys()
        limit = min(FREED, self.job.cluster.stall_timeout)
        answers = ask_workers(connection.client, forget_run, addresses, self.name, within=limit)
        reason = f"no answer within {limit:g} s, it may keep the run's memory"
        for address in answers.silent:
            self.emit(Warned(value=f"worker {there[address]} ({address})", reason=reason, remedy="restart it"))
