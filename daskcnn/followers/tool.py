"""What a tool that follows a run is told, and what it has to answer.

A run as curves and parameters: what TensorBoard and MLflow draw, from the run's events and its job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from distributed import Client

from daskcnn.errors import installing
from daskcnn.events import (
    EpochEnded,
    EpochWorker,
    Event,
    Judged,
    RoundEnded,
    RunEnded,
    RunResumed,
    StepsEnded,
)
from daskcnn.job.tables import Job


@dataclass(frozen=True)
class FollowedRun:
    """The run that tools follow.

    Attributes
    ----------
    job : its job.
    client : the client of the cluster that it trains on.
    directory : gives its run directory; another one once the run had to be kept elsewhere.
    """

    job: Job
    client: Client
    directory: Callable[[], Path]


class Tool(ABC):
    """A tool that is told a run's events. All its methods but the checks are called on a thread of its own.

    What they raise ends the tool with a warning, and never the run.
    """

    key: ClassVar[str]
    """The key of `[run]` that asks for it."""
    extra: ClassVar[str]
    """The extra that brings its package."""
    package: ClassVar[str]
    """The module that it needs on the driver; empty for none."""

    @abstractmethod
    def __init__(self, run: FollowedRun) -> None: ...

    @classmethod
    def problems(cls, setting: str | bool) -> Iterator[str]:
        """What keeps it from following a run with this setting, found before anything starts."""
        if cls.package and find_spec(cls.package) is None:
            yield (
                f"run.{cls.key}: needs the package {cls.package}, which is not installed; "
                f"{installing(cls.extra)}, or remove the key"
            )

    @classmethod
    def check_cluster(cls, client: Client) -> None:
        """Raise ClusterError where the cluster lacks what the tool needs."""
        return

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Take in the events since the last call, in order."""

    def finish(self) -> None:
        """Write what is left. The run has ended, and its directory is complete."""
        return

    def close(self) -> None:
        """Free what it holds, after an error too."""
        return


Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a curve.

    Attributes
    ----------
    step : steps of the run, or merges of its server, when it was measured.
    at : seconds since 1970.
    """

    curve: str
    step: int
    value: float
    at: float


@dataclass
class Curves:
    """Folds events, in order, into points. An event that has no step of its own has that of the last one."""

    step: int = 0
    _at: float = field(default=0.0, repr=False)

    def points(self, event: Event) -> list[Point]:
        """The points of this event, which has its time."""
        self._at = event.at or 0.0
        match event:
            case EpochEnded():
                self.step = event.step
                return self._made({**_of_epoch(event), **_of_workers(event.workers)})
            case StepsEnded():
                self.step = event.step
                return self._made(
                    {"step/loss": event.loss, "step/seconds": event.seconds_per_step, "learning rate": event.lr}
                )
            case RoundEnded():
                self.step = max(self.step, event.version or 0)
                return self._made(_of_round(event))
            case RunEnded():
                return self._made({**_judged("test", event.test), "seconds": event.seconds})
            case RunResumed():
                self.step = event.step
        return []

    def _made(self, values: Mapping[str, float | None]) -> list[Point]:
        return [Point(curve, self.step, value, self._at) for curve, value in values.items() if value is not None]


def _of_epoch(event: EpochEnded) -> dict[str, float | None]:
    return {
        "epoch": event.epoch,
        "training/loss": event.loss,
        "training/accuracy": event.accuracy,
        **_judged("validation", event.validation),
        "learning rate": event.lr,
        "samples per second": event.samples_per_second,
    }


def _judged(part: str, judged: Judged | None) -> dict[str, float | None]:
    if judged is None:
        return {}
    return {f"{part}/loss": judged.loss, f"{part}/accuracy": judged.accuracy, f"{part}/auc": judged.auc}


def _of_workers(workers: tuple[EpochWorker, ...]) -> dict[str, float | None]:
    kinds = ("busy", "wait", "communication")
    return {f"workers/{worker.name}/{kind} seconds": getattr(worker, kind) for worker in workers for kind in kinds}


def _of_round(event: RoundEnded) -> dict[str, float | None]:
    values = {
        "busy seconds": event.busy,
        "load seconds": event.load,
        "wait seconds": event.wait,
        "communication seconds": event.communication,
        "evaluation seconds": event.evaluation,
        "samples per second": event.samples_per_second,
        "loss": event.loss,
        "accuracy": event.accuracy,
        "learning rate": event.lr,
        "staleness": event.staleness,
        "gamma": event.gamma,
    }
    return {f"workers/{event.worker}/{name}": value for name, value in values.items()}


def parameters(job: Job) -> dict[str, Scalar]:
    """The keys of the job that describe the method, as `section.key`; where it runs and is kept is left out."""
    tables = job.model_dump(mode="json", by_alias=True)
    kept = {section: tables[section] for section in ("data", "model", "train", "rule")}
    kept["cluster"] = {key: tables["cluster"][key] for key in ("workers", "wire", "overlap", "ps_shards")}
    return dict(_flat(kept))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", value if isinstance(value, bool | int | float | str) else str(value)
