"""Figures of runs on the ports where Dask serves `/metrics`: in the scheduler's process and in the workers'.

Dask serves prometheus_client's registry there. A collector in it shows the last figures of each run's driver.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

KEPT = 20  # runs whose last figures a process keeps
RUNS = "daskcnn_runs"  # the only metric that this module makes: runs by status, of all drivers


class Metric(NamedTuple):
    """A metric of Prometheus: its name, without `_total` for a counter, its meaning, and the labels besides `run`."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run, or of a worker in it, as a driver sends them: by metric, and by values of its labels.

    place: host and path of its directory, which tell runs of one name apart.
    """

    run: str
    status: str
    figures: Mapping[Metric, Mapping[tuple[str, ...], float]]
    worker: str = ""
    place: str = ""


class RunsCollector:
    """Gives prometheus_client's registry the figures of all runs in this process.

    A process may be scheduler and workers at once. Then a worker's figures are part of its run's, and shown once. The
    label `run` is the name, with the place behind it where another run has the same.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, RunFigures]] = {}  # by place, or by name where none is given, and worker
        self._lock = threading.Lock()

    def keep(self, figures: RunFigures) -> str:
        """Keep these figures in place of older ones, and return the run's label.

        The oldest runs beyond `KEPT` are dropped.
        """
        key = figures.place or figures.run
        with self._lock:
            self._runs[key] = {**self._runs.pop(key, {}), figures.worker: figures}
            while len(self._runs) > KEPT:
                del self._runs[next(iter(self._runs))]
            return self._labels()[key]

    def _labels(self) -> dict[str, str]:
        names = {key: next(iter(parts.values())).run for key, parts in self._runs.items()}
        having = Counter(names.values())
        return {key: name if having[name] == 1 else f"{name} ({key})" for key, name in names.items()}

    def collect(self) -> Iterator[Any]:
        """Yield every metric as a family of prometheus_client's."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            shown, kept = self._labels(), {key: dict(parts) for key, parts in self._runs.items()}
        runs = [
            (shown[key], part)
            for key, parts in kept.items()
            for part in ([parts[""]] if "" in parts else parts.values())
        ]
        by_status = GaugeMetricFamily(RUNS, "Runs whose figures are kept here, by status.", labels=["status"])
        for status, count in Counter({label: run.status for label, run in runs}.values()).items():
            by_status.add_metric([status], count)
        yield by_status
        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for metric in dict.fromkeys(metric for _, run in runs for metric in run.figures):
            family = families[metric.kind](metric.name, metric.meaning, labels=["run", *metric.labels])
            for label, run in runs:
                for others, value in run.figures.get(metric, {}).items():
                    family.add_metric([label, *others], value)
            yield family

    def describe(self) -> Iterable[Any]:
        """Return no names, so that the registry does not ask for figures to find them: none are known before a run."""
        return ()


@cache
def collector_here() -> RunsCollector:
    """Return the collector of this process, registered in prometheus_client's registry."""
    from prometheus_client import REGISTRY

    collector = RunsCollector()
    REGISTRY.register(collector)
    return collector


def show_figures(figures: RunFigures) -> str:
    """Show the figures on this process's port, and return the run's label there.

    Runs in the scheduler's process and in the workers'.
    """
    return collector_here().keep(figures)


def serves_metrics() -> bool:
    """Return True if this process has the package that `/metrics` needs."""
    return find_spec("prometheus_client") is not None
