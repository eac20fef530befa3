"""A training state as a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import DataError
from daskcnn.job.network import initial_weights
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, leaves
from daskcnn.nn.score import Score
from daskcnn.runs.checkpoint import Checkpoint
from daskcnn.store import Described
from daskcnn.store.facts import Facts


@dataclass(frozen=True)
class TrainingState:
    """All that resuming needs. step: merges or minibatches so far; epoch: presentations a sample, on average.

    weights (size,) and velocities (parameter_size,) by worker lie on the host; book is JSON and the strategy's own.
    rule_state: what the update rule keeps on the server, by name.
    """

    step: int
    epoch: float
    weights: Array
    velocities: dict[str, Array]
    book: Mapping[str, Any]
    validation: Score | None = None
    rule_state: Mapping[str, Array] = field(default_factory=dict)


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
    weights = weights_of(checkpoint, job, facts_of(checkpoint))
    velocities, rule_state = (_beginning_with(prefix, checkpoint) for prefix in (VELOCITY, RULE))
    record = checkpoint.state
    validation = Score(*record["validation"]) if record["validation"] else None
    return TrainingState(checkpoint.step, record["epoch"], weights, velocities, record["book"], validation, rule_state)


def _beginning_with(prefix: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {name.removeprefix(prefix): a for name, a in checkpoint.arrays.items() if name.startswith(prefix)}


def facts_of(checkpoint: Checkpoint) -> Facts:
    """What the checkpoint says of the images."""
    return Facts.from_dict(checkpoint.state.get("images", {}))


def weights_of(checkpoint: Checkpoint, job: Job, facts: Facts) -> Any:
    """The checkpoint's weights as one vector. Raises DataError where they are not those of the job's network."""
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
        path,
        f"{name} {has}, the job's network wants {np.dtype(view.dtype)}{view.shape}",
        "use the job and the checkpoint of one run",
    )
