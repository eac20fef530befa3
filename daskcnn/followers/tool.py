"""Tools that follow a run: their interface, and the curves and parameters that TensorBoard and MLflow draw."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from distributed import Client

from daskcnn.errors import installing
from daskcnn.events import EpochEnded, Event, Judged, RoundEnded, RunEnded, RunResumed, StepsEnded
from daskcnn.job.method import method_of
from daskcnn.job.tables import Job


@dataclass(frozen=True)
class FollowedRun:
    """The run that tools follow. directory: gives its run directory; another one once it had to be kept elsewhere."""

    job: Job
    client: Client
    directory: Callable[[], Path]


class Tool(ABC):
    """A tool that is told a run's events on a thread of its own. An error ends it with a warning, never the run."""

    key: ClassVar[str]  # of `[run]`
    extra: ClassVar[str]  # that brings its package
    package: ClassVar[str]  # the module that it needs on the driver; empty for none

    @abstractmethod
    def __init__(self, run: FollowedRun) -> None: ...

    @classmethod
    def problems(cls, setting: str | bool) -> Iterator[str]:
        """Yield what keeps it from following a run with this setting, before anything starts."""
        if cls.package and find_spec(cls.package) is None:
            problem = f"run.{cls.key}: needs the package {cls.package}, which is not installed"
            yield f"{problem}; {installing(cls.extra)}, or remove the key"

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
    """A value of a curve after a step of the run, or a merge of its server; at: seconds since 1970."""

    curve: str
    step: int
    value: float
    at: float


_OF_ROUND = {f"{kind}_seconds": kind for kind in ("busy", "load", "wait", "communication", "evaluation")}
_OF_ROUND |= {"samples_per_second": "samples_per_second", "loss": "loss", "accuracy": "accuracy"}
_OF_ROUND |= {"learning_rate": "lr", "staleness": "staleness", "gamma": "gamma"}
"""Curves of a worker, and the fields of its rounds that they show."""
_OF_EPOCH = ("busy", "wait", "communication")  # seconds of a worker in an epoch of sharded kernels


@dataclass
class Curves:
    """Folds events, in order, into points. An event that has no step of its own has that of the last one."""

    step: int = 0

    def points(self, event: Event) -> list[Point]:
        """Return the points of this event, which has its time."""
        values: dict[str, float | None] = {}
        match event:
            case EpochEnded():
                self.step = event.step
                values = {"epoch": event.epoch, "training/loss": event.loss, "training/accuracy": event.accuracy}
                values |= _judged("validation", event.validation)
                values |= {"learning_rate": event.lr, "samples_per_second": event.samples_per_second}
                values |= {"noise_scale": event.noise_scale, "step_samples": event.step_samples}
                for worker in event.workers:
                    values |= {f"workers/{worker.name}/{kind}_seconds": getattr(worker, kind) for kind in _OF_EPOCH}
            case StepsEnded():
                self.step = event.step
                values = {"step/loss": event.loss, "step/seconds": event.seconds_per_step, "learning_rate": event.lr}
            case RoundEnded():
                self.step = max(self.step, event.version or 0)
                values = {f"workers/{event.worker}/{name}": getattr(event, of) for name, of in _OF_ROUND.items()}
            case RunEnded():
                values = {**_judged("test", event.test), "seconds": event.seconds}
            case RunResumed():
                self.step = event.step
        at = event.at or 0.0
        return [Point(shared_name(name), self.step, value, at) for name, value in values.items() if value is not None]


def shared_name(text: str) -> str:
    """Return the text in the characters that names may have in every tool, so that a figure has one name in all."""
    return re.sub(r"[^\w\-./]", "_", text)


def _judged(part: str, judged: Judged | None) -> dict[str, float | None]:
    if judged is None:
        return {}
    known = {name: getattr(judged, name) for name in ("loss", "accuracy", "auc")} | judged.metrics
    return {f"{part}/{name}": value for name, value in known.items()}


def parameters(job: Job) -> dict[str, Scalar]:
    """Return the hyper-parameters: the keys of the job that describe the method, as `section.key`."""
    return dict(_flat(method_of(job.model_dump(mode="json", by_alias=True))))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield shared_name(f"{before}{key}"), value if isinstance(value, bool | int | float | str) else str(value)
