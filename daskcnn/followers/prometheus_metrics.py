"""A run's figures for Prometheus, on the ports of the scheduler and of the workers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from socket import gethostname

from distributed import Client

from daskcnn.cluster.link.calls import ask_scheduler, ask_workers
from daskcnn.cluster.link.metrics_port import Metric, RunFigures, serves_metrics, show_figures
from daskcnn.errors import ClusterError
from daskcnn.events import (
    EpochEnded,
    Event,
    Judged,
    RoundEnded,
    RunEnded,
    RunResumed,
    RunStarted,
    StepsEnded,
    Warned,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.followers.tool import FollowedRun, Tool
from daskcnn.runs.totals import Totals, WorkerTotals

Figures = dict[tuple[str, ...], float]  # the values of a metric by its labels' values

EPOCH = Metric("daskcnn_run_epoch", "gauge", "Epochs that the run has trained so far.")
EPOCHS = Metric("daskcnn_run_epochs", "gauge", "Epochs to train.")
TRAINING = Metric("daskcnn_run_training", "gauge", "1 while the run goes on, 0 once it has ended.")
LOSS = Metric("daskcnn_run_loss", "gauge", "Mean loss per sample.", ("part",))
ACCURACY = Metric("daskcnn_run_accuracy", "gauge", "Share of samples classified correctly, 0 to 1.", ("part",))
OWN = Metric("daskcnn_run_metric", "gauge", "Mean of a metric of the job's (train.metrics).", ("part", "metric"))
RATE = Metric("daskcnn_run_learning_rate", "gauge", "The learning rate of the last step.")
SPEED = Metric("daskcnn_run_samples_per_second", "gauge", "Samples trained on per second in the last epoch.")
SEEN = Metric("daskcnn_run_last_event_timestamp_seconds", "gauge", "When the run logged its last event.")
LOST = Metric("daskcnn_run_lost_workers", "counter", "Workers and groups that the run has lost.")
WARNINGS = Metric("daskcnn_run_warnings", "counter", "Warnings of the run.")
SAMPLES = Metric("daskcnn_worker_samples", "counter", "Samples that the worker has trained on.", ("worker",))
PUSHES = Metric("daskcnn_worker_pushes", "counter", "Pushes of the worker.", ("worker",))
BYTES = Metric("daskcnn_worker_bytes", "counter", "Bytes that the worker sent and received.", ("worker", "direction"))
SECONDS = Metric("daskcnn_worker_seconds", "counter", "Seconds of the worker, by what it did.", ("worker", "kind"))
STALENESS = Metric("daskcnn_worker_staleness", "gauge", "The largest staleness of its last round.", ("worker",))

METRICS = (
    *(EPOCH, EPOCHS, TRAINING, LOSS, ACCURACY, OWN, RATE, SPEED, SEEN, LOST, WARNINGS),
    *(SAMPLES, PUSHES, BYTES, SECONDS, STALENESS),
)
"""Every metric of a run."""
ANSWER = 5.0  # seconds within which a worker takes its figures, or goes without them


class Tally:
    """Folds a run's events, in order, into its figures. place: of its directory."""

    def __init__(self, run: str, place: str = "") -> None:
        self.run, self.place, self.status = run, place, "starting"
        self._figures: defaultdict[Metric, Figures] = defaultdict(dict)
        self._totals = Totals()
        self._figures[LOST][()] = self._figures[WARNINGS][()] = 0.0

    def apply(self, event: Event) -> None:
        """Take in an event."""
        self._totals.take(event)
        self._set(SEEN, event.at)
        match event:
            case RunStarted():
                self._set(EPOCHS, event.epochs)
            case RunResumed():
                self._set(EPOCH, event.epoch)
            case WorkersCalibrated():
                self.status = "training"
            case EpochEnded():
                self._set(EPOCH, event.epoch)
                self._set(LOSS, event.loss, "training")
                self._set(ACCURACY, event.accuracy, "training")
                self._judged("validation", event.validation)
                self._set(RATE, event.lr)
                self._set(SPEED, event.samples_per_second)
            case StepsEnded():
                self._set(EPOCH, event.epoch)
                self._set(LOSS, event.loss, "training")
                self._set(RATE, event.lr)
            case RoundEnded():
                self._set(STALENESS, event.staleness, event.worker)
                self._set(EPOCH, event.epoch)
                self._set(RATE, event.lr)
            case WorkerLost():
                self._figures[LOST][()] += 1
            case Warned():
                self._figures[WARNINGS][()] += 1
            case RunEnded():
                self.status = event.status
                self._judged("test", event.test)
        self._set(TRAINING, float(self.status in ("starting", "training")))

    def figures(self) -> RunFigures:
        """Return the figures of the whole run so far."""
        return self._shown(self._totals.values(), self._figures, "")

    def figures_of(self, worker: str) -> RunFigures:
        """Return those of one worker alone."""
        stale: Figures = {labels: value for labels, value in self._figures[STALENESS].items() if labels == (worker,)}
        return self._shown([self._totals.of(worker)], {STALENESS: stale}, worker)

    def _shown(self, workers: Iterable[WorkerTotals], others: Mapping[Metric, Figures], worker: str) -> RunFigures:
        """Figures of these workers, and others."""
        found = defaultdict(dict, {metric: dict(rows) for metric, rows in others.items()})
        for each in workers:
            for metric, value, *labels in _counted(each):
                if math.isfinite(value):
                    found[metric][(each.name, *labels)] = value
        known = {metric: rows for metric, rows in found.items() if rows}
        return RunFigures(self.run, self.status, known, worker, self.place)

    def _judged(self, part: str, judged: Judged | None) -> None:
        if judged is not None:
            self._set(LOSS, judged.loss, part)
            self._set(ACCURACY, judged.accuracy, part)
            for name, value in judged.metrics.items():
                self._set(OWN, value, part, name)

    def _set(self, metric: Metric, value: float | None, *labels: str) -> None:
        if value is not None:
            self._figures[metric][labels] = float(value)


