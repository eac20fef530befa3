"""A run as curves and parameters: what TensorBoard and MLflow draw, from the run's events and its job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
