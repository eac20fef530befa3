"""A training state as a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.cluster.run_context import TrainingState
from daskcnn.errors import DataError
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, leaves
from daskcnn.runs.checkpoint import Checkpoint
from daskcnn.store import Described
from daskcnn.training.replica import Score, initial_weights
from daskcnn.training.trained_network import Classifier, Facts

VELOCITY, RULE = "velocity:", "rule:"


def to_checkpoint(state: TrainingState, layout: Layout, images: Described, seconds: float) -> Checkpoint:
    """Weights by the network's own names, momentum by worker, everything else as JSON. seconds: trained so far."""
    arrays = {name: a for tree in layout.views(state.weights) for name, a in leaves(tree)}
    velocities = {f"{VELOCITY}{worker}": v for worker, v in state.velocities.items()}
    rule_state = {f"{RULE}{name}": v for name, v in state.rule_state.items()}
    validation = state.validation
    record = {
        "epoch": state.epoch,
        "seconds": seconds,
        "book": dict(state.book),
        "images": Facts.of(images).to_dict(),
        "validation": validation and [validation.loss_sum, validation.correct, validation.samples],
    }
    score = validation.accuracy if validation else None
    return Checkpoint({**arrays, **velocities, **rule_state}, record, state.step, score)


def to_state(checkpoint: Checkpoint, job: Job) -> TrainingState:
    """The inverse of `to_checkpoint`. Raises DataError where the weights are not those of the job's network."""
    weights = _weights(checkpoint, job, facts_of(checkpoint))
    velocities, rule_state = (_beginning_with(prefix, checkpoint) for prefix in (VELOCITY, RULE))
    record = checkpoint.state
    validation = Score(*record["validation"]) if record["validation"] else None
    return TrainingState(checkpoint.step, record["epoch"], weights, velocities, record["book"], validation, rule_state)


def _beginning_with(prefix: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {name.removeprefix(prefix): a for name, a in checkpoint.arrays.items() if name.startswith(prefix)}


def facts_of(checkpoint: Checkpoint) -> Facts:
    """What the checkpoint says of the images."""
    return Facts.from_dict(checkpoint.state.get("images", {}))


def to_classifier(checkpoint: Checkpoint, job: Job) -> Classifier:
    """The checkpoint's network. Raises DataError where the weights are not those of the job's network."""
    facts = facts_of(checkpoint)
    return Classifier(job, facts, _weights(checkpoint, job, facts))


def _weights(checkpoint: Checkpoint, job: Job, facts: Facts) -> Any:
    layout, weights = initial_weights(job, facts)
    for tree in layout.views(weights):
        for name, view in leaves(tree):
            found = checkpoint.arrays.get(name)
            if found is None or found.shape != view.shape or found.dtype != view.dtype:
                raise _misfit(checkpoint.path, name, view, found)
            view[...] = found
    return weights


def _misfit(path: Path | None, name: str, view: Any, found: Any) -> DataError:
    has = "is missing" if found is None else f"is {found.dtype}{found.shape}"
    return DataError(
        f"{path}: {name} {has}, the job's network wants {np.dtype(view.dtype)}{view.shape}; "
        "use the job and the checkpoint of one run"
    )