def _counted(worker: WorkerTotals) -> Iterator[tuple[Metric, float, *tuple[str, ...]]]:
    """A metric, its value and the labels behind the worker's name; none before the worker has trained."""
    if worker.rounds:
        yield PUSHES, worker.pushes
        yield SECONDS, worker.load, "load"
        yield SECONDS, worker.evaluation, "evaluation"
    if worker.rounds or worker.samples:
        yield SAMPLES, worker.samples
        yield SECONDS, worker.compute, "compute"
        yield SECONDS, worker.wait, "wait"
        yield SECONDS, worker.communication, "communication"
        yield BYTES, worker.bytes_up, "up"
        yield BYTES, worker.bytes_down, "down"


class PrometheusMetrics(Tool):
    """Sends the figures of the whole run to the scheduler, and to each worker its own, where they have changed."""

    key, extra, package = "prometheus", "dashboard", ""

    def __init__(self, run: FollowedRun) -> None:
        place = run.directory().absolute()
        self._client, self._tally = run.client, Tally(place.name, f"{gethostname()}:{place}")
        self._addresses: dict[str, str] = {}

    @classmethod
    def check_cluster(cls, client: Client) -> None:
        """Raise ClusterError where the scheduler lacks prometheus_client. A worker without it is passed over."""
        if not ask_scheduler(client, serves_metrics):
            reason = "it has no prometheus_client, so it serves no /metrics"
            remedy = f"pip install 'daskcnn[{cls.extra}]' there and restart it, or remove the key"
            raise ClusterError(f"run.prometheus: scheduler {client.scheduler.address}", reason, remedy)

    def write(self, events: Sequence[Event]) -> None:
        """Take in the events, and send what came of them once."""
        trained = set[str]()
        for event in events:
            self._tally.apply(event)
            match event:
                case WorkersCalibrated():
                    self._addresses |= {worker.name: worker.address for worker in event.workers if worker.address}
                case RoundEnded():
                    trained.add(event.worker)
                case EpochEnded():
                    trained |= {worker.name for worker in event.workers}
        label = ask_scheduler(self._client, partial(show_figures, self._tally.figures()))
        for name in sorted(trained & self._addresses.keys()):
            # one that is gone, hangs or has no prometheus_client shows no figures: the scheduler has them
            figures = replace(self._tally.figures_of(name), run=label)
            ask_workers(self._client, show_figures, [self._addresses[name]], figures, within=ANSWER)
