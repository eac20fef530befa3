"""Training that goes on from call to call: the weights, and what optimizers and update rule keep beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.errors import DataError
from daskcnn.job.network import optimizer_of
from daskcnn.job.tables import Job
from daskcnn.launch.resume import EarlierRun
from daskcnn.nn import OptimizerState
from daskcnn.ps.average import TRAINED
from daskcnn.runs.checkpoint import latest, save
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, to_checkpoint, to_state
from daskcnn.store.manifest import silent
from daskcnn.trained.trained_model import TrainedModel


@dataclass(frozen=True)
class Momentum:
    """States beside a run's weights: those of the optimizers by replica, vectors of the update rule by name.

    method : strategy, names of the optimizers' vectors, `ema` if weights are averaged. Another method has no use for
        these.
    merges : those behind an average that the server keeps, which goes by their number; 0 without one.
    """

    method: tuple[str, ...]
    optimizers: Mapping[str, OptimizerState]
    rule: Mapping[str, Array]
    merges: int = 0

    @classmethod
    def at_end_of(cls, run: Path, job: Job) -> Self:
        """Return that of a run's last checkpoint. Raises DataError where there is none."""
        kept = latest(run / "checkpoints", warn=silent)
        if kept is None:
            raise DataError(run.parent, "no checkpoint could be written there", "make room, or give run_dir")
        state = to_state(kept, job)
        merges = state.step if TRAINED in state.rule_state else 0
        return cls(_method(job), dict(state.optimizers), dict(state.rule_state), merges)


def _method(job: Job) -> tuple[str, ...]:
    averaged = ["ema"] if job.train.ema is not None else []
    return job.train.strategy, *optimizer_of(job).vectors, *averaged


def kept_tables(model: TrainedModel) -> dict[str, dict[str, Any]]:
    """Return the tables by which training goes on: the network, and what images are normalised by."""
    network = model.job.model.model_dump(
        mode="json", by_alias=True, exclude={"from_", "from_checkpoint"}, exclude_none=True
    )
    facts = model.classifier.facts
    scale = {name: [float(value) for value in getattr(facts, name)] for name in ("mean", "deviation")}
    return {"model": network, "data": {"scale": scale}}


def run_to_go_on_with(model: TrainedModel, momentum: Momentum | None, job: Job) -> EarlierRun:
    """Write a run of the job at its beginning, with the weights of the model, and momentum of the same method."""
    if momentum is not None and momentum.method != _method(job):
        momentum = None
    own = model.classifier
    kept = momentum or Momentum((), {}, {})
    optimizers = dict(kept.optimizers)
    state = TrainingState(kept.merges, 0.0, own.weights, optimizers, {}, rule_state=kept.rule)
    how: dict[str, Any] = {"strategy": job.train.strategy, "now": datetime.now(UTC)}
    with RunDirectory.create(job.run.dir, job.run.name, **how) as run:
        run.write_job(job.model_dump(mode="json"))
        save(run.checkpoints, to_checkpoint(state, own.layout, own.facts, 0.0, optimizer_of(job).vectors))
    return EarlierRun(RunDirectory.open(run.path), job)


def all_classes(given: Any, known: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Return all classes, sorted: those given, or known from calls before. Raises ValueError where the two differ."""
    if given is None:
        if known is None:
            raise ValueError("classes must be passed on the first call to partial_fit")
        return known
    found = np.unique(np.asarray(given))
    if known is not None and not np.array_equal(found, known):
        raise ValueError(f"classes={found} is not the same as on last call to partial_fit, was: {known}")
    return found


def places_among(classes: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return each label's place among the sorted classes. Raises ValueError for labels of others, or of one only."""
    if unknown := np.setdiff1d(y, classes).tolist():
        raise ValueError(f"y has labels {unknown[:5]} that are none of the classes {classes.tolist()[:20]}")
    if (y == y[0]).all():
        raise ValueError(f"y has 1 class ({y[:1].tolist()[0]!r}): give samples of 2 or more together; shuffle them")
    return np.searchsorted(classes, y)
