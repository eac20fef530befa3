"""Metrics of a network's probabilities besides accuracy, loss and AUC: means over samples, built in or a user's own.

A metric is a function of probabilities (N, classes) and labels, (N,) or (N, labels) of 0 and 1, arrays of the host that
it must not change. It returns a number for each sample (N,), or their mean. Parts of the samples are judged apart, on
several workers: the value of all is the mean over samples, so one that is no such mean would depend on how they are
cut.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError, nearest, or_own

Metric: TypeAlias = Callable[[npt.NDArray[Any], npt.NDArray[Any]], Any]
CONTRACT = "return a number for each sample, or their mean, of probabilities (N, classes) and labels (N,)"
_TAKEN = {"accuracy", "loss", "auc"}


@dataclass(frozen=True)
class AmongHighest:
    """Samples with a right class among this number of highest probabilities; of equal ones the first are higher.

    A sample with a probability that is not a number is none of them.
    """

    most: int

    def __call__(self, probabilities: npt.NDArray[Any], labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return True for each such sample (N,)."""
        highest = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.most]
        right = np.take_along_axis(labels > 0, highest, axis=1) if labels.ndim == 2 else highest == labels[:, None]
        return np.asarray(right.any(axis=1) & np.isfinite(probabilities).all(axis=1))


METRICS: dict[str, Metric] = {"top3": AmongHighest(3), "top5": AmongHighest(5)}
"""Metrics by name. A function of a module has the name MODULE:FUNCTION besides."""


def short_name(name: str) -> str:
    """Return the name that a metric has in events and reports: that of its function."""
    return name.rpartition(":")[2]


def module_of(name: str) -> str:
    """Return the module that a metric's name says it is of; empty for one of `METRICS`."""
    return name.rpartition(":")[0]


def metric_of(name: str) -> Metric:
    """Return a metric, whose module is imported. Raises ValueError for a name without one."""
    if not (module := module_of(name)):
        if name not in METRICS:
            own = f"a function of yours is my_module:{name:.60}"
            raise ValueError(f"no such metric{or_own(nearest(name, METRICS), own)}")
        return METRICS[name]
    if module == "__main__":
        own = short_name(name)[:60]
        remedy = f"put the function into a module of its own, or set METRICS[{own!r}] = {own} and name {own}"
        raise ValueError(f"on a worker __main__ is another module; {remedy}")
    found = getattr(sys.modules.get(module), short_name(name), None)
    if not callable(found):
        there = getattr(sys.modules.get(module), "__dict__", {})
        known = [key for key, value in there.items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{module} has no function of this name{nearest(short_name(name), known)}")
    metric: Metric = found
    return metric


def name_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each name that is none, or that two metrics have."""
    for name in names:
        try:
            metric_of(name)
        except ValueError as reason:
            yield f"train.metrics = {name!r}: {reason}"
    for short, times in Counter(map(short_name, names)).items():
        if times > 1 or short in _TAKEN:
            yield f"train.metrics: {short!r} is the name of another figure too; give the function another name"


def measured(names: Sequence[str], probabilities: npt.NDArray[Any], labels: npt.NDArray[Any]) -> dict[str, float]:
    """Return the sums of metrics over a batch, by short name. Raises DataError for one that fails."""
    return {short_name(name): _sum_of(name, _locked(probabilities), _locked(labels)) for name in names}


def _sum_of(name: str, probabilities: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    try:
        found = np.asarray(metric_of(name)(probabilities, labels)).astype(np.float64, casting="same_kind")
    except Exception as error:
        raise DataError(f"metric {name}", f"it fails ({type(error).__name__}: {error})", CONTRACT) from error
    if found.shape not in ((), (len(labels),)):
        raise DataError(f"metric {name}", f"it returned an array of shape {found.shape}", CONTRACT)
    return float(found.sum() if found.ndim else found * len(labels))


def _locked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
